"""The MLP, the one-hot task, the initial weights, and what holds for every architecture."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mtrl_lightning.networks import MLP
from tests.helpers.networks import (
    ARCHITECTURES,
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    assert_equals_row_by_row,
    num_parameters,
)
from tests.helpers.specs import spec_of


def make(**options):
    torch.manual_seed(0)
    return MLP(
        IN_DIM,
        OUT_DIM,
        spec_of(NUM_TASKS),
        **{"width": 8, "depth": 2, "output_bound": 0.5, **options},
    )


def normalized(h_H, layer):
    centered_H = h_H - h_H.sum() / len(h_H)
    variance = (centered_H * centered_H).sum() / len(h_H)
    return centered_H / (variance + 1e-5).sqrt() * layer.weight + layer.bias


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_it_is_the_composition_of_its_layers_row_by_row(depth, layer_norm):
    def slow(network, x_D, task):
        h_H = torch.cat([x_D, torch.eye(NUM_TASKS).double()[task]])
        for layer in network.trunk:
            if isinstance(layer, nn.Linear):
                h_H = layer.weight @ h_H + layer.bias
            else:
                h_H = normalized(h_H, layer) if isinstance(layer, nn.LayerNorm) else h_H.clamp(0)
        assert len(network.trunk) == depth * (3 if layer_norm else 2)
        return network.head.weight @ h_H + network.head.bias

    assert_equals_row_by_row(make(depth=depth, layer_norm=layer_norm), slow)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_hidden_layers_begin_he_uniform_with_zero_biases(architecture, layer_norm):
    torch.manual_seed(0)
    network = architecture(90, 3, spec_of(10), width=400, depth=3, layer_norm=layer_norm)
    linears = [module for module in network.trunk if isinstance(module, nn.Linear)]
    assert [linear.in_features for linear in linears] == [100, 400, 400]
    assert [linear.out_features for linear in linears] == [400, 400, 400]
    for linear in linears:
        bound = math.sqrt(6 / linear.in_features)
        weight = linear.weight.detach()
        assert 0.999 * bound < weight.abs().max().item() <= bound
        assert weight.mean().item() == pytest.approx(
            0, abs=5 * bound / math.sqrt(3 * weight.numel())
        )
        assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
        assert torch.equal(linear.bias, torch.zeros(400))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("given", "bound"), [(3e-3, 3e-3), (0.5, 0.5), (0, 1 / math.sqrt(256))])
def test_the_output_layer_begins_within_its_bound(architecture, given, bound):
    torch.manual_seed(0)
    network = architecture(4, 30, spec_of(2), width=256, depth=1, output_bound=given)
    head = network.head if hasattr(network, "head") else network.heads
    for parameter in (head.weight.detach(), head.bias.detach()):
        assert parameter.abs().max().item() <= bound
        assert parameter.min().item() < -0.8 * bound < 0.8 * bound < parameter.max().item()
    assert head.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.05)


def test_residual_blocks_take_the_place_of_the_hidden_layers():
    network = MLP(3, 2, spec_of(4), width=8, depth=2, residual=True)
    kinds = [type(module) for module in network.trunk]
    assert kinds[:3] == [nn.Linear, nn.LayerNorm, nn.ReLU] and len(kinds) == 3 + 2
    assert num_parameters(network) == (8 * 8 + 16) + 2 * 2 * (9 * 8 + 16) + 9 * 2
