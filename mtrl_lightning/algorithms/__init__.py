"""LightningModules that learn from a ``TransitionBatch``. They know neither environments nor callbacks."""

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.sac import SAC
from mtrl_lightning.algorithms.temperature import Temperature

__all__ = ["SAC", "Algorithm", "Temperature"]
