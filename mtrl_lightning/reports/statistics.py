"""Statistics over seeds and tasks: interquartile mean, bootstrap intervals, profiles.

They are those of Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", and of its library rliable, which does not import beside current versions of what it
needs (pandas 3). The numbers are the same.

Shapes: ``S`` seeds, ``T`` tasks, ``K`` thresholds, ``N`` resamples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2_000
CONFIDENCE = 95.0
"""Percent of the resamples that an interval contains."""
LARGEST_BLOCK = 2_000_000
"""Scores that are resampled at once, some 16 MB."""

Scores = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """The bounds between which 95 % of the resampled values lie."""

    low: float
    high: float


def interquartile_mean(scores: Scores) -> float:
    """Return the mean of the middle half of all scores.

    A quarter of the scores, rounded down to whole scores, is cut at each end, as in rliable.
    """
    return float(_interquartile_means(np.asarray(scores).reshape(1, -1))[0])


def _interquartile_means(scores_NK: Scores) -> Scores:
    """Return the interquartile mean of each row."""
    from scipy.stats import trim_mean  # takes a second to import

    return np.asarray(trim_mean(scores_NK, 0.25, axis=1))


def interval(scores_ST: Scores, generator: np.random.Generator) -> Interval:
    """Return the bootstrap interval of the interquartile mean; resample the seeds of each task."""
    drawn_NST = _draw(scores_ST.shape, generator)
    return _bounds(_resampled_means(scores_ST, drawn_NST))


def curve_intervals(scores_STP: Scores, generator: np.random.Generator) -> Scores:
    """Return the interval of the interquartile mean at each point of a curve, ``[P, 2]``.

    All points have the same resamples.

    Args:
        scores_STP: scores of each seed and task at ``P`` points.
        generator: draws the resamples.
    """
    drawn_NST = _draw(scores_STP.shape[:2], generator)
    points = range(scores_STP.shape[2])
    return np.array([_bounds(_resampled_means(scores_STP[:, :, p], drawn_NST)) for p in points])


def mean_interval(scores_ST: Scores, generator: np.random.Generator) -> Interval:
    """Return the bootstrap interval of the mean; resample the seeds of each task."""
    drawn_NST = _draw(scores_ST.shape, generator)
    return _bounds(_resampled(scores_ST, drawn_NST).mean((1, 2)))


def probability_of_improvement(scores_ST: Scores, others_ST: Scores) -> float:
    """Return how probably a run is better than one of another method, averaged over tasks.

    It is the share of pairs of seeds in which the first is better; a tie counts as half.

    Args:
        scores_ST: scores of a method.
        others_ST: scores of the other method on the same tasks; it may have other seeds.
    """
    better_SST = scores_ST[:, None] > others_ST[None]
    equal_SST = scores_ST[:, None] == others_ST[None]
    return float((better_SST + 0.5 * equal_SST).mean())


def probability_interval(
    scores_ST: Scores, others_ST: Scores, generator: np.random.Generator
) -> Interval:
    """Return the bootstrap interval of ``probability_of_improvement``."""
    drawn_NST = _draw(scores_ST.shape, generator)
    others_drawn_NST = _draw(others_ST.shape, generator)
    # each pair is compared once: a resample only chooses pairs
    better_SST = scores_ST[:, None] > others_ST[None]
    equal_SST = scores_ST[:, None] == others_ST[None]
    value_SST = better_SST + 0.5 * equal_SST
    num_tasks = scores_ST.shape[1]
    total_N = np.zeros(RESAMPLES)
    for task in range(num_tasks):
        # how often each seed was drawn
        count_NS = _counts(drawn_NST[:, :, task], len(scores_ST))
        others_count_NS = _counts(others_drawn_NST[:, :, task], len(others_ST))
        value_SS = value_SST[:, :, task]
        total_N += np.einsum("ns,sr,nr->n", count_NS, value_SS, others_count_NS, optimize=True)
    return _bounds(total_N / (num_tasks * len(scores_ST) * len(others_ST)))


def performance_profile(
    scores_ST: Scores, thresholds_K: Scores, generator: np.random.Generator | None = None
) -> tuple[Scores, Scores]:
    """Return which share of all runs' tasks is above each threshold, and the intervals.

    Args:
        scores_ST: scores of a method.
        thresholds_K: the thresholds.
        generator: draws the resamples; without one, the intervals have no width.

    Returns:
        The shares ``[K]`` and their bounds ``[K, 2]``.
    """
    above_STK = (scores_ST[:, :, None] > thresholds_K).astype(np.float64)
    share_K = above_STK.mean((0, 1))
    if generator is None:
        return share_K, np.stack([share_K, share_K], axis=1)
    num_seeds, num_tasks = scores_ST.shape
    drawn_NST = _draw(scores_ST.shape, generator)
    total_NK = np.zeros((RESAMPLES, len(thresholds_K)))
    for task in range(num_tasks):
        total_NK += _counts(drawn_NST[:, :, task], num_seeds) @ above_STK[:, task]
    low_K, high_K = _percentiles(total_NK / (num_seeds * num_tasks))
    return share_K, np.stack([low_K, high_K], axis=1)


def difference_of_means(
    scores_S: Scores, others_S: Scores, generator: np.random.Generator
) -> tuple[float, Interval]:
    """Return the difference of two methods' means over seeds, and its bootstrap interval."""
    drawn_NS = generator.choice(scores_S, (RESAMPLES, len(scores_S)))
    others_drawn_NS = generator.choice(others_S, (RESAMPLES, len(others_S)))
    difference = float(scores_S.mean() - others_S.mean())
    return difference, _bounds(drawn_NS.mean(1) - others_drawn_NS.mean(1))


def _draw(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw which seed stands at each place, independently for each task."""
    return generator.integers(shape[0], size=(RESAMPLES, *shape))


def _resampled(scores_ST: Scores, drawn_NST: npt.NDArray[np.int64]) -> Scores:
    return np.take_along_axis(scores_ST[None], drawn_NST, axis=1)


def _resampled_means(scores_ST: Scores, drawn_NST: npt.NDArray[np.int64]) -> Scores:
    """Return the interquartile mean of each resample."""
    block = max(1, LARGEST_BLOCK // scores_ST.size)
    means = []
    for first in range(0, len(drawn_NST), block):
        part_NST = _resampled(scores_ST, drawn_NST[first : first + block])
        means.append(_interquartile_means(part_NST.reshape(len(part_NST), -1)))
    return np.concatenate(means)


def _counts(drawn_NS: npt.NDArray[np.int64], num_seeds: int) -> Scores:
    """Return how often each resample drew each seed, ``[N, S]``."""
    seeds = np.arange(num_seeds)
    return (drawn_NS[:, :, None] == seeds).sum(1).astype(np.float64)


def _percentiles(values: Scores) -> Scores:
    outside = (100 - CONFIDENCE) / 2
    return np.percentile(values, [outside, 100 - outside], axis=0)


def _bounds(values_N: Scores) -> Interval:
    low, high = _percentiles(values_N)
    return Interval(float(low), float(high))
