"""Videos of test episodes during training."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from mtrl_lightning.callbacks.images import WarnOnce, is_evaluation_of_run, log_tensorboard_image
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.data import TaskData
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError, Interrupted
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.transitions import step_unit
from mtrl_lightning.video import VideoFormat, check_recording, gif, record_videos


class VideoCallback(Callback):
    """Record a video of test episodes of each task after evaluations, in ``videos/step_N/``.

    They are logged to W&B and TensorBoard as ``videos/<task>``. The episodes run in separate
    environments and do not affect training. One frame is rendered before training, so that missing
    requirements raise an error at the start; later, a video that cannot be recorded or logged is a
    warning.

    Rendering a MuJoCo frame takes about 40 ms on one core without a GPU. A MetaWorld episode has
    190 frames (500 steps of 1/80 s).

    Args:
        every: record a video at every n-th evaluation, and always at the last one, even if the run
            stops early.
        tasks: names of the tasks; null for all.
        split: split to record; null for the first evaluated one, ``eval``.
        num_episodes: test episodes of each task, concatenated in the video.
        first_episode: index of the first test episode; evaluations start with 0.
        width: width of a frame in pixels, even.
        height: height of a frame in pixels, even.
        fps: frames per second of the video.
        num_workers: worker processes that step and render; null for one per core, 0 to use the
            training process.
        timeout: seconds to wait for a worker before the recording is aborted.
    """

    order: ClassVar[int] = 4

    def __init__(
        self,
        every: int = 1,
        tasks: list[str] | None = None,
        split: str | None = None,
        num_episodes: int = 1,
        first_episode: int = 0,
        width: int = 480,
        height: int = 360,
        fps: int = 30,
        num_workers: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        at_least(1, every=every, num_episodes=num_episodes, prefix="VideoCallback's ")
        at_least(1, width=width, height=height, fps=fps, prefix="VideoCallback's ")
        at_least(0, first_episode=first_episode, num_workers=num_workers, prefix="VideoCallback's ")
        above(0, timeout=timeout, prefix="VideoCallback's ")
        self._every = every
        self._tasks = tasks
        self._split = split
        self._num_episodes = num_episodes
        self._first_episode = first_episode
        self._format = VideoFormat(width, height, fps)
        self._num_workers = num_workers
        self._timeout = timeout
        self._num_evaluations = 0
        self._missed_at: int | None = None
        """Environment steps of the last evaluation if it has no video yet."""
        self._warn_once = WarnOnce()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the requirements of videos."""
        if stage == "fit":
            self._missed_at = None
            with distributed.raise_on_all_ranks(ConfigurationError):
                if trainer.is_global_zero:
                    self._check(data_of(trainer))

    def _check(self, data: TaskData) -> None:
        num_workers = 1 if self._num_workers is None else min(1, self._num_workers)
        try:
            check_recording(data.benchmark, self._tasks, self._split, self._format, num_workers)
        except EnvironmentFaultError as error:
            raise ConfigurationError(
                f"VideoCallback cannot render a frame: {error}. Remove it from trainer.callbacks"
                " to train without videos"
            ) from error

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record a video if one is due, and at the last evaluation."""
        if not is_evaluation_of_run(trainer):
            return
        data = data_of(trainer)
        self._num_evaluations += 1
        is_last = data.is_over or trainer.should_stop
        if is_last or self._num_evaluations % self._every == 0:
            self._missed_at = None
            with data.stopwatch.measure("evaluate"):
                self._record(trainer, data)
        else:
            self._missed_at = data.counters.env_steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record a video of the last evaluation if it has none and ended the run."""
        data = data_of(trainer)
        if self._missed_at == data.counters.env_steps:
            self._record(trainer, data)

    def _record(self, trainer: Trainer, data: TaskData) -> None:
        if not trainer.is_global_zero:
            return
        env_steps, unit = data.counters.env_steps, step_unit(data.kind)
        files: dict[str, Path] = {}
        failure = f"no video could be recorded after {env_steps:,} {unit}"
        warn_once = self._warn_once(failure, "the next evaluation tries again", "recording")
        # an interruption ends the run at the next check: the evaluation is complete
        with contextlib.suppress(Interrupted), warn_once:
            recording = record_videos(
                with_action_transforms(data.algorithm, data.action_transforms),
                data.benchmark,
                data.folder / "videos" / f"step_{env_steps:012d}",
                tasks=self._tasks,
                split=self._split,
                num_episodes=self._num_episodes,
                first_episode=self._first_episode,
                format=self._format,
                caption=f"after {env_steps:,} {unit}",
                num_workers=self._num_workers,
                timeout=self._timeout,
                on_step=data.check_signals,
            )
            files = recording.files
        for logger in trainer.loggers if files else []:
            name = type(logger).__name__
            failure = f"{name} could not log the videos of {env_steps:,} {unit}"
            with self._warn_once(failure, "later videos are logged again", name):
                _log(logger, files, env_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of evaluations, which determines when the next video is due."""
        return {"evaluations": self._num_evaluations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self._num_evaluations = state_dict["evaluations"]


def _log(logger: Logger, files: dict[str, Path], env_steps: int) -> None:
    """Log the videos to a logger that supports them."""
    if isinstance(logger, WandbLogger):
        import wandb

        row: dict[str, Any] = {"env_steps": env_steps}
        for name, path in files.items():
            row[f"videos/{name}"] = wandb.Video(str(path), format="mp4")
        logger.log_metrics(row, step=env_steps)
    elif isinstance(logger, TensorBoardLogger):
        for name, path in files.items():
            # TensorBoard displays GIFs as images; its add_video needs another encoder
            log_tensorboard_image(logger, f"videos/{name}", gif(path), env_steps)
