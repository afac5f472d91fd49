"""One network a task."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks.separate import Separate
from tests.helpers.networks import (
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    assert_equals_row_by_row,
    perceptron,
)
from tests.helpers.specs import spec_of


def make(**options):
    torch.manual_seed(0)
    return Separate(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), **{"width": 8, "depth": 2, **options})


# the first asks for a conditioning, of which there is none


@pytest.mark.parametrize("depth", [1, 3])
def test_it_is_a_perceptron_for_each_task(depth):
    def slow(network, x_D, task):
        return perceptron(network.own.experts, task, x_D)

    assert_equals_row_by_row(make(depth=depth), slow)


def test_the_output_begins_within_its_bound():
    network = make(width=64, output_bound=0.25)
    for parameters in (network.own.experts.weights, network.own.experts.biases):
        assert 0.15 < parameters[-1].abs().max().item() <= 0.25
