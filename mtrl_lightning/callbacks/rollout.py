"""Off-policy collection: fill the replay while learning from it, and decide when to update."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.callbacks.common import check_trainer
from mtrl_lightning.callbacks.driver import Driver
from mtrl_lightning.envs.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.precision import check_precision
from mtrl_lightning.replay import ReplayDataset
from mtrl_lightning.schedules import Until, UpdateRatio


class RolloutCallback(Driver):
    """Step the training environments: at random until the warm-up is over, then with the policy.

    Actions are sent when a training batch starts and the transitions are received when it ends, so
    that the workers step while the learner updates. A batch is one update. Lightning has drawn it
    by then: an update learns from the transitions up to the previous vector step, and the actions
    are those of the weights before the update, whatever the number of workers.

    Args:
        total_steps: environment steps after which training ends.
        warmup_steps: environment steps with uniformly random actions before the first update.
        warmup_updates: updates made at once when the warm-up ends (mtrl makes as many as vector
            steps of warm-up).
        updates_per_step: updates per vector step (all environments once), also fractional.
        envs_per_task: copies of each task's environment.
        num_workers: worker processes that step environments; null for the cores but one, 0 for
            this process.
        learner_threads: threads of PyTorch on the CPU, set by the command line; null leaves its own
            choice, one per core, which is slow where small networks share the cores with
            environments.
        window: finished episodes per task over which ``rollout/...`` metrics are averaged.
        timeout: seconds to wait for a worker before it counts as hung.
        max_restarts: how often, from one start of the program to its end, broken environments are
            rebuilt: one that raised or returned a NaN, or whose worker died or hung. At the next
            fault the run saves and ends.
        seed: of the environments.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    def __init__(
        self,
        total_steps: int = 1_000_000,
        warmup_steps: int = 10_000,
        warmup_updates: int = 0,
        updates_per_step: float = 1.0,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        learner_threads: int | None = None,
        window: int = 50,
        timeout: float = 300.0,
        max_restarts: int = 10,
        seed: int = 0,
    ) -> None:
        if envs_per_task < 1 or warmup_steps < 1:
            raise ConfigurationError(
                f"rollout.envs_per_task is {envs_per_task}, rollout.warmup_steps {warmup_steps}:"
                " give at least 1"
            )
        if total_steps <= warmup_steps:
            raise ConfigurationError(
                f"rollout.total_steps {total_steps} must be above rollout.warmup_steps"
                f" {warmup_steps}"
            )
        if learner_threads is not None and learner_threads < 1:
            raise ConfigurationError(
                f"rollout.learner_threads is {learner_threads}: give at least 1, or null"
            )
        if window < 1 or timeout <= 0 or max_restarts < 0:
            raise ConfigurationError(
                f"rollout.window is {window}, rollout.timeout {timeout}: both must be above 0;"
                f" rollout.max_restarts is {max_restarts}: give 0 or more"
            )
        super().__init__()
        self.total_steps = total_steps
        self.learner_threads = learner_threads
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._window = window
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._seed = seed
        self._warmup = Until(warmup_steps)
        self._ratio = UpdateRatio(updates_per_step, warmup_updates)
        self._is_step_under_way = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the training environments and take the replay's memory."""
        super().setup(trainer, pl_module, stage)
        session = self.session
        session.total_steps = self.total_steps
        if stage != TrainerFn.FITTING or session.is_open:
            return
        check_trainer(trainer)
        device = trainer.strategy.root_device
        check_precision(trainer.precision, device)
        self._check_capacity()
        session.algorithm.check_device(device)
        envs = VectorEnv(
            session.benchmark,
            np.repeat(session.spec.train_tasks, self._envs_per_task).tolist(),
            seed=self._seed,
            num_workers=self._num_workers,
            timeout=self._timeout,
            max_restarts=self._max_restarts,
            on_restart=lambda reason: session.note_restart(envs, reason),
        )
        session.open(envs, self._window, device)
        session.data.stream = ReplayDataset(session.replay, session.data.batch_size)

    def _check_capacity(self) -> None:
        num_envs = len(self.session.spec.train_tasks) * self._envs_per_task
        if self.session.data.capacity < num_envs:
            raise ConfigurationError(
                f"data.capacity is {self.session.data.capacity} for {num_envs} environments"
                " (rollout.envs_per_task each task): give at least one transition per environment"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warm up, unless a checkpoint says that it is done; do what an interruption left undone.

        Raises:
            ConfigurationError: if an environment cannot be used.
        """
        session = self.session
        session.is_training = True
        counters = session.counters
        if not session.collector.has_started:
            session.collector.reset()
        self.warn_of_lost_states()
        self._warm_up()
        self._refill()
        if counters.updates == 0:
            session.begin_learning()
        self._ratio.start(counters.vector_steps, counters.updates)
        if not self._is_update_owed():
            self.continue_calls()
            # a run that is prolonged skipped the reset that was due at its former end
            session.reset_networks(counters.env_steps, self.is_finished())
        if self.is_finished():
            rank_zero_info(
                f"{counters.env_steps:,} env steps are made already:"
                " raise rollout.total_steps to continue"
            )
            trainer.should_stop = True

    def _warm_up(self) -> None:
        counters = self.session.counters
        if self._warmup(counters.env_steps):
            rank_zero_info(f"Warm-up: {self._warmup.limit:,} env steps with random actions")
        while self._warmup(counters.env_steps):
            self.send("random")
            self.receive()
            self.session.check_signals()

    def _refill(self) -> None:
        """Collect as much as a warm-up if the replay was not restored with the checkpoint."""
        replay = self.session.replay
        counters = self.session.counters
        wanted = min(self._warmup.limit, replay.capacity)
        if len(replay) >= wanted or self.is_finished():
            return
        rank_zero_info(f"Filling the replay with {wanted - len(replay):,} env steps of the policy")
        while len(replay) < wanted:
            self.send("explore")
            self.receive()
            self.session.check_signals()
        self._ratio.restart(counters.vector_steps, counters.updates)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Step until an update is owed; do not wait for the last of these steps."""
        self._is_step_under_way = False
        while not self._is_update_owed():
            if self._is_step_under_way:
                self.receive()
            self.send("explore")
            self._is_step_under_way = True
        self.session.stopwatch.start("update")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Receive the transitions; after the last update that is owed, do what is due."""
        self.session.stopwatch.stop("update")
        if self._is_step_under_way:
            self._is_step_under_way = False
            self.receive()
        if self._is_update_owed():
            self.check_faults()
        else:
            self.complete_step()
        self.session.check_signals()

    def _is_update_owed(self) -> bool:
        counters = self.session.counters
        vector_steps = counters.vector_steps + self._is_step_under_way
        return self._ratio.due(vector_steps, counters.updates)

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        has_stepped = self.session.counters.env_steps >= self.total_steps
        return has_stepped and not self._is_update_owed()

    def state_dict(self) -> dict[str, Any]:
        """Return schedules, which call is next, and the environments' states."""
        schedules = {"warmup": self._warmup.state_dict(), "ratio": self._ratio.state_dict()}
        return schedules | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them; an evaluation has no environments to restore."""
        super().load_state_dict(state_dict)
        if self.session.is_open and state_dict["collector"]:
            self._warmup.load_state_dict(state_dict["warmup"])
            self._ratio.load_state_dict(state_dict["ratio"])
