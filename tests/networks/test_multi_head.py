"""Heads of their own on shared layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning.networks import MLP, MultiHead, hidden
from tests.helpers.networks import (
    ALWAYS_FUSED,
    CONTRACT,
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


def make_two_layers(**options):
    return make(head_width=6, **options)


def make_residual(**options):
    return make(residual=True, head_width=6, **options)


@pytest.mark.slow
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("check", CONTRACT)
def test_the_contract_with_fused_layers(check, layer_norm, monkeypatch):
    monkeypatch.setattr(hidden, "MIN_OUTPUTS", ALWAYS_FUSED)
    check(partial(make, layer_norm=layer_norm))


@pytest.mark.slow
@pytest.mark.parametrize("check", CONTRACT)
def test_the_contract_with_residual_blocks_and_heads_of_two_layers(check):
    check(make_residual)


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


@pytest.mark.parametrize("out_dim", [1, OUT_DIM])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tasks", [[0, 1, 2], [0, 2], [1]])
def test_groups_of_tasks_have_the_outputs_and_gradients_of_the_same_rows_backwards(
    out_dim, rows, tasks
):
    torch.manual_seed(0)
    network = MultiHead(4, out_dim, spec_of(NUM_TASKS), width=16, depth=2, output_bound=0.5)
    x_RnD = uniform(len(tasks), rows, 4)
    task_Rn = torch.tensor(tasks)[:, None].expand(-1, rows)
    grouped_RnO = network(x_RnD, task_Rn)
    backwards_BO = network(x_RnD.flatten(0, 1).flip(0), task_Rn.flatten().flip(0))
    outputs = grouped_RnO, backwards_BO.flip(0).view_as(grouped_RnO)
    gradients = []
    for out_RnO in outputs:
        network.zero_grad()
        (out_RnO * uniform(*out_RnO.shape, seed=5)).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("out_dim", [1, OUT_DIM])
def test_the_shape_of_the_rows_does_not_decide_the_type(out_dim):
    network = MultiHead(4, out_dim, spec_of(NUM_TASKS), width=16, depth=2)
    with torch.autocast("cpu", torch.bfloat16):
        for task_B in (
            torch.tensor([2, 1, 0]),
            torch.tensor([], dtype=torch.int64),
            torch.tensor([[0], [1], [2]]),
            torch.tensor([[0, 0], [2, 2]]),
        ):
            out_BO = network(uniform(*task_B.shape, 4), task_B)
            assert out_BO.dtype == torch.bfloat16 and out_BO.shape == (*task_B.shape, out_dim)


@pytest.mark.parametrize("head_width", [0, 6])
def test_it_is_a_head_for_each_task_row_by_row(head_width):
    def slow(network, x_D, task):
        h_H = network.trunk(torch.cat([x_D, network.conditioning(torch.tensor([task]))[0]])[None])[
            0
        ]
        if head_width:
            return perceptron(
                network.heads.experts.weights, network.heads.experts.biases, task, h_H
            )
        rows = slice(task * OUT_DIM, (task + 1) * OUT_DIM)
        return network.heads.weight[rows] @ h_H + network.heads.bias[rows]

    assert_equals_row_by_row(make(head_width=head_width), slow)


def test_heads_of_two_layers_have_their_sizes_and_bound():
    network = make_two_layers()
    assert num_parameters(network.heads) == NUM_TASKS * (17 * 6 + 7 * OUT_DIM)
    assert 0.4 < network.heads.experts.weights[1].abs().max().item() <= 0.5
