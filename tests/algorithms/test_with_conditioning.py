"""The algorithm's task conditioning, passed to its networks."""

from functools import partial

import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import SAC
from mtrl_lightning.algorithms.arguments import with_conditioning
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.specs import spec_of

SPEC = spec_of(3)
SHARED = partial(networks.Embedding, dim=5)


def test_conditioning_is_passed_unless_a_network_has_its_own():
    make = partial(networks.MLP, width=8)
    own = partial(make, conditioning=networks.OneHot)
    for factory, conditioning, out_dim in ((make, None, 3), (make, SHARED, 5), (own, SHARED, 3)):
        network = with_conditioning(factory, conditioning, SPEC)(4, 2, SPEC)
        assert network.conditioning.out_dim == out_dim


def test_network_without_task_conditioning_refuses_one():
    make = partial(networks.Separate, width=8)
    assert with_conditioning(make, None, SPEC) is make
    assert with_conditioning(make, networks.NoConditioning, SPEC) is make
    with pytest.raises(ConfigurationError, match="conditioning"):
        with_conditioning(make, networks.Embedding, SPEC)


def test_sac_passes_conditioning_to_actor_and_critics():
    small, spec = partial(networks.MLP, width=8), ToyReach(num_tasks=3).spec
    own = partial(small, conditioning=SHARED)
    passed = SAC(spec, actor=small, critic=small, conditioning=SHARED)
    given = SAC(spec, actor=own, critic=own)
    for a, b in zip(passed.parameters(), given.parameters(), strict=True):
        assert torch.equal(a, b)
    assert passed.actor.conditioning.out_dim == passed.critic.members[1].conditioning.out_dim == 5
