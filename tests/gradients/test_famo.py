"""FAMO: updates by hand."""

import pytest
import torch

from mtrl_lightning.gradients import TaskParameters
from mtrl_lightning.gradients.famo import FAMO
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients
from tests.helpers.specs import spec_of

GENERATOR = torch.Generator()


def test_the_gradient_is_that_of_the_balanced_logarithms():
    problem, method = Quadratic(random_gradients(3)), FAMO(spec_of(3))
    method.logit_R.copy_(torch.tensor([0.3, -0.5, 1.0]))
    z_R = method.logit_R.softmax(0)
    loss_R = problem.losses()
    c = 1 / (z_R / (loss_R + 1e-8)).sum().detach()
    every = [*problem.shared, *problem.own]
    expected = torch.autograd.grad(c * (z_R * (loss_R + 1e-8).log()).sum(), every)
    method.backward(problem.losses(), problem.parameters, GENERATOR)
    for parameter, gradient in zip(every, expected, strict=True):
        assert_near(parameter.grad, gradient)


def test_the_weights_by_hand():
    # losses 1 and 3 at equal z: weights 3/4 and 1/4, for own parameters too
    problem, method = Problem([[4.0, 0.0], [0.0, 8.0]]), FAMO(spec_of(2))
    problem.offset = torch.tensor([1.0, 3.0])
    assert_near(problem.update(method), [3.0, 2.0])
    assert_near(problem.own[0].grad, [0.75, 0.5])
    assert {name: float(value) for name, value in method.metrics().items()} == pytest.approx(
        {"weight_min": 0.5, "weight_max": 1.5}
    )


def test_two_updates_with_an_explicit_jacobian():
    method = FAMO(spec_of(3), lr=0.1, decay=0.01)
    logit = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    adam = torch.optim.Adam([logit], lr=0.1, weight_decay=0.01)
    problem = Problem(torch.ones(3, 2))
    for before, after in (([1.0, 2.0, 4.0], [0.5, 2.2, 3.9]), ([0.7, 1.0, 3.0], [0.8, 0.6, 2.0])):
        problem.offset = torch.tensor(before)
        method.backward(problem.losses(), problem.parameters, GENERATOR)
        method.after_step(lambda after=after: torch.tensor(after))
        z = logit.detach().softmax(0)
        jacobian = torch.diag(z) - torch.outer(z, z)
        fall = (torch.tensor(before).double() + 1e-8).log() - (
            torch.tensor(after).double() + 1e-8
        ).log()
        logit.grad = jacobian.t() @ fall
        adam.step()
        assert_near(method.logit_R, logit.detach())
    assert method.logit_R.abs().max() > 0.05


def test_a_negative_loss_is_compared_with_itself_under_one_shift():
    method, problem = FAMO(spec_of(2), decay=0.0), Problem(torch.ones(2, 2), offset=-1.0)
    gradients = []
    method.optimizer.register_forward_pre_hook(
        lambda module, args: gradients.append(args[0].clone())
    )
    method.backward(problem.losses(), problem.parameters, GENERATOR)
    method.after_step(lambda: torch.tensor([-3.0, -1.0]))
    # lowest -3 and -1, lower -7 and -3: the losses are 6 and 2 before, 4 and 2 after; J is [[1,
    # -1], [-1, 1]] / 4
    fall = torch.tensor(6 / 4).log()
    assert_near(gradients[0], torch.stack([fall, -fall]) / 4)


def test_a_loss_that_is_not_finite_teaches_the_weights_nothing():
    method, problem = FAMO(spec_of(2)), Problem(torch.ones(2, 2))
    method.backward(problem.losses(), problem.parameters, GENERATOR)
    method.after_step(lambda: torch.tensor([float("nan"), 1.0]))
    assert torch.equal(method.logit_R, torch.zeros(2))
    problem.offset = torch.tensor([float("nan"), 1.0])
    assert problem.update(method).isnan().any()
    assert torch.equal(method.logit_R, torch.zeros(2))


def test_a_task_of_loss_zero_takes_no_part():
    """A masked task, or one of weight 0, has the loss 0: the others are weighted without it."""
    three, two = FAMO(spec_of(3)), FAMO(spec_of(2))
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    present = torch.tensor([1.0, 0.0, 1.0])
    three.backward(
        parameter.square() * present, TaskParameters([parameter], [], []), torch.Generator()
    )
    found = parameter.grad.clone()
    parameter.grad = None
    two.backward(parameter.square()[[0, 2]], TaskParameters([parameter], [], []), torch.Generator())
    torch.testing.assert_close(found, parameter.grad)
    three.after_step(lambda: torch.tensor([0.5, 0.0, 9.0]))
    assert torch.isfinite(three.logit_R).all() and three.logit_R[0] < three.logit_R[2]


def test_losses_that_are_all_zero_give_no_gradient():
    method, parameter = FAMO(spec_of(2)), torch.nn.Parameter(torch.ones(2))
    method.backward(parameter * 0, TaskParameters([parameter], [], []), torch.Generator())
    method.after_step(lambda: torch.zeros(2))
    assert not parameter.grad.any() and not method.logit_R.any()
