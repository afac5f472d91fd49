"""Check that algorithm, data and trainer of a run are compatible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.data.run_io import RunIO
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.strategy import RanksStrategy

if TYPE_CHECKING:
    from mtrl_lightning.data.task_data import TaskData

AUTOMATIC = (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
"""Callbacks that require automatic optimization."""


def is_better_when_larger(metric: str) -> bool:
    """Return whether larger values of a metric are better."""
    quantity = metric.partition("/")[2]
    return quantity.startswith(("success", "return", "score"))


def check_run(trainer: Trainer, data: TaskData) -> None:
    """Check that algorithm, data and trainer are compatible, before anything is started.

    Args:
        trainer: the run's trainer.
        data: its data module.
    """
    algorithm = trainer.lightning_module
    if not isinstance(algorithm, Algorithm) or algorithm.kind != data.kind:
        raise ConfigurationError(
            f"{type(algorithm).__name__} cannot learn from {type(data).__name__}: use ReplayData"
            " for off-policy, RolloutData for on-policy, DemonstrationData for offline algorithms"
        )
    if algorithm.spec.task_names != data.spec.task_names:
        raise ConfigurationError(
            f"the algorithm has other tasks than the data: {algorithm.spec.task_names} and"
            f" {data.spec.task_names}. Build it with data.spec"
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, RanksStrategy):
        raise ConfigurationError(
            f"trainer.strategy is {type(trainer.strategy).__name__}, which does not average"
            " gradients in manual optimization: set it to ddp, or remove it"
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigurationError(
            f"trainer.precision is {trainer.precision}: use 32-true or bf16-mixed"
        )
    if type(trainer.strategy.checkpoint_io) not in (TorchCheckpointIO, RunIO):
        raise ConfigurationError("a run uses its own CheckpointIO: remove yours from the trainer")
    check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for name in ("overfit_batches", "reload_dataloaders_every_n_epochs"):
        if getattr(trainer, name):
            raise ConfigurationError(f"trainer.{name} is not supported: remove it")
    if trainer.check_val_every_n_epoch not in (None, 1):
        raise ConfigurationError(
            f"trainer.check_val_every_n_epoch is {trainer.check_val_every_n_epoch}, which is not"
            " supported: set evaluation.every in environment steps"
        )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that no callback requires automatic optimization, or keeps the worst policy."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, AUTOMATIC):
            raise ConfigurationError(f"{name} requires automatic optimization: remove it")
        keeps_smallest = getattr(callback, "mode", "max") == "min"
        metric = getattr(callback, "monitor", None) or ""
        if keeps_smallest and is_better_when_larger(metric):
            raise ConfigurationError(f"{name} monitors {metric}: set its mode to max")
