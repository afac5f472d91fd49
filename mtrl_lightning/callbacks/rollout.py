"""Act while learning: fill the replay, and decide when to update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import begin_learning, check_trainer, data_of
from mtrl_lightning.callbacks.signals import Interrupted, check_signals
from mtrl_lightning.envs.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError, RestartsExhaustedError
from mtrl_lightning.memory import keep_freed_memory
from mtrl_lightning.rollout import Collector
from mtrl_lightning.schedules import Until, UpdateRatio
from mtrl_lightning.types import Mode


class RolloutCallback(Callback):
    """Step the training environments: at random until the warm-up is over, then with the policy.

    Actions are sent when a training batch starts and the transitions are taken when it ends, so
    that the workers step while the learner updates. A batch is one update.

    Args:
        total_steps: environment steps after which training ends.
        warmup_steps: environment steps with uniformly random actions before the first update.
        warmup_updates: updates made at once when the warm-up ends (mtrl makes as many as vector
            steps of warm-up).
        updates_per_step: updates a vector step (all environments once), also fractional.
        envs_per_task: copies of each task's environment.
        num_workers: worker processes that step environments; null for the cores but one, 0 for this
            process.
        learner_threads: threads of PyTorch on the CPU; null leaves its own choice, one a core,
            which is slow where small networks share the cores with environments.
        window: finished episodes a task over which ``rollout/...`` metrics are averaged.
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
        self.total_steps = total_steps
        self._envs_per_task, self._num_workers = envs_per_task, num_workers
        self._learner_threads = learner_threads
        self._window, self._timeout, self._seed = window, timeout, seed
        self._max_restarts = max_restarts
        self._warmup, self._ratio = (
            Until(warmup_steps),
            UpdateRatio(updates_per_step, warmup_updates),
        )
        self.collector: Collector | None = None
        self.after_step: list[Callable[[int], None]] = []
        """Called with the environment steps made after each vector step, also those of the warm-up."""
        self.step_complete = True
        """Whether all updates owed for the last vector step are made."""
        self.begun = False
        """Whether training has begun: what a checkpoint holds is restored, and can be saved again."""
        self._under_way = False
        self._last_state: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the training environments."""
        if stage != TrainerFn.FITTING or self.collector is not None:
            return
        assert isinstance(pl_module, Algorithm)
        check_trainer(trainer)
        pl_module.check_device(trainer.strategy.root_device)
        keep_freed_memory()
        if self._learner_threads is not None:
            torch.set_num_threads(self._learner_threads)
        data = data_of(trainer)
        rank_zero_info(", ".join(f"{key} {value}" for key, value in data.spec.protocol.items()))
        tasks = np.repeat(data.spec.train_tasks, self._envs_per_task).tolist()
        counters, most = pl_module.counters, self._max_restarts

        def on_restart(reason: str) -> None:
            counters.worker_restarts += 1
            rank_zero_warn(
                f"environments are rebuilt, restart {envs.num_restarts} of at most {most}: {reason}"
            )

        envs = VectorEnv(
            data.benchmark,
            tasks,
            seed=self._seed,
            num_workers=self._num_workers,
            timeout=self._timeout,
            max_restarts=most,
            on_restart=on_restart,
        )
        rank_zero_info(
            f"Stepping {envs.num_envs} environments of {len(data.spec.train_tasks)} tasks in"
            f" {envs.num_workers} workers"
        )
        self.collector = Collector(envs, pl_module, counters=counters, window=self._window)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warm up, unless a checkpoint says that it is done.

        Raises:
            ConfigurationError: if an environment's state cannot be saved, which a checkpoint would
                find out too late.
        """
        assert isinstance(pl_module, Algorithm) and self.collector is not None
        self.begun = True
        counters = pl_module.counters
        if not self.collector.begun:
            self.collector.reset()
        self.collector.state_dict()
        if self._warmup(counters.env_steps):
            rank_zero_info(f"Warm-up: {self._warmup.limit:,} env steps with random actions")
        while self._warmup(counters.env_steps):
            self._send(pl_module, "random")
            self._receive(trainer, pl_module)
            check_signals(trainer)
        self._refill(trainer, pl_module)
        if counters.updates == 0:
            begin_learning(trainer, pl_module)
        self._ratio.start(counters.vector_steps, counters.updates)
        self.step_complete = not self._ratio.due(counters.vector_steps, counters.updates)
        if self._finished(pl_module):
            rank_zero_info(
                f"{counters.env_steps:,} env steps are made already: raise rollout.total_steps to"
                " go on"
            )
            trainer.should_stop = True

    def _refill(self, trainer: Trainer, algorithm: Algorithm) -> None:
        """Collect what a warm-up would have if the replay did not come back with the checkpoint."""
        buffer, counters = data_of(trainer).buffer, algorithm.counters
        assert buffer is not None
        wanted = min(self._warmup.limit, buffer.capacity)
        if len(buffer) >= wanted or self._finished(algorithm):
            return
        rank_zero_info(f"Filling the replay with {wanted - len(buffer):,} env steps of the policy")
        while len(buffer) < wanted:
            self._send(algorithm, "explore")
            self._receive(trainer, algorithm)
            check_signals(trainer)
        self._ratio.start_anew(counters.vector_steps, counters.updates)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Step until an update is due, and send the actions of the last step without waiting for it."""
        assert isinstance(pl_module, Algorithm)
        self._under_way = False
        while not self._ratio.due(
            pl_module.counters.vector_steps + self._under_way, pl_module.counters.updates
        ):
            if self._under_way:
                self._receive(trainer, pl_module)
            self._send(pl_module, "explore")
            self._under_way = True
        pl_module.stopwatch.start("update")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the transitions; stop if that was all."""
        assert isinstance(pl_module, Algorithm)
        pl_module.stopwatch.stop("update")
        if self._under_way:
            self._receive(trainer, pl_module)
        self.step_complete = not self._ratio.due(
            pl_module.counters.vector_steps, pl_module.counters.updates
        )
        if self._finished(pl_module):
            trainer.should_stop = True
        if self.collector is not None and self.collector.envs.fault is not None:
            raise self.collector.envs.fault

    def _finished(self, algorithm: Algorithm) -> bool:
        counters = algorithm.counters
        return counters.env_steps >= self.total_steps and not self._ratio.due(
            counters.vector_steps, counters.updates
        )

    def _send(self, algorithm: Algorithm, mode: Mode) -> None:
        assert self.collector is not None
        with algorithm.stopwatch.measure("act"):
            self.collector.send(mode)

    def _receive(self, trainer: Trainer, algorithm: Algorithm) -> None:
        assert self.collector is not None
        with algorithm.stopwatch.measure("step"):
            transitions, _ = self.collector.receive()
        buffer = data_of(trainer).buffer
        assert buffer is not None
        buffer.add(transitions)
        algorithm.observe(transitions)
        for call in self.after_step:
            call(algorithm.counters.env_steps)

    def metrics(self, task_names: tuple[str, ...]) -> dict[str, float]:
        """Return ``rollout/return``, ``rollout/success`` and ``rollout/length``: window means, and each task's.

        Besides, what was survived since the run began: ``fault/worker_restarts``,
        ``fault/dropped_transitions`` and ``fault/skipped_updates``.
        """
        assert self.collector is not None
        summary, counters = self.collector.windows.summary(), self.collector.counters
        result: dict[str, float] = {
            "fault/worker_restarts": counters.worker_restarts,
            "fault/dropped_transitions": counters.dropped_transitions,
            "fault/skipped_updates": counters.skipped_updates,
        }
        for name in ("return", "success", "length") if summary else ():
            means = {task: statistics[name]["mean"] for task, statistics in summary.items()}
            result[f"rollout/{name}"] = float(np.mean(list(means.values())))
            result |= {f"rollout/{name}/{task_names[task]}": mean for task, mean in means.items()}
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return schedules, windows and the environments' states."""
        return {
            "warmup": self._warmup.state_dict(),
            "ratio": self._ratio.state_dict(),
            "collector": self._last_state
            if self.collector is None
            else self.collector.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them; without environments (evaluation) nothing is to be restored."""
        if self.collector is not None and state_dict["collector"]:
            self._warmup.load_state_dict(state_dict["warmup"])
            self._ratio.load_state_dict(state_dict["ratio"])
            self.collector.load_state_dict(state_dict["collector"])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the workers; the checkpoint of an interrupted run is written after this and needs their last state."""
        if (
            isinstance(exception, (Interrupted, RestartsExhaustedError))
            and self.collector is not None
        ):
            self._last_state = self.collector.state_dict()
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the workers."""
        self._close()

    def _close(self) -> None:
        if self.collector is not None:
            self.collector.envs.close()
            self.collector = None
