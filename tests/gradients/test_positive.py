"""Losses above zero, and Adam in a module's state."""

import torch

from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from tests.helpers.gradients import assert_near, random_gradients


def test_the_shift_by_hand():
    shifted = ShiftedLosses(3)
    shifted.observe(torch.tensor([0.0, 3.0, 1.0]))
    assert_near(shifted(torch.tensor([0.5, 2.0, 0.0])), [0.5, 2.0, 0.0])  # none was negative
    shifted.observe(torch.tensor([-2.0, 3.0, -0.25]))
    assert_near(shifted(torch.tensor([-2.0, 3.0, 1.0])), [3.0, 3.0, 2.5])
    shifted.observe(torch.tensor([-1.0, -4.0, 5.0]))  # the lowest counts, not the last
    assert_near(shifted(torch.tensor([-1.0, -4.0, 5.0])), [4.0, 5.0, 6.5])


def test_what_was_seen_is_above_zero_and_changes_no_gradient():
    shifted = ShiftedLosses(5)
    for loss_R in random_gradients(20, 5) * 100:
        shifted.observe(loss_R)
        assert (
            shifted(loss_R) >= torch.where(shifted.lowest_R < 0, 1 - shifted.lowest_R, loss_R)
        ).all()
    loss_R = torch.zeros(5, requires_grad=True)
    shifted(loss_R).sum().backward()
    assert torch.equal(loss_R.grad, torch.ones(5))


def test_losses_that_are_not_finite_are_not_remembered():
    shifted = ShiftedLosses(3)
    shifted.observe(torch.tensor([float("nan"), -float("inf"), -1.0]))
    assert torch.equal(shifted.lowest_R, torch.tensor([0.0, 0.0, -1.0]))


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
