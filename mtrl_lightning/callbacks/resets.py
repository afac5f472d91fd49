"""Begin the networks anew from time to time."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import begin_learning, step_complete
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schedules import Every


class ResetCallback(Callback):
    """Give the networks fresh weights on a schedule, and keep the replay: networks lose the ability to learn with time.

    Nikishin et al. 2022 ("The Primacy Bias in Deep Reinforcement Learning"); ARS (Cho et al. 2025)
    resets 4 times on MT10 and 6 times on MT50. It comes just before the next update: what is
    evaluated and saved at that step are the networks before it. List it before ``RolloutCallback``,
    so that it also comes before the next actions.

    Args:
        every: environment steps between two resets, after the warm-up; null for none.
        times: number of resets, the last of which should leave time to learn; null for no limit.

    Raises:
        ConfigurationError: if a number is below 1.
    """

    def __init__(self, every: int | None = None, times: int | None = None) -> None:
        if times is not None and (times < 1 or every is None):
            raise ConfigurationError(
                f"resets.times is {times}, resets.every {every}: give both, or times null"
            )
        self._every = None if every is None else Every(every, "resets.every")
        self._times = times
        self._made = 0
        self._begun = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reset when it is time; nothing that lies before the first call is made up for."""
        assert isinstance(pl_module, Algorithm)
        if self._every is None or not step_complete(trainer):
            return
        due, self._begun = self._every(pl_module.counters.env_steps) and self._begun, True
        if due and (self._times is None or self._made < self._times):
            self._made += 1
            rank_zero_info(f"The networks begin anew at {pl_module.counters.env_steps:,} env steps")
            pl_module.reset_networks()
            begin_learning(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, and how many resets were made."""
        schedule = None if self._every is None else self._every.state_dict()
        return {"every": schedule, "made": self._made, "begun": self._begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them; a run that goes on may have another schedule, or its first."""
        self._made = state_dict["made"]
        if self._every is not None and state_dict["every"] is not None:
            self._begun = state_dict["begun"]
            self._every.load_state_dict(state_dict["every"])
