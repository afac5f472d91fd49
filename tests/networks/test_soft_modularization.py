"""Soft modularization beside the paper's equations, module by module."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mtrl_lightning.networks.soft_modularization import SoftModularization
from tests.helpers.networks import (
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    Dense,
    assert_equals_row_by_row,
    uniform,
)
from tests.helpers.specs import spec_of


def make(**options):
    torch.manual_seed(0)
    sizes = {"width": 6, "depth": 2, "num_modules": 2, "embedding_dim": 5, "output_bound": 0.5}
    return SoftModularization(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), **{**sizes, **options})


def make_deep(**options):
    return make(**{"depth": 4, "num_modules": 3, **options})


def linear(layer, x_D):
    return layer.weight @ x_D + layer.bias


def slow(network, x_D, task):
    """One row, module by module."""
    code = network.conditioning(torch.tensor([task]))[0]
    f_E = linear(network.encoder[2], linear(network.encoder[0], x_D).clamp(min=0))
    z_E = f_E * linear(network.task_encoder, code)
    num_modules, depth = network.layers[0].num_experts, len(network.layers)
    g = [f_E.clamp(min=0)] * num_modules
    p = linear(network.routing[0], z_E.clamp(min=0))
    for layer in range(depth):
        weights, biases = network.layers[layer].weights[0], network.layers[layer].biases[0]
        outputs = [(g[j] @ weights[j] + biases[j, 0]).clamp(min=0) for j in range(num_modules)]
        taken = []
        for i in range(1 if layer == depth - 1 else num_modules):
            shares = [p[num_modules * i + j].exp() for j in range(num_modules)]
            taken.append(
                sum(
                    share / sum(shares) * output
                    for share, output in zip(shares, outputs, strict=True)
                )
            )
        g = taken
        if layer < depth - 1:
            p = linear(
                network.routing[layer + 1],
                (linear(network.routing_inputs[layer], p) * z_E).clamp(min=0),
            )
    return linear(network.head, g[0])


@pytest.mark.parametrize("conditioning", [{}, {"conditioning": Dense}])
@pytest.mark.parametrize(
    ("depth", "num_modules"),
    [(1, 1), (1, 3), (2, 2), (3, 2), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_it_is_the_papers_equations_row_by_row(depth, num_modules, conditioning):
    assert_equals_row_by_row(make(depth=depth, num_modules=num_modules, **conditioning), slow)


def test_shares_add_up_to_one_and_begin_nearly_even():
    network = make_deep(embedding_dim=50, width=20)
    task_B = torch.tensor([0, 1, 2, 2])
    routes = network.route(uniform(4, 50), task_B)
    assert [tuple(route.shape) for route in routes] == [(4, 3, 3)] * 3 + [(4, 1, 3)]
    for p_BMM in routes:
        torch.testing.assert_close(p_BMM.sum(-1), torch.ones(p_BMM.shape[:2]))
        torch.testing.assert_close(p_BMM, torch.full(p_BMM.shape, 1 / 3), rtol=0, atol=0.1)
        assert not torch.equal(p_BMM[2], p_BMM[0])


def test_layers_begin_within_their_bounds():
    network = make(width=256, embedding_dim=400)
    assert 2.9e-3 < network.routing[0].weight.abs().max().item() <= 3e-3
    assert network.layers[1].weights[0].abs().max().item() == pytest.approx(
        math.sqrt(6 / 256), rel=0.01
    )
    assert network.encoder[2].weight.var().item() == pytest.approx(2 / 400, rel=0.02)
    assert 0.48 < network.head.weight.abs().max().item() <= 0.5
    assert F.relu(network.head.bias.abs() - 0.5).sum() == 0
