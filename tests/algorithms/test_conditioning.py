"""The algorithm's task conditioning, and tasks that are evaluated without being trained."""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms.arguments import rebuild, with_conditioning
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Embedding, Separate
from tests.helpers.algorithms import OBSERVATION_ED, make_ppo, make_sac, make_spec, make_td3
from tests.helpers.specs import spec_of

SPEC = spec_of(3)
SHARED = partial(Embedding, dim=5)


def test_conditioning_is_passed_unless_a_network_has_its_own():
    make = partial(MLP, width=8)
    own = partial(make, conditioning=networks.OneHot)
    for factory, conditioning, out_dim in ((make, None, 3), (make, SHARED, 5), (own, SHARED, 3)):
        network = with_conditioning(factory, conditioning, SPEC)(4, 2, SPEC)
        assert network.conditioning.out_dim == out_dim


def test_network_without_task_conditioning_refuses_one():
    make = partial(Separate, width=8)
    assert with_conditioning(make, None, SPEC) is make
    assert with_conditioning(make, networks.NoConditioning, SPEC) is make
    with pytest.raises(ConfigurationError, match="conditioning"):
        with_conditioning(make, Embedding, SPEC)


def test_sac_passes_conditioning_to_actor_and_critics():
    sac = make_sac(SPEC, conditioning=SHARED)
    assert sac.actor.conditioning.out_dim == sac.critic.members[1].conditioning.out_dim == 5


PARTLY_TRAINED = make_spec(3, train_tasks=(0, 2))


def act(algorithm, *tasks):
    return algorithm.act(OBSERVATION_ED[:3], np.array(tasks), "exploit")


def modes(algorithm, *tasks):
    with torch.no_grad():
        policy = algorithm.policy(torch.from_numpy(OBSERVATION_ED[:3]), torch.tensor(tasks))
        return policy.mode().numpy()


@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
def test_it_acts_with_the_mean_of_the_trained_tasks_embeddings(make):
    algorithm = make(PARTLY_TRAINED, conditioning=SHARED)
    own_EA = modes(algorithm, 0, 0, 0)
    found_EA = act(algorithm, 1, 0, 1)
    np.testing.assert_allclose(found_EA[1], own_EA[1], rtol=1e-5, err_msg="a trained task's own")
    weight_TC = algorithm.actor.conditioning.weight_TC.detach()
    torch.testing.assert_close(weight_TC[1], (weight_TC[0] + weight_TC[2]) / 2)
    np.testing.assert_allclose(found_EA[[0, 2]], modes(algorithm, 1, 1, 1)[[0, 2]], rtol=1e-5)


def test_untrained_task_keeps_its_initial_parameters_if_asked():
    sac = make_sac(PARTLY_TRAINED, conditioning=SHARED, untrained_tasks="own")
    wanted_EA = modes(sac, 1, 1, 1)
    rebuilt = rebuild(sac.hyper_parameters, PARTLY_TRAINED, type(sac))
    for algorithm in (sac, rebuilt):
        np.testing.assert_allclose(act(algorithm, 1, 1, 1), wanted_EA, rtol=1e-5)


def test_networks_of_single_tasks_are_refused():
    with pytest.raises(ConfigurationError, match="actor"):
        make_sac(PARTLY_TRAINED, actor=partial(Separate, width=8))
    make_sac(PARTLY_TRAINED, critic=partial(Separate, width=8))  # a critic does not act
