"""One run's parts, put together once: every callback gets the same ``Session``.

The callbacks register here what the others need of them, so none looks another one up, and their
order in the trainer's list is without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import distributed
from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.counters import Counters
from mtrl_lightning.envs.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import MultiTaskData, ReplayBuffer, RolloutBuffer
from mtrl_lightning.rollout import ActionTransform, Collector, EpisodeListener
from mtrl_lightning.rollout.episodes import EpisodeWindows, named

if TYPE_CHECKING:
    from mtrl_lightning.algorithms import Algorithm


class PostStepCall(Protocol):
    """Something that happens after a vector step whose updates are made, when it is due."""

    def __call__(self, env_steps: int, at_end: bool) -> None:
        """Act if it is due at ``env_steps``, or at the end of the run."""


class ReplayFiles(Protocol):
    """The replay on disk, which is written with every checkpoint."""

    def prune(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the files that none of the checkpoints needs."""


class Agreement(NamedTuple):
    """What the processes of a run have agreed on after a vector step; the same on all of them."""

    signal: int = 0
    """Number of a signal that one of them has received; 0 for none."""
    faulty_rank: int | None = None
    """The first whose environments broke more often than they may be rebuilt."""
    is_stop_wanted: bool = False
    """Whether something on one of them has asked the trainer to end the run."""
    restarts: int = 0
    """Groups of environments that were rebuilt on all of them since the program started."""


def _never(env_steps: int, at_end: bool) -> None:
    """Stand for a call that the run does not have."""


class Session:
    """The parts of one run. Making it starts nothing; ``open`` starts workers and takes memory.

    Args:
        algorithm: what acts and learns.
        data: the benchmark and the replay.
        folder: the run's folder.
        trainer: whose loggers get every row of metrics.
    """

    def __init__(
        self, algorithm: Algorithm, data: MultiTaskData, folder: Path, trainer: Trainer
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.benchmark = data.benchmark
        self.spec = data.spec
        self.counters = algorithm.counters
        """Counts over all processes."""
        self.own_counters = self.counters if distributed.world_size() == 1 else Counters()
        """What this process has counted since the last ``agree``; the same with one process."""
        self.agreement = Agreement()
        self.received_signal: Callable[[], int] = lambda: 0
        """Returns the number of the signal that this process has received; 0 for none."""
        self.stopwatch = algorithm.stopwatch
        self.folder = folder
        self.trainer = trainer
        self.loggers: list[Logger] = trainer.loggers if distributed.rank() == 0 else []
        self.total_steps = 0
        """Environment steps after which the run ends."""
        self.refill_steps = 0
        """Environment steps that filled a lost replay: they come on top of those asked for."""
        self.action_transforms: Sequence[ActionTransform] = ()
        """What changes the policy's actions before environments are sent them."""
        self.is_training = False
        """True from the start of training on: before that, state may be half restored."""
        self.results: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.evaluated_at = -1
        """Environment steps at the last evaluation."""
        self.replay_files: ReplayFiles | None = None
        self.has_nothing_left: Callable[[], bool] = lambda: False
        """Whether all steps, updates and results of the last step are there: once restored."""
        self.unused_options: Callable[[], Collection[str]] = tuple
        """Names of the options that change nothing from here on."""

        self.evaluate_at_start: Callable[[], None] = lambda: None
        self.save_at_start: Callable[[], None] = lambda: None
        """Called in this order before the first environment step, if there was none yet."""
        self.evaluate: PostStepCall = _never
        self.log_metrics: PostStepCall = _never
        self.save_best: PostStepCall = _never
        self.reset_networks: PostStepCall = _never
        self.save_last: PostStepCall = _never
        self.save_interrupted: Callable[[], None] = lambda: None
        """Save a run that a signal or a fault ends."""
        self.check_signals: Callable[[], None] = lambda: None
        """Raise ``Interrupted`` if a signal came; called between two steps of long work."""
        self.after_vector_step: list[Callable[[int], None]] = []
        """Called with the environment steps made, also during the warm-up."""
        self.after_evaluation: list[Callable[[], None]] = []
        self.after_failure: list[Callable[[], None]] = []
        """Called when an exception has ended the run, after it was saved."""
        self._collector: Collector | None = None

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
    ) -> None:
        """Take the training environments, whose workers are started, and memory for transitions.

        Args:
            envs: the training environments.
            window: finished episodes per task over which statistics are kept.
            device: that trains.
            listeners: called at the events of every training episode.
        """
        protocol = {key: v for key, v in self.spec.protocol.items() if key != "wrappers"}
        rank_zero_info(", ".join(f"{key} {value}" for key, value in protocol.items()))
        if self.pipeline:
            rank_zero_info(self.pipeline)
        num_tasks = len(self.spec.train_tasks)
        rank_zero_info(self.algorithm.summary)
        if self.algorithm.untrained_summary:
            rank_zero_info(self.algorithm.untrained_summary)
        num_processes = distributed.world_size()
        each = distributed.each_of()
        rank_zero_info(
            f"{each}Stepping {envs.num_envs} environments of {num_tasks} tasks"
            f" in {envs.num_workers} workers"
        )
        if num_processes > 1 and self.algorithm.collection is None:
            rank_zero_info(
                f"{each}{self.data.batch_size // num_processes:,} of the {self.data.batch_size:,}"
                " transitions of a batch"
            )
        self._collector = Collector(
            envs,
            self.algorithm,
            counters=self.own_counters,
            window=-(-window // num_processes),
            listeners=listeners,
            action_transforms=self.action_transforms,
        )
        fields = self.algorithm.policy_fields
        tasks = envs.task_E.tolist()
        collection = self.algorithm.collection
        if collection is None:
            self.data.open_replay(tasks, self.folder, device, fields)
        else:
            self.data.open_rollout_buffer(tasks, collection, fields, device)

    @property
    def pipeline(self) -> str:
        """What changes observations, rewards and actions on their way; empty if nothing does."""
        wrappers = str(self.spec.protocol.get("wrappers", ""))
        transforms = [
            type(transform).__name__
            for transform in self.algorithm.transforms
            if type(transform) is not RewardScale  # which leaves rewards as they are
        ]
        action_transforms = [type(transform).__name__ for transform in self.action_transforms]
        pipelines = []
        if wrappers or transforms:
            steps = ["environment", wrappers, "stored", *transforms, "learner"]
            steps = [step for step in steps if step]
            pipelines.append(f"Observations and rewards: {' > '.join(steps)}")
        if action_transforms:
            steps = ["policy", "stored", *action_transforms, "environment"]
            pipelines.append(f"Actions: {' > '.join(steps)}")
        return ". ".join(pipelines)

    @property
    def collector(self) -> Collector:
        """What steps the training environments."""
        assert self._collector is not None, "the session is not open"
        return self._collector

    @property
    def is_open(self) -> bool:
        """Whether the training environments are there."""
        return self._collector is not None

    @property
    def replay(self) -> ReplayBuffer:
        """The replay buffer of an off-policy algorithm."""
        assert self.data.buffer is not None, "the session is not open"
        return self.data.buffer

    @property
    def rollout_buffer(self) -> RolloutBuffer:
        """The transitions of an on-policy algorithm's iteration."""
        assert self.data.rollout_buffer is not None, "the session is not open"
        return self.data.rollout_buffer

    @property
    def transitions(self) -> ReplayBuffer | RolloutBuffer:
        """What holds the transitions that are learned from."""
        return self.replay if self.algorithm.collection is None else self.rollout_buffer

    @property
    def is_collecting(self) -> bool:
        """Whether an on-policy algorithm is in the middle of an iteration."""
        return self.algorithm.collection is not None and not self.rollout_buffer.is_empty

    @property
    def counted_steps(self) -> int:
        """Environment steps made of those asked for, without those that filled a lost replay."""
        return self.counters.env_steps - self.refill_steps

    def note_restart(self, envs: VectorEnv, reason: str) -> None:
        """Count environments that were rebuilt after a fault, and say why."""
        self.own_counters.worker_restarts += 1
        distributed.warn(
            f"environments are rebuilt, restart {envs.num_restarts} of at most"
            f" {envs.max_restarts}: {reason}"
        )

    def agree(self, wants_stop: bool) -> None:
        """Add up what all processes have counted, and learn what any of them asks for.

        With one process there is nothing to do.

        Args:
            wants_stop: whether something here has asked the trainer to end the run.
        """
        if distributed.world_size() == 1:
            return
        own = self.own_counters
        envs = self.collector.envs
        own_numbers = [
            own.env_steps,
            own.dropped_transitions,
            own.episodes,
            own.worker_restarts,
            self.received_signal(),
            int(envs.fault is not None),
            int(wants_stop),
            envs.num_restarts,
        ]
        numbers = np.array(distributed.gather_numbers(own_numbers))
        total = self.counters
        totals = numbers.sum(0).tolist()
        total.env_steps += totals[0]
        total.dropped_transitions += totals[1]
        total.episodes += totals[2]
        total.worker_restarts += totals[3]
        total.vector_steps += own.vector_steps
        own.load_state_dict(Counters().state_dict())
        faulty = np.flatnonzero(numbers[:, 5])
        self.agreement = Agreement(
            signal=int(numbers[:, 4].max()),
            faulty_rank=int(faulty[0]) if len(faulty) else None,
            is_stop_wanted=bool(totals[6]),
            restarts=totals[7],
        )

    def begin_learning(self) -> None:
        """Give the algorithm each trained task's mean reward in the replay, if it has one."""
        if self.algorithm.collection is None:
            self.algorithm.begin_learning(self.replay.mean_rewards())

    def log(self, metrics: dict[str, float]) -> None:
        """Give a row to every logger, with ``env_steps`` in it and as its step."""
        env_steps = self.counters.env_steps
        for logger in self.loggers:
            logger.log_metrics({"env_steps": env_steps, **metrics}, step=env_steps)

    def joined_windows(self) -> EpisodeWindows:
        """Return the windows of finished episodes of all processes."""
        windows = self.collector.windows
        if distributed.world_size() == 1:
            return windows
        return EpisodeWindows.joined(distributed.gather(windows.state_dict()))

    def rollout_metrics(self, windows: EpisodeWindows | None = None) -> dict[str, float]:
        """Return ``rollout/return``, ``rollout/success``, ``rollout/length`` and ``fault/...``.

        A benchmark without success has no ``rollout/success``.

        The former are means over the windows of finished episodes, on average and for each task;
        the latter are counts since the run began.

        Args:
            windows: of finished episodes; None for those of this process.
        """
        metrics: dict[str, float] = {
            "fault/worker_restarts": self.counters.worker_restarts,
            "fault/dropped_transitions": self.counters.dropped_transitions,
            "fault/skipped_updates": self.counters.skipped_updates,
        }
        summary = (windows or self.collector.windows).summary()
        measured = (
            ("return", "success", "length") if self.spec.has_success else ("return", "length")
        )
        for name in measured if summary else ():
            means = {task: statistics[name]["mean"] for task, statistics in summary.items()}
            over_all = float(np.mean(list(means.values())))
            metrics |= named(f"rollout/{name}", over_all, means, self.spec.task_names)
        return metrics

    def episode_metrics(self, windows: EpisodeWindows) -> dict[str, float]:
        """Return what is logged of finished episodes beside the means of ``rollout_metrics``.

        ``rollout/episodes`` counts them since the run began; ``time/seconds_per_episode`` is the
        mean over those that this process finished since the last call; see
        ``EpisodeWindows.metrics`` for the others.

        Args:
            windows: of finished episodes.
        """
        names = self.spec.task_names
        counts = {task: float(windows.count_T[task]) for task in self.spec.train_tasks}
        metrics = named("rollout/episodes", self.counters.episodes, counts, names)
        metrics |= windows.metrics(names)
        seconds = self.collector.times.drain()
        if seconds:
            mean = float(np.mean(list(seconds.values())))
            metrics |= named("time/seconds_per_episode", mean, seconds, names)
        return metrics

    def close(self) -> None:
        """End the workers of the training environments."""
        if self._collector is not None:
            self._collector.envs.close()
            self._collector = None
        self.data.session = None
