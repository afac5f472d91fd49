"""Videos of test episodes in the course of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.callbacks.images import log_tensorboard_image
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError, Interrupted
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.video import (
    Recording,
    VideoFormat,
    check_drawing,
    check_encoder,
    chosen_split,
    chosen_tasks,
    gif,
    record_videos,
)


class VideoCallback(SessionCallback):
    """Write a video of a test episode of each task at evaluations, into ``videos/step_N/``.

    W&B and TensorBoard get them as ``videos/<task>`` if they are on. The episodes are run in
    environments of their own after an evaluation: training is the same with and without them. At
    the start one image is drawn, and missing requirements of videos are an error; later, a video
    that cannot be made, or that a logger cannot take, is a warning.

    An image of a MuJoCo simulation takes about 40 ms of one core without a GPU. An episode of
    MetaWorld has 190 images (500 steps of 1/80 s).

    Args:
        every: a video at every n-th evaluation and at the last one, also where the run stops early.
        tasks: names of the tasks; null for all.
        split: which environments; null for the first that is evaluated, ``eval``.
        num_episodes: test episodes of each task, one after another in the video.
        first_episode: number of the first test episode; an evaluation begins with 0.
        width: pixels of an image, even.
        height: pixels of an image, even.
        fps: frames per second of the video.
        num_workers: worker processes that step and draw; null for one per core, 0 for the process
            that trains.
        timeout: seconds to wait for a worker before the recording is given up.

    Raises:
        ConfigurationError: at the start of training, if the tasks or the split are unknown, or no
            video can be made on this machine.
    """

    key = "video"

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
        at_least(0, first_episode=first_episode, num_workers=num_workers, prefix="VideoCallback's ")
        above(0, timeout=timeout, prefix="VideoCallback's ")
        self._every = every
        self._tasks = tasks
        self._split = split
        self._num_episodes = num_episodes
        self._first_episode = first_episode
        self._format = VideoFormat(width, height, fps).check()
        self._num_workers = num_workers
        self._timeout = timeout
        self._num_evaluations = 0
        self._is_ending = False
        self._is_last_recorded = True
        """Whether the last evaluation of this process has a video."""
        self._warn_once = WarnOnce()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the requirements of videos, and register with the session.

        Raises:
            ConfigurationError: if no video can be made.
        """
        super().setup(trainer, pl_module, stage)
        if stage != TrainerFn.FITTING:
            return
        self._is_ending = False
        self._is_last_recorded = True
        self.session.after_evaluation.append(self._record_if_due)
        with distributed.raise_on_all_ranks(ConfigurationError):
            if trainer.is_global_zero:
                self._check()

    def _check(self) -> None:
        check_encoder()
        benchmark = self.session.benchmark
        split = chosen_split(benchmark, self._split)
        tasks = chosen_tasks(benchmark, self._tasks, split)
        num_workers = 1 if self._num_workers is None else min(1, self._num_workers)
        try:
            check_drawing(benchmark, tasks[0], split, self._format, num_workers)
        except EnvironmentFaultError as error:
            raise ConfigurationError(
                f"VideoCallback cannot draw an image: {error}. Leave it out of trainer.callbacks"
                " to train without videos"
            ) from error

    def _record_if_due(self) -> None:
        self._num_evaluations += 1
        env_steps = self.session.counters.env_steps
        is_last = self._is_ending or env_steps >= self.session.loop.last_step
        self._is_last_recorded = is_last or self._num_evaluations % self._every == 0
        if self._is_last_recorded:
            with self.session.stopwatch.measure("evaluate"):
                self._record_and_log(env_steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the last evaluation's episodes if the run stops early and they have no video."""
        self._is_ending = True  # the evaluation may still follow, if this is called before it
        env_steps = self.session.counters.env_steps
        if not self._is_last_recorded and self.session.evaluated_at == env_steps:
            self._record_and_log(env_steps)

    @rank_zero_only
    def _record_and_log(self, env_steps: int) -> None:
        unit = self.session.algorithm.step_unit
        recording = None
        failure = f"no video was made after {env_steps:,} {unit}"
        later = "a video is tried at the next evaluation"
        warn_once = self._warn_once(failure, continuation=later, kind="recording")
        # an interruption ends the run at the next check: the evaluation is complete
        with contextlib.suppress(Interrupted), warn_once:
            recording = self._record(env_steps)
        if recording is None:
            return
        for logger in self.session.loggers:
            name = type(logger).__name__
            failure = f"{name} could not take the videos of {env_steps:,} {unit}"
            hint = f"They are in {self.session.folder / 'videos'}."
            later = "the next ones are given to it, too"
            with self._warn_once(failure, continuation=later, kind=name, hint=hint):
                _log(logger, recording.files, env_steps)

    def _record(self, env_steps: int) -> Recording:
        session = self.session
        return record_videos(
            with_action_transforms(session.algorithm, session.action_transforms),
            session.benchmark,
            session.folder / "videos" / f"step_{env_steps:012d}",
            tasks=self._tasks,
            split=self._split,
            num_episodes=self._num_episodes,
            first_episode=self._first_episode,
            format=self._format,
            caption=f"after {env_steps:,} {session.algorithm.step_unit}",
            num_workers=self._num_workers,
            timeout=self._timeout,
            on_step=session.check_signals,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of evaluations, which decides when the next video is due."""
        return {"evaluations": self._num_evaluations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self._num_evaluations = state_dict["evaluations"]


def _log(logger: Logger, files: dict[str, Path], env_steps: int) -> None:
    """Give the videos to a logger that shows them."""
    if isinstance(logger, WandbLogger):
        import wandb

        row: dict[str, Any] = {"env_steps": env_steps}
        for name, path in files.items():
            row[f"videos/{name}"] = wandb.Video(str(path), format="mp4")
        logger.log_metrics(row, step=env_steps)
    elif isinstance(logger, TensorBoardLogger):
        for name, path in files.items():
            # TensorBoard shows a GIF among the images; its own add_video needs another encoder
            log_tensorboard_image(logger, f"videos/{name}", gif(path), env_steps)
