"""Checks of an algorithm's numbers and parts."""

from __future__ import annotations

from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.algorithms.weighting import TaskWeighting
from mtrl_lightning.errors import ConfigurationError


def check_ranges(
    num_critics: int,
    discount: float,
    tau: float,
    actor_every: int,
    target_every: int,
    low: float,
    high: float,
) -> None:
    """Check SAC's numbers.

    Raises:
        ConfigurationError: naming those that are out of their range.
    """
    if min(num_critics, actor_every, target_every) < 1:
        raise ConfigurationError("num_critics, actor_every and target_every must be at least 1")
    if not (0 <= discount <= 1 and 0 < tau <= 1):
        raise ConfigurationError(
            f"discount is {discount}, tau {tau}: give 0 <= discount <= 1 and 0 < tau <= 1"
        )
    if not low < high:
        raise ConfigurationError(f"log_std_min {low} must be below log_std_max {high}")


def check_parts(
    weighting: TaskWeighting, temperature: Temperature, reward_scale: RewardScale, discount: float
) -> None:
    """Check that SAC's parts go together.

    Raises:
        ConfigurationError: naming those that do not.
    """
    weighting.check(temperature)
    reward_scale.check(discount)
