"""One run's parts, put together once: every callback gets the same ``Session``.

Callbacks register their shared parts here, so none looks another one up, and their order in the
trainer's list has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from mtrl_lightning.counters import Counters
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer, RolloutBuffer
from mtrl_lightning.rollout import ActionTransform, Collector
from mtrl_lightning.run.data import NO_LOOP, MultiTaskData
from mtrl_lightning.run.rank_status import RankStatus
from mtrl_lightning.run.registered import Checkpoints, ReplayFiles, Signals, StepAction

if TYPE_CHECKING:
    from mtrl_lightning.algorithms import Algorithm
    from mtrl_lightning.run.loop import TrainingLoop


class Session:
    """The parts of one run.

    Constructing it starts nothing. ``RolloutCallback`` starts the workers and calls ``open``.

    Args:
        algorithm: the algorithm.
        data: the benchmark and the replay.
        folder: the run's folder.
        trainer: the trainer, whose loggers receive every row of metrics.
    """

    def __init__(
        self, algorithm: Algorithm, data: MultiTaskData, folder: Path, trainer: Trainer
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.benchmark = data.benchmark
        self.spec = data.spec
        self.folder = folder
        self.trainer = trainer
        self.loggers: list[Logger] = trainer.loggers if distributed.rank() == 0 else []
        self.stopwatch = algorithm.stopwatch
        self.counters = algorithm.counters
        """Counts over all processes."""
        self.local_counters = self.counters if distributed.world_size() == 1 else Counters()
        """Counts of this process since the last ``sync_ranks``; the same with one process."""
        self.rank_status = RankStatus()
        self.is_training = False
        """False until the loop starts: state may be half restored before."""
        self.is_restoring = False
        """Whether a checkpoint is read, and training or evaluation with it has not started."""
        self.results: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.evaluated_at = -1
        """Environment steps at the last evaluation."""

        # registered by callbacks
        self.action_transforms: Sequence[ActionTransform] = ()
        """Changes of the policy's actions on their way to the environments, in order."""
        self.signals: Signals | None = None
        self.checkpoints: Checkpoints | None = None
        self.replay_files: ReplayFiles | None = None
        self.after_updates: dict[str, StepAction] = {}
        """Actions after a vector step and its updates, by their names in ``AFTER_UPDATES``."""
        self.after_vector_step: list[Callable[[int], None]] = []
        """Called right after every vector step, also in the warm-up."""
        self.after_evaluation: list[Callable[[], None]] = []
        self._loop: TrainingLoop | None = None
        self._collector: Collector | None = None
        self.is_open = False
        """Whether the buffers are allocated."""

    @classmethod
    def of(cls, trainer: Trainer, algorithm: LightningModule) -> Session:
        """Return the session of a trainer's run; the first callback that asks makes it.

        Raises:
            ConfigurationError: if the trainer's data are not a ``MultiTaskData``.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, MultiTaskData):
            raise ConfigurationError("pass trainer.fit(model, datamodule=MultiTaskData(...))")
        session = data.session
        if session is None or (session.algorithm, session.trainer) != (algorithm, trainer):
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            data.session = cls(algorithm, data, folder, trainer)  # type: ignore[arg-type]
        return data.session

    def open(self, device: torch.device, collector: Collector | None = None) -> None:
        """Allocate the transitions; for an offline algorithm, read the demonstrations.

        Args:
            device: of the buffers and the algorithm.
            collector: steps the training environments, whose workers are started; None offline.
        """
        self._collector = collector
        tasks = [] if collector is None else collector.envs.task_E.tolist()
        self.data.open(self.algorithm, tasks, self.folder, device)
        self.is_open = True

    @property
    def has_envs(self) -> bool:
        """Whether there are training environments."""
        return self._collector is not None

    @property
    def collector(self) -> Collector:
        """Steps the training environments."""
        assert self._collector is not None, "the session has no training environments"
        return self._collector

    @property
    def loop(self) -> TrainingLoop:
        """The loop that trains.

        Raises:
            ConfigurationError: if the run has none.
        """
        if self._loop is None:
            raise ConfigurationError(NO_LOOP)
        return self._loop

    @loop.setter
    def loop(self, loop: TrainingLoop) -> None:
        self._loop = loop

    @property
    def replay(self) -> ReplayBuffer:
        """The replay buffer of an off-policy algorithm, or the demonstrations of an offline one."""
        assert self.data.buffer is not None, "the session is not open"
        return self.data.buffer

    @property
    def rollout_buffer(self) -> RolloutBuffer:
        """The transitions of an on-policy algorithm's iteration."""
        assert self.data.rollout_buffer is not None, "the session is not open"
        return self.data.rollout_buffer

    @property
    def is_collecting(self) -> bool:
        """Whether an on-policy algorithm is in the middle of an iteration."""
        return self.algorithm.collection is not None and not self.rollout_buffer.is_empty

    @property
    def received_signal(self) -> int:
        """Number of the signal that this process has received; 0 for none."""
        return 0 if self.signals is None else self.signals.received_signal

    def check_signals(self) -> None:
        """Raise ``Interrupted`` if a signal came; called between two steps of long work."""
        if self.signals is not None:
            self.signals.check()

    def log(self, metrics: dict[str, float]) -> None:
        """Log a row of metrics, with ``env_steps`` as a column and as its step."""
        env_steps = self.counters.env_steps
        for logger in self.loggers:
            logger.log_metrics({"env_steps": env_steps, **metrics}, step=env_steps)

    def close(self) -> None:
        """End the workers of the training environments."""
        if self._collector is not None:
            self._collector.envs.close()
            self._collector = None
        self.is_open = False
        self.data.session = None
