"""The name of the reward scales of ``mtrl_lightning.learning.transforms`` until 0.3."""

from mtrl_lightning.learning.transforms import MeanReward, ReturnRange, RewardScale

__all__ = ["MeanReward", "ReturnRange", "RewardScale"]
