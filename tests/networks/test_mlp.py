"""The MLP, the one-hot task, the initial weights, and what holds for every architecture."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.networks import MLP, MultiHead, Network, OneHot, hidden
from tests.helpers.networks import (
    ALWAYS_FUSED,
    ARCHITECTURES,
    CONTRACT,
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    Dense,
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


def test_one_hot_by_hand():
    out = OneHot(spec_of(3))(torch.tensor([2, 0, 2]))
    assert out.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 1]]


def test_one_hot_says_how_many_numbers_it_gives_and_learns_nothing():
    one_hot = OneHot(spec_of(5))
    assert one_hot.out_dim == 5
    assert list(one_hot.parameters()) == []
    assert one_hot.state_dict() == {}


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


@pytest.mark.parametrize("architecture", PLAIN)
def test_layer_norm_is_there_only_when_it_is_asked_for(architecture):
    assert kinds(architecture(2, 1, spec_of(1), width=4, depth=2)) == [nn.Linear, nn.ReLU] * 2
    assert (
        kinds(architecture(2, 1, spec_of(1), width=4, depth=2, layer_norm=True))
        == [nn.Linear, nn.LayerNorm, nn.ReLU] * 2
    )


@pytest.mark.parametrize("architecture", PLAIN)
def test_the_defaults_are_those_of_the_protocol(architecture):
    defaults = {name: p.default for name, p in inspect.signature(architecture).parameters.items()}
    assert (defaults["width"], defaults["depth"], defaults["layer_norm"]) == (400, 3, False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_is_built_by_three_positional_numbers(architecture):
    parameters = inspect.signature(architecture).parameters.values()
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["in_dim", "out_dim", "spec"]
    network = architecture(5, 7, spec_of(3))
    assert isinstance(network, Network)
    assert network(uniform(4, 5), torch.tensor([0, 1, 2, 1])).shape == (4, 7)


@pytest.mark.parametrize("architecture", PLAIN)
def test_the_task_makes_a_difference(architecture):
    torch.manual_seed(0)
    network = architecture(3, 2, spec_of(3), width=16, output_bound=0.5)
    out = network(uniform(1, 3).expand(3, 3), torch.tensor([0, 1, 2]))
    assert len({tuple(row) for row in out.tolist()}) == 3


@pytest.mark.parametrize("architecture", PLAIN)
def test_a_row_does_not_depend_on_the_others(architecture):
    torch.manual_seed(0)
    network = architecture(3, 2, spec_of(3), width=16, output_bound=0.5, layer_norm=True).double()
    x_BD, task_B = uniform(9, 3).double(), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    whole = network(x_BD, task_B)
    alone = torch.cat([network(x_BD[i : i + 1], task_B[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(whole, alone, rtol=1e-12, atol=1e-12)
    order = torch.tensor([8, 3, 0, 5, 1, 7, 2, 6, 4])
    torch.testing.assert_close(
        network(x_BD[order], task_B[order]), whole[order], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("architecture", PLAIN)
def test_every_parameter_gets_a_gradient(architecture):
    torch.manual_seed(0)
    network = architecture(
        3, 2, spec_of(2), width=16, output_bound=0.5, layer_norm=True, conditioning=Dense
    )
    network(uniform(20, 3), torch.arange(20) % 2).square().sum().backward()
    assert [
        name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()
    ] == []


@pytest.mark.parametrize("architecture", PLAIN)
def test_another_conditioning_takes_the_place_of_the_one_hot(architecture):
    network = architecture(3, 2, spec_of(7), width=8, conditioning=Dense)
    assert network.trunk[0].in_features == 3 + 5
    assert any(
        parameter is network.conditioning.table.weight for parameter in network.shared_parameters()
    )


def test_all_of_an_mlp_is_shared():
    network = MLP(3, 2, spec_of(2), width=8)
    assert list(map(id, network.shared_parameters())) == list(map(id, network.parameters()))


def test_residual_blocks_take_the_place_of_the_hidden_layers():
    network = MLP(3, 2, spec_of(4), width=8, depth=2, residual=True)
    assert kinds(network)[:3] == [nn.Linear, nn.LayerNorm, nn.ReLU] and len(network.trunk) == 3 + 2
    assert num_parameters(network) == (8 * 8 + 16) + 2 * 2 * (9 * 8 + 16) + 9 * 2
    assert network.last_shared_weight() is network.head.weight
