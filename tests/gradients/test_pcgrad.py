"""PCGrad against a plain double loop."""

import pytest
import torch

from mtrl_lightning.gradients.pcgrad import PCGrad, orders
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of


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
