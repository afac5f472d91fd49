"""Statistics over seeds and tasks: interquartile mean and bootstrap intervals, using SciPy.

They follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", and its library rliable. SciPy is imported lazily, because the import takes a second.

Shapes: ``S`` seeds, ``T`` tasks; ``...`` any further dimensions, such as the points of a curve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2_000
CONFIDENCE = 0.95
"""Confidence level of the intervals."""
LARGEST_BATCH = 2_000_000
"""Number of scores resampled at once, about 16 MB."""

Scores = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A statistic and its confidence interval: numbers, or arrays for the points of a curve."""

    value: Any
    low: Any = None
    """None without an interval, which requires two seeds."""
    high: Any = None


def interquartile_mean(scores_ST: Scores) -> Estimate:
    """Return the mean of the middle half of all scores.

    A quarter of the scores, rounded down, is cut off at each end, as in rliable.

    Args:
        scores_ST: scores ``[S, T, ...]``; all points of a curve use the same resamples.
    """
    from scipy.stats import trim_mean

    def statistic(*samples: Scores, axis: int) -> Scores:
        return np.asarray(trim_mean(np.concatenate(samples, axis), 0.25, axis))

    return _estimate(statistic, _by_task(scores_ST))


def mean(scores_ST: Scores) -> Estimate:
    """Return the mean of all scores ``[S, T, ...]``."""

    def statistic(*samples: Scores, axis: int) -> Scores:
        return np.asarray(np.concatenate(samples, axis).mean(axis))

    return _estimate(statistic, _by_task(scores_ST))


def probability_of_improvement(scores_ST: Scores, others_ST: Scores) -> Estimate:
    """Return the probability that a run is better than one of another method, averaged over tasks.

    This is the fraction of seed pairs in which the first is better; ties count as half.

    Args:
        scores_ST: scores of a method.
        others_ST: scores of the other method on the same tasks; its seeds may differ.
    """
    num_tasks = scores_ST.shape[1]

    def statistic(*samples: Scores, axis: int) -> Scores:
        shares = []
        for one, other in zip(samples[:num_tasks], samples[num_tasks:], strict=True):
            difference = one[..., :, None] - other[..., None, :]
            shares.append((0.5 + 0.5 * np.sign(difference)).mean((-2, -1)))
        return np.asarray(np.mean(shares, axis=0))

    return _estimate(statistic, [*_by_task(scores_ST), *_by_task(others_ST)])


def _by_task(scores_ST: Scores) -> list[Scores]:
    """Return the scores of each task, ``[..., S]``, for independent resampling of seeds."""
    return list(np.moveaxis(scores_ST, 0, -1))


def _estimate(statistic: Callable[..., Scores], samples: list[Scores]) -> Estimate:
    """Compute a statistic of samples over their last dimension, with its bootstrap interval."""
    from scipy.stats import bootstrap

    value = statistic(*samples, axis=-1)[()]
    if min(sample.shape[-1] for sample in samples) < 2:
        return Estimate(value)
    result = bootstrap(
        samples,
        statistic,
        axis=-1,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, LARGEST_BATCH // sum(sample.size for sample in samples)),
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return Estimate(value, *result.confidence_interval)
