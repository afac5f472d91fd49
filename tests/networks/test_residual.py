"""Residual blocks beside the papers' formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mtrl_lightning.networks.hidden import residual_layers
from tests.helpers.networks import gradients, randomize, uniform


def layer_norm(h_H, gain_H, bias_H):
    mean = h_H.sum() / len(h_H)
    variance = (h_H - mean).square().sum() / len(h_H)
    return (h_H - mean) / (variance + 1e-5).sqrt() * gain_H + bias_H


@pytest.mark.parametrize("depth", [1, 3])
def test_it_is_a_layer_and_blocks_that_are_added(depth):
    layers = randomize(residual_layers(4, 6, depth)).double()
    parameters = list(layers.parameters())
    # weight and bias, gain and bias
    groups = [parameters[i : i + 4] for i in range(0, len(parameters), 4)]
    assert len(groups) == 1 + 2 * depth

    def slow(x_D):
        def normed(group, h_H):
            return layer_norm(group[0] @ h_H + group[1], group[2], group[3])

        h_H = normed(groups[0], x_D).clamp(min=0)
        for block in range(depth):
            first, second = groups[1 + 2 * block], groups[2 + 2 * block]
            h_H = h_H + normed(second, normed(first, h_H).clamp(min=0))
        return h_H

    x_BD = uniform(7, 4).double().requires_grad_()
    out, wanted = layers(x_BD), torch.stack([slow(x_D) for x_D in x_BD])
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)
    inputs, weights = [x_BD, *parameters], uniform(7, 6).double()
    torch.testing.assert_close(
        gradients(out, inputs, weights), gradients(wanted, inputs, weights), rtol=1e-10, atol=1e-10
    )


def test_it_begins_he_uniform_with_zero_biases():
    torch.manual_seed(0)
    linears = [
        module for module in residual_layers(50, 200, 2).modules() if isinstance(module, nn.Linear)
    ]
    assert [linear.in_features for linear in linears] == [50, 200, 200, 200, 200]
    for linear in linears:
        assert linear.weight.abs().max().item() == pytest.approx(
            math.sqrt(6 / linear.in_features), rel=0.01
        )
        assert not linear.bias.any()
