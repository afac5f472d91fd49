"""What every gradient method keeps to."""

import io
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
every_method = pytest.mark.parametrize("name", METHODS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@every_method
def test_it_is_the_mean_when_the_tasks_agree(name):
    gradients = torch.tensor([0.3, -0.5, 0.2, 0.1]).expand(4, 4)
    assert_near(update(METHODS[name](spec_of(4)), gradients), gradients[0])


@pytest.mark.parametrize("method", [Mean, partial(CAGrad, c=0.0), partial(FairGrad, alpha=0.0)])
def test_mean_of_gradients_of_any_length(method):
    gradients = random_gradients(5) * torch.logspace(-2, 2, 5)[:, None]
    assert_near(update(method(spec_of(5)), gradients), gradients.mean(0))


@every_method
def test_one_task_is_the_mean(name):
    problem = Quadratic([[0.2, -0.3, 0.4]])
    method = METHODS[name](spec_of(1))
    for _ in range(3):
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(problem.losses().mean(), problem.shared)]
        )
        assert_near(problem.update(method, lr=0.1), expected)


@every_method
def test_the_order_of_the_tasks_does_not_matter(name):
    # PCGrad and CAGrad-Fast draw: they keep to it where there is nothing to draw
    num_tasks = 2 if name in ("pcgrad", "cagrad_fast") else 5
    gradients = random_gradients(num_tasks)
    order = torch.tensor([3, 0, 4, 2, 1] if num_tasks == 5 else [1, 0])
    gradients[1] *= -1  # so that the first two conflict
    one, other = METHODS[name](spec_of(num_tasks)), METHODS[name](spec_of(num_tasks))
    expected = update(one, gradients)
    assert_near(update(other, gradients[order]), expected, atol=1e-5)
    assert (expected - gradients.mean(0)).abs().max() > 1e-3 or name in ("mean", *WEIGHT_LOSSES)
    for metric, value in one.metrics().items():
        assert_near(other.metrics()[metric], value, atol=1e-5)


@every_method
@pytest.mark.parametrize("zeros", [[0], [0, 1, 2]])
def test_zero_gradients_give_finite_ones(name, zeros):
    gradients = random_gradients(3)
    gradients[zeros] = 0
    problem, method = Problem(gradients), METHODS[name](spec_of(3))
    for _ in range(3):
        found = problem.update(method, lr=0.01)
        assert torch.isfinite(found).all()
        assert all(torch.isfinite(value) for value in method.metrics().values())
    assert bool((found == 0).all()) == (len(zeros) == 3)


@every_method
@pytest.mark.parametrize("offset", [-1e4, 0.0])
def test_negative_losses_give_finite_gradients(name, offset):
    problem, method = Quadratic(random_gradients(3), offset), METHODS[name](spec_of(3))
    for _ in range(10):
        assert torch.isfinite(problem.update(method, lr=0.05)).all()


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_gradient(name, value):
    gradients = random_gradients(3)
    gradients[1, 0] = value
    problem, method = Problem(gradients), METHODS[name](spec_of(3))
    assert not torch.isfinite(problem.update(method)).all()
    again = Quadratic(random_gradients(3))  # and is not remembered
    for _ in range(3):
        assert torch.isfinite(again.update(method, lr=0.01)).all()


@every_method
def test_own_parameters_get_the_gradient_of_the_mean_loss(name):
    problem = Problem(random_gradients(4))
    problem.update(METHODS[name](spec_of(4)))
    assert_near(problem.own[0].grad, torch.arange(1.0, 5) / 4)


@every_method
def test_a_task_that_uses_nothing_shared_has_the_gradient_zero(name):
    problem, reference = Problem(random_gradients(3)), Problem(random_gradients(3))
    reference.gradient_RD[1] = 0

    def losses():
        full = Problem.losses(problem)
        return torch.stack([full[0], problem.own[0][1] * 2 + 1, full[2]])

    problem.losses = losses
    assert_near(
        problem.update(METHODS[name](spec_of(3))), reference.update(METHODS[name](spec_of(3)))
    )


@every_method
def test_other_parameters_and_the_method_itself_get_no_gradient(name):
    problem, method = Quadratic(random_gradients(3)), METHODS[name](spec_of(3))
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    loss_R = problem.losses()
    method.backward(loss_R, problem.parameters, generator())
    assert torch.equal(other.grad, torch.full((2,), 7.0))
    assert all(parameter.grad is None for parameter in method.parameters())
    assert all(not value.requires_grad for value in method.state_dict().values())
    assert all(not value.requires_grad and value.ndim == 0 for value in method.metrics().values())


@every_method
def test_the_same_seed_gives_the_same(name):
    def run(seed):
        problem = Quadratic(random_gradients(6, 3))
        method = METHODS[name](spec_of(6))
        drawn = generator(seed)
        return torch.stack([problem.update(method, drawn, lr=0.02) for _ in range(4)])

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(0), run(1)) != (name in ("pcgrad", "cagrad_fast"))


@every_method
def test_it_continues_from_its_state_bit_for_bit(name):
    def new():
        return Quadratic(random_gradients(4), -2.0), METHODS[name](spec_of(4)), generator()

    problem, method, drawn = new()
    whole = [problem.update(method, drawn, lr=0.03) for _ in range(5)]
    problem, method, drawn = new()
    for _ in range(3):
        problem.update(method, drawn, lr=0.03)
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    fresh = METHODS[name](spec_of(4))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for expected in whole[3:]:
        assert torch.equal(problem.update(fresh, drawn, lr=0.03), expected)
    if name in (*WEIGHT_LOSSES, "nash_mtl_kept"):  # without its state it would not
        problem, method, drawn = new()
        for _ in range(3):
            problem.update(method, drawn, lr=0.03)
        assert not torch.equal(problem.update(METHODS[name](spec_of(4)), drawn, lr=0.03), whole[3])


@every_method
def test_metrics_are_named_alike(name):
    problem, method = Quadratic(random_gradients(3)), METHODS[name](spec_of(3))
    problem.update(method)
    weights = {"weight_min", "weight_max"}
    expected = (
        set()
        if name == "mean"
        else weights
        if name in WEIGHT_LOSSES
        else {*weights, "conflicts", "cosine"}
    )
    assert set(method.metrics()) == expected


@every_method
def test_two_conflicting_tasks_both_improve(name):
    # the second, much shorter, gradient points against the mean
    gradients = torch.tensor([[10.0, 0.0], [-1.0, 0.5]])
    products = gradients @ update(METHODS[name](spec_of(2)), gradients)
    improve_both = ("pcgrad", "nash_mtl", "nash_mtl_kept", "fairgrad")
    assert bool((products >= 0).all()) == (name in improve_both)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_method
def test_a_gpu_gives_the_same(name):
    # those that draw do so on the device: there is nothing to draw for two tasks
    num_tasks = 2 if name in ("pcgrad", "cagrad_fast") else 4
    gradients = random_gradients(num_tasks)
    one, other = Quadratic(gradients), Quadratic(gradients)
    for holder in ("gradient_RD", "slope_R"):
        setattr(other, holder, getattr(other, holder).cuda())
    other.shared = [torch.nn.Parameter(p.detach().cuda()) for p in other.shared]
    other.own = [torch.nn.Parameter(p.detach().cuda()) for p in other.own]
    other.unused = torch.nn.Parameter(other.unused.detach().cuda())
    here = METHODS[name](spec_of(num_tasks))
    there = METHODS[name](spec_of(num_tasks)).cuda()
    for seed in range(4):
        expected = one.update(here, generator(seed), lr=0.02)
        drawn = torch.Generator("cuda").manual_seed(seed)
        assert_near(other.update(there, drawn, lr=0.02).cpu(), expected, atol=1e-4)
