"""What happens after each vector step, in which order; and the base class of the loops."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning import distributed, saved
from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.signals import Interrupted
from mtrl_lightning.errors import RestartsExhaustedError
from mtrl_lightning.session import PostStepCall, Session
from mtrl_lightning.types import Mode

NUM_RESULT_CALLS = 3
"""The first of ``_post_step_calls`` leave results: ``evaluate``, ``log_metrics``, ``save_best``."""


class Driver(SessionCallback, Checkpoint):
    """Step the training environments; after each vector step evaluate, log, save and reset.

    A ``Loop`` decides when environments are stepped, when updates are made, and when a vector step
    is complete; it then calls ``complete_step``. A checkpoint that one of the calls after a vector
    step writes, or that is written when one is interrupted, remembers which call is next: the
    resumed run starts there.

    With several processes each steps its own environments. After each vector step they agree on the
    counts of all, so that schedules, the end of the run, signals and faults are the same on all.

    It is one of Lightning's ``Checkpoint`` callbacks, which are called last: what it saves holds
    the state of all other callbacks after the same batch.
    """

    key = "rollout"

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._next_call: int | None = None
        """Place of the next one in ``_post_step_calls``; None when all are done."""
        self._wants_stop = False
        """Whether something on this process has asked to end the run, and not all know it yet."""
        self._is_end_agreed = False
        """Whether all processes are ended by the same exception, and can save the run."""

    def _post_step_calls(self) -> tuple[PostStepCall, ...]:
        """Return what happens after a vector step whose updates are made, in this order."""
        session = self.session
        return (
            session.evaluate,
            session.log_metrics,
            session.save_best,
            session.reset_networks,
            session.save_last,
            self._stop_at_end,
        )

    def complete_step(self) -> None:
        """Do what is due after a vector step whose updates are made."""
        self._next_call = 0
        self.check_faults()
        self.continue_calls()

    def continue_calls(self) -> None:
        """Make the calls that are left; a continued run may have some."""
        if self._next_call is None:
            return
        calls = self._post_step_calls()
        for place in range(self._next_call, len(calls)):
            # set before the call: a checkpoint that the call writes must resume after it
            self._next_call = place + 1
            try:
                calls[place](self.session.counters.env_steps, self._is_at_end())
            except (Interrupted, RestartsExhaustedError):
                self._next_call = place
                self._is_end_agreed = True
                raise
        self._next_call = None

    @property
    def has_pending_results(self) -> bool:
        """Whether evaluation, metrics or best checkpoint of the last vector step are missing."""
        return self._next_call is not None and self._next_call < NUM_RESULT_CALLS

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        raise NotImplementedError

    @property
    def should_stop(self) -> bool:
        """Whether something, such as early stopping, has asked the trainer to end the run."""
        assert self._trainer is not None
        return self._trainer.should_stop

    def _is_at_end(self) -> bool:
        return self.is_finished() or self.should_stop

    def _stop_at_end(self, env_steps: int, at_end: bool) -> None:
        assert self._trainer is not None
        if at_end:
            self._trainer.should_stop = True

    def send(self, mode: Mode) -> None:
        """Choose actions and let the environments step."""
        with self.session.stopwatch.measure("act"):
            self.session.collector.send(mode)

    def receive(self) -> None:
        """Wait for the step that ``send`` started, and keep its transitions to learn from."""
        session = self.session
        episodes = session.counters.episodes
        with session.stopwatch.measure("step"):
            transitions, _ = session.collector.receive()
            self.agree()
        session.transitions.add(transitions)
        session.algorithm.observe(transitions, session.counters.episodes > episodes)
        for call in session.after_vector_step:
            call(session.counters.env_steps)

    def agree(self) -> None:
        """Learn what the other processes have counted and ask for."""
        session = self.session
        session.agree(self._wants_stop)
        if session.agreement.is_stop_wanted and self._trainer is not None:
            self._wants_stop = False
            self._trainer.should_stop = True

    def hold_back_stop(self) -> None:
        """Let all processes end after the same step if something on this one wants to end."""
        assert self._trainer is not None
        if distributed.world_size() == 1 or not self._trainer.should_stop:
            return
        if not self.session.agreement.is_stop_wanted:
            self._wants_stop = True
            self._trainer.should_stop = False

    def check_signals(self) -> None:
        """Raise ``Interrupted`` if a signal came; the run's state must be whole."""
        try:
            self.session.check_signals()
        except Interrupted:
            self._is_end_agreed = True
            raise

    def check_faults(self) -> None:
        """Raise the fault for which no restart was left, now that the state is whole.

        The restarts of all processes count.
        """
        envs = self.session.collector.envs
        if distributed.world_size() == 1:
            if envs.fault is not None:
                raise envs.fault
            return
        agreement = self.session.agreement
        if agreement.faulty_rank is not None:
            self._is_end_agreed = True
            distributed.raise_together(envs.fault, [RestartsExhaustedError])
        if agreement.restarts > (envs.max_restarts or 0):
            self._is_end_agreed = True
            exhausted = RestartsExhaustedError(
                f"environments were rebuilt {agreement.restarts} times on all processes together,"
                f" and rollout.max_restarts is {envs.max_restarts}: see the warnings above"
            )
            exhausted.is_on_all_ranks = True  # type: ignore[attr-defined]
            raise exhausted

    def warn_of_lost_states(self) -> None:
        """Say which environments cannot be saved in the middle of an episode."""
        for task, reason in self.session.collector.envs.unsavable().items():
            rank_zero_warn(
                f"the state of {task}'s environment cannot be saved ({reason}):"
                " a continued run starts new episodes there, and is not the uninterrupted run"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get the session, and keep the trainer, which ends when it is asked to."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return which call is next, and the environments' states."""
        collector = self.session.collector.state_dict() if self.session.is_open else {}
        return {"next_call": self._next_call, "collector": collector}

    def restore(self, state_dict: dict[str, Any]) -> None:
        """Restore them; an evaluation has no environments to restore."""
        if self.session.is_open and state_dict["collector"]:
            next_call = state_dict["next_call"]
            if next_call is not None:
                saved.count(next_call, "rollout.next_call", len(self._post_step_calls()))
            self._next_call = next_call
            self.session.collector.load_state_dict(state_dict["collector"])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save a run that was interrupted or is out of restarts; end the workers."""
        is_whole = isinstance(exception, (Interrupted, RestartsExhaustedError))
        if distributed.world_size() > 1:
            is_whole = is_whole and self._is_end_agreed
        is_training = (
            trainer.state.fn == TrainerFn.FITTING
            and hasattr(self, "session")
            and self.session.is_training
        )
        try:
            if is_training and is_whole:
                self.session.save_interrupted()
            if is_training and (is_whole or not isinstance(exception, SystemExit)):
                for call in self.session.after_failure:
                    call()
        finally:
            self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the workers."""
        self._close()

    def _close(self) -> None:
        if hasattr(self, "session"):
            self.session.close()


class Loop:
    """In which order environments are stepped and updates are made.

    Args:
        driver: steps the environments, and does what is due after a vector step.
        total_steps: environment steps after which training ends.
    """

    def __init__(self, driver: Driver, total_steps: int) -> None:
        self.driver = driver
        self.total_steps = total_steps

    @property
    def session(self) -> Session:
        """The run's parts."""
        return self.driver.session

    def check(self, num_envs: int) -> None:
        """Check the options before environments are started.

        Raises:
            ConfigurationError: if they do not fit.
        """

    def open(self) -> None:
        """Set what training batches are drawn from."""

    def start(self) -> None:
        """Step until there is something to learn from; do what an interruption left undone."""

    def before_batch(self) -> None:
        """Called before an update."""

    def after_batch(self) -> None:
        """Called after an update."""

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        raise NotImplementedError

    def unused_options(self) -> Collection[str]:
        """Return the names of the options that change nothing from here on."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
