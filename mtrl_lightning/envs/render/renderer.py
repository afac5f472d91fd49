"""Render the MuJoCo simulation of an environment."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.simulator import simulations_of
from mtrl_lightning.errors import ConfigurationError

UPSIDE_DOWN = -0.1
"""Vertical component of a camera's up vector below which its image is rotated by 180 degrees."""


MIN_GEOMS = 1_000
"""Minimum number of geoms for which the renderer allocates memory."""


class Quality(NamedTuple):
    """Rendering effects; each takes time, especially without a GPU."""

    shadows: bool = False
    reflections: bool = False
    multisampling: bool = False
    """Multisample antialiasing, with the model's number of samples per pixel."""


OF_VIDEOS = Quality(reflections=True, multisampling=True)
"""Quality of videos; without shadows, rendering is about three times faster."""


class SimulationRenderer:
    """Render an environment's MuJoCo simulation: each call returns an image.

    The model is not modified, so that it can be rendered with several sizes and qualities.

    Args:
        env: an environment with an ``MjData``.
        camera: name or index of the model's camera; None for its first, or a free camera.
        size: width and height of the image in pixels.
        quality: rendering effects.
    """

    def __init__(
        self,
        env: gym.Env,
        camera: str | int | None,
        size: tuple[int, int],
        quality: Quality = OF_VIDEOS,
    ) -> None:
        self._env = env
        self._camera = camera
        self._size = size
        self._quality = quality
        self._renderer: Any = None

    def __call__(self) -> npt.NDArray[np.uint8]:
        """Return an image of the current state, ``[height, width, 3]``."""
        data, camera = self.open()
        self._renderer.update_scene(data, camera)
        image = self._renderer.render()
        if camera >= 0 and data.cam_xmat[camera].reshape(3, 3)[2, 1] < UPSIDE_DOWN:
            # MetaWorld's corner cameras are upside down
            return image[::-1, ::-1]
        return image

    def open(self) -> tuple[Any, int]:
        """Create the renderer if necessary, and return the simulation and the camera index."""
        check_drawable(self._env)
        data = simulation_of(self._env)
        camera = self._camera_number(data.model)
        if self._renderer is None or self._renderer.model is not data.model:
            self.close()  # an environment may rebuild its model
            self._renderer = self._make_renderer(data.model)
        return data, camera

    def start_episode(self) -> None:
        """Update height fields for the next image, because a reset may change them."""
        if self._renderer is not None and self._renderer.model.nhfield:
            self.close()

    def _make_renderer(self, model: Any) -> Any:
        import mujoco

        width, height = self._size
        screen = model.vis.global_
        quality = model.vis.quality
        previous = (screen.offwidth, screen.offheight, quality.shadowsize, quality.offsamples)
        # these only determine the sizes of buffers, not the images
        screen.offwidth = width
        screen.offheight = height
        if not self._quality.shadows:
            quality.shadowsize = 0
        if not self._quality.multisampling:
            quality.offsamples = 0
        try:
            # MuJoCo's default of 10,000 takes 9 MiB per environment
            max_geoms = max(MIN_GEOMS, 2 * (model.ngeom + model.nsite + model.nwrap))
            renderer = mujoco.Renderer(model, height, width, max_geoms)
            _used.add(self)
            _close_used_at_exit()
        finally:
            screen.offwidth, screen.offheight, quality.shadowsize, quality.offsamples = previous
        flags = renderer.scene.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = self._quality.shadows
        flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = self._quality.reflections
        return renderer

    def _camera_number(self, model: Any) -> int:
        if self._camera is None:
            return 0 if model.ncam else -1
        names = [model.camera(camera_id).name for camera_id in range(model.ncam)]
        if isinstance(self._camera, str) and self._camera in names:
            return names.index(self._camera)
        if isinstance(self._camera, int) and -1 <= self._camera < model.ncam:
            return self._camera
        raise ConfigurationError(
            f"the model has no camera {self._camera!r}: choose from {', '.join(names) or 'none'}"
        )

    def close(self) -> None:
        """Release the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


_used: weakref.WeakSet[SimulationRenderer] = weakref.WeakSet()


@functools.cache
def _close_used_at_exit() -> None:
    """Close renderers before MuJoCo's exit handler, which would otherwise print errors.

    Exit handlers run in reverse order, and MuJoCo's is already registered when this is called.
    """

    def close_used() -> None:
        for renderer in list(_used):
            renderer.close()

    atexit.register(close_used)


def check_drawable(env: gym.Env) -> None:
    """Check that a simulation has textures and visual meshes, which may be omitted."""
    if not getattr(env.unwrapped, "is_drawable", True):
        raise ConfigurationError(
            "this environment's simulation has no textures and visual meshes, to save memory: make"
            " one that can be rendered with the benchmark's make_rendered_env(task, split, seed)"
        )


def simulation_of(env: gym.Env) -> Any:
    """Return the ``MjData`` of an environment; None if it has none."""
    simulations = simulations_of(env)
    return simulations[0] if simulations else None


class Drawing(gym.Wrapper):
    """An environment with ``image()``, using a ``SimulationRenderer`` or its own ``render()``.

    Args:
        env: the environment.
        renderer: renderer of its simulation; None for its own ``render()``.
    """

    def __init__(self, env: gym.Env, renderer: SimulationRenderer | None) -> None:
        super().__init__(env)
        self._renderer = renderer
        if renderer is not None:
            renderer.open()
        elif env.render_mode != "rgb_array":
            raise ConfigurationError(
                f"the environment {env} cannot render images (its render_mode is"
                f" {env.render_mode!r}, and it has no MuJoCo simulation): make it with"
                " render_mode='rgb_array', in the benchmark's make_env or make_rendered_env"
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        result = self.env.reset(seed=seed, options=options)
        if self._renderer is not None:
            self._renderer.start_episode()
        return result

    def image(self) -> npt.NDArray[np.uint8]:
        """Return an image of the current state, ``[height, width, 3]``."""
        image = np.asarray(self.env.render() if self._renderer is None else self._renderer())
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigurationError(
                f"the image of {self.env} has dtype {image.dtype} and shape {image.shape}:"
                " render() must return unsigned bytes [height, width, 3]"
            )
        return image

    def close(self) -> None:
        """Close the environment and its renderer."""
        if self._renderer is not None:
            self._renderer.close()
        super().close()
