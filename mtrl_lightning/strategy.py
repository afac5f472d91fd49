"""The name of ``mtrl_lightning.ranks.strategy`` until 0.2."""

from mtrl_lightning.ranks.strategy import *  # noqa: F403
