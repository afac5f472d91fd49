"""CAGrad against the dual of the problem that it solves."""

import pytest
import torch

from mtrl_lightning.gradients.cagrad import CAGrad
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of


def assert_is_best(update_D, gradient_GD, mean_D, c):
    """Check that an update maximizes the smallest ``g . d`` in the ball around the mean.

    It lies in the ball, and reaches the value of the dual problem for the weights ``w`` of its
    direction ``g_w``: no direction in the ball reaches more, for any ``w`` on the simplex.
    """
    update_D, gradient_GD, mean_D = (x.double() for x in (update_D, gradient_GD, mean_D))
    direction_D = update_D * (1 + c)
    added_D = direction_D - mean_D
    radius = c * mean_D.norm()
    assert float(added_D.norm()) == pytest.approx(float(radius), rel=1e-5)
    w_G = torch.linalg.lstsq(gradient_GD.t(), added_D).solution
    w_G = w_G / w_G.sum()
    assert w_G.min() > -1e-4
    bound = w_G @ gradient_GD @ mean_D + radius * (w_G @ gradient_GD).norm()
    assert float((gradient_GD @ direction_D).min()) == pytest.approx(float(bound), rel=1e-3)


@pytest.mark.parametrize(("num_tasks", "size"), [(3, 6), (10, 30), (50, 200)])
@pytest.mark.parametrize("c", [0.3, 0.8])
def test_update_is_the_best_direction_in_the_ball(num_tasks, size, c):
    gradients = random_gradients(num_tasks, size, seed=num_tasks)
    found = update(CAGrad(spec_of(num_tasks), c=c), gradients)
    assert_is_best(found, gradients, gradients.mean(0), c)


def test_fast_treats_the_tasks_that_were_not_drawn_as_one():
    gradients = random_gradients(6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    rows = torch.cat([gradients[order[:2]], gradients[order[2:]].mean(0, keepdim=True)])
    method = CAGrad(spec_of(6), c=0.5, num_sampled=2)
    found = update(method, gradients, torch.Generator().manual_seed(3))
    assert_is_best(found, rows, gradients.mean(0), 0.5)
    four, full = random_gradients(4), CAGrad(spec_of(4))
    for num_sampled in (3, 4):
        assert_near(update(CAGrad(spec_of(4), num_sampled=num_sampled), four), update(full, four))


def test_one_gradient_much_shorter_by_hand():
    # g_w = (4 w, 1 - w), g_0 = (2, 1/2): where w = 0 the slope is 8 - 1/2 - c ||g_0|| > 0, so w is
    # 0
    method = CAGrad(spec_of(2), c=0.5)
    norm = (4 + 0.25) ** 0.5
    assert_near(update(method, [[4.0, 0.0], [0.0, 1.0]]), [2 / 1.5, (0.5 + 0.5 * norm) / 1.5])
    relative = {name: float(value) for name, value in method.metrics().items()}
    expected = {"conflicts": 0, "cosine": 0, "weight_min": 1 / 1.5, "weight_max": (1 + norm) / 1.5}
    assert relative == pytest.approx(expected, rel=1e-6)


def test_worst_task_stays_where_not_all_can_improve():
    # (2, 0) and (-1, 0) allow no step in the first direction, so the dual's g_w is zero; g_0 is (1,
    # 1) / 3
    gradients = [[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]
    assert_near(update(CAGrad(spec_of(3), c=0.9), gradients), [0.0, 1 / 3 / 1.9], atol=1e-3)
