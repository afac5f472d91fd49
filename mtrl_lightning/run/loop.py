"""How a run trains: the loop from which Lightning takes a batch for every update.

Lightning asks an iterable for batches and makes an update with each, so the iterable is the loop:
it steps the environments, and yields where an update happens. ``_off_policy``, ``_on_policy`` and
``_offline`` are the ways to train; ``AFTER_UPDATES`` lists the actions after a vector step, in
order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset

from mtrl_lightning.errors import EnvironmentFaultError, Interrupted, RestartsExhaustedError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.resources import one_thread
from mtrl_lightning.run.rank_status import sync_ranks
from mtrl_lightning.run.session import Session
from mtrl_lightning.schedules import Until, UpdateRatio
from mtrl_lightning.types import Mode, TransitionBatch

AFTER_UPDATES = (
    "check_drift",
    "evaluate",
    "log_metrics",
    "save_best",
    "reset_networks",
    "save_last",
)
"""Actions after a vector step and its updates, in this order.

A callback registers each of its actions under one of these names in ``session.after_updates``.
"""
RESULT_ACTIONS = AFTER_UPDATES[: AFTER_UPDATES.index("reset_networks")]
"""Actions that leave results of the step: a run is not finished before they are done."""

ENDLESS = 10**12
"""Length reported to Lightning, which fetches a dataset without length one batch too early."""


class TrainingLoop(IterableDataset[TransitionBatch]):
    """Step the environments, and yield a batch for every update.

    After each ``yield`` Lightning calls ``training_step`` with the batch; the code below the
    ``yield`` runs when it requests the next one. Only the end of the iterator ends a run.
    ``trainer.should_stop`` is checked where environments and buffers are consistent: after the
    present update, its vector step, and that step's actions if no further update is owed.

    A checkpoint records the next action of ``AFTER_UPDATES``; the resumed run starts there.

    With several processes each steps its own environments. After each vector step, and on-policy
    after each update, they exchange their counts, so that schedules, the end of the run, signals
    and faults are the same on all.

    Args:
        session: the run's parts.
        total_steps: environment steps after which training ends; an on-policy algorithm finishes
            its iteration. Offline they are updates.
        warmup_steps: off-policy only: environment steps with uniformly random actions before the
            first update.
        ratio: off-policy only: updates per vector step.
    """

    def __init__(
        self, session: Session, total_steps: int, warmup_steps: int, ratio: UpdateRatio
    ) -> None:
        self.session = session
        self.total_steps = total_steps
        self.refill_steps = 0
        """Environment steps that filled a lost replay: they come on top of the total."""
        self._warmup = Until(warmup_steps)
        self._ratio = ratio
        self._iteration_start = 0
        """On-policy: environment steps before this iteration."""
        self._next_action: str | None = None
        """The next one of ``AFTER_UPDATES``; None when all are done."""
        self._wants_stop = False
        """Whether a stop was requested on this process, and not all processes know it yet."""

    def __len__(self) -> int:
        """Return a number that is never reached."""
        return ENDLESS

    def __iter__(self) -> Iterator[TransitionBatch]:
        """Train; the iterator steps nothing before its first batch is asked for."""
        self._begin()
        ways = {
            "off-policy": self._off_policy,
            "on-policy": self._on_policy,
            "offline": self._offline,
        }
        yield from ways[self.session.algorithm.kind]()
        self.session.trainer.should_stop = True  # else Lightning starts another epoch

    def _off_policy(self) -> Iterator[TransitionBatch]:
        """Warm up; then step the environments, and yield a batch for every update that is owed.

        Steps and updates overlap: sample a batch, send actions, yield the batch, receive the
        transitions. The update does not see the step in flight, whose actions use the weights
        before the update: the result does not depend on the speed of the workers. Further updates
        of the same step follow without stepping; where several steps go by between two updates,
        the last one overlaps.
        """
        session = self.session
        self._warm_up()
        self._refill()
        if session.counters.updates == 0:
            session.algorithm.begin_learning(session.replay.mean_rewards())
        # updates are owed for vector steps from here on, not for the warm-up
        self._ratio.start(session.counters.vector_steps, session.counters.updates)
        if not self._owes_update():
            self._resume_actions()
        self._report_nothing_to_do()

        while not self._is_ending():
            with session.stopwatch.measure("sample"):
                batch = session.data.next_batch()
            # step until the next update is owed; the last of these steps runs during the update
            is_step_pending = False
            while not self._owes_update(is_step_pending):
                if is_step_pending:
                    self._receive()
                    self._check_faults()
                self._send("explore")
                is_step_pending = True

            yield batch  # Lightning calls training_step with it, while the workers step
            self._defer_stop()

            # the step that ran during the update: its transitions are in the next batches
            if is_step_pending:
                self._receive()
            # actions wait for the last update of a step: an evaluation sees all of them
            if self._owes_update():
                self._check_faults()
            else:
                self._finish_step()
            session.check_signals()

    def _on_policy(self) -> Iterator[TransitionBatch]:
        """Collect an iteration, yield its minibatches, and collect the next.

        While environments are stepped nothing learns, so that the workers have all cores, and the
        other way round. Every vector step is finished at once, the last of an iteration after its
        updates.
        """
        session = self.session
        buffer = session.rollout_buffer
        if not buffer.has_begun:
            self._resume_actions()
        self._report_nothing_to_do()

        while not self._is_ending():
            if not buffer.has_begun:
                self._collect()
                if not buffer.is_full:
                    return  # something has asked to end the run
                self._begin_iteration()
            with session.stopwatch.measure("sample"):
                batch = session.data.next_batch()

            yield batch  # Lightning calls training_step with it
            self._defer_stop()

            self._sync_ranks()
            # the policy has moved too far from the one that collected: drop the remaining epochs
            if session.algorithm.is_iteration_over():
                buffer.skip_rest()
            if buffer.is_used_up:
                session.algorithm.end_iteration(buffer.collected())
                buffer.clear()
                self._finish_step()
            session.check_signals()

    def _offline(self) -> Iterator[TransitionBatch]:
        """Yield batches of demonstrations; each update counts as a step of the schedules."""
        session = self.session
        if session.counters.updates == 0:
            session.algorithm.begin_learning(session.replay.mean_rewards())
        self._resume_actions()
        self._report_nothing_to_do()

        while not self._is_ending():
            with session.stopwatch.measure("sample"):
                batch = session.data.next_batch()

            progress = min(session.counters.updates / self.total_steps, 1.0)
            session.algorithm.begin_update(progress)

            yield batch  # Lightning calls training_step with it
            self._defer_stop()

            session.counters.env_steps = session.counters.updates  # the clock of all schedules
            self._sync_ranks()
            for call in session.after_vector_step:
                call(session.counters.env_steps)
            self._finish_step()
            session.check_signals()

    def _begin(self) -> None:
        """Start the episodes; evaluate and save a new run before its first step if asked to."""
        session = self.session
        unknown = session.after_updates.keys() - set(AFTER_UPDATES)
        assert not unknown, f"add {unknown} to AFTER_UPDATES, where its order is"
        session.is_restoring = False
        session.is_training = True
        if session.has_envs:
            self._begin_episodes()
        # an evaluation and a checkpoint of the untrained policy, where they are configured
        if session.counters.env_steps == 0:
            for name in AFTER_UPDATES:
                if name in session.after_updates:
                    session.after_updates[name].at_start()

    def _begin_episodes(self) -> None:
        collector = self.session.collector
        if not collector.has_started:
            collector.reset()
        for task, reason in collector.envs.unsavable().items():
            rank_zero_warn(
                f"the state of {task}'s environment cannot be saved ({reason}):"
                " a continued run starts new episodes there, and is not the uninterrupted run"
            )

    def _warm_up(self) -> None:
        """Step with random actions, unless the checkpoint's run has finished its warm-up."""
        counters = self.session.counters
        if self._warmup(counters.env_steps):
            rank_zero_info(f"Warm-up: {self._warmup.limit:,} env steps with random actions")
        while self._warmup(counters.env_steps):
            self._send("random")
            self._receive()
            self._check_faults()
            self.session.check_signals()

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
            self._send("explore")
            self._receive()
            self.refill_steps += counters.env_steps - steps_before
            self._check_faults()
            self.session.check_signals()
        # the steps of the refill owe no updates
        self._ratio.restart(counters.vector_steps, counters.updates)

    def _num_missing(self) -> int:
        """Return the number of transitions that the replay lacks before an update."""
        replay = self.session.replay
        # a replay smaller than the warm-up is full before
        needed = min(self._warmup.limit, replay.guaranteed_size * distributed.world_size())
        return needed - distributed.total(len(replay))

    def _collect(self) -> None:
        """Step until the iteration is complete, or something asks to end the run."""
        buffer = self.session.rollout_buffer
        if buffer.is_empty:
            self._iteration_start = self.session.counters.env_steps
        with one_thread():
            while not buffer.is_full and not self._should_stop:
                self._send("explore")
                self._receive()
                if not buffer.is_full:
                    self._finish_step()
                    self.session.check_signals()

    def _begin_iteration(self) -> None:
        """Let the algorithm compute the columns of its updates, such as advantages."""
        session = self.session
        buffer = session.rollout_buffer
        # for schedules of learning rates
        progress = min(self._iteration_start / self.total_steps, 1.0)
        with session.stopwatch.measure("update"):
            # a task without a valid transition ends the run on all processes
            with distributed.raise_on_all_ranks(EnvironmentFaultError):
                collected = buffer.collected()
            computed = session.algorithm.begin_iteration(collected, progress)
            buffer.begin(computed, session.collector.paused_E)

    def _send(self, mode: Mode) -> None:
        """Choose actions and let the environments step."""
        session = self.session
        with session.stopwatch.measure("act"):
            # environments are paused and woken between iterations; off-policy, after as many steps
            # as the longest episode has
            if self._is_off_policy:
                may_pause = session.counters.vector_steps % session.spec.horizon == 0
            else:
                may_pause = session.rollout_buffer.is_empty
            if mode == "explore" and may_pause:
                session.collector.choose_paused()
            session.collector.send(mode)

    def _receive(self) -> None:
        """Wait for the step that ``_send`` started, and keep its transitions to learn from."""
        session = self.session
        episodes = session.counters.episodes
        # of this step: where its episode ends, another policy may act from here on
        foreign_E = session.collector.foreign_E if session.collector.reuse is not None else None
        with session.stopwatch.measure("step"):
            transitions, _ = session.collector.receive()
            self._sync_ranks()  # from here on counts are those of all processes
        if self._is_off_policy:
            session.replay.add(transitions)
        else:
            session.rollout_buffer.add(transitions, foreign_E)
        session.algorithm.observe(transitions, session.counters.episodes > episodes)
        for call in session.after_vector_step:
            call(session.counters.env_steps)
        self._defer_stop()

    def _finish_step(self) -> None:
        """Run the actions that are due after a vector step and its updates."""
        # before the check: a run that a fault ends here runs all actions when it continues
        self._next_action = AFTER_UPDATES[0]
        if self.session.has_envs:
            self._check_faults()
        self._continue_actions()

    def _resume_actions(self) -> None:
        """Run the actions that an interruption skipped; nothing in a new run.

        A run that is extended has also skipped the reset that was due at its previous end.
        """
        self._continue_actions()
        self._act("reset_networks")

    def _continue_actions(self) -> None:
        """Run the actions from the next one on."""
        if self._next_action is None:
            return
        for index in range(AFTER_UPDATES.index(self._next_action), len(AFTER_UPDATES)):
            name = AFTER_UPDATES[index]
            # set before the action: a checkpoint that the action writes must resume after it
            self._next_action = AFTER_UPDATES[index + 1] if index + 1 < len(AFTER_UPDATES) else None
            try:
                self._act(name)
            except (Interrupted, RestartsExhaustedError):
                self._next_action = name  # it is repeated, an evaluation from its first episode
                raise

    def _act(self, name: str) -> None:
        action = self.session.after_updates.get(name)
        if action is not None:
            action.run(self.session.counters.env_steps, self._is_ending())

    def _owes_update(self, is_step_pending: bool = False) -> bool:
        """Return whether an update has to be made before the next vector step."""
        counters = self.session.counters
        num_steps = counters.vector_steps + int(is_step_pending)  # one in flight counts as made
        return self._ratio.due(num_steps, counters.updates)

    @property
    def _is_off_policy(self) -> bool:
        return self.session.algorithm.kind == "off-policy"

    @property
    def last_step(self) -> int:
        """The environment step after which training ends."""
        return self.total_steps + self.refill_steps

    @property
    def counted_steps(self) -> int:
        """Environment steps made of ``total_steps``, without steps that filled a lost replay."""
        return self.session.counters.env_steps - self.refill_steps

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        if self.session.counters.env_steps < self.last_step:
            return False
        if self._is_off_policy:
            # not before the updates of the last vector step, nor in the warm-up
            return self._ratio.has_started and not self._owes_update()
        return not self.session.is_collecting

    def is_complete(self) -> bool:
        """Return whether the results of the last vector step are there, too."""
        return self.is_finished() and self._next_action not in RESULT_ACTIONS

    @property
    def _should_stop(self) -> bool:
        """Whether something, such as early stopping, has asked the trainer to end the run."""
        return self.session.trainer.should_stop

    def _is_ending(self) -> bool:
        return self.is_finished() or self._should_stop

    def _report_nothing_to_do(self) -> None:
        if self.is_finished():
            rank_zero_info(
                f"{self.counted_steps:,} {self.session.algorithm.step_unit} are made already:"
                " raise rollout.total_steps to continue"
            )

    def unused_options(self) -> Collection[str]:
        """Return the options without effect, as the warm-up is over; its length sizes a refill."""
        return ("rollout.warmup_updates",) if self._ratio.has_started else ()

    def _sync_ranks(self) -> None:
        """Exchange counts and requests with the other processes."""
        sync_ranks(self.session, self._wants_stop)
        if self.session.rank_status.is_stop_requested:
            self._wants_stop = False
            self.session.trainer.should_stop = True

    def _defer_stop(self) -> None:
        """Postpone a stop that was requested on this process until all processes know of it."""
        trainer = self.session.trainer
        if distributed.world_size() == 1 or not trainer.should_stop:
            return
        if not self.session.rank_status.is_stop_requested:
            self._wants_stop = True
            trainer.should_stop = False

    def _check_faults(self) -> None:
        """Raise the fault for which no restart was left, now that the state is whole.

        The restarts of all processes count.
        """
        envs = self.session.collector.envs
        if distributed.world_size() == 1:
            if envs.fault is not None:
                raise envs.fault
            return
        status = self.session.rank_status
        if status.faulty_rank is not None:
            distributed.raise_together(envs.fault, [RestartsExhaustedError])
        if status.restarts > (envs.max_restarts or 0):
            exhausted = RestartsExhaustedError(
                f"environments were rebuilt {status.restarts} times, over all processes,"
                f" and rollout.max_restarts is {envs.max_restarts}: see the warnings above"
            )
            exhausted.is_on_all_ranks = True  # type: ignore[attr-defined]
            raise exhausted

    def state_dict(self) -> dict[str, Any]:
        """Return the next action; off-policy the schedules, on-policy the iteration's begin."""
        state: dict[str, Any] = {"next_call": self._next_action}
        if self.session.algorithm.kind == "on-policy":
            state["iteration_start"] = self._iteration_start
        if self._is_off_policy:
            state |= {
                "warmup": self._warmup.state_dict(),
                "ratio": self._ratio.state_dict(),
                "refill_steps": self.refill_steps,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it; the ratio of updates may differ from the saved run's."""
        self._next_action = state["next_call"]
        counters = self.session.counters
        if self.session.algorithm.kind == "on-policy":
            self._iteration_start = state["iteration_start"]
        if not self._is_off_policy:
            return
        self._warmup.load_state_dict(state["warmup"])
        self._ratio.load_state_dict(state["ratio"])
        self.refill_steps = state["refill_steps"]
        if state["ratio"] and state["ratio"]["ratio"] != self._ratio.ratio:
            self._ratio.restart(counters.vector_steps, counters.updates)
