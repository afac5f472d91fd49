"""The name of the values of ``mtrl_lightning.learning.losses`` until 0.3."""

from mtrl_lightning.learning.losses import Categorical, Scalar, Value

__all__ = ["Categorical", "Scalar", "Value"]
