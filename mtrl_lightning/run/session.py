"""One run's parts, put together once: every callback gets the same ``Session``.

Callbacks register their shared parts here, so none looks another one up, and their order in the
trainer's list has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from mtrl_lightning.counters import Counters
from mtrl_lightning.envs.vector.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer, RolloutBuffer
from mtrl_lightning.rollout import (
    ActionTransform,
    Collector,
    CorrelatedNoise,
    EpisodeListener,
    PauseSolved,
)
from mtrl_lightning.run.data import NO_LOOP, MultiTaskData
from mtrl_lightning.run.rank_status import RankStatus

if TYPE_CHECKING:
    from mtrl_lightning.algorithms import Algorithm
    from mtrl_lightning.run.loop import TrainingLoop


def _do_nothing() -> None:
    pass


class StepAction(NamedTuple):
    """Something that happens after a vector step and its updates, if it is due."""

    run: Callable[[int, bool], None]
    """Receives the environment steps made, and whether the run ends with them.

    With several processes it sets ``trainer.should_stop`` on all of them or on none.
    """
    at_start: Callable[[], None] = _do_nothing
    """Called before the first environment step of a run."""


class Signals(Protocol):
    """Signals that ask the run to end."""

    @property
    def received_signal(self) -> int:
        """Number of the signal that this process has received; 0 for none."""

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came; the run's state must be whole."""


class Checkpoints(Protocol):
    """The checkpoints of a run."""

    def save_interrupted(self) -> None:
        """Save a run that a signal or a fault ends."""


class ReplayFiles(Protocol):
    """The replay on disk, which is written with every checkpoint."""

    def prune(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the files that none of the checkpoints needs."""


class Session:
    """The parts of one run.

    Constructing it starts nothing. ``RolloutCallback`` starts the workers and calls ``open``, which
    allocates the buffers; for an offline algorithm it calls ``open_offline``.

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
        """True from the start of the loop on: before that, state may be half restored."""
        self.results: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.evaluated_at = -1
        """Environment steps at the last evaluation."""

        # registered by callbacks
        self.action_transforms: Sequence[ActionTransform] = ()
        """They change the policy's actions before these are sent to the environments."""
        self.signals: Signals | None = None
        self.checkpoints: Checkpoints | None = None
        self.replay_files: ReplayFiles | None = None
        self.after_updates: dict[str, StepAction] = {}
        """Actions after a vector step and its updates, by their names in ``AFTER_UPDATES``."""
        self.after_vector_step: list[Callable[[int], None]] = []
        """Called right after every vector step, also in the warm-up."""
        self.after_evaluation: list[Callable[[], None]] = []
        self.after_failure: list[Callable[[], None]] = []
        """Called when an exception has ended the run, after it was saved."""
        self._loop: TrainingLoop | None = None
        self._collector: Collector | None = None
        self._is_open = False

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

    def open(
        self,
        envs: VectorEnv,
        window: int,
        device: torch.device,
        listeners: Sequence[EpisodeListener] = (),
        exploration: CorrelatedNoise | None = None,
        pausing: PauseSolved | None = None,
    ) -> None:
        """Take the training environments, whose workers are started, and memory for transitions.

        Args:
            envs: the training environments.
            window: finished episodes per task over which statistics are kept, over all processes.
            device: of the buffers and the algorithm.
            listeners: called at the events of every training episode.
            exploration: makes the noise of explored actions in place of the algorithm.
            pausing: which environments are not stepped.
        """
        self._is_open = True
        self._collector = Collector(
            envs,
            self.algorithm,
            counters=self.local_counters,
            window=-(-window // distributed.world_size()),
            listeners=listeners,
            action_transforms=self.action_transforms,
            exploration=exploration,
            pausing=pausing,
        )
        fields = self.algorithm.policy_fields
        tasks = envs.task_E.tolist()
        collection = self.algorithm.collection
        if collection is None:
            self.data.open_replay(tasks, self.folder, device, fields)
        else:
            self.data.open_rollout_buffer(tasks, collection, fields, device)

    def open_offline(self, device: torch.device) -> None:
        """Read the demonstrations of an offline algorithm, which has no training environments.

        Args:
            device: of the buffer and the algorithm.
        """
        self.data.open_demonstrations(device)
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether what is learned from is there."""
        return self._is_open

    @property
    def has_envs(self) -> bool:
        """Whether the training environments are there."""
        return self._collector is not None

    @property
    def step_unit(self) -> str:
        """What a step of the schedules is called."""
        return self.algorithm.step_unit

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
    def transitions(self) -> ReplayBuffer | RolloutBuffer:
        """The transitions that are learned from."""
        return self.rollout_buffer if self.algorithm.kind == "on-policy" else self.replay

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

    def begin_learning(self) -> None:
        """Give the algorithm each trained task's mean reward in the replay, if it has one."""
        if self.algorithm.kind != "on-policy":
            self.algorithm.begin_learning(self.replay.mean_rewards())

    def log(self, metrics: dict[str, float]) -> None:
        """Give a row to every logger, with ``env_steps`` in it and as its step."""
        env_steps = self.counters.env_steps
        for logger in self.loggers:
            logger.log_metrics({"env_steps": env_steps, **metrics}, step=env_steps)

    def close(self) -> None:
        """End the workers of the training environments."""
        if self._collector is not None:
            self._collector.envs.close()
            self._collector = None
        self._is_open = False
        self.data.session = None
