"""Image observations: the pixel version of any benchmark whose environments can be rendered."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.checks import at_least, within
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, BenchmarkWrapper, check_spec
from mtrl_lightning.envs.benchmarks.images import packed, packed_size, parts_of
from mtrl_lightning.envs.render.opengl import (
    THREADS,
    find_renderer,
    restored_variables,
    use_renderer,
)
from mtrl_lightning.envs.render.renderer import Quality, SimulationRenderer, simulation_of
from mtrl_lightning.envs.step_values import check_finite
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec


class Pixels(BenchmarkWrapper):
    """A benchmark whose observations are images instead of states.

    An observation is the stack of an episode's newest frames, unsigned bytes ``[S, 3, H, W]`` with
    the newest frame last; at the start of an episode, the first frame is repeated. One image is
    rendered per environment step, regardless of the benchmark's action repeat, in the process that
    steps the environment. MuJoCo simulations are rendered directly, other environments by their
    ``render()`` with ``render_mode="rgb_array"``, whose image is resized.

    Args:
        benchmark: the tasks, such as ``DMControl``, ``DMControlFamily``, ``MetaWorld`` or
            ``GymnasiumTasks``.
        size: width and height of an image in pixels (84 in the papers).
        frame_stack: number of stacked frames, ``S`` (3 in the papers).
        camera: name or index of the MuJoCo model's camera; None for the benchmark's default.
        shadows: whether to render shadows. With shadows, reflections and multisampling, images
            equal those of dm_control's ``physics.render``, as shown in papers. Without all three,
            rendering on a CPU is many times faster.
        reflections: whether to render reflections on the floor.
        multisampling: whether to use multisample antialiasing.
        state: entries of the state to observe with the images, for ``MultiInput``; in MetaWorld,
            the first four are the position of the hand and the gripper. Empty for images only.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        size: int = 84,
        frame_stack: int = 3,
        camera: str | int | None = None,
        shadows: bool = False,
        reflections: bool = False,
        multisampling: bool = False,
        state: Sequence[int] = (),
    ) -> None:
        super().__init__(benchmark)
        spec = benchmark.spec
        at_least(1, size=size, hint=" pixel, such as 84")
        within(1, spec.horizon, frame_stack=frame_stack, hint=", the steps of an episode")
        self.size = size
        self.frame_stack = frame_stack
        self.drawn_camera = camera
        self.state = tuple(state)
        self.quality = Quality(shadows, reflections, multisampling)
        self._renderer: str | None = None
        # raise errors of environments that cannot be rendered before the run folder is created
        task = spec.train_tasks[0]
        env = benchmark.make_rendered_env(task, benchmark.splits[0], seed=0)
        self._is_simulated = simulation_of(env) is not None
        if self._is_simulated:
            self._renderer = find_renderer()  # once, not in each worker
        with self._drawing():
            observing = self._observing(env, task)
        observing.reset(seed=0)
        observing.close()
        check_spec(self.spec)

    @property
    def spec(self) -> EnvSpec:
        """The benchmark's spec, with stacked frames as observations."""
        spec = self.benchmark.spec
        frame = (3, self.size, self.size)
        parts = parts_of(len(self.state), frame) if self.state else ()
        shape = (self.frame_stack, *([packed_size(parts)] if parts else frame))
        protocol: dict[str, Any] = {
            "pixels": f"{self.size} x {self.size}",
            "frame_stack": self.frame_stack,
        }
        if self.state:
            protocol["state"] = " ".join(map(str, self.state))
        if self.drawn_camera is not None:
            protocol["camera"] = self.drawn_camera
        if self._is_simulated:
            drawn = [name for name, value in self.quality._asdict().items() if value]
            protocol["drawn"] = " ".join(drawn) if drawn else "plain"
        return spec._replace(
            observation_space=Box(0, 255, shape, np.uint8),
            observation_sizes=(),
            observation_parts=parts,
            frame_stack=self.frame_stack,
            protocol={**spec.protocol, **protocol},
        )

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one of the benchmark's environments with image observations."""
        with self._drawing():
            return self._observing(self.benchmark.make_rendered_env(task, split, seed), task)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment for a video, rendered like that of the benchmark."""
        return self.make_env(task, split, seed)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Select the rendering library in this context, then restore the environment variables.

        Without a GPU, it renders in the calling thread, because a worker has a single core.
        """
        with restored_variables():
            os.environ.setdefault(THREADS, "0")
            if self._renderer is not None:
                use_renderer(self._renderer)
            yield

    def _observing(self, env: gym.Env, task: int) -> PixelEnv:
        """Wrap an environment to observe images."""
        name = self.benchmark.spec.task_names[task]
        draw: Callable[[], Any] = env.render
        if simulation_of(env) is not None:
            camera = self.benchmark.camera(task) if self.drawn_camera is None else self.drawn_camera
            draw = SimulationRenderer(env, camera, (self.size, self.size), self.quality)
            try:
                draw.open()
            except ConfigurationError as error:
                raise ConfigurationError(f"task {name!r}: {error}") from error
        elif env.render_mode != "rgb_array":
            raise ConfigurationError(
                f"the environment of task {name!r} cannot render images (its render_mode is"
                f" {env.render_mode!r}, and it has no MuJoCo simulation): make it with"
                " render_mode='rgb_array', in the benchmark's make_env or make_rendered_env"
            )
        return PixelEnv(env, draw, self.size, self.frame_stack, self.state)


class PixelEnv(gym.Wrapper):
    """Observe a stack of the newest frames of an episode.

    Args:
        env: the environment.
        draw: returns its image, ``[height, width, 3]``.
        size: width and height of a frame in pixels; images of other sizes are resized.
        frame_stack: number of stacked frames.
        state: entries of the state to pack with each frame.
    """

    def __init__(
        self,
        env: gym.Env,
        draw: Callable[[], npt.NDArray],
        size: int,
        frame_stack: int,
        state: Sequence[int] = (),
    ) -> None:
        super().__init__(env)
        self.draw = draw
        """Returns the current image."""
        self._size = size
        self._state = list(state)
        frame = (3, size, size)
        row = (packed_size(parts_of(len(state), frame)),) if state else frame
        shape = (frame_stack, *row)
        self.observation_space = Box(0, 255, shape, np.uint8)
        self._stack: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Start an episode; return its first frame, repeated."""
        state, info = self.env.reset(seed=seed, options=options)
        check_finite("the state", np.asarray(state))  # it is not checked anywhere else
        if isinstance(self.draw, SimulationRenderer):
            self.draw.start_episode()
        self._stack[:] = self._frame(state)
        return self._stack.copy(), info

    def step(self, action: Any) -> tuple[npt.NDArray[np.uint8], Any, bool, bool, dict[str, Any]]:
        """Step; return the newest frames."""
        state, reward, terminated, truncated, info = self.env.step(action)
        check_finite("the state", np.asarray(state))  # it is not checked anywhere else
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._frame(state)
        return self._stack.copy(), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment and its renderer."""
        if isinstance(self.draw, SimulationRenderer):
            self.draw.close()
        super().close()

    def _frame(self, state: Any) -> npt.NDArray[np.uint8]:
        """Return the current image, ``[3, size, size]``, or a packed row of the state and it."""
        image = np.asarray(self.draw())
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigurationError(
                f"the image has dtype {image.dtype} and shape {image.shape}:"
                " render() must return unsigned bytes [height, width, 3]"
            )
        if image.shape[:2] != (self._size, self._size):
            image = _scaled(image, self._size)
        image = image.transpose(2, 0, 1)
        return packed(np.asarray(state)[self._state], image) if self._state else image


def _scaled(image: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Resize an image by averaging over areas."""
    from PIL import Image

    scaled = Image.fromarray(image).resize((size, size), Image.Resampling.BOX)
    return np.asarray(scaled)
