"""Checks of an algorithm's numbers and parts."""

from __future__ import annotations

from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.algorithms.weighting import TaskWeighting


def check_parts(
    weighting: TaskWeighting, temperature: Temperature, reward_scale: RewardScale, discount: float
) -> None:
    """Check that SAC's parts go together.

    Raises:
        ConfigurationError: naming those that do not.
    """
    weighting.check(temperature)
    reward_scale.check(discount)
