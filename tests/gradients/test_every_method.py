"""What every gradient method keeps to."""

from functools import partial

import pytest
import torch

from mtrl_lightning.gradients import CAGrad, FairGrad, Mean
from tests.helpers.gradients import (
    METHODS,
    Problem,
    Quadratic,
    assert_near,
    random_gradients,
    update,
)
from tests.helpers.specs import spec_of

WEIGHT_LOSSES = ("gradnorm", "famo")
DRAW = ("pcgrad", "cagrad_fast")
every_method = pytest.mark.parametrize("name", METHODS)


def make(name, num_tasks=3):
    return METHODS[name](spec_of(num_tasks))


@every_method
def test_update_is_the_mean_of_equal_tasks_and_of_one(name):
    gradients = torch.tensor([0.3, -0.5, 0.2, 0.1]).expand(4, 4)
    assert_near(update(make(name, 4), gradients), gradients[0])
    problem, method = Quadratic([[0.2, -0.3, 0.4]]), make(name, 1)
    for _ in range(3):
        expected = torch.autograd.grad(problem.losses().mean(), problem.shared)
        assert_near(problem.update(method, lr=0.1), torch.cat([g.flatten() for g in expected]))


@pytest.mark.parametrize("method", [Mean, partial(CAGrad, c=0.0), partial(FairGrad, alpha=0.0)])
def test_mean_of_gradients_of_any_length(method):
    gradients = random_gradients(5) * torch.logspace(-2, 2, 5)[:, None]
    assert_near(update(method(spec_of(5)), gradients), gradients.mean(0))


@every_method
@pytest.mark.parametrize("zeros", [[0], [0, 1, 2]])
def test_zero_gradients_give_finite_ones(name, zeros):
    gradients = random_gradients(3)
    gradients[zeros] = 0
    problem, method = Problem(gradients), make(name)
    for _ in range(3):
        found = problem.update(method, lr=0.01)
        assert torch.isfinite(found).all()
        assert all(torch.isfinite(value) for value in method.metrics().values())
    assert bool((found == 0).all()) == (len(zeros) == 3)


@pytest.mark.parametrize("name", WEIGHT_LOSSES)
@pytest.mark.parametrize("offset", [-1e4, 0.0])
def test_negative_losses_give_finite_gradients(name, offset):
    problem, method = Quadratic(random_gradients(3), offset), make(name)
    for _ in range(10):
        assert torch.isfinite(problem.update(method, lr=0.05)).all()


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_gradient_and_is_not_remembered(name, value):
    gradients = random_gradients(3)
    gradients[1, 0] = value
    method = make(name)
    assert not torch.isfinite(Problem(gradients).update(method)).all()
    if name == "gradnorm":
        assert torch.equal(method.weight_R, torch.ones(3)) and not method.initial_R.any()
    again = Quadratic(random_gradients(3))
    for _ in range(3):
        assert torch.isfinite(again.update(method, lr=0.01)).all()


@every_method
def test_only_what_is_trained_gets_a_gradient(name):
    problem, method = Problem(random_gradients(4)), make(name, 4)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    problem.update(method)
    assert_near(problem.own[0].grad, torch.arange(1.0, 5) / 4)  # that of the mean loss
    assert torch.equal(other.grad, torch.full((2,), 7.0))
    assert all(parameter.grad is None for parameter in method.parameters())
    assert all(not value.requires_grad for value in method.state_dict().values())
    assert all(not value.requires_grad and value.ndim == 0 for value in method.metrics().values())
    weights = {"weight_min", "weight_max"} if name != "mean" else set()
    pairs = {"conflicts", "cosine"} if name not in ("mean", *WEIGHT_LOSSES) else set()
    assert set(method.metrics()) == weights | pairs


@every_method
def test_a_task_that_uses_nothing_shared_has_the_gradient_zero(name):
    problem, reference = Problem(random_gradients(3)), Problem(random_gradients(3))
    reference.gradient_RD[1] = 0

    def losses():
        full = Problem.losses(problem)
        return torch.stack([full[0], problem.own[0][1] * 2 + 1, full[2]])

    problem.losses = losses
    assert_near(problem.update(make(name)), reference.update(make(name)))


@every_method
def test_draws_come_from_the_generator_only(name):
    def run(seed):
        problem, method = Quadratic(random_gradients(6, 3)), make(name, 6)
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([problem.update(method, generator, lr=0.02) for _ in range(4)])

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(0), run(1)) != (name in DRAW)
