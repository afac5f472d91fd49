"""Frames for videos, rendered in the environment's worker process."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, BenchmarkWrapper
from mtrl_lightning.envs.render.opengl import find_renderer, use_renderer
from mtrl_lightning.envs.render.renderer import Drawing, SimulationRenderer, simulation_of
from mtrl_lightning.envs.step_values import read_reward, read_success
from mtrl_lightning.errors import ConfigurationError

JPEG_QUALITY = 95
"""JPEG quality without visible loss; a frame of 480 x 360 takes 30 kB instead of 520 kB."""


class VideoFormat(NamedTuple):
    """Frame size and frame rate of a video."""

    width: int = 480
    """Pixels of a frame, an even number."""
    height: int = 360
    """Pixels of a frame, an even number."""
    fps: int = 30
    """Frames per second of the video."""


class VideoFrame(NamedTuple):
    """A compressed frame of an episode, and the values of its labels."""

    episode: int
    """Number of the environment's episode, starting at 1."""
    step: int
    return_: float
    """Sum of the rewards so far."""
    success: bool
    """Whether there was success in any step so far."""
    jpeg: bytes


class WithFrameRecorder(BenchmarkWrapper):
    """A benchmark whose environments record frames of their steps, for ``take_frames``.

    Args:
        benchmark: the tasks, which determines how an environment is rendered
            (``Benchmark.make_rendered_env`` and ``Benchmark.camera``).
        format: format of the video.
    """

    def __init__(self, benchmark: Benchmark, format: VideoFormat) -> None:
        super().__init__(benchmark)
        self.format = format
        self._renderer: str | None = None
        if "mujoco" in sys.modules:  # find the renderer once, not in each worker
            with contextlib.suppress(ConfigurationError):  # raised when an environment needs it
                self._renderer = find_renderer()

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment that records frames."""
        if self._renderer is not None:
            use_renderer(self._renderer)
        env = self.benchmark.make_rendered_env(task, split, seed)
        renderer = None
        if simulation_of(env) is not None:
            if self._renderer is None:
                use_renderer(find_renderer())
            if env.render_mode != "rgb_array":
                size = (self.format.width, self.format.height)
                renderer = SimulationRenderer(env, self.benchmark.camera(task), size)
        return FrameRecorder(Drawing(env, renderer), self.spec.has_success, self.format)


class FrameRecorder(gym.Wrapper):
    """Record the frames of a video that runs in real time of the simulation.

    The environment's ``metadata["render_fps"]`` is the number of steps per second; without it, each
    step is a frame.

    Args:
        env: the environment.
        has_success: whether it reports success.
        format: format of the video.
    """

    env: Drawing

    def __init__(self, env: Drawing, has_success: bool, format: VideoFormat) -> None:
        super().__init__(env)
        self._has_success = has_success
        self._size = (format.width, format.height)
        steps_per_second = float(env.metadata.get("render_fps") or format.fps)
        self._frames_per_step = format.fps / steps_per_second
        self._frames: list[VideoFrame] = []
        self._frame_index = 0
        """Index of the next frame in the video of its episode."""
        self._present = self._shown = VideoFrame(0, 0, 0.0, False, b"")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and record a frame of its first state."""
        result = self.env.reset(seed=seed, options=options)
        self._frame_index = 0
        self._present = VideoFrame(self._present.episode + 1, 0, 0.0, False, b"")
        self._keep(0)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and record a frame if one is due or at the end of an episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._present = self._present._replace(
            step=self._present.step + 1,
            return_=self._present.return_ + read_reward(reward),
            success=self._present.success or (self._has_success and read_success(info)),
        )
        frame_index = math.floor(self._present.step * self._frames_per_step + 1e-9)
        if frame_index >= self._frame_index or terminated or truncated:
            self._keep(max(frame_index, self._frame_index))
        return observation, reward, terminated, truncated, info

    def take_frames(self) -> list[VideoFrame]:
        """Return the frames since the last call."""
        frames, self._frames = self._frames, []
        return frames

    def _keep(self, frame_index: int) -> None:
        """Record a frame of the current state, repeating the previous one for skipped frames."""
        self._frames += [self._shown] * (frame_index - self._frame_index)
        self._shown = self._present._replace(jpeg=_compressed(self.env.image(), self._size))
        self._frames.append(self._shown)
        self._frame_index = frame_index + 1


def decompressed(jpeg: bytes) -> Any:
    """Decompress a frame to a Pillow image."""
    from PIL import Image

    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def _compressed(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> bytes:
    """Compress a frame to JPEG, with black borders if its aspect ratio differs."""
    from PIL import Image, ImageOps

    fitted = Image.fromarray(np.ascontiguousarray(image))
    if fitted.size != size:
        fitted = ImageOps.pad(fitted, size)
    compressed = io.BytesIO()
    fitted.save(compressed, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return compressed.getvalue()
