"""Several networks of one architecture."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks import Ensemble
from tests.helpers.networks import ARCHITECTURES, uniform
from tests.helpers.specs import spec_of

TASK_B = torch.tensor([0, 0, 1, 1, 2, 2])


def make(architecture, size=3):
    torch.manual_seed(0)
    return Ensemble(lambda: architecture(4, 1, spec_of(3), width=8, output_bound=0.5), size)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_output_is_that_of_each_member(architecture, size):
    ensemble, x_BD = make(architecture, size), uniform(6, 4)
    q_QB = ensemble(x_BD, TASK_B)
    assert q_QB.shape == (size, 6, 1)
    for member, q_B in zip(ensemble.members, q_QB, strict=True):
        assert torch.equal(q_B, member(x_BD, TASK_B))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_members_begin_with_weights_of_their_own(architecture):
    ensemble = make(architecture)
    first, second = ensemble.members[0].state_dict(), ensemble.members[1].state_dict()
    equal = {name for name in first if torch.equal(first[name], second[name])}
    assert equal == {name for name in first if name.startswith("trunk") and name.endswith("bias")}
