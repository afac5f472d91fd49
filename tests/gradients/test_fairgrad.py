"""FairGrad: the fairness of its update; its direction is in test_torchjd.py."""

import pytest
import torch

from mtrl_lightning.gradients.fairgrad import FairGrad
from tests.helpers.gradients import assert_near, update
from tests.helpers.specs import spec_of


def fair(alpha, gradients):
    return update(FairGrad(spec_of(len(gradients)), alpha=alpha), torch.as_tensor(gradients))


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.0, [0.5, 4.0]), (0.5, [1.5, 3.0]), (1.0, [2.25, 2.25]), (2.0, [3.0, 1.5])],
)
def test_two_orthogonal_tasks_by_hand(alpha, expected):
    # w = n^(-2 alpha / (1 + alpha)) for norms n of 1 and 8, so that w n is (1, 8), (1, 2), (1, 1)
    # and (1, 1/2); the shares of the mean norm 4.5 are in proportion to them
    assert_near(fair(alpha, [[1.0, 0.0], [0.0, 8.0]]), expected)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
def test_gradients_that_cancel_are_a_draw_and_zero_takes_no_part(alpha):
    assert_near(fair(alpha, [[2.0, 0.0], [-1.0, 0.0]]), [0.0, 0.0], atol=1e-5)
    # the third gradient is orthogonal to the two that cancel, which therefore weigh far more
    found = fair(alpha, [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert_near(found[0], 0.0)
    assert 0 < found[1] < 0.02
    gradients = [[2.0, 0.0], [1.0, 4.0]]
    assert_near(fair(alpha, [*gradients, [0.0, 0.0]]), fair(alpha, gradients) * 2 / 3)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5, 2.0, 1e3])
def test_equal_gradients_and_one_that_is_tiny(alpha):
    gradients = torch.tensor([0.3, -0.5]).expand(10, 2)
    assert_near(fair(alpha, gradients), gradients[0])
    found = fair(alpha, torch.cat([gradients, torch.tensor([[1e-12, 0.0]])]))
    assert torch.isfinite(found).all()
    assert found.norm() > 0.1  # the ten tasks still learn
