"""GradNorm against automatic differentiation of its loss."""

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.gradnorm import GradNorm
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients, update
from tests.helpers.specs import spec_of


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
    problem, method = Quadratic(random_gradients(3)), GradNorm(spec_of(3), asymmetry=0.7, lr=0.05)
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
    problem, method = Problem([[3.0, 0.0], [0.0, 1.0]]), GradNorm(spec_of(2))
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
    with pytest.raises(ConfigurationError, match="choose a network"):
        GradNorm(spec_of(2)).check(problem.parameters._replace(last_shared=[]))
