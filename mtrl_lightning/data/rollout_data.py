"""The data of an on-policy algorithm: rollouts of successive iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms.on_policy import OnPolicyAlgorithm
from mtrl_lightning.data.env_data import EnvData
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import RolloutBuffer
from mtrl_lightning.replay.rollout_buffer import rows_per_task
from mtrl_lightning.rollout import CorrelatedNoise, PauseSolved, PolicyReuse
from mtrl_lightning.rollout.extras import extra_of
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.utils.devices import one_thread

NEVER = 10**9
"""Length of an epoch as reported to Lightning; the epoch ends with its iterator."""


class Minibatches:
    """Yield one tick for each minibatch of an iteration; see ``Ticks``.

    An algorithm may end an iteration early. The reported length is never reached: otherwise,
    Lightning would count an epoch twice when it resumes at its last batch.

    Args:
        data: the data module whose iteration determines the end of the epoch.
    """

    def __init__(self, data: RolloutData) -> None:
        self._data = data

    def __len__(self) -> int:
        """Return a number that is never reached."""
        return NEVER

    def __iter__(self) -> Iterator[int]:
        """Yield ticks until the iteration is over."""
        while self._data.buffer.has_begun:
            yield 0


class RolloutData(EnvData):
    """Training environments, and the minibatches of successive iterations.

    Each of Lightning's epochs is an iteration: a rollout of all environments, followed by updates.
    Stepping and updates alternate, so that each can use all cores.
    """

    kind = "on-policy"
    spare_cores = 0
    algorithm: OnPolicyAlgorithm
    buffer: RolloutBuffer
    """The transitions of the iteration, available after ``setup``."""
    _iteration_start = 0
    """Environment steps before this iteration."""

    def check_options(self) -> None:
        """Check the number of minibatches, and that ``max_kl`` is applicable."""
        max_kl = getattr(self.algorithm, "max_kl", None)
        if max_kl is not None and extra_of(self._extras, CorrelatedNoise) is not None:
            raise ConfigurationError(
                f"max_kl is {max_kl}, but with CorrelatedNoise the KL divergence is overestimated,"
                " because actions are not independent samples of the policy: set"
                " model.init_args.max_kl to null, or remove CorrelatedNoise from data.extras"
            )
        rows_per_task(
            self.num_envs // distributed.world_size(),
            len(self.spec.train_tasks),
            self.algorithm.collection,
        )

    def _batch_rows(self) -> int:
        collection = self.algorithm.collection
        return collection.num_steps * self.num_envs // collection.num_minibatches

    def train_dataloader(self) -> Minibatches:
        """Return an iterable over the minibatches of this iteration."""
        return Minibatches(self)

    def begin_epoch(self) -> None:
        """Collect a rollout, and prepare the algorithm's updates."""
        buffer = self.buffer
        if buffer.has_begun:
            return
        if buffer.is_empty:
            self._iteration_start = self.counters.env_steps
        with one_thread():
            while not buffer.is_full:
                # environments are paused and resumed between iterations
                self.step("explore", may_pause=buffer.is_empty)
        progress = min(self._iteration_start / self.total_steps, 1.0)
        assert self.collector is not None
        with self.stopwatch.measure("update"):
            # a task without a valid transition ends the run on all processes
            with distributed.raise_on_all_ranks(EnvironmentFaultError):
                collected = buffer.collected()
            computed = self.algorithm.begin_iteration(collected, progress)
            buffer.begin(computed)

    def begin_learning(self) -> None:
        """Do nothing: on-policy algorithms have no reward scale."""

    def next_batch(self) -> TransitionBatch:
        """Return the next minibatch."""
        return self.buffer.next_minibatch()

    def end_update(self) -> None:
        """End the iteration after its last update."""
        self.exchange()
        buffer = self.buffer
        # the policy has moved too far from the one that collected: skip the remaining epochs
        if self.algorithm.is_iteration_over():
            buffer.skip_rest()
        if buffer.is_used_up:
            self.algorithm.end_iteration(buffer.collected())
            buffer.clear()
        self.is_busy = False

    def add(self, transitions: Transitions) -> None:
        """Add the transitions to the iteration."""
        self.buffer.add(transitions)

    @property
    def is_step_finished(self) -> bool:
        """Whether no iteration is in progress."""
        return self.buffer.is_empty

    def open_buffer(self, tasks: Sequence[int], device: torch.device) -> None:
        """Allocate the memory of an iteration, and print its size."""
        collection = self.algorithm.collection
        fields = [*self.algorithm.policy_fields]
        if extra_of(self._extras, PolicyReuse) is not None:
            fields.append(Field("foreign", (), "bool"))
        self.buffer = RolloutBuffer(self.spec, tasks, collection, fields, self._seed, device)
        rows = collection.num_steps * len(tasks)
        rank_zero_info(
            f"{distributed.per_rank_prefix()}Iterations of {rows:,} env steps"
            f" ({self.buffer.num_bytes / 2**20:,.0f} MiB),"
            f" {collection.num_epochs} epochs of {collection.num_minibatches} minibatches of"
            f" {rows // collection.num_minibatches:,}"
        )
        rows *= distributed.world_size()
        if extra_of(self._extras, PauseSolved) is None and self.total_steps % rows:
            whole = -(-self.total_steps // rows) * rows
            rank_zero_info(
                f"data.total_steps {self.total_steps:,} is rounded up to {whole:,},"
                f" a multiple of the {rows:,} env steps of an iteration"
            )

    def training_state(self) -> dict[str, Any]:
        """Return the states of environments and iteration."""
        assert self.collector is not None
        return {
            "collector": self.collector.state_dict(),
            "buffer": self.buffer.state_dict(),
            "iteration_start": self._iteration_start,
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        assert self.collector is not None
        self.collector.load_state_dict(state["collector"])
        self.buffer.load_state_dict(state["buffer"])
        self._iteration_start = state["iteration_start"]
        if not self.buffer.has_begun:
            return
        saved = set(self.buffer.computed_columns)
        needed = set(self.algorithm.computed_columns)
        # computed columns may replace the policy's fields, such as the first log_prob of PPO
        may_replace = {field.name for field in self.algorithm.policy_fields}
        if needed and not needed <= saved <= needed | may_replace:
            raise ConfigurationError(
                f"the checkpoint's iteration has the computed columns {', '.join(sorted(saved))},"
                f" but this algorithm needs {', '.join(sorted(needed))}: resume with the"
                " algorithm's previous options, or from a checkpoint between two iterations"
            )
