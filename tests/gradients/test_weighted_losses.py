"""FAMO and GradNorm: updates by hand and by automatic differentiation, and shifted losses."""

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import TaskParameters
from mtrl_lightning.gradients.famo import FAMO
from mtrl_lightning.gradients.gradnorm import GradNorm
from mtrl_lightning.gradients.positive import ShiftedLosses
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients, update
from tests.helpers.specs import spec_of

NAN = float("nan")


def step(method, problem, before, after):
    """Make an update with these losses before and after the optimizer's step."""
    problem.offset = torch.tensor(before)
    method.backward(problem.losses(), problem.parameters, torch.Generator())
    method.after_step(lambda: torch.tensor(after))


def test_the_gradient_is_that_of_the_balanced_logarithms():
    problem, method = Quadratic(random_gradients(3)), FAMO(spec_of(3))
    method.logit_R.copy_(torch.tensor([0.3, -0.5, 1.0]))
    z_R = method.logit_R.softmax(0)
    loss_R = problem.losses()
    c = 1 / (z_R / (loss_R + 1e-8)).sum().detach()
    every = [*problem.shared, *problem.own]
    expected = torch.autograd.grad(c * (z_R * (loss_R + 1e-8).log()).sum(), every)
    problem.update(method)
    for parameter, gradient in zip(every, expected, strict=True):
        assert_near(parameter.grad, gradient)
    relative_R = 3 * c * z_R / (loss_R + 1e-8)
    assert_near(method.metrics()["weight_min"], relative_R.min())
    assert_near(method.metrics()["weight_max"], relative_R.max())


def test_two_updates_with_an_explicit_jacobian():
    method, problem = FAMO(spec_of(3), lr=0.1, decay=0.01), Problem(torch.ones(3, 2))
    logit = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    adam = torch.optim.Adam([logit], lr=0.1, weight_decay=0.01)
    for before, after in (([1.0, 2.0, 4.0], [0.5, 2.2, 3.9]), ([0.7, 1.0, 3.0], [0.8, 0.6, 2.0])):
        step(method, problem, before, after)
        z = logit.detach().softmax(0)
        jacobian = torch.diag(z) - torch.outer(z, z)
        fall = torch.log((torch.tensor(before).double() + 1e-8) / (torch.tensor(after) + 1e-8))
        logit.grad = jacobian.t() @ fall
        adam.step()
        assert_near(method.logit_R, logit.detach())
    assert method.logit_R.abs().max() > 0.05


def test_a_negative_loss_is_compared_with_itself_under_one_shift():
    method, problem = FAMO(spec_of(2), decay=0.0), Problem(torch.ones(2, 2))
    step(method, problem, [-1.0, -1.0], [-3.0, -1.0])
    # lowest -3 and -1, lower -7 and -3: the losses are 6 and 2 before, 4 and 2 after; J is [[1,
    # -1], [-1, 1]] / 4
    fall = torch.tensor(6 / 4).log()
    # Adam's first moment is a tenth of the first gradient
    assert_near(method.optimizer.first_R, torch.stack([fall, -fall]) / 40)


def test_a_loss_that_is_not_finite_teaches_the_weights_nothing():
    method, problem = FAMO(spec_of(2)), Problem(torch.ones(2, 2))
    step(method, problem, [1.0, 1.0], [NAN, 1.0])
    step(method, problem, [NAN, 1.0], [NAN, 1.0])
    assert problem.shared[0].grad.isnan().any()
    assert torch.equal(method.logit_R, torch.zeros(2))


def test_tasks_of_loss_zero_take_no_part():
    """A masked task, or one of weight 0, has the loss 0: the others are weighted without it."""
    three, two, none = FAMO(spec_of(3)), FAMO(spec_of(2)), FAMO(spec_of(3))
    gradients = []
    for method, losses in (
        (three, lambda p: p.square() * torch.tensor([1.0, 0.0, 1.0])),
        (two, lambda p: p.square()[[0, 2]]),
        (none, lambda p: p * 0),
    ):
        parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        method.backward(losses(parameter), TaskParameters([parameter], [], []), torch.Generator())
        gradients.append(parameter.grad)
    assert_near(gradients[0], gradients[1])
    assert not gradients[2].any()
    three.after_step(lambda: torch.tensor([0.5, 2.0, 9.0]))
    none.after_step(lambda: torch.zeros(3))
    # only the first loss fell: Adam's first step is the learning rate
    assert_near(three.logit_R, [-0.025, 0.025, 0.025])
    assert not none.logit_R.any()


def test_losses_are_shifted_by_the_lowest_one():
    shifted = ShiftedLosses(3)
    for observed, losses, expected in (
        ([0.0, 3.0, 1.0], [0.5, 2.0, 0.0], [0.5, 2.0, 0.0]),  # none was negative
        ([-2.0, 3.0, -0.25], [-2.0, 3.0, 1.0], [3.0, 3.0, 2.5]),
        ([-1.0, -4.0, 5.0], [-1.0, -4.0, 5.0], [4.0, 5.0, 6.5]),  # the lowest counts
        ([NAN, -float("inf"), -0.1], [-1.0, -4.0, 5.0], [4.0, 5.0, 6.5]),
    ):
        shifted.observe(torch.tensor(observed))
        assert_near(shifted(torch.tensor(losses)), expected)


def by_autograd(problem, last, weight_R, initial_R, asymmetry):
    """Return the gradient of ``sum_i |G_i - target_i|`` through the gradients of the losses."""
    weight_R = weight_R.clone().requires_grad_()
    loss_R = problem.losses()
    norms = []
    for loss in weight_R * loss_R:
        (gradient,) = torch.autograd.grad(loss, last, create_graph=True)
        norms.append(gradient.norm())
    norm_R = torch.stack(norms)
    ratio_R = (loss_R / initial_R).detach()
    target_R = norm_R.mean().detach() * (ratio_R / ratio_R.mean()) ** asymmetry
    return torch.autograd.grad((norm_R - target_R).abs().sum(), weight_R)[0]


def test_the_weights_follow_the_gradient_of_the_paper():
    problem = Quadratic(random_gradients(3))
    method = GradNorm(spec_of(3), asymmetry=0.7, lr=0.05)
    last = problem.shared[0]  # without the second shared parameter
    parameters = problem.parameters._replace(last_shared=[last])
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], lr=0.05)
    initial_R = problem.losses().detach()
    for _ in range(4):
        weight.grad = by_autograd(problem, last, weight.detach(), initial_R, 0.7)
        adam.step()
        weight.data *= 3 / weight.data.sum()
        for parameter in (*problem.shared, *problem.own):
            parameter.grad = None
        method.backward(problem.losses(), parameters, torch.Generator())
        assert_near(method.weight_R, weight.detach(), rtol=1e-4)
        for parameter in (*problem.shared, *problem.own):
            parameter.data -= 0.1 * parameter.grad
    assert torch.equal(method.initial_R, initial_R)


def test_rounding_moves_no_weight():
    values = random_gradients(1, 9)[0]
    orders = [torch.randperm(9, generator=torch.Generator().manual_seed(seed)) for seed in range(7)]
    method = GradNorm(spec_of(7))
    for _ in range(3):
        update(method, torch.stack([values[order] for order in orders]))
    assert_near(method.weight_R, torch.ones(7))


def test_the_networks_gradient_is_that_of_the_weighted_mean_loss():
    problem = Problem([[3.0, 0.0], [0.0, 1.0]])
    method = GradNorm(spec_of(2))
    method.weight_R.copy_(torch.tensor([0.5, 1.5]))
    assert_near(problem.update(method), [0.75, 0.75])
    assert_near(problem.own[0].grad, [0.25, 1.5])
    metrics = {name: float(value) for name, value in method.metrics().items()}
    assert metrics == {"weight_min": 0.5, "weight_max": 1.5}


def test_a_masked_task_begins_with_its_first_loss():
    method = GradNorm(spec_of(2), lr=0.1)
    for losses in ([2.0, 0.0], [2.0, 8.0], [2.0, 4.0], [0.0, 4.0]):
        gradients = torch.diag(torch.tensor([1.0, float(losses[1] != 0)]))
        Problem(gradients, offset=torch.tensor(losses)).update(method)
    assert_near(method.initial_R, [2.0, 8.0])
    assert method.weight_R.min() > 0.5, "no ratio to a loss of 0"


def test_weights_stay_above_zero():
    method = GradNorm(spec_of(2), lr=5.0)
    for _ in range(4):
        update(method, [[100.0, 0.0], [0.0, 1.0]])
        assert method.weight_R.min() > 0
        assert float(method.weight_R.sum()) == pytest.approx(2)


def test_no_shared_layer_is_refused():
    problem = Problem(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match="network"):
        GradNorm(spec_of(2)).check(problem.parameters._replace(last_shared=[]))
