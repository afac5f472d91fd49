"""Frames for videos, drawn where the environment is: in its worker process."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, BenchmarkWrapper
from mtrl_lightning.envs.render.opengl import find_renderer, use_renderer
from mtrl_lightning.envs.render.renderer import SimulationRenderer, simulation_of
from mtrl_lightning.errors import ConfigurationError

JPEG_QUALITY = 95
"""No loss is visible. A frame of 480 x 360 takes 30 kB in place of 520 kB."""


class VideoFormat(NamedTuple):
    """Size and speed of a video."""

    width: int = 480
    """Pixels of a frame, an even number of at least 32."""
    height: int = 360
    """Pixels of a frame, an even number of at least 32."""
    fps: int = 30
    """Frames per second of the video."""

    def check(self) -> VideoFormat:
        """Return this, with its numbers checked."""
        for name, pixels in (("width", self.width), ("height", self.height)):
            if pixels < 32 or pixels % 2:
                raise ConfigurationError(
                    f"the video's {name} is {pixels}: give an even number of at least 32 pixels"
                )
        at_least(1, fps=self.fps, prefix="the video's ")
        return self


class VideoFrame(NamedTuple):
    """A compressed frame of an episode, and the values of its labels."""

    frame_index: int
    """Its index in the video of its episode; it is repeated up to the next frame's index."""
    step: int
    return_: float
    """Sum of the rewards so far."""
    success: bool
    """Whether there was success in any step so far."""
    is_last: bool
    """Whether the episode ended with it."""
    jpeg: bytes


class WithFrameRecorder(BenchmarkWrapper):
    """A benchmark whose environments keep frames of their steps, for ``take_frames``.

    Args:
        benchmark: the tasks, which decides how an environment is drawn
            (``Benchmark.make_rendered_env`` and ``Benchmark.camera``).
        format: of the video.
    """

    def __init__(self, benchmark: Benchmark, format: VideoFormat) -> None:
        super().__init__(benchmark)
        self.format = format.check()
        self._renderer: str | None = None
        if "mujoco" in sys.modules:  # found once here, and not in each worker
            with contextlib.suppress(ConfigurationError):  # raised where an environment needs it
                self._renderer = find_renderer()

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment that keeps frames.

        Raises:
            ConfigurationError: if the environment cannot be drawn.
        """
        if self._renderer is not None:
            use_renderer(self._renderer)
        name = self.spec.task_names[task]
        try:
            env = self.benchmark.make_rendered_env(task, split, seed)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"no environment of task {name!r} that draws frames can be made"
                f" ({type(error).__name__}: {error})"
            ) from error
        is_simulated = simulation_of(env) is not None
        if is_simulated and self._renderer is None:
            use_renderer(find_renderer())
        draws_itself = env.render_mode == "rgb_array"
        if not draws_itself and not is_simulated:
            raise ConfigurationError(
                f"the environment of task {name!r} draws no frames (its render_mode is"
                f" {env.render_mode!r}, and it has no MuJoCo simulation): make it with"
                " render_mode='rgb_array', in the benchmark's make_env or make_rendered_env"
            )
        size = (self.format.width, self.format.height)
        camera = self.benchmark.camera(task)
        draw = env.render if draws_itself else SimulationRenderer(env, camera, size)
        return FrameRecorder(env, draw, name, self.format)


class FrameRecorder(gym.Wrapper):
    """Keep frames of the steps, as many per second of simulated time as the video has.

    The environment's ``metadata["render_fps"]`` is the number of steps in a second; without it each
    step is a frame.

    Args:
        env: the environment.
        draw: returns its frame, ``[height, width, 3]``.
        name: of its task.
        format: of the video.
    """

    def __init__(
        self, env: gym.Env, draw: Callable[[], Any], name: str, format: VideoFormat
    ) -> None:
        super().__init__(env)
        self._draw = draw
        self._name = name
        self._size = (format.width, format.height)
        steps_per_second = float(env.metadata.get("render_fps") or format.fps)
        self._frames_per_step = format.fps / steps_per_second
        self._frames: list[VideoFrame] = []
        self._frame_index = 0
        self._step = 0
        self._return = 0.0
        self._success = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, with a frame of its first state."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._step = 0
        self._return = 0.0
        self._success = False
        if isinstance(self._draw, SimulationRenderer):
            self._draw.start_episode()
        self._keep(0, is_last=False)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, with a frame where the next one is due and at the end of an episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._step += 1
        self._return += float(reward)
        self._success |= bool(info.get("success", False))
        is_last = terminated or truncated
        frame_index = math.floor(self._step * self._frames_per_step + 1e-9)
        if frame_index > self._frame_index or is_last:
            self._keep(max(frame_index, self._frame_index + 1), is_last)
        return observation, reward, terminated, truncated, info

    def take_frames(self) -> list[VideoFrame]:
        """Return the frames since the last call."""
        frames = self._frames
        self._frames = []
        return frames

    def close(self) -> None:
        """Close the environment and its renderer."""
        if isinstance(self._draw, SimulationRenderer):
            self._draw.close()
        super().close()

    def _keep(self, frame_index: int, is_last: bool) -> None:
        try:
            drawn = self._draw()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the environment of task {self._name!r} cannot be drawn"
                f" ({type(error).__name__}: {error})"
            ) from error
        image = np.asarray(drawn)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigurationError(
                f"the frame of task {self._name!r} has the type {image.dtype} and the shape"
                f" {image.shape}: render() must return unsigned bytes [height, width, 3]"
            )
        jpeg = _compressed(image, self._size)
        frame = VideoFrame(frame_index, self._step, self._return, self._success, is_last, jpeg)
        self._frames.append(frame)
        self._frame_index = frame_index


def decompressed(jpeg: bytes) -> Any:
    """Return a frame as an image of Pillow."""
    from PIL import Image

    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def _compressed(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> bytes:
    """Return a frame as JPEG, with black margins where its shape is another one."""
    from PIL import Image, ImageOps

    fitted = Image.fromarray(np.ascontiguousarray(image))
    if fitted.size != size:
        fitted = ImageOps.pad(fitted, size)
    compressed = io.BytesIO()
    fitted.save(compressed, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return compressed.getvalue()
