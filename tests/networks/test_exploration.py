"""The standard deviations of Gaussian policies, and their bounds."""

import pytest
import torch
from torch.optim import SGD

from mtrl_lightning.networks import StateDependentStd, StateIndependentStd
from tests.helpers.networks import uniform
from tests.helpers.specs import spec_of

SPEC = spec_of(3, action_dim=2)
TASK_B = torch.tensor([2, 0, 0, 1])
each_kind = pytest.mark.parametrize("kind", [StateIndependentStd, StateDependentStd])


def make(kind, log_std_TA=None, **options):
    made = kind(SPEC, **options)
    if log_std_TA is not None:
        made.load_state_dict({"log_std_TA": torch.as_tensor(log_std_TA)})
    return made


def test_state_dependent_deviations_stay_in_their_bounds():
    made = make(
        StateDependentStd, [[-1.0, -1.0], [-1.0, -1.0], [-0.5, 0.25]], minimum=-2.0, maximum=0.5
    )
    output_BO = torch.tensor(
        [[1.0, 2.0, 0.125, 0.125], [3.0, 4.0, 0.5, -5.0], [5.0, 6.0, -1.0, 1.5], [0.0] * 4]
    )
    policy = made.distribution(output_BO, TASK_B)
    assert policy.mean_BA.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert policy.log_std_BA.tolist() == [[-0.375, 0.375], [-0.5, -2], [-2, 0.5], [-1, -1]]


@each_kind
def test_groups_have_the_distributions_of_rows_in_float32(kind):
    made = make(kind, 0.3 * uniform(3, 2))
    output_RnO = uniform(2, 3, 2 * made.outputs_per_action).bfloat16()
    task_Rn = torch.tensor([[0] * 3, [2] * 3])
    policy = made.distribution(output_RnO, task_Rn)
    rows = made.distribution(output_RnO.flatten(0, 1), task_Rn.flatten())
    for found, wanted in zip(policy[:2], rows[:2], strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found.expand(2, 3, -1).flatten(0, 1), wanted)


@each_kind
def test_step_beyond_a_bound_is_clipped_and_can_return(kind):
    made = make(kind, initial=-1.0, minimum=-2.0, maximum=0.5)
    assert (made.log_std_TA == -1).all()
    optimizer = SGD(made.parameters(), lr=1.0)
    push_T1 = torch.tensor([[10.0], [-10.0], [0.1]])

    def push(sign):
        optimizer.zero_grad()
        (sign * push_T1 * made.log_std_TA).sum().backward()
        optimizer.step()
        made.after_step(None, None, None)

    push(1)
    assert made.log_std_TA[:2].tolist() == [[-2, -2], [0.5, 0.5]]
    assert made.log_std_TA[2].tolist() == pytest.approx([-1.1, -1.1])
    push(-0.01)
    # a clamp in the forward pass would leave no gradient at a bound, or beyond it
    assert made.log_std_TA[0].tolist() == pytest.approx([-1.9, -1.9])
    assert made.log_std_TA[1].tolist() == pytest.approx([0.4, 0.4])
