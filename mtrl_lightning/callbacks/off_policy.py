"""Off-policy collection: fill the replay while learning from it, and decide when to update."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import distributed, saved
from mtrl_lightning.callbacks.driver import Driver, Loop
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplayDataset
from mtrl_lightning.replay.datamodule import check_share
from mtrl_lightning.schedules import Until, UpdateRatio

WARMUP_STEPS = 10_000
"""Environment steps of the warm-up if none are given."""


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Check the environment steps of the warm-up and of the run.

    Raises:
        ConfigurationError: if there is no warm-up, or nothing after it.
    """
    if warmup_steps < 1:
        raise ConfigurationError(f"rollout.warmup_steps is {warmup_steps}: give at least 1")
    if total_steps <= warmup_steps:
        raise ConfigurationError(
            f"rollout.total_steps {total_steps} must be above rollout.warmup_steps {warmup_steps}"
        )


class OffPolicyLoop(Loop):
    """Step the environments: at random until the warm-up is over, then with the policy.

    Actions are sent when a training batch starts and the transitions are received when it ends, so
    that the workers step while the learner updates. A batch is one update. Lightning has drawn it
    by then: an update learns from the transitions up to the previous vector step, and the actions
    are those of the weights before the update, whatever the number of workers.

    Args:
        driver: steps the environments, and does what is due after a vector step.
        total_steps: environment steps after which training ends.
        warmup_steps: environment steps with uniformly random actions before the first update;
            None for 10,000.
        ratio: of updates to vector steps.

    Raises:
        ConfigurationError: if the warm-up is out of range.
    """

    def __init__(
        self,
        driver: Driver,
        total_steps: int,
        warmup_steps: int | None,
        ratio: UpdateRatio,
    ) -> None:
        super().__init__(driver, total_steps)
        warmup_steps = WARMUP_STEPS if warmup_steps is None else warmup_steps
        check_warmup(warmup_steps, total_steps)
        self._warmup = Until(warmup_steps)
        self._ratio = ratio
        self._is_step_under_way = False

    def check(self, num_envs: int) -> None:
        """Check that the replay has a row for each environment, and the shares of a batch."""
        data = self.session.data
        num_tasks = len(self.session.spec.train_tasks)
        check_share(data.batch_size, num_tasks, distributed.world_size())
        capacity = data.capacity
        if capacity < num_envs:
            raise ConfigurationError(
                f"data.capacity is {capacity} for {num_envs} environments"
                " (rollout.envs_per_task each task): give at least one transition per environment"
            )

    def open(self) -> None:
        """Let training batches be drawn from the replay."""
        data = self.session.data
        batch_size = data.batch_size // distributed.world_size()
        data.stream = ReplayDataset(self.session.replay, batch_size)

    def start(self) -> None:
        """Warm up, unless a checkpoint says that it is done; make the calls that are left."""
        session = self.session
        counters = session.counters
        self._warm_up()
        self._refill()
        if counters.updates == 0:
            session.begin_learning()
        self._ratio.start(counters.vector_steps, counters.updates)
        if not self._is_update_owed():
            self.driver.continue_calls()
            # a run that is prolonged skipped the reset that was due at its former end
            session.reset_networks(counters.env_steps, self.is_finished())

    def _warm_up(self) -> None:
        counters = self.session.counters
        if self._warmup(counters.env_steps):
            rank_zero_info(f"Warm-up: {self._warmup.limit:,} env steps with random actions")
        while self._warmup(counters.env_steps):
            self.driver.send("random")
            self.driver.receive()
            self.driver.check_signals()

    def _refill(self) -> None:
        """Collect as much as a warm-up if the replay was not restored with the checkpoint."""
        counters = self.session.counters
        num_missing = self._num_missing()
        if num_missing <= 0 or self.is_finished():
            return
        rank_zero_info(
            f"Filling the replay with {num_missing:,} env steps of the policy, on top of"
            f" rollout.total_steps {self.total_steps:,}"
        )
        while self._num_missing() > 0:
            steps_before = counters.env_steps
            self.driver.send("explore")
            self.driver.receive()
            self.session.refill_steps += counters.env_steps - steps_before
            self.session.total_steps = self.last_step
            self.driver.check_signals()
        self._ratio.restart(counters.vector_steps, counters.updates)

    def _num_missing(self) -> int:
        """Return how many transitions the replay lacks before an update."""
        replay = self.session.replay
        wanted = min(self._warmup.limit, replay.certain_size * distributed.world_size())
        return wanted - distributed.total(len(replay))

    def before_batch(self) -> None:
        """Step until an update is owed; do not wait for the last of these steps."""
        self._is_step_under_way = False
        while not self._is_update_owed():
            if self._is_step_under_way:
                self.driver.receive()
            self.driver.send("explore")
            self._is_step_under_way = True

    def after_batch(self) -> None:
        """Receive the transitions; after the last update that is owed, do what is due."""
        if self._is_step_under_way:
            self._is_step_under_way = False
            self.driver.receive()
        if self._is_update_owed():
            self.driver.check_faults()
        else:
            self.driver.complete_step()
        self.driver.check_signals()

    def _is_update_owed(self) -> bool:
        counters = self.session.counters
        vector_steps = counters.vector_steps + self._is_step_under_way
        return self._ratio.due(vector_steps, counters.updates)

    @property
    def last_step(self) -> int:
        """The environment step after which training ends."""
        return self.total_steps + self.session.refill_steps

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        has_stepped = self.session.counters.env_steps >= self.last_step
        return has_stepped and self._ratio.has_started and not self._is_update_owed()

    def unused_options(self) -> Collection[str]:
        """Return the options of a warm-up that is over; its length also fills a lost replay."""
        return ("rollout.warmup_updates",) if self._ratio.has_started else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedules."""
        return {
            "warmup": self._warmup.state_dict(),
            "ratio": self._ratio.state_dict(),
            "refill_steps": self.session.refill_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._warmup.load_state_dict(state["warmup"])
        self._ratio.load_state_dict(state["ratio"])
        counters = self.session.counters
        refill_steps = state.get("refill_steps", 0)  # new in this version
        self.session.refill_steps = saved.count(refill_steps, "refill_steps", counters.env_steps)
        self.session.total_steps = self.last_step
        # each vector step has stepped an environment: more of them would owe updates without an end
        if counters.vector_steps > counters.env_steps + counters.dropped_transitions:
            raise ValueError(f"{counters.vector_steps} vector steps in {counters.env_steps} steps")
        if state["ratio"] and state["ratio"]["updates"] > counters.updates:
            raise ValueError(f"{counters.updates} updates, and more when learning began")
        saved_ratio = state["ratio"].get("ratio", self._ratio.ratio)  # new in this version
        if saved.number(saved_ratio, "ratio.ratio") != self._ratio.ratio:
            self._ratio.restart(counters.vector_steps, counters.updates)
