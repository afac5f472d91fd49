"""Refuse callbacks that would give a wrong result."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)

from mtrl_lightning.errors import ConfigurationError

AUTOMATIC = (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
"""Callbacks that work with automatic optimization only."""


def is_better_when_larger(metric: str) -> bool:
    """Return whether the largest value of a metric is a run's best."""
    quantity = metric.partition("/")[2]
    return quantity.startswith(("success", "return", "score"))


def check_callbacks(trainer: Trainer) -> None:
    """Check that no callback needs automatic optimization, or keeps the worst policy."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, AUTOMATIC):
            raise ConfigurationError(f"{name} needs automatic optimization: leave it out")
        keeps_smallest = getattr(callback, "mode", "max") == "min"
        metric = getattr(callback, "monitor", None) or ""
        if keeps_smallest and is_better_when_larger(metric):
            raise ConfigurationError(f"{name} monitors {metric}: set its mode to max")
