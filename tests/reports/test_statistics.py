"""Statistics over seeds and tasks: by hand, by naive loops, and beside rliable's numbers."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, trim_mean

from mtrl_lightning.formats import with_interval
from mtrl_lightning.reports import statistics
from mtrl_lightning.reports.statistics import (
    curve_intervals,
    difference_of_means,
    interquartile_mean,
    interval,
    mean_interval,
    performance_profile,
    probability_interval,
    probability_of_improvement,
)

A_ST = np.array([[0.6, 0.3, 0.0], [0.0, 0.8, 0.9], [0.6, 0.7, 0.5], [0.9, 0.8, 0.0]])
B_ST = np.array(
    [[0.9, 0.0, 0.7], [0.2, 0.9, 0.5], [0.3, 0.4, 0.0], [0.1, 0.7, 0.6], [0.6, 0.4, 1.0]]
)
RLIABLE = {
    "iqm of A": 0.5833333333333334,
    "interval of A": (0.28333333, 0.76666667),
    "P(A > B)": 0.5083333333333333,
    "interval of P(A > B)": (0.28333333, 0.73333333),
    "profile of A": (0.75, 0.75, 0.58333333, 0.33333333),
    "low of the profile": (0.5, 0.5, 0.33333333, 0.08333333),
    "high of the profile": (0.91666667, 0.91666667, 0.83333333, 0.58333333),
}
"""What rliable 1.2.0 gives for A and B: 20,000 resamples, 5,000 for the profile."""


@pytest.fixture
def generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([5.0], 5.0),
        ([0.0, 1.0, 2.0, 30.0], 1.5),
        ([1.0, 2.0, 4.0], 7 / 3),
        ([1.0, 2.0, 3.0, 5.0, 100.0], 10 / 3),
        ([9.0, 1.0, 2.0, 4.0, 3.0, 100.0, 8.0], 26 / 5),
        ([[7.0, -90.0], [5.0, 90.0]], 6.0),
    ],
)
def test_the_interquartile_mean_by_hand(scores, wanted):
    assert interquartile_mean(np.array(scores)) == pytest.approx(wanted)


def test_the_interquartile_mean_cuts_whole_scores_as_rliable_does():
    scores = np.random.default_rng(1).normal(size=(6, 5))
    ordered = sorted(scores.ravel())
    assert interquartile_mean(scores) == pytest.approx(sum(ordered[7:23]) / 16)
    assert interquartile_mean(scores) == pytest.approx(trim_mean(scores, 0.25, axis=None))


def test_numbers_are_those_of_rliable(generator, monkeypatch):
    assert interquartile_mean(A_ST) == pytest.approx(RLIABLE["iqm of A"])
    assert probability_of_improvement(A_ST, B_ST) == pytest.approx(RLIABLE["P(A > B)"])
    thresholds = np.array([0.0, 0.25, 0.5, 0.75])
    share_K, bounds_K2 = performance_profile(A_ST, thresholds, generator)
    assert share_K == pytest.approx(RLIABLE["profile of A"])
    monkeypatch.setattr(statistics, "RESAMPLES", 20_000)
    found = [interval(A_ST, generator), probability_interval(A_ST, B_ST, generator)]
    # both draw at random: the bounds of a few scores lie on steps of about 0.02
    assert found[0] == pytest.approx(RLIABLE["interval of A"], abs=0.02)
    assert found[1] == pytest.approx(RLIABLE["interval of P(A > B)"], abs=0.02)
    assert bounds_K2[:, 0] == pytest.approx(RLIABLE["low of the profile"], abs=0.01)
    assert bounds_K2[:, 1] == pytest.approx(RLIABLE["high of the profile"], abs=0.01)


def drawn_by_hand(scores_ST, generator):
    """Resample the seeds of each task, one number after another."""
    num_seeds, num_tasks = scores_ST.shape
    for drawn_ST in generator.integers(num_seeds, size=(statistics.RESAMPLES, *scores_ST.shape)):
        yield np.array(
            [[scores_ST[drawn_ST[s, t], t] for t in range(num_tasks)] for s in range(num_seeds)]
        )


def bounds(values):
    return pytest.approx(np.percentile(values, [2.5, 97.5]))


def test_intervals_are_those_of_naive_loops(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 60)
    monkeypatch.setattr(statistics, "LARGEST_BLOCK", 7 * A_ST.size)  # several blocks

    def fresh():
        return np.random.default_rng(3)

    resamples = list(drawn_by_hand(A_ST, fresh()))
    assert interval(A_ST, fresh()) == bounds([interquartile_mean(one) for one in resamples])
    assert mean_interval(A_ST, fresh()) == bounds([one.mean() for one in resamples])
    thresholds = np.array([0.1, 0.6])
    _, bounds_K2 = performance_profile(A_ST, thresholds, fresh())
    for k, threshold in enumerate(thresholds):
        assert bounds_K2[k] == bounds([(one > threshold).mean() for one in resamples])
    generator = fresh()
    of_a = list(drawn_by_hand(A_ST, generator))
    of_b = list(drawn_by_hand(B_ST, generator))
    pairs = [probability_of_improvement(a, b) for a, b in zip(of_a, of_b, strict=True)]
    assert probability_interval(A_ST, B_ST, fresh()) == bounds(pairs)
    curve_STP = np.stack([A_ST, A_ST**2], axis=2)
    for place, found in enumerate(curve_intervals(curve_STP, fresh())):
        assert found == bounds([interquartile_mean(one ** (place + 1)) for one in resamples])


def test_the_probability_of_improvement_is_the_statistic_of_mann_and_whitney():
    shares = []
    for task in range(3):
        statistic, _ = mannwhitneyu(A_ST[:, task], B_ST[:, task])
        shares.append(statistic / (len(A_ST) * len(B_ST)))
    assert probability_of_improvement(A_ST, B_ST) == pytest.approx(np.mean(shares))
    assert probability_of_improvement(A_ST, A_ST) == 0.5
    assert probability_of_improvement(A_ST + 2, B_ST) == 1.0


def test_tasks_are_never_mixed_and_one_seed_has_no_interval(generator):
    same_ST = np.full((4, 3), 0.25)
    assert interval(same_ST, generator) == (0.25, 0.25)
    low, high = interval(A_ST, generator)
    assert A_ST.min() < low < interquartile_mean(A_ST) < high < A_ST.max()
    low, high = interval(A_ST[:1], generator)
    assert low == high == interquartile_mean(A_ST[:1])


def test_the_difference_of_means_by_hand(generator):
    value, (low, high) = difference_of_means(np.array([1.0, 3.0]), np.array([0.5]), generator)
    assert value == 1.5 and (low, high) == (0.5, 2.5)


def test_an_interval_has_the_decimals_of_its_number():
    assert with_interval(0.85, (0.8, 0.9)) == "0.85 [0.80, 0.90]"
    assert with_interval(1024.0, (998.1, 1050.2)) == "1,024 [998, 1,050]"
