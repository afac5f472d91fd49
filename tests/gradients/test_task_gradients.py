"""Every task's own gradient, how they are combined, PCGrad's loop, and what all methods keep to."""

from functools import partial

import pytest
import torch

from mtrl_lightning.gradients import CAGrad, FairGrad, Mean
from mtrl_lightning.gradients.pcgrad import PCGrad, orders
from mtrl_lightning.gradients.task_gradients import (
    TaskGradients,
    batched_gradients,
    statistics,
    weights_from,
)
from tests.helpers.gradients import (
    METHODS,
    Problem,
    Quadratic,
    assert_near,
    random_gradients,
    update,
)
from tests.helpers.specs import spec_of

ROWS = [[3.0, 0.0, 4.0], [0.0, 2.0, 0.0], [-1.0, 0.0, 0.0]]


def test_gradients_of_each_task_and_their_combination_by_hand():
    problem = Problem(ROWS)
    found = TaskGradients.from_losses(problem.losses(), problem.parameters)
    assert_near(torch.cat([g.flatten(1) for g in found.shared[:2]], 1), torch.tensor(ROWS))
    assert torch.equal(found.shared[2], torch.zeros(3, 3))
    gram = found.gram()
    assert gram.dtype == torch.float64
    assert_near(gram, [[25.0, 0, -3], [0, 4, 0], [-3, 0, 1]])
    found.combine(torch.tensor([1.0, 0.5, -2.0]))
    assert_near(torch.cat([p.grad.flatten() for p in problem.shared]), [5.0, 1.0, 4.0])
    assert_near(problem.own[0].grad, torch.tensor([1.0, 2.0, 3.0]) / 3)
    assert torch.equal(problem.unused.grad, torch.zeros(3))
    shares = torch.tensor([0.5, 0.25, 0.25])
    of_groups = TaskGradients.from_losses(problem.losses(), problem.parameters, shares)
    assert_near(of_groups.own[0], [0.5, 0.5, 0.75])


def test_one_batched_pass_and_a_kept_graph_give_the_same():
    problem = Quadratic(ROWS)
    loss_R, parameters = problem.losses(), problem.parameters
    trained = [*parameters.shared, *problem.own]
    batched = batched_gradients(loss_R, trained, retain_graph=True)
    kept = TaskGradients.from_losses(loss_R, parameters, retain_graph=True)
    last = TaskGradients.from_losses(loss_R, parameters)
    for found in (batched[:-1], last.shared):
        for gradient, other in zip(found, kept.shared, strict=True):
            assert gradient.shape == other.shape
            assert_near(gradient, other)
    assert_near(batched[-1].mean(0), kept.own[0])
    assert_near(last.own[0], kept.own[0])


def test_statistics_by_hand():
    rows = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    weight_R, mean_weight_R = torch.tensor([0.5, 0.125, 0.25, 0.25]), torch.full((4,), 0.25)
    found = statistics(rows @ rows.t(), weight_R, mean_weight_R)
    # cosines of the pairs: -1, 0.6, 0, -0.6, 0, 0
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"conflicts": 2 / 6, "cosine": -1 / 6, "weight_min": 0.5, "weight_max": 2.0}
    )
    found = statistics(torch.ones(1, 1, dtype=torch.float64), torch.ones(1), torch.ones(1))
    assert float(found["conflicts"]) == float(found["cosine"]) == 0, "one task has no pairs"


def test_a_scaled_matrix_is_solved_or_the_mean_followed():
    mean_weight_R = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def solve(gram_RR):
        assert float(gram_RR.diagonal().mean()) == pytest.approx(1)
        return gram_RR[0]

    for gram, expected in (
        ([[6.0, -3.0], [-3.0, 2.0]], [1.5, -0.75]),
        ([[0.0, 0.0], [0.0, 0.0]], mean_weight_R),
        ([[1.0, float("nan")], [float("nan"), 1.0]], mean_weight_R),
        ([[float("inf"), 1], [1, 1]], mean_weight_R),
    ):
        gram_RR = torch.tensor(gram, dtype=torch.float64)
        assert_near(weights_from(gram_RR, mean_weight_R, solve), expected)


def double_loop(gradients, order):
    """Algorithm 1 of the paper on vectors, with the mean instead of the sum."""
    projected = []
    for i, gradient in enumerate(gradients):
        gradient = gradient.clone()
        for j in order[i]:
            product = gradient @ gradients[j]
            if product < 0:
                gradient -= product / (gradients[j] @ gradients[j]) * gradients[j]
        projected.append(gradient)
    return torch.stack(projected).mean(0)


def test_conflicting_gradients_by_hand():
    # g_1 = (1, 0) loses (1/2, -1/2), its projection on g_2 = (-1, 1); g_2 loses (-1, 0)
    method = PCGrad(spec_of(2))
    assert_near(update(method, [[1.0, 0.0], [-1.0, 1.0]]), [0.25, 0.75])
    # as coefficients: g_1 + g_2 / 2 and g_2 + g_1
    found = {name: float(value) for name, value in method.metrics().items()}
    assert found == pytest.approx(
        {"conflicts": 1, "cosine": -(0.5**0.5), "weight_min": 1.5, "weight_max": 2}
    )


def test_update_is_that_of_the_double_loop():
    gradients = random_gradients(7, 4, seed=1)
    order = orders(7, torch.Generator().manual_seed(5)).tolist()
    found = update(PCGrad(spec_of(7)), gradients, torch.Generator().manual_seed(5))
    assert_near(found, double_loop(gradients.double(), order))


def test_all_orders_of_the_others_are_equally_likely():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([orders(4, generator) for _ in range(3000)])
    for i in range(4):
        others = [j for j in range(4) if j != i]
        assert torch.equal(drawn[:, i].sort(1).values, torch.tensor(others).expand(3000, 3))
        for place in range(3):
            counts = torch.bincount(drawn[:, i, place], minlength=4)[others]
            assert (counts / 3000 - 1 / 3).abs().max() < 0.04  # 4.6 standard deviations


WEIGHT_LOSSES = ("gradnorm", "famo")
DRAW = ("pcgrad", "cagrad_fast")
every_method = pytest.mark.parametrize("name", METHODS)


def make_method(name, num_tasks=3):
    return METHODS[name](spec_of(num_tasks))


@every_method
def test_update_is_the_mean_of_equal_tasks_and_of_one(name):
    gradients = torch.tensor([0.3, -0.5, 0.2, 0.1]).expand(4, 4)
    assert_near(update(make_method(name, 4), gradients), gradients[0])
    problem = Quadratic([[0.2, -0.3, 0.4]])
    method = make_method(name, 1)
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
    problem = Problem(gradients)
    method = make_method(name)
    for _ in range(3):
        found = problem.update(method, lr=0.01)
        assert torch.isfinite(found).all()
        assert all(torch.isfinite(value) for value in method.metrics().values())
    assert bool((found == 0).all()) == (len(zeros) == 3)


@pytest.mark.parametrize("name", WEIGHT_LOSSES)
@pytest.mark.parametrize("offset", [-1e4, 0.0])
def test_negative_losses_give_finite_gradients(name, offset):
    problem = Quadratic(random_gradients(3), offset)
    method = make_method(name)
    for _ in range(10):
        assert torch.isfinite(problem.update(method, lr=0.05)).all()


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_reach_the_gradient_but_not_the_state(name, value):
    gradients = random_gradients(3)
    gradients[1, 0] = value
    method = make_method(name)
    assert not torch.isfinite(Problem(gradients).update(method)).all()
    if name == "gradnorm":
        assert torch.equal(method.weight_R, torch.ones(3)) and not method.initial_R.any()
    again = Quadratic(random_gradients(3))
    for _ in range(3):
        assert torch.isfinite(again.update(method, lr=0.01)).all()


@every_method
def test_only_what_is_trained_gets_a_gradient(name):
    problem = Problem(random_gradients(4))
    method = make_method(name, 4)
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
    assert_near(problem.update(make_method(name)), reference.update(make_method(name)))


@every_method
def test_draws_come_from_the_generator_only(name):
    def run(seed):
        problem = Quadratic(random_gradients(6, 3))
        method = make_method(name, 6)
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([problem.update(method, generator, lr=0.02) for _ in range(4)])

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(0), run(1)) != (name in DRAW)
