"""Heads of their own on shared layers."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks import MLP, MultiHead
from tests.helpers.networks import (
    assert_equals_row_by_row,
    num_parameters,
    perceptron,
    uniform,
)
from tests.helpers.specs import spec_of

NUM_TASKS, OUT_DIM = 3, 2


def make(**options):
    torch.manual_seed(0)
    return MultiHead(4, OUT_DIM, spec_of(NUM_TASKS), width=16, depth=2, output_bound=0.5, **options)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_with_one_task_it_is_an_mlp(layer_norm):
    torch.manual_seed(0)
    mlp = MLP(4, 3, spec_of(1), width=16, layer_norm=layer_norm, output_bound=0.5)
    multi = MultiHead(4, 3, spec_of(1), width=16, layer_norm=layer_norm, output_bound=0.5)
    multi.load_state_dict(
        {name.replace("head.", "heads."): value for name, value in mlp.state_dict().items()}
    )
    x_BD, task_B = uniform(32, 4), torch.zeros(32, dtype=torch.int64)
    assert torch.equal(multi(x_BD, task_B), mlp(x_BD, task_B))


@pytest.mark.parametrize("head_width", [0, 6])
def test_it_is_a_head_for_each_task_row_by_row(head_width):
    def slow(network, x_D, task):
        h_H = network.trunk(torch.cat([x_D, network.conditioning(torch.tensor([task]))[0]])[None])[
            0
        ]
        if head_width:
            return perceptron(network.heads.experts, task, h_H)
        rows = slice(task * OUT_DIM, (task + 1) * OUT_DIM)
        return network.heads.weight[rows] @ h_H + network.heads.bias[rows]

    assert_equals_row_by_row(make(head_width=head_width), slow)


def test_heads_of_two_layers_have_their_sizes_and_bound():
    network = make(head_width=6)
    assert num_parameters(network.heads) == NUM_TASKS * (17 * 6 + 7 * OUT_DIM)
    assert 0.4 < network.heads.experts.weights[1].abs().max().item() <= 0.5
