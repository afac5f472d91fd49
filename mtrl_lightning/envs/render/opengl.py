"""Which OpenGL library MuJoCo draws images with; only the standard library is needed.

MuJoCo looks at ``MUJOCO_GL`` when it is imported, and takes GLFW, which needs a screen, where that
is not set. EGL and OSMesa need none; both draw without a GPU, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

from mtrl_lightning.errors import ConfigurationError, import_optional

VARIABLE = "MUJOCO_GL"
THREADS = "LP_NUM_THREADS"
"""With how many threads Mesa draws without a GPU; 0 draws in the calling one."""
VARIABLES = (VARIABLE, "PYOPENGL_PLATFORM", THREADS)
"""Variables that choosing a library sets in a process; MuJoCo sets the second one."""
RENDERERS = ("egl", "osmesa", "glfw")
"""Values of ``MUJOCO_GL`` on Linux, best first; the last one needs a screen."""
PACKAGES = "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri, or apt-get install libosmesa6"
"""What to do on Debian and Ubuntu where MuJoCo cannot draw."""
RENDER = (
    "import mujoco; model = mujoco.MjModel.from_xml_string('<mujoco/>');"
    " renderer = mujoco.Renderer(model, 16, 16); renderer.update_scene(mujoco.MjData(model));"
    " renderer.render(); renderer.close()"
)
RENDER_SECONDS = 60.0
"""After which a renderer counts as hung."""


def can_render(name: str | None) -> bool:
    """Return whether MuJoCo can draw; in a process of its own, which a bad driver may end.

    Args:
        name: value of ``MUJOCO_GL``; None leaves it as it is.
    """
    environment = dict(os.environ) if name is None else {**os.environ, VARIABLE: name}
    try:
        done = subprocess.run(
            [sys.executable, "-c", RENDER],
            env=environment,
            capture_output=True,
            check=False,
            timeout=RENDER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def find_renderer() -> str:
    """Return the value of ``MUJOCO_GL`` with which MuJoCo draws here; empty if it needs none.

    It takes about a second the first time.

    Raises:
        ConfigurationError: if the library of ``MUJOCO_GL`` does not work, or none does. The message
            names Debian's packages.
    """
    return _find_renderer(os.environ.get(VARIABLE, ""))


@functools.cache
def _find_renderer(chosen: str) -> str:
    if chosen:
        if can_render(chosen):
            return chosen
        raise ConfigurationError(
            f"{VARIABLE} is {chosen}, and MuJoCo cannot draw with it on this machine: unset it, so"
            f" that a library that works is chosen, or install its packages (Debian, Ubuntu:"
            f" {PACKAGES})"
        )
    if sys.platform != "linux":
        if can_render(None):
            return ""
        raise ConfigurationError(
            "MuJoCo cannot draw images on this machine: give the program a screen, or make the"
            " videos on another machine"
        )
    for name in RENDERERS:
        if can_render(name):
            return name
    raise ConfigurationError(
        "MuJoCo cannot draw images on this machine, because neither EGL nor OSMesa works: install"
        f" one of them (Debian, Ubuntu: {PACKAGES})"
    )


def import_simulated(module: str, package: str) -> ModuleType:
    """Import a module of an optional package that imports MuJoCo.

    MuJoCo cannot be imported, and nothing can be simulated, where ``MUJOCO_GL`` names a library
    that is not installed.

    Raises:
        ConfigurationError: if the package is not installed, or because of ``MUJOCO_GL``.
    """
    try:
        return import_optional(module, package)
    except ConfigurationError:
        raise
    except Exception as error:
        chosen = os.environ.get(VARIABLE)
        if not chosen:
            raise
        raise ConfigurationError(
            f"{module} cannot be imported while {VARIABLE} is {chosen}"
            f" ({type(error).__name__}: {error}): unset it, so that a library that works is chosen,"
            f" or install its packages (Debian, Ubuntu: {PACKAGES})"
        ) from error


@contextlib.contextmanager
def restored_variables() -> Iterator[None]:
    """Restore the environment variables that ``use_renderer`` changes, once images are drawn."""
    previous = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def use_renderer(name: str) -> None:
    """Let MuJoCo draw with a library in this process, also if it was imported already.

    It sets environment variables, which processes started later inherit; see
    ``restored_variables``.

    Args:
        name: as ``find_renderer`` returned it.
    """
    if not name:
        return
    os.environ[VARIABLE] = name
    contexts = sys.modules.get("mujoco.gl_context")
    if contexts is None:
        return
    present = getattr(contexts, "GLContext", None)
    if present is None or present.__module__ != f"mujoco.{name}":
        importlib.reload(contexts)
