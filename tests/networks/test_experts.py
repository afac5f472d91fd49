"""Batched perceptrons compared with single ones, and the contract of every architecture."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks.experts import Experts
from tests.helpers.networks import (
    gradients,
    perceptron,
    randomize,
    uniform,
)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("own_inputs", [False, True])
def test_each_expert_is_a_perceptron(depth, relu_last, own_inputs):
    experts = randomize(Experts(3, 4, 2, width=5, depth=depth, relu_last=relu_last)).double()
    x_KBD = uniform(3, 6, 4).double() if own_inputs else uniform(6, 4).double().expand(3, 6, 4)
    out = experts(x_KBD if own_inputs else x_KBD[0])
    wanted = torch.stack(
        [
            torch.stack([perceptron(experts, k, x_D, relu_last) for x_D in x_KBD[k]])
            for k in range(3)
        ]
    )
    assert out.shape == (3, 6, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    parameters = list(experts.parameters())
    ours = gradients(out, parameters, uniform(3, 6, 2))
    theirs = gradients(wanted, parameters, uniform(3, 6, 2))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
