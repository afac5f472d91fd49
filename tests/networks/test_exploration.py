"""How far a policy explores, and the bounds of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD

from mtrl_lightning.networks import PolicyStd, StateDependentStd, StateIndependentStd
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics
from mtrl_lightning.updates.update import Update
from mtrl_lightning.utils.counters import Counters
from tests.helpers.networks import uniform
from tests.helpers.specs import spec_of

NUM_TASKS, ACTION_DIM = 3, 2
TASK_B = torch.tensor([2, 0, 0, 1])
KINDS = [StateIndependentStd, StateDependentStd]


def make(kind, **options) -> PolicyStd:
    return kind(spec_of(NUM_TASKS, action_dim=ACTION_DIM), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dimension_begins_with_the_initial_deviation(kind):
    made = make(kind, initial=-0.5)
    assert made.log_std_TA.tolist() == [[-0.5] * ACTION_DIM] * NUM_TASKS
    mean = uniform(4, ACTION_DIM)
    change = torch.zeros(4, ACTION_DIM * (made.outputs_per_action - 1))
    policy = made.distribution(torch.cat([mean, change], dim=1), TASK_B)
    assert torch.equal(policy.mean_BA, mean)
    assert policy.log_std_BA.tolist() == [[-0.5] * ACTION_DIM] * 4


def test_each_row_has_the_deviation_of_its_task():
    made = make(StateIndependentStd)
    with torch.no_grad():
        made.log_std_TA.copy_(torch.tensor([[0.1, 0.2], [-1.0, -1.1], [-2.0, 0.3]]))
    policy = made.distribution(uniform(4, ACTION_DIM), TASK_B)
    wanted = torch.tensor([[-2.0, 0.3], [0.1, 0.2], [0.1, 0.2], [-1.0, -1.1]])
    assert torch.equal(policy.log_std_BA, wanted)


def test_state_dependent_deviation_stays_within_its_bounds():
    made = make(StateDependentStd, initial=-1.0, minimum=-2.0, maximum=0.5)
    with torch.no_grad():
        made.log_std_TA[2] = torch.tensor([-0.5, 0.25])
    output_BO = torch.tensor(
        [[1.0, 2.0, 0.125, 0.125], [3.0, 4.0, 0.5, -5.0], [5.0, 6.0, -1.0, 1.5], [0.0] * 4]
    )
    policy = made.distribution(output_BO, TASK_B)
    assert policy.mean_BA.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert policy.log_std_BA.tolist() == [[-0.375, 0.375], [-0.5, -2], [-2, 0.5], [-1, -1]]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_tasks_have_the_noise_of_their_rows(kind):
    made = make(kind)
    with torch.no_grad():
        made.log_std_TA.copy_(0.3 * uniform(NUM_TASKS, ACTION_DIM))
    output_RnO = uniform(2, 3, ACTION_DIM * made.outputs_per_action)
    task_Rn = torch.tensor([[0] * 3, [2] * 3])
    policy = made.distribution(output_RnO, task_Rn)
    rows = made.distribution(output_RnO.flatten(0, 1), task_Rn.flatten())
    for found, wanted in zip(policy[:2], rows[:2], strict=True):
        assert torch.equal(found.expand(2, 3, -1).flatten(0, 1), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_left_behind(kind):
    made = make(kind)
    output_BO = torch.zeros(4, ACTION_DIM * made.outputs_per_action, dtype=torch.bfloat16)
    policy = made.distribution(output_BO, TASK_B)
    assert {value.dtype for value in policy[:2]} == {torch.float32}


def update_of(made, learning_rate=1.0):
    """What makes optimizer steps, as an algorithm does."""
    update = Update(
        "actor",
        [made],
        partial(SGD, lr=learning_rate),
        generators=Generators(0),
        metrics=MeanMetrics(),
        guard=DivergenceGuard("stop", 0, ["a", "b", "c"], Counters()),
        spec=spec_of(NUM_TASKS),
    )
    update.configure_optimizer()
    return update


@pytest.mark.parametrize("kind", KINDS)
def test_step_beyond_a_bound_is_clipped_and_can_return(kind):
    made = make(kind, initial=-1.0, minimum=-2.0, maximum=0.5)
    update = update_of(made)
    push_T1 = torch.tensor([[30.0], [-30.0], [0.3]])

    def push(sign):
        # the gradient of the mean over the tasks is a third of the push
        update(lambda: (sign * (push_T1 * made.log_std_TA).mean(1) * ACTION_DIM, None))

    push(1)
    assert made.log_std_TA[:2].tolist() == [[-2, -2], [0.5, 0.5]]
    assert made.log_std_TA[2].tolist() == pytest.approx([-1.1, -1.1])
    push(-0.01)
    # a clamp in the forward pass would leave no gradient at a bound, or beyond it
    assert made.log_std_TA[0].tolist() == pytest.approx([-1.9, -1.9])
    assert made.log_std_TA[1].tolist() == pytest.approx([0.4, 0.4])
