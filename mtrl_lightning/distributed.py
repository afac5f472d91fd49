"""The name of ``mtrl_lightning.ranks.distributed`` until 0.2."""

from mtrl_lightning.ranks.distributed import *  # noqa: F403
