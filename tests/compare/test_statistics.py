"""Statistics over seeds and tasks: by hand, and against rliable's numbers."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, trim_mean

from mtrl_lightning.compare import statistics
from mtrl_lightning.compare.statistics import (
    interquartile_mean,
    mean,
    probability_of_improvement,
)

A_ST = np.array([[0.6, 0.3, 0.0], [0.0, 0.8, 0.9], [0.6, 0.7, 0.5], [0.9, 0.8, 0.0]])
B_ST = np.array(
    [[0.9, 0.0, 0.7], [0.2, 0.9, 0.5], [0.3, 0.4, 0.0], [0.1, 0.7, 0.6], [0.6, 0.4, 1.0]]
)


@pytest.mark.parametrize("num_seeds", range(1, 9))
def test_the_interquartile_mean_is_a_trimmed_mean(num_seeds):
    scores_ST = np.random.default_rng(0).normal(size=(num_seeds, 3))
    expected = trim_mean(scores_ST, 0.25, axis=None)
    assert interquartile_mean(scores_ST).value == pytest.approx(expected)


def test_numbers_are_those_of_rliable(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 20_000)
    monkeypatch.setattr(statistics, "LARGEST_BATCH", 7_001 * A_ST.size)  # several batches
    iqm = interquartile_mean(A_ST)
    better = probability_of_improvement(A_ST, B_ST)
    # of rliable 1.2.0 with 20,000 resamples
    assert iqm.value == pytest.approx(0.5833333333333334)
    assert better.value == pytest.approx(0.5083333333333333)
    # both draw at random: the bounds of a few scores lie on steps of about 0.02
    assert iqm[1:] == pytest.approx((0.28333333, 0.76666667), abs=0.02)
    assert better[1:] == pytest.approx((0.28333333, 0.73333333), abs=0.02)
    # a normal distribution: the seeds of each task are resampled independently
    error = 1.96 * np.sqrt(A_ST.var(0).sum() / 4) / 3
    value = A_ST.mean()
    assert mean(A_ST) == pytest.approx((value, value - error, value + error), abs=0.02)


def test_the_points_of_a_curve_have_the_same_resamples():
    curve = interquartile_mean(np.stack([A_ST, A_ST**2, A_ST + 1], axis=2))
    for point, scores_ST in enumerate((A_ST, A_ST**2, A_ST + 1)):
        alone = interquartile_mean(scores_ST)
        assert [values[point] for values in curve] == pytest.approx(list(alone))


def test_probability_of_improvement_is_mann_whitneys():
    shares = []
    for task in range(3):
        statistic, _ = mannwhitneyu(A_ST[:, task], B_ST[:, task])
        shares.append(statistic / (len(A_ST) * len(B_ST)))
    assert probability_of_improvement(A_ST, B_ST).value == pytest.approx(np.mean(shares))
    assert probability_of_improvement(A_ST, A_ST).value == 0.5
    assert probability_of_improvement(A_ST + 2, B_ST) == (1.0, 1.0, 1.0)


def test_tasks_are_never_mixed_and_one_seed_has_no_interval():
    assert mean(np.array([[0.0, 10.0], [0.0, 10.0]])) == (5.0, 5.0, 5.0)
    assert interquartile_mean(A_ST[:1])[1:] == (None, None)
    assert probability_of_improvement(A_ST, B_ST[:1])[1:] == (None, None)
