"""Each algorithm learns the values and the best actions of ten diagnostic tasks, in seconds."""

from functools import partial

import lightning
import numpy as np
import pytest
import torch
from torch.optim import Adam

from mtrl_lightning import PPO, SAC, TD3, BehaviourCloning, Distral
from mtrl_lightning.data import ReplayData, RolloutData
from mtrl_lightning.networks import MLP
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.weighting import FixedTemperature
from tests.helpers.algorithms import attach
from tests.helpers.fitting import QUIET
from tests.helpers.probes import DISCOUNT, STATES, probes

TASK_B1 = torch.tensor([[task] for task, _ in STATES])
OBSERVATION_B11 = torch.tensor([[[float(state.observation)]] for _, state in STATES])
VALUE_B = [state.value for _, state in STATES]
ACTION_B = np.array([state.action for _, state in STATES])

ACTOR = {"actor": partial(MLP, width=64, depth=2), "actor_optimizer": partial(Adam, lr=3e-3)}
CRITIC = {"critic": ACTOR["actor"], "critic_optimizer": ACTOR["actor_optimizer"]}
OFF_POLICY = {**ACTOR, **CRITIC, "discount": DISCOUNT, "tau": 0.05}
# the bonus for entropy is part of the learned values, so it is small
SMALL = 1e-3
ALGORITHMS = {
    "sac": partial(SAC, temperature=partial(FixedTemperature, value=SMALL), **OFF_POLICY),
    "td3": partial(TD3, **OFF_POLICY),
    "distral": partial(Distral, kappa=SMALL, omega=SMALL, **OFF_POLICY),
}


@pytest.fixture
def trained(tmp_path):
    def train(make, data):
        algorithm = make(data.spec)
        options = {"default_root_dir": tmp_path, "enable_checkpointing": False}
        lightning.Trainer(**QUIET, **options).fit(algorithm, data)
        return algorithm

    return train


def check_actions(algorithm):
    action_B1 = algorithm.act(OBSERVATION_B11[:, 0].numpy(), TASK_B1[:, 0].numpy(), "exploit")
    matters_B = ~np.isnan(ACTION_B)
    np.testing.assert_allclose(action_B1[matters_B, 0], ACTION_B[matters_B], atol=0.15)


@pytest.mark.parametrize("name", ["sac", "td3", pytest.param("distral", marks=pytest.mark.slow)])
def test_off_policy_algorithms_learn_values_and_actions(name, trained):
    options = {"batch_size": 160, "capacity": 10_000, "warmup_steps": 1000, "num_workers": 0}
    algorithm = trained(ALGORITHMS[name], ReplayData(probes(), 3000, **options))
    check_actions(algorithm)
    z_B1Z = algorithm.encoder(OBSERVATION_B11, TASK_B1)
    action_B11 = algorithm.policy(OBSERVATION_B11, TASK_B1).mode()
    q_QB1 = algorithm.value.q(algorithm.critic_outputs_of(z_B1Z, action_B11, TASK_B1))
    np.testing.assert_allclose(q_QB1.mean(0)[:, 0].tolist(), VALUE_B, atol=0.05)


def test_ppo_learns_values_and_actions(trained):
    options = {"num_steps": 32, "num_epochs": 8, "num_minibatches": 4}
    make = partial(PPO, discount=DISCOUNT, **options, **ACTOR, **CRITIC)
    algorithm = trained(make, RolloutData(probes(), 9600, num_workers=0))
    check_actions(algorithm)
    normalized_B1 = algorithm.return_scale(algorithm.critic(OBSERVATION_B11, TASK_B1), TASK_B1)
    value_B1 = algorithm.return_scale.denormalize(normalized_B1, TASK_B1)
    np.testing.assert_allclose(value_B1[:, 0].tolist(), VALUE_B, atol=0.1)


@pytest.mark.parametrize("loss", ["mse", "log_prob"])
def test_behaviour_cloning_learns_the_actions(loss):
    algorithm = BehaviourCloning(probes().spec, loss=loss, **ACTOR)
    attach(algorithm)
    num_tasks = int(TASK_B1.max()) + 1
    rows = [[i for i, (task, _) in enumerate(STATES) if task == one] for one in range(num_tasks)]
    index_Rn = torch.tensor([(of_task * 2)[:2] for of_task in rows])
    zeros_Rn = torch.zeros(index_Rn.shape)
    batch = TransitionBatch(
        OBSERVATION_B11[index_Rn, 0],
        torch.from_numpy(np.nan_to_num(ACTION_B)).float()[index_Rn, None],
        zeros_Rn,
        OBSERVATION_B11[index_Rn, 0],
        zeros_Rn.bool(),
        TASK_B1[index_Rn, 0],
    )
    for step in range(300):
        algorithm.training_step(batch, step)
    check_actions(algorithm)
