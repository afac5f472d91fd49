"""Losses above zero, and Adam in a module's state."""

import torch

from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from tests.helpers.gradients import assert_near, random_gradients


def test_the_shift_by_hand():
    shifted = ShiftedLosses(3)
    for observed, losses, expected in (
        ([0.0, 3.0, 1.0], [0.5, 2.0, 0.0], [0.5, 2.0, 0.0]),  # none was negative
        ([-2.0, 3.0, -0.25], [-2.0, 3.0, 1.0], [3.0, 3.0, 2.5]),
        ([-1.0, -4.0, 5.0], [-1.0, -4.0, 5.0], [4.0, 5.0, 6.5]),  # the lowest counts
        ([float("nan"), -float("inf"), -0.1], [-1.0, -4.0, 5.0], [4.0, 5.0, 6.5]),
    ):
        shifted.observe(torch.tensor(observed))
        loss_R = torch.tensor(losses, requires_grad=True)
        assert_near(shifted(loss_R), expected)
        shifted(loss_R).sum().backward()
        assert torch.equal(loss_R.grad, torch.ones(3))


def test_the_optimizer_is_adam():
    weight = torch.nn.Parameter(torch.zeros(4))
    adam = torch.optim.Adam([weight], lr=0.03)
    ours = WeightOptimizer(4, 0.03)
    own = torch.zeros(4)
    for gradient in random_gradients(30, 4) * torch.tensor([1.0, 1e-3, 1e3, 0.0]):
        weight.grad = gradient.clone()
        adam.step()
        own -= ours(gradient)
    assert_near(own, weight.detach())
