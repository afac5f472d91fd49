"""Reset the networks on a schedule."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.run.registered import StepAction
from mtrl_lightning.schedules import Every


class ResetCallback(SessionCallback):
    """Reset the networks every N env steps; the replay is kept.

    An on-policy algorithm resets them between two iterations.

    Networks lose the ability to learn with time: Nikishin et al. 2022 ("The Primacy Bias in Deep
    Reinforcement Learning"). ARS (Cho et al. 2025) resets 4 times on MT10 and 6 times on MT50. An
    evaluation and a best checkpoint at the same step are of the networks before the reset.

    Args:
        every: environment steps between two resets, after the warm-up; null for none.
        times: number of resets; the last one should leave time to learn; null for no limit.
    """

    key = "resets"
    learning_options = ("every", "times")

    def __init__(self, every: int | None = None, times: int | None = None) -> None:
        at_least(1, prefix="resets.", times=times)
        if times is not None and every is None:
            raise ConfigurationError(
                f"resets.times is {times}, resets.every {every}: give both, or times null"
            )
        self._every = None if every is None else Every(every, "resets.every")
        self._times = times
        self._has_started = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the resets with the session."""
        super().setup(trainer, pl_module, stage)
        if self._every is not None:
            self.session.after_updates["reset_networks"] = StepAction(self.reset_if_due)

    def reset_if_due(self, env_steps: int, at_end: bool) -> None:
        """Reset when it is due; resets due before the first call are left out."""
        assert self._every is not None
        if at_end:
            return  # a run that is extended resets here before its next action
        if self.session.is_collecting:
            return  # a collected iteration is of the present policy, and so must be its updates
        is_due = self._every(env_steps) and self._has_started
        self._has_started = True
        counters = self.session.counters
        is_allowed = self._times is None or counters.network_resets < self._times
        if is_due and is_allowed:
            counters.network_resets += 1
            algorithm = self.session.algorithm
            rank_zero_info(f"The networks are reset at {env_steps:,} {algorithm.step_unit}")
            algorithm.reset_networks()
            if algorithm.kind != "on-policy":
                algorithm.begin_learning(self.session.replay.mean_rewards())

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule."""
        schedule = None if self._every is None else self._every.state_dict()
        return {"every": schedule, "has_started": self._has_started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; a continued run may have another schedule, or its first."""
        if self._every is not None and state_dict["every"] is not None:
            self._has_started = state_dict["has_started"]
            self._every.load_state_dict(state_dict["every"])
