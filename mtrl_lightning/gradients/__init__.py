"""How the tasks' losses become one gradient."""

from mtrl_lightning.gradients.mean import Mean
from mtrl_lightning.gradients.method import GradientMethod

__all__ = ["GradientMethod", "Mean"]
