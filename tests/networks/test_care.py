"""CARE beside its equations, row by row."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning.networks.language import EMBEDDINGS, load_embeddings
from mtrl_lightning.networks.mixture import CARE
from tests.helpers.networks import (
    DTYPES,
    assert_same_output_and_gradients,
    layers,
    perceptron,
    randomize,
    uniform,
)
from tests.helpers.specs import spec_of

SPACE = Box(-np.inf, np.inf, (5,), np.float32)
NAMES = ["reach-v3", "door-open-v3", "push-v3", "cheetah-run"]
TASK_B = torch.tensor([2, 0, 2, 1, 3, 3, 0])
Z = 3


def make(seed=0, **settings):
    settings = {"num_experts": 4, "width": 6, "out_dim": Z, "context_dim": Z, **settings}
    encoder = CARE(spec_of(NAMES, SPACE), **settings)
    return randomize(encoder, seed)


def slow(encoder, x_BD, task_B):
    """Sodhani et al. 2021, section 4: encoders, context, attention, and what the policy sees."""
    table_TC = torch.from_numpy(load_embeddings(EMBEDDINGS, NAMES)).to(x_BD)
    context = encoder.context
    rows = []
    for x_D, task in zip(x_BD, task_B.tolist(), strict=True):
        context_C = layers(table_TC[task], [context.hidden[0], context.hidden[2], context.output])
        z = [perceptron(encoder.experts, k, x_D) for k in range(4)]
        power = [torch.exp((z_Z * context_C.detach()).sum()) for z_Z in z]
        mixed_Z = sum(power[k] / sum(power) * z[k] for k in range(4))
        rows.append(torch.cat([mixed_Z, context_C]))
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_features_equal_a_loop_over_rows_and_experts(dtype, tolerance):
    encoder, x_BD = make().to(dtype), uniform(7, 5, seed=9).to(dtype)
    assert_same_output_and_gradients(
        encoder, encoder(x_BD, TASK_B), slow(encoder, x_BD, TASK_B), tolerance
    )
    mean_BZ = encoder.experts(x_BD).mean(0)
    assert (encoder(x_BD, TASK_B)[:, :Z] - mean_BZ).abs().max() > 0.1, "attention is sharp"


def test_the_sizes_are_the_papers():
    defaults = {name: p.default for name, p in inspect.signature(CARE).parameters.items()}
    names = ("num_experts", "width", "depth", "out_dim", "context_dim")
    assert [defaults[name] for name in names] == [6, 50, 2, 50, 50]
    encoder = CARE(spec_of([*NAMES] * 2, SPACE))
    assert encoder.out_dim == 100
    assert [tuple(weight.shape) for weight in encoder.experts.weights] == [
        (6, 5, 50),
        (6, 50, 50),
        (6, 50, 50),
    ]
    assert [tuple(parameter.shape) for parameter in encoder.context.parameters()][::2] == [
        (50, 384),
        (50, 50),
        (50, 50),
    ]
