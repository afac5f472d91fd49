"""Every task's own gradient, and how the gradients are combined."""

import pytest
import torch

from mtrl_lightning.gradients.task_gradients import (
    TaskGradients,
    batched_gradients,
    statistics,
    weights_from,
)
from tests.helpers.gradients import Problem, Quadratic, assert_near

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
