"""The MLP, the one-hot task, the initial weights, and what holds for every architecture."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.networks import MLP, MultiHead, hidden
from tests.helpers.networks import (
    ALWAYS_FUSED,
    CONTRACT,
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    num_parameters,
    uniform,
)
from tests.helpers.specs import spec_of

PLAIN = [pytest.param(MLP, id="mlp"), pytest.param(MultiHead, id="multi_head")]


def make(**options):
    torch.manual_seed(0)
    return MLP(
        IN_DIM,
        OUT_DIM,
        spec_of(NUM_TASKS),
        **{"width": 8, "depth": 2, "output_bound": 0.5, **options},
    )


def make_residual(**options):
    return make(residual=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("check", CONTRACT)
def test_the_contract_with_fused_layers(check, layer_norm, monkeypatch):
    monkeypatch.setattr(hidden, "MIN_OUTPUTS", ALWAYS_FUSED)
    check(partial(make, layer_norm=layer_norm))


@pytest.mark.parametrize("check", CONTRACT)
def test_the_contract_with_residual_blocks(check):
    check(make_residual)


def by_hand(weights, x, task, num_tasks, depth, layer_norm):
    """The same computation in plain Python floats."""
    h = [*x, *(1.0 if i == task else 0.0 for i in range(num_tasks))]
    stride = 3 if layer_norm else 2
    for layer in range(depth):
        w, b = weights[f"trunk.{stride * layer}.weight"], weights[f"trunk.{stride * layer}.bias"]
        h = [
            sum(wij * hj for wij, hj in zip(row, h, strict=True)) + bi
            for row, bi in zip(w, b, strict=True)
        ]
        if layer_norm:
            mean = sum(h) / len(h)
            variance = sum((v - mean) ** 2 for v in h) / len(h)
            gain = weights[f"trunk.{stride * layer + 1}.weight"]
            bias = weights[f"trunk.{stride * layer + 1}.bias"]
            h = [
                (v - mean) / math.sqrt(variance + 1e-5) * g + c
                for v, g, c in zip(h, gain, bias, strict=True)
            ]
        h = [max(v, 0.0) for v in h]
    w, b = weights["head.weight"], weights["head.bias"]
    return [
        sum(wij * hj for wij, hj in zip(row, h, strict=True)) + bi
        for row, bi in zip(w, b, strict=True)
    ]


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(1, 4), (2, 5), (3, 8)])
def test_the_output_equals_a_loop_over_numbers(depth, width, layer_norm):
    network = MLP(3, 2, spec_of(4), width=width, depth=depth, layer_norm=layer_norm)
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            parameter.copy_(uniform(*parameter.shape, seed=i))
    weights = {name: value.tolist() for name, value in network.state_dict().items()}
    x_BD, task_B = uniform(6, 3, seed=99), torch.tensor([0, 3, 1, 2, 2, 0])
    rows = zip(x_BD.tolist(), task_B.tolist(), strict=True)
    wanted = [by_hand(weights, x, task, 4, depth, layer_norm) for x, task in rows]
    torch.testing.assert_close(network(x_BD, task_B), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", PLAIN)
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


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize(("given", "bound"), [(3e-3, 3e-3), (0.5, 0.5), (0, 1 / math.sqrt(256))])
def test_the_output_layer_begins_within_its_bound(architecture, given, bound):
    torch.manual_seed(0)
    network = architecture(4, 30, spec_of(2), width=256, depth=1, output_bound=given)
    head = network.head if hasattr(network, "head") else network.heads
    for parameter in (head.weight.detach(), head.bias.detach()):
        assert parameter.abs().max().item() <= bound
        assert parameter.min().item() < -0.8 * bound < 0.8 * bound < parameter.max().item()
    assert head.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.05)


def kinds(network):
    return [type(module) for module in network.trunk]


def test_residual_blocks_take_the_place_of_the_hidden_layers():
    network = MLP(3, 2, spec_of(4), width=8, depth=2, residual=True)
    assert kinds(network)[:3] == [nn.Linear, nn.LayerNorm, nn.ReLU] and len(network.trunk) == 3 + 2
    assert num_parameters(network) == (8 * 8 + 16) + 2 * 2 * (9 * 8 + 16) + 9 * 2
