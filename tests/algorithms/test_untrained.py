"""How an algorithm acts on tasks that are evaluated without being trained."""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms.arguments import rebuild
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Embedding, Separate
from tests.helpers.algorithms import make_ppo, make_sac, make_spec, make_td3

TRAINED = (0, 2)
NETWORK = partial(MLP, width=8, depth=1, output_bound=0.3)
NETWORKS = {"actor": NETWORK, "critic": NETWORK}


@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
def test_it_acts_with_the_mean_of_the_trained_tasks_embeddings(make):
    spec = make_spec(3, train_tasks=TRAINED)
    algorithm = make(spec, **NETWORKS, conditioning=partial(Embedding, dim=5))
    observation_ED = np.random.default_rng(0).normal(size=(3, 4))
    found_EA = algorithm.act(observation_ED, np.array([1, 0, 1]), "exploit")
    own_EA = algorithm.act(observation_ED, np.array([0, 0, 0]), "exploit")
    assert np.array_equal(found_EA[1], own_EA[1]), "a trained task has its own"
    with torch.no_grad():
        weight_TC = algorithm.actor.conditioning.weight_TC
        torch.testing.assert_close(weight_TC[1], (weight_TC[0] + weight_TC[2]) / 2)
        policy = algorithm.policy(torch.tensor(observation_ED).float(), torch.tensor([1, 1, 1]))
    np.testing.assert_allclose(found_EA[[0, 2]], policy.mode()[[0, 2]].numpy(), rtol=1e-5)
    assert algorithm.untrained.summary == (
        "Evaluated without training: task-1."
        " Parameters of a task are the mean of the trained tasks'"
    )


def test_untrained_task_keeps_its_initial_parameters_if_asked():
    spec = make_spec(3, train_tasks=TRAINED)
    sac = make_sac(spec, **NETWORKS, untrained_tasks="own")
    observation_ED = np.ones((1, 4), np.float32)
    with torch.no_grad():
        policy = sac.policy(torch.ones(1, 4), torch.tensor([1]))
    action_EA = sac.act(observation_ED, np.array([1]), "exploit")
    assert np.array_equal(action_EA, policy.mode().numpy())
    assert "as initialized" in sac.untrained.summary
    rebuilt = rebuild(sac.hyper_parameters, spec, type(sac))
    assert np.array_equal(rebuilt.act(observation_ED, np.array([1]), "exploit"), action_EA)


def test_there_is_nothing_to_say_where_all_tasks_are_trained():
    assert make_sac(make_spec(2)).untrained.summary == ""


def test_networks_of_single_tasks_are_refused():
    spec = make_spec(3, train_tasks=TRAINED)
    with pytest.raises(ConfigurationError, match="actor"):
        make_sac(spec, actor=partial(Separate, width=8))
    make_sac(spec, critic=partial(Separate, width=8))  # a critic does not act
