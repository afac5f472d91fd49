"""The name of the temperatures of ``mtrl_lightning.learning.weighting`` until 0.3."""

from mtrl_lightning.learning.weighting import FixedTemperature, Temperature

__all__ = ["FixedTemperature", "Temperature"]
