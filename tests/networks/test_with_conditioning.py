from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import (
    MLP,
    MOORE,
    Embedding,
    FiLM,
    MultiHead,
    NoConditioning,
    OneHot,
    PaCo,
    Separate,
    SoftModularization,
    with_conditioning,
)
from tests.helpers.specs import spec_of

SPEC = spec_of(3)

TAKE_ONE = [
    partial(MLP, width=8),
    partial(MultiHead, width=8),
    partial(FiLM, width=8),
    partial(MOORE, width=8),
    partial(PaCo, width=8, max_loss=None),
    partial(SoftModularization, width=8, embedding_dim=8),
]


@pytest.mark.parametrize("make", TAKE_ONE, ids=lambda make: make.func.__name__)
def test_the_algorithms_conditioning_is_passed_unless_a_network_has_its_own(make):
    shared = partial(Embedding, dim=5)
    assert isinstance(with_conditioning(make, None, SPEC)(4, 2, SPEC).conditioning, OneHot)
    passed = with_conditioning(make, shared, SPEC)(4, 2, SPEC).conditioning
    assert isinstance(passed, Embedding) and passed.out_dim == 5
    own = partial(make, conditioning=OneHot)
    assert isinstance(with_conditioning(own, shared, SPEC)(4, 2, SPEC).conditioning, OneHot)


def test_a_network_without_task_conditioning_refuses_one_with_numbers():
    make = partial(Separate, width=8)
    assert with_conditioning(make, None, SPEC) is make
    assert with_conditioning(make, NoConditioning, SPEC) is make
    with pytest.raises(ConfigurationError, match="conditioning"):
        with_conditioning(make, Embedding, SPEC)


def test_sac_passes_it_to_actor_and_critics_with_the_same_weights_as_an_own_one():
    small, shared = partial(MLP, width=8), partial(Embedding, dim=5)
    own = partial(small, conditioning=shared)
    spec = ToyReach(num_tasks=3).spec
    passed = SAC(spec, actor=small, critic=small, conditioning=shared)
    given = SAC(spec, actor=own, critic=own)
    for a, b in zip(passed.parameters(), given.parameters(), strict=True):
        assert torch.equal(a, b)
    assert passed.actor.conditioning.out_dim == passed.critic.members[1].conditioning.out_dim == 5
    mixed = SAC(spec, actor=small, critic=partial(small, conditioning=OneHot), conditioning=shared)
    assert mixed.actor.conditioning.out_dim == 5
    assert mixed.critic.members[0].conditioning.out_dim == 3
