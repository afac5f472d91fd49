"""Critics' outputs, temperatures and weights of tasks, by hand and against loops.

The losses of scalar values are in the updates of ``test_sac.py``.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import (
    Categorical,
    FixedTemperature,
    ManualWeights,
    Temperature,
    TemperatureWeights,
    losses,
)
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.algorithms import make_sac, make_spec, train

Q, R, ROWS, NUM_BINS = 2, 3, 2, 5
BINS = [-2.0, -1.0, 0.0, 1.0, 2.0]
REST_RN = torch.tensor([[0.9, 0.0], [0.9, 0.9], [0.0, 0.9]])
"""The discount, and 0 where an episode has terminated."""


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projection(probabilities, values):
    """C51's projection (Bellemare et al. 2017): each value's share of its two nearest bins."""
    distance = np.abs(np.clip(values, BINS[0], BINS[-1])[:, None] - BINS)
    return np.array(probabilities) @ (1 - distance).clip(0)


def test_distribution_learns_by_projected_cross_entropy():
    value = Categorical(num_bins=NUM_BINS, bound=2.0)
    output, following = (draws(Q, R, ROWS, NUM_BINS, seed=seed) for seed in (4, 5))
    reward_Rn, cost_Rn = draws(R, ROWS, seed=1), draws(R, ROWS, seed=2)
    wanted_R = [0.0] * R
    for row in itertools.product(range(R), range(ROWS)):
        mean = following[(slice(None), *row)].softmax(-1).mean(0).tolist()
        moved = [(reward_Rn[row] + REST_RN[row] * (z - cost_Rn[row])).item() for z in BINS]
        target = projection(mean, moved)
        for i in range(Q):
            log_q = output[(i, *row)].log_softmax(-1).tolist()
            wanted_R[row[0]] -= sum(p * x for p, x in zip(target, log_q, strict=True)) / ROWS
    no = torch.zeros(R, ROWS)
    batch = TransitionBatch(no, no, reward_Rn, no, REST_RN == 0, no)
    loss_R = value.loss(output, losses.CriticTarget(following, cost_Rn), batch, 0.9)
    assert loss_R.tolist() == pytest.approx(wanted_R, rel=1e-4)
    # the value is the mean of the expectations
    wanted_1Rn = (output.softmax(-1) @ torch.tensor(BINS)).mean(0, keepdim=True)
    torch.testing.assert_close(value.q(output), wanted_1Rn)


def test_nonfinite_value_makes_only_its_row_nan():
    value = Categorical(num_bins=NUM_BINS, bound=2.0)
    moved = draws(1, 3, NUM_BINS, seed=1)
    moved[0, 1] = math.nan
    projected = value.project(draws(1, 3, NUM_BINS).softmax(-1), moved)
    assert projected.isfinite().all(-1).tolist() == [[True, False, True]]


@pytest.mark.parametrize("next_q", [math.inf, math.nan])
def test_what_comes_after_a_termination_is_not_looked_at(next_q):
    terminated_Rn = torch.tensor([[True]])
    next_q_QRn = torch.full((2, 1, 1), next_q)
    target_Rn = losses.critic_target(
        torch.ones(1, 1), terminated_Rn, next_q_QRn, next_q_QRn[0], 0.9
    )
    assert target_Rn.item() == 1


TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
SPEC = make_spec(3)


def test_one_temperature_follows_the_entropy_of_all_tasks():
    temperature = Temperature(SPEC, per_task=False)
    log_prob_Rn = torch.tensor([[1.0, 2.0], [-3.0, -1.0], [0.5, 2.5]])
    losses.temperature_loss(temperature(TASK_RN), log_prob_Rn, -2.0).mean().backward()
    # -(mean log prob - 2)
    assert temperature.log_alpha.grad.tolist() == pytest.approx([2 - 2 / 6])


def test_fixed_temperature_weights_the_entropy_and_stays():
    sac = train(make_sac(temperature=partial(FixedTemperature, value=0.3)), 3)
    assert sac.temperature.values().tolist() == pytest.approx([0.3] * 3)
    log_alpha_Rn = sac.temperature(TASK_RN)
    torch.testing.assert_close(log_alpha_Rn, torch.full((3, 2), math.log(0.3)))
    assert [update.name for update in sac.updates] == ["critic", "actor"]
    assert not [name for name in (*sac.drain_metrics(), *sac.state_dict()) if "temperat" in name]


def test_temperature_weights_are_a_softmax_by_hand():
    log_alpha_R = torch.tensor([1.0, 0.5, 0.25]).log().requires_grad_()
    weight_R = TemperatureWeights(SPEC)(log_alpha_R)
    # exp(-log alpha) is 1, 2 and 4: shares 1/7, 2/7, 4/7 of three tasks
    assert weight_R.tolist() == pytest.approx([3 / 7, 6 / 7, 12 / 7], rel=1e-5)
    assert not weight_R.requires_grad


@pytest.mark.parametrize(
    ("trained", "weights", "wanted"),
    [((0, 1, 2), {"task-1": 4.0}, [0.5, 2.0, 0.5]), ((0, 2), {"task-2": 3.0}, [0.5, 1.5])],
)
def test_manual_weights_sum_to_the_number_of_tasks(trained, weights, wanted):
    weighting = ManualWeights(make_spec(3, train_tasks=trained), weights)
    assert weighting(torch.zeros(len(trained))).tolist() == pytest.approx(wanted)
