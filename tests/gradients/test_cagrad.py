"""CAGrad against a fine grid and the problem it is the dual of."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from mtrl_lightning.gradients.cagrad import CAGrad
from tests.helpers.gradients import Problem, assert_near, random_gradients, update
from tests.helpers.specs import spec_of


def direct(gradients, c):
    """Maximize the smallest ``g_i . d`` in the ball around the mean; divide by ``1 + c``."""
    g, mean = gradients.double().numpy(), gradients.double().mean(0).numpy()
    radius = c * np.linalg.norm(mean)
    best = None
    for seed in range(4):
        noise = np.random.default_rng(seed).normal(size=len(mean))
        start = np.append(mean + 0.1 * radius * noise / np.linalg.norm(noise), -10.0)
        found = minimize(
            lambda x: (-x[-1], np.append(np.zeros(len(mean)), -1.0)),
            start,
            jac=True,
            method="SLSQP",
            constraints=[
                {"type": "ineq", "fun": lambda x: g @ x[:-1] - x[-1]},
                {"type": "ineq", "fun": lambda x: radius**2 - ((x[:-1] - mean) ** 2).sum()},
            ],
            options={"ftol": 1e-13, "maxiter": 500},
        )
        if found.success and (best is None or found.fun < best.fun):
            best = found
    return best.x[:-1] / (1 + c)


def test_one_gradient_much_shorter_by_hand():
    # g_w = (4 w, 1 - w), g_0 = (2, 1/2): where w = 0 the slope is 8 - 1/2 - c ||g_0|| > 0, so w is
    # 0
    method = CAGrad(spec_of(2), c=0.5)
    norm = (4 + 0.25) ** 0.5
    assert_near(update(method, [[4.0, 0.0], [0.0, 1.0]]), [2 / 1.5, (0.5 + 0.5 * norm) / 1.5])
    relative = {name: float(value) for name, value in method.metrics().items()}
    expected = {"conflicts": 0, "cosine": 0, "weight_min": 1 / 1.5, "weight_max": (1 + norm) / 1.5}
    assert relative == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_tasks", "size"), [(3, 6), (5, 8), (10, 30)])
@pytest.mark.parametrize("c", [0.3, 0.8])
def test_it_is_the_best_direction_in_the_ball(num_tasks, size, c):
    gradients = random_gradients(num_tasks, size, seed=num_tasks)
    found = update(CAGrad(spec_of(num_tasks), c=c), gradients)
    assert_near(found, torch.tensor(direct(gradients, c)), atol=2e-4)
    distance = (found * (1 + c) - gradients.mean(0)).norm()
    assert float(distance / gradients.mean(0).norm()) == pytest.approx(c, rel=1e-5)


def test_worst_task_stays_where_not_all_can_improve():
    # (2, 0) and (-1, 0) allow no step in the first direction, so the dual's g_w is zero; g_0 is (1,
    # 1) / 3
    assert_near(
        update(CAGrad(spec_of(3), c=0.9), [[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]),
        [0.0, 1 / 3 / 1.9],
        atol=1e-3,
    )


def test_fifty_tasks_are_solved_well():
    gradients = random_gradients(50, 200)
    found = update(CAGrad(spec_of(50), c=0.5), gradients).double() * 1.5
    products = gradients.double() @ found
    mean = gradients.double().mean(0)
    # with more parameters than tasks the primal value equals the dual's at the same weights
    assert float((found - mean).norm() / mean.norm()) == pytest.approx(0.5, rel=1e-5)
    extra = found - mean
    weight = torch.linalg.lstsq(gradients.double().t(), extra).solution
    weight = weight / weight.sum()
    dual = (
        weight @ gradients.double() @ mean
        + 0.5 * mean.norm() * (weight @ gradients.double()).norm()
    )
    assert weight.min() > -1e-5
    assert float(products.min()) == pytest.approx(float(dual), rel=1e-4)


def test_fast_solves_the_sampled_and_the_mean_of_the_others():
    gradients = random_gradients(6)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()
    sampled, rest = order[:2], order[2:]
    found = update(CAGrad(spec_of(6), c=0.5, num_sampled=2), gradients, generator)
    g = np.stack([*gradients[sampled].double().numpy(), gradients[rest].double().mean(0).numpy()])
    mean = gradients.double().mean(0).numpy()
    norm = np.linalg.norm(mean)
    first, second = np.meshgrid(np.linspace(0, 1, 1501), np.linspace(0, 1, 1501))
    inside = first + second <= 1
    w = np.stack([first[inside], second[inside], 1 - first[inside] - second[inside]], 1)
    g_w = w @ g
    lengths = np.linalg.norm(g_w, axis=1)
    best = np.argmin(g_w @ mean + 0.5 * norm * lengths)
    assert_near(
        found, torch.tensor((mean + 0.5 * norm / lengths[best] * g_w[best]) / 1.5), atol=1e-3
    )


def test_fast_makes_one_pass_a_sampled_task_and_one_more(monkeypatch):
    calls = []
    real = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    update(CAGrad(spec_of(9), num_sampled=3), random_gradients(9))
    assert len(calls) == 4


def test_fast_gives_the_others_the_gradient_of_the_mean_loss():
    problem = Problem(random_gradients(6))
    problem.update(CAGrad(spec_of(6), num_sampled=2))
    assert_near(problem.own[0].grad, torch.arange(1.0, 7) / 6)


def test_fast_with_as_many_tasks_as_there_are_is_the_full_method():
    gradients = random_gradients(4)
    assert torch.equal(
        update(CAGrad(spec_of(4), num_sampled=4), gradients), update(CAGrad(spec_of(4)), gradients)
    )
    assert_near(
        update(CAGrad(spec_of(4), num_sampled=3), gradients), update(CAGrad(spec_of(4)), gradients)
    )
