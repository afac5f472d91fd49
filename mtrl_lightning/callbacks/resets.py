"""Begin the networks anew from time to time."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import data_of, step_complete
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schedules import Every


class ResetCallback(Callback):
    """Give the networks fresh weights on a schedule, and keep the replay: networks lose the ability to learn with time.

    Nikishin et al. 2022 ("The Primacy Bias in Deep Reinforcement Learning"); ARS (Cho et al. 2025) resets 4 times on
    MT10 and 6 times on MT50.

    Args:
        every: environment steps between two resets; null for none.
        times: number of resets, the last of which should leave time to learn; null for no limit.

    Raises:
        ConfigurationError: if a number is below 1.
    """

    def __init__(self, every: int | None = None, times: int | None = None) -> None:
        if times is not None and (times < 1 or every is None):
            raise ConfigurationError(f"resets.times is {times}, resets.every {every}: give both, or times null")
        self._every = None if every is None else Every(every, "resets.every")
        self._last = None if every is None or times is None else every * times

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count after the warm-up; reset first if the checkpoint was written just before."""
        assert isinstance(pl_module, Algorithm)
        if self._every is not None and pl_module.counters.updates == 0:
            self._every(pl_module.counters.env_steps)
        elif step_complete(trainer):
            self._reset_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reset when it is time, after evaluation and checkpoint."""
        assert isinstance(pl_module, Algorithm)
        if step_complete(trainer):
            self._reset_if_due(trainer, pl_module)

    def _reset_if_due(self, trainer: Trainer, algorithm: Algorithm) -> None:
        env_steps = algorithm.counters.env_steps
        if self._every is None or trainer.should_stop or not self._every(env_steps):
            return
        if self._last is None or env_steps // self._every.interval * self._every.interval <= self._last:
            rank_zero_info(f"The networks begin anew at {env_steps:,} env steps")
            algorithm.reset_networks()
            buffer = data_of(trainer).buffer
            assert buffer is not None
            algorithm.begin_learning(buffer.mean_rewards())

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule."""
        return {} if self._every is None else self._every.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule; a run that goes on may have another, or none."""
        if self._every is not None and state_dict:
            self._every.load_state_dict(state_dict)
