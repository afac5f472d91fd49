from functools import partial

import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import SAC
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.specs import spec_of

SPEC = spec_of(3)

TAKE_ONE = [
    partial(networks.MLP, width=8),
    partial(networks.MultiHead, width=8),
    partial(networks.FiLM, width=8),
    partial(networks.MOORE, width=8),
    partial(networks.PaCo, width=8, max_loss=None),
    partial(networks.SoftModularization, width=8, embedding_dim=8),
]


@pytest.mark.parametrize("make", TAKE_ONE, ids=lambda make: make.func.__name__)
def test_conditioning_is_passed_unless_a_network_has_its_own(make):
    shared = partial(networks.Embedding, dim=5)
    assert isinstance(
        networks.with_conditioning(make, None, SPEC)(4, 2, SPEC).conditioning, networks.OneHot
    )
    passed = networks.with_conditioning(make, shared, SPEC)(4, 2, SPEC).conditioning
    assert isinstance(passed, networks.Embedding) and passed.out_dim == 5
    own = partial(make, conditioning=networks.OneHot)
    assert isinstance(
        networks.with_conditioning(own, shared, SPEC)(4, 2, SPEC).conditioning, networks.OneHot
    )


def test_network_without_task_conditioning_refuses_one():
    make = partial(networks.Separate, width=8)
    assert networks.with_conditioning(make, None, SPEC) is make
    assert networks.with_conditioning(make, networks.NoConditioning, SPEC) is make
    with pytest.raises(ConfigurationError, match="conditioning"):
        networks.with_conditioning(make, networks.Embedding, SPEC)


def test_sac_passes_conditioning_to_actor_and_critics():
    small, shared = partial(networks.MLP, width=8), partial(networks.Embedding, dim=5)
    own = partial(small, conditioning=shared)
    spec = ToyReach(num_tasks=3).spec
    passed = SAC(spec, actor=small, critic=small, conditioning=shared)
    given = SAC(spec, actor=own, critic=own)
    for a, b in zip(passed.parameters(), given.parameters(), strict=True):
        assert torch.equal(a, b)
    assert passed.actor.conditioning.out_dim == passed.critic.members[1].conditioning.out_dim == 5
    mixed = SAC(
        spec, actor=small, critic=partial(small, conditioning=networks.OneHot), conditioning=shared
    )
    assert mixed.actor.conditioning.out_dim == 5
    assert mixed.critic.members[0].conditioning.out_dim == 3
