"""Task conditioning, compared with the equations row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.networks.conditioning import (
    Embedding,
    NoConditioning,
    TaskEncoder,
)
from mtrl_lightning.networks.mlp import MLP
from tests.helpers.networks import (
    DTYPES,
    assert_same_output_and_gradients,
    layers,
    randomize,
    uniform,
)
from tests.helpers.specs import spec_of

TASK_B = torch.tensor([2, 0, 2, 1, 3, 3, 0])


def test_nothing_is_added_to_features_that_tell_the_task():
    nothing = NoConditioning(spec_of(3))
    assert nothing(torch.tensor([0, 2])).shape == (2, 0)
    assert nothing.out_dim == 0 and nothing.state_dict() == {}
    network = MLP(4, 2, spec_of(3), width=8, conditioning=NoConditioning, output_bound=0.5)
    x_BD = uniform(1, 4).expand(3, 4)
    assert network.trunk[0].in_features == 4
    out = network(x_BD, torch.tensor([0, 1, 2]))
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) and out.any()


def test_an_embedding_begins_normal_and_has_32_numbers():
    torch.manual_seed(0)
    embedding = Embedding(spec_of(500))
    assert embedding.out_dim == 32
    assert embedding.weight_TC.mean().item() == pytest.approx(0, abs=0.03)
    assert embedding.weight_TC.std().item() == pytest.approx(1, abs=0.03)
    # no unit length unless it is asked for
    assert embedding(torch.arange(500)).norm(dim=-1).std() > 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("unit_norm", [False, True])
def test_an_embedding_equals_a_loop_over_rows(unit_norm, dtype, tolerance):
    embedding = Embedding(spec_of(4), dim=5, unit_norm=unit_norm).to(dtype)
    rows = [embedding.weight_TC[task] for task in TASK_B.tolist()]
    wanted = torch.stack([row / (row**2).sum() ** 0.5 if unit_norm else row for row in rows])
    assert_same_output_and_gradients(embedding, embedding(TASK_B), wanted, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_task_encoder_equals_a_loop_over_rows(depth, dtype, tolerance):
    encoder = TaskEncoder(
        spec_of(4), embedding=lambda t: Embedding(t, dim=6), width=7, depth=depth, out_dim=5
    )
    randomize(encoder).to(dtype)
    linears = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == depth + 1
    wanted = torch.stack(
        [layers(encoder.embedding.weight_TC[task], linears) for task in TASK_B.tolist()]
    )
    assert_same_output_and_gradients(encoder, encoder(TASK_B), wanted, tolerance)


def test_a_task_encoder_has_the_papers_sizes():
    encoder = TaskEncoder(spec_of(10))
    shapes = {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}
    assert sorted(shapes.values()) == sorted(
        [(10, 50), (50, 50), (50,), (50, 50), (50,), (50, 50), (50,)]
    )
    assert encoder.out_dim == 50
