"""What critics' outputs mean, by hand and by loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mtrl_lightning.algorithms import Categorical, Scalar

Q = 2
R = 3
ROWS = 2
NUM_BINS = 5


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments():
    terminated_Rn = torch.tensor([[False, True], [False, False], [True, False]])
    return {
        "reward_Rn": draws(R, ROWS, seed=1),
        "terminated_Rn": terminated_Rn,
        "next_cost_Rn": draws(R, ROWS, seed=2),
        "discount": 0.9,
    }


def all_rows():
    return itertools.product(range(R), range(ROWS))


def test_scalar_value_learns_by_squared_error():
    output = draws(Q, R, ROWS, 1, seed=4)
    following = draws(Q, R, ROWS, 1, seed=5)
    given = arguments()
    wanted_R = [0.0] * R
    for row in all_rows():
        smallest = min(following[(i, *row, 0)].item() for i in range(Q))
        value = smallest - given["next_cost_Rn"][row].item()
        target = given["reward_Rn"][row].item()
        target += 0 if given["terminated_Rn"][row] else 0.9 * value
        for i in range(Q):
            wanted_R[row[0]] += (output[(i, *row, 0)].item() - target) ** 2 / ROWS
    assert Scalar().loss(output, following, **given).tolist() == pytest.approx(wanted_R, rel=1e-5)
    assert torch.equal(Scalar().q(output), output[..., 0])


def projection(probabilities, values, low, high):
    """C51's projection, one value at a time (Bellemare et al. 2017, algorithm 1)."""
    width = (high - low) / (len(probabilities) - 1)
    result = [0.0] * len(probabilities)
    for p, value in zip(probabilities, values, strict=True):
        place = (min(max(value, low), high) - low) / width
        lower, upper = math.floor(place + 1e-9), math.ceil(place - 1e-9)
        if lower == upper:
            result[lower] += p
        else:
            result[lower] += p * (upper - place)
            result[upper] += p * (place - lower)
    return result


def test_distribution_learns_by_projected_cross_entropy():
    value = Categorical(num_bins=NUM_BINS, bound=2.0)
    output = draws(Q, R, ROWS, NUM_BINS, seed=4)
    following = draws(Q, R, ROWS, NUM_BINS, seed=5)
    given = arguments()
    bins = [-2.0, -1.0, 0.0, 1.0, 2.0]
    wanted_R = [0.0] * R
    for row in all_rows():
        mean = following[(slice(None), *row)].softmax(-1).mean(0).tolist()
        cost = given["next_cost_Rn"][row].item()
        rest = 0.0 if given["terminated_Rn"][row] else 0.9
        moved = [given["reward_Rn"][row].item() + rest * (z - cost) for z in bins]
        target = projection(mean, moved, -2.0, 2.0)
        for i in range(Q):
            log_q = output[(i, *row)].log_softmax(-1).tolist()
            wanted_R[row[0]] -= sum(p * x for p, x in zip(target, log_q, strict=True)) / ROWS
    assert value.loss(output, following, **given).tolist() == pytest.approx(wanted_R, rel=1e-4)


def test_value_is_the_mean_of_the_expectations():
    value, output = Categorical(num_bins=NUM_BINS, bound=2.0), draws(Q, R, ROWS, NUM_BINS)
    q = value.q(output)
    assert q.shape == (1, R, ROWS)
    bins = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    wanted = [
        sum(float(output[(i, *row)].softmax(-1) @ bins) for i in range(Q)) / Q for row in all_rows()
    ]
    assert q.flatten().tolist() == pytest.approx(wanted, rel=1e-5)


def moved_bins(value, num_tasks):
    """Return probabilities and values of 4 rows per task as learning projects them.

    The first row of each task has ended.
    """
    probability = (3 * draws(num_tasks, 4, value.out_dim)).softmax(-1)
    reward, cost = draws(num_tasks, 4, 1, seed=1), draws(num_tasks, 4, 1, seed=2)
    rest = torch.tensor([0.0, 0.99, 0.99, 0.99])[:, None]
    return probability, reward + rest * (value.bin_O - cost)


def test_a_projection_is_that_of_a_loop():
    value = Categorical(num_bins=101, bound=10.0)
    probability, moved = moved_bins(value, 8)
    projected = value.project(probability, moved)
    for row in itertools.product(range(8), range(4)):
        wanted = projection(probability[row].tolist(), moved[row].tolist(), -10.0, 10.0)
        assert projected[row].tolist() == pytest.approx(wanted, abs=5e-6)
    assert torch.equal(projected, value.project(probability, moved))


def test_nonfinite_value_makes_only_its_row_nan():
    value = Categorical(num_bins=NUM_BINS, bound=2.0)
    probability = draws(1, 3, NUM_BINS).softmax(-1)
    moved = draws(1, 3, NUM_BINS, seed=1)
    moved[0, 1] = math.nan
    projected = value.project(probability, moved)
    assert projected.isfinite().all(-1).tolist() == [[True, False, True]]


def test_the_target_has_no_gradient_and_the_outputs_have():
    value = Categorical(num_bins=NUM_BINS, bound=2.0)
    output = draws(Q, R, ROWS, NUM_BINS).requires_grad_()
    value.loss(output, draws(Q, R, ROWS, NUM_BINS, seed=5), **arguments()).sum().backward()
    assert output.grad.abs().sum(-1).gt(0).all()
