"""Videos of test episodes in the course of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.signals import Interrupted
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.video import (
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
    the start one picture is drawn, and what is missing for videos is an error; later, a video that
    cannot be made is a warning.

    A picture of a MuJoCo simulation takes about 40 ms of one core without a GPU. An episode of
    MetaWorld has 190 pictures (500 steps of 1/80 s).

    Args:
        every: a video at every n-th evaluation and at the last one.
        tasks: names of the tasks; null for all.
        split: which environments; null for the first that is evaluated, ``eval``.
        num_episodes: test episodes of each task, one after another in the video.
        first_episode: number of the first test episode; an evaluation begins with 0.
        width: pixels of a picture, even.
        height: pixels of a picture, even.
        fps: pictures per second of the video.
        num_workers: worker processes that step and draw; null for one per core, 0 for the process
            that trains.
        timeout: seconds to wait for a worker before the recording is given up.

    Raises:
        ConfigurationError: if a number is out of range; at the start of training, if the tasks or
            the split are unknown, or no video can be made on this machine.
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
        if every < 1 or num_episodes < 1 or first_episode < 0:
            raise ConfigurationError(
                f"VideoCallback: every is {every}, num_episodes {num_episodes}: give at least 1;"
                f" first_episode is {first_episode}: give at least 0"
            )
        if timeout <= 0 or (num_workers is not None and num_workers < 0):
            raise ConfigurationError(
                f"VideoCallback: timeout is {timeout}: give a number above 0;"
                f" num_workers is {num_workers}: give 0 or more, or null"
            )
        self._every = every
        self._tasks = tasks
        self._split = split
        self._num_episodes = num_episodes
        self._first_episode = first_episode
        self._format = VideoFormat(width, height, fps).check()
        self._num_workers = num_workers
        self._timeout = timeout
        self._num_evaluations = 0
        self._has_warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check what videos need, and register with the session.

        Raises:
            ConfigurationError: if no video can be made.
        """
        super().setup(trainer, pl_module, stage)
        if stage != TrainerFn.FITTING:
            return
        self.session.after_evaluation.append(self._record_if_due)
        self._check()

    @rank_zero_only
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
                f"VideoCallback cannot draw a picture: {error}. Leave it out of trainer.callbacks"
                " to train without videos"
            ) from error

    def _record_if_due(self) -> None:
        self._num_evaluations += 1
        env_steps = self.session.counters.env_steps
        is_last = env_steps >= self.session.total_steps
        if is_last or self._num_evaluations % self._every == 0:
            with self.session.stopwatch.measure("evaluate"):
                self._record(env_steps)

    @rank_zero_only
    def _record(self, env_steps: int) -> None:
        session = self.session
        try:
            recording = record_videos(
                with_action_transforms(session.algorithm, session.action_transforms),
                session.benchmark,
                session.folder / "videos" / f"step_{env_steps:012d}",
                tasks=self._tasks,
                split=self._split,
                num_episodes=self._num_episodes,
                first_episode=self._first_episode,
                format=self._format,
                caption=f"after {env_steps:,} env steps",
                num_workers=self._num_workers,
                timeout=self._timeout,
                on_step=session.check_signals,
            )
            for logger in session.loggers:
                _log(logger, recording.files, env_steps)
        except Interrupted:
            return  # the next check ends the run, whose evaluation is complete
        except Exception as error:  # a video is no reason to lose a run
            if not self._has_warned:
                rank_zero_warn(
                    f"no video was made after {env_steps:,} env steps"
                    f" ({type(error).__name__}: {error}). Training continues, and a video is tried"
                    " at the next evaluation; there is no further warning"
                )
            self._has_warned = True

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
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, path in files.items():
            # TensorBoard shows a GIF among the images; its own add_video needs another encoder
            image = Summary.Image(encoded_image_string=gif(path), colorspace=3)
            value = Summary.Value(tag=f"videos/{name}", image=image)
            writer = logger.experiment._get_file_writer()
            writer.add_summary(Summary(value=[value]), env_steps)
