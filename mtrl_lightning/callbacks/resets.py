"""Reset the networks on a schedule."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.checks import at_least
from mtrl_lightning.data import TaskData
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schedules import Every
from mtrl_lightning.transitions import step_unit


class ResetCallback(Callback):
    """Reset the networks every N environment steps, but keep the replay.

    On-policy algorithms are reset between two iterations.

    Networks lose plasticity during training: Nikishin et al. 2022 ("The Primacy Bias in Deep
    Reinforcement Learning"). ARS (Cho et al. 2025) resets 4 times on MT10 and 6 times on MT50.
    Evaluations and checkpoints at the same step use the networks before the reset.

    Args:
        every: environment steps between two resets, after the warm-up; None for no resets.
        times: maximum number of resets, chosen so that the last one leaves enough time to learn;
            None for no limit.
    """

    order: ClassVar[int] = 0

    def __init__(self, every: int | None = None, times: int | None = None) -> None:
        at_least(1, prefix="resets.", times=times)
        if times is not None and every is None:
            raise ConfigurationError(
                f"resets.times is {times} and resets.every is {every}: set both, or times to null"
            )
        self._every = None if every is None else Every(every, "resets.every")
        self._times = times
        self._has_started = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reset before the next vector step if a reset is due."""
        data = data_of(trainer)
        if data.is_step_finished and data.kind != "on-policy":
            self._reset_if_due(data)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset before the next iteration is collected if a reset is due."""
        data = data_of(trainer)
        if data.kind == "on-policy" and data.is_step_finished:
            self._reset_if_due(data)

    def _reset_if_due(self, data: TaskData) -> None:
        """Reset if a reset is due; resets due before the first call are skipped."""
        counters, algorithm = data.counters, data.algorithm
        if self._every is None or not counters.updates:
            return
        is_due = self._every(counters.env_steps) and self._has_started
        self._has_started = True
        if is_due and (self._times is None or counters.network_resets < self._times):
            counters.network_resets += 1
            rank_zero_info(
                f"The networks are reset at {counters.env_steps:,} {step_unit(data.kind)}"
            )
            algorithm.reset_networks()
            data.begin_learning()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule."""
        schedule = None if self._every is None else self._every.state_dict()
        return {"every": schedule, "has_started": self._has_started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule; a resumed run may have a different schedule, or its first."""
        if self._every is not None and state_dict["every"] is not None:
            self._has_started = state_dict["has_started"]
            self._every.load_state_dict(state_dict["every"])
