"""Selection of the OpenGL library for MuJoCo; only the standard library is needed.

MuJoCo reads ``MUJOCO_GL`` on import and defaults to GLFW, which needs a display. EGL and OSMesa do
not, and also render without a GPU.
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
"""Mesa's variable for the number of threads that render without a GPU; 0 for the caller's."""
VARIABLES = (VARIABLE, "PYOPENGL_PLATFORM", THREADS)
"""Environment variables set by selecting a library; the second one is set by MuJoCo."""
RENDERERS = ("egl", "osmesa", "glfw")
"""Values of ``MUJOCO_GL`` on Linux, in order of preference; the last one needs a display."""
PACKAGES = "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri, or apt-get install libosmesa6"
"""Installation hint for Debian and Ubuntu if MuJoCo cannot render."""
RENDER = (
    "import mujoco; model = mujoco.MjModel.from_xml_string('<mujoco/>');"
    " renderer = mujoco.Renderer(model, 16, 16); renderer.update_scene(mujoco.MjData(model));"
    " renderer.render(); renderer.close()"
)
RENDER_SECONDS = 60.0
"""Seconds after which a renderer counts as hung."""


def can_render(name: str) -> bool:
    """Return whether MuJoCo can render, tested in a subprocess, which a bad driver may crash.

    Args:
        name: value of ``MUJOCO_GL``; empty to leave it unchanged.
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
    """Return the value of ``MUJOCO_GL`` with which MuJoCo can render; empty if none is needed.

    The first call takes about a second.
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
        f"MuJoCo cannot render on this machine{tried} install a library that needs no display"
        f" (Debian, Ubuntu: {PACKAGES})"
    )


@contextlib.contextmanager
def restored_variables() -> Iterator[None]:
    """Restore the environment variables that ``use_renderer`` changes at the end of a context."""
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
    """Select MuJoCo's rendering library in this process, even if it was already imported.

    This sets environment variables, which later subprocesses inherit; see ``restored_variables``.

    Args:
        name: result of ``find_renderer``.
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
