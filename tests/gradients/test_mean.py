"""The mean of the tasks' losses."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from mtrl_lightning.gradients import GradientMethod, Mean, TaskParameters
from tests.helpers.specs import spec_of

GENERATOR = torch.Generator()


def losses(shared, own):
    """Three tasks' losses; task ``i`` alone uses ``own[i]``."""
    target = torch.tensor([1.0, -2.0, 0.5])
    return (shared.sum() * target - 1).square() + 3 * own.square()


def parameters():
    return Parameter(torch.tensor([0.5, -1.5])), Parameter(torch.tensor([1.0, 2.0, -1.0]))


def test_the_gradient_by_hand():
    shared, own = parameters()
    Mean(spec_of(3)).backward(
        losses(shared, own), TaskParameters([shared], [own], [shared]), GENERATOR
    )
    # the sum is -1: d/ds (s t - 1)^2 = 2 t (s t - 1) is -4, -4 and -1.5 for the targets 1, -2 and
    # 0.5
    torch.testing.assert_close(shared.grad, torch.full((2,), (-4 - 4 - 1.5) / 3))
    torch.testing.assert_close(own.grad, torch.tensor([6.0, 12.0, -6.0]) / 3)


def test_what_is_said_to_be_shared_makes_no_difference():
    first, second = parameters(), parameters()
    Mean(spec_of(3)).backward(losses(*first), TaskParameters([], list(first), []), GENERATOR)
    Mean(spec_of(3)).backward(losses(*second), TaskParameters(list(second), [], []), GENERATOR)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_it_has_no_state_and_no_statistics():
    method = Mean(spec_of(3))
    assert isinstance(method, GradientMethod)
    assert method.num_trained == 3
    assert method.state_dict() == {}
    assert method.metrics() == {}
