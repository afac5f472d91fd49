"""Hidden layers modulated by the task."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mtrl_lightning.networks.film import FiLM
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
    return FiLM(
        IN_DIM,
        OUT_DIM,
        spec_of(NUM_TASKS),
        **{"width": 8, "depth": 2, "output_bound": 0.5, **options},
    )


def make_scalar(**options):
    return make(scalar=True, **options)


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("options", [{}, {"conditioning": Dense}, {"depth": 1}])
def test_it_is_the_papers_equation_row_by_row(scalar, options):
    def slow(network, x_D, task):
        code = (
            network.conditioning.table.weight[task]
            if "conditioning" in options
            else F.one_hot(torch.tensor(task), 3)
        )
        numbers = network.modulation.weight @ code.double()
        size = 1 if scalar else 8
        for layer in network.layers:
            delta_F, beta_F, numbers = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
            x_D = ((1 + delta_F) * (layer.weight @ x_D + layer.bias) + beta_F).clamp(min=0)
        assert len(numbers) == 0
        return network.head.weight @ x_D + network.head.bias

    assert_equals_row_by_row(make(scalar=scalar, **options), slow)


@pytest.mark.parametrize("variant", [make, make_scalar])
def test_it_begins_as_the_same_network_for_every_task(variant):
    network, x_BD = variant(), uniform(5, IN_DIM)
    h_BH = x_BD
    for layer in network.layers:
        h_BH = F.relu(layer(h_BH))
    for task in range(NUM_TASKS):
        assert torch.equal(network(x_BD, torch.full((5,), task)), network.head(h_BH))


def test_it_begins_he_uniform_and_its_output_within_the_bound():
    network = make(width=300, output_bound=0.01)
    for layer in network.layers:
        assert isinstance(layer, nn.Linear) and not layer.bias.any()
        assert layer.weight.var().item() == pytest.approx(2 / layer.in_features, rel=0.15)
    assert 0.009 < network.head.weight.abs().max().item() <= 0.01
