"""On-policy collection: collect an iteration with the present policy, then learn from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import distributed
from mtrl_lightning.callbacks.driver import Driver, Loop
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.replay import RolloutDataset
from mtrl_lightning.replay.datamodule import refuse_replay_options
from mtrl_lightning.replay.rollout_buffer import rows_per_task
from mtrl_lightning.saved import HINT
from mtrl_lightning.threads import one_thread


class OnPolicyLoop(Loop):
    """Collect an iteration, make all its updates, and start the next.

    While environments are stepped nothing learns, so that the workers have all cores, and the other
    way round. A batch is one minibatch. What is due after a vector step is done after each one; at
    the last step of an iteration, after its updates.

    Args:
        driver: steps the environments, and does what is due after a vector step.
        total_steps: environment steps after which training ends; rounded up to whole iterations.
        unused: options of the driver that only off-policy algorithms have, by name.
    """

    def __init__(self, driver: Driver, total_steps: int, unused: Mapping[str, Any]) -> None:
        super().__init__(driver, total_steps)
        self._unused = unused

    def check(self, num_envs: int) -> None:
        """Check that no option of a replay is given, and that minibatches can be equal."""
        session = self.session
        refuse_replay_options({**session.data.given_replay_options, **self._unused})
        collection = session.algorithm.collection
        assert collection is not None
        num_tasks = len(session.spec.train_tasks)
        rows_per_task(num_envs // distributed.world_size(), num_tasks, collection)

    def open(self) -> None:
        """Let training batches be those of the iteration."""
        buffer = self.session.rollout_buffer
        rows = buffer.collection.num_steps * buffer.num_envs * distributed.world_size()
        if self.total_steps % rows:
            whole = -(-self.total_steps // rows) * rows
            rank_zero_info(
                f"rollout.total_steps {self.total_steps:,} is rounded up to {whole:,},"
                f" whole iterations of {rows:,} env steps"
            )
        self.session.data.stream = RolloutDataset(buffer)

    def start(self) -> None:
        """Continue the iteration of a checkpoint, or collect the first."""
        if self.session.rollout_buffer.has_begun:
            self._check_columns()
            return
        self.driver.continue_calls()
        # a run that is prolonged skipped the reset that was due at its former end
        self.session.reset_networks(self.session.counters.env_steps, self.is_finished())
        if not self.is_finished():
            self._collect()

    def _check_columns(self) -> None:
        """Check that an iteration of a checkpoint has what this algorithm computes of it.

        Raises:
            ConfigurationError: if it has not.
        """
        algorithm = self.session.algorithm
        found = set(self.session.rollout_buffer.computed_columns)
        needed = set(algorithm.computed_columns)
        may_replace = {field.name for field in algorithm.policy_fields}
        if needed and not needed <= found <= needed | may_replace:
            raise ConfigurationError(
                f"the checkpoint's iteration has the computed columns {', '.join(sorted(found))},"
                f" this algorithm needs {', '.join(sorted(needed))}: {HINT}"
            )

    def _collect(self) -> None:
        """Step until the iteration is complete, and let the algorithm begin to learn from it."""
        session = self.session
        buffer = session.rollout_buffer
        if not buffer.is_full:
            with one_thread():
                self._step_until_full()
        if not buffer.is_full:
            return
        steps_before = session.counters.env_steps - distributed.total(len(buffer))
        progress = min(steps_before / self.total_steps, 1.0)
        with session.stopwatch.measure("update"):
            with distributed.together(EnvironmentFaultError):
                collected = buffer.collected()
            buffer.begin(session.algorithm.begin_iteration(collected, progress))

    def _step_until_full(self) -> None:
        """Step until the iteration is complete, or the trainer is asked to end the run."""
        while not self.driver.should_stop:
            self.driver.send("explore")
            self.driver.receive()
            if self.session.rollout_buffer.is_full:
                return
            self.driver.complete_step()
            self.driver.check_signals()

    def after_batch(self) -> None:
        """After the iteration's last minibatch, do what is due and collect the next iteration."""
        session = self.session
        buffer = session.rollout_buffer
        if session.algorithm.is_iteration_over():
            buffer.skip_rest()
        if buffer.is_used_up:
            session.algorithm.end_iteration(buffer.collected())
            buffer.clear()
            self.driver.complete_step()
        self.driver.agree()
        self.driver.check_signals()
        if not buffer.has_begun and not self.is_finished():
            self._collect()

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        has_stepped = self.session.counters.env_steps >= self.total_steps
        return has_stepped and self.session.rollout_buffer.is_empty
