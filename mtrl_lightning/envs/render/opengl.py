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

from mtrl_lightning.errors import ConfigurationError

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


def can_render(name: str) -> bool:
    """Return whether MuJoCo can draw; in a process of its own, which a bad driver may end.

    Args:
        name: value of ``MUJOCO_GL``; empty to leave it as it is.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", RENDER],
            env={**os.environ, VARIABLE: name} if name else None,
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
    """
    return _find_renderer(os.environ.get(VARIABLE, ""))


@functools.cache
def _find_renderer(chosen: str) -> str:
    names = RENDERERS if not chosen and sys.platform == "linux" else (chosen,)
    for name in names:
        if can_render(name):
            return name
    tried = f" with {VARIABLE}={chosen}: unset it, or" if chosen else ":"
    raise ConfigurationError(
        f"MuJoCo cannot draw images on this machine{tried} install a library that needs no screen"
        f" (Debian, Ubuntu: {PACKAGES})"
    )


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
