"""The algorithm's task conditioning, passed to its networks."""

from functools import partial

import pytest

from mtrl_lightning import networks
from mtrl_lightning.algorithms.arguments import with_conditioning
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.algorithms import make_sac
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
    sac = make_sac(SPEC, conditioning=SHARED)
    assert sac.actor.conditioning.out_dim == sac.critic.members[1].conditioning.out_dim == 5
