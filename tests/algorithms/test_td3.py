"""TD3's update against plain PyTorch and Stable-Baselines3, and its exploration.

What it shares with SAC is tested with SAC; the matrix has both.
"""

from __future__ import annotations

import copy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam

from mtrl_lightning.algorithms import Scalar, losses
from mtrl_lightning.algorithms.td3 import spread_over_environments
from mtrl_lightning.networks import Network
from mtrl_lightning.updates.generators import Generators
from tests.helpers import by_hand as hand
from tests.helpers.algorithms import attach, make_batch, make_spec, make_td3

STD, CLIP = 0.2, 0.15
TARGET_M, TARGET_C = [0.5, -0.1], -0.4
SEED = 5


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


# ---- one update ----


def test_the_noise_and_the_smoothed_action_are_clipped():
    action_RnA = torch.tensor([[[0.5], [0.5]], [[0.95], [-0.99]]])
    noise_RnA = torch.tensor([[[1.0], [9.0]], [[1.0], [-9.0]]])
    smoothed_RnA = losses.smoothed_action(action_RnA, noise_RnA, std=0.2, clip=0.5)
    assert smoothed_RnA.flatten().tolist() == close([0.7, 1.0, 1.0, -1.0])
    assert losses.smoothed_action(action_RnA, noise_RnA, 0.2, 0.3)[0, 1].item() == close(0.8)


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_update_is_that_of_plain_pytorch(reduction):
    m, c, k, w = hand.numbers(hand.M, hand.C, hand.K, hand.CRITICS)
    target_m, target_c, target_k, target_w = hand.numbers(
        TARGET_M, TARGET_C, hand.TARGET_K, hand.TARGET_CRITICS
    )
    observation, action, reward, next_observation, terminated, task = hand.rows()
    stream = Generators(SEED).get("learn", torch.device("cpu"))
    noise = (STD * torch.randn(4, generator=stream)).clip(-CLIP, CLIP)
    assert (noise.abs() < CLIP).any() and (noise.abs() == CLIP).any()
    # the critics and the encoder
    with torch.no_grad():
        next_z = target_k * next_observation
        next_action = torch.tanh(target_m[task] + target_c * next_z) + noise
        next_q = hand.q_values(target_w, next_z, next_action.clip(-1, 1))
        next_q = next_q.amin(0) if reduction == "min" else next_q.mean(0)
        target = reward + hand.DISCOUNT * ~terminated * next_q
    q = hand.q_values(w, k * observation, action)
    critic_loss = hand.task_means(((q - target) ** 2).sum(0)).mean()
    (w, k), _ = hand.descend(critic_loss, w, k)
    # the actor follows the first critic
    z = (k * observation).detach()
    actor_loss = -hand.q_values(w.detach(), z, torch.tanh(m[task] + c * z))[0].mean()
    (m, c), _ = hand.descend(actor_loss, m, c)

    value = partial(Scalar, reduction=reduction)
    options = {"target_std": STD, "target_clip": CLIP, "value": value, "seed": SEED}
    td3 = hand.by_hand(make_td3, **options)
    with torch.no_grad():
        td3.target_actor.m.copy_(torch.tensor(TARGET_M))
        td3.target_actor.c.fill_(TARGET_C)
    td3.training_step(hand.BATCH, 0)
    wanted = {
        "encoder.k": k,
        "actor.m": m,
        "actor.c": c,
        "target_encoder.k": torch.lerp(target_k, k, hand.ENCODER_TAU),
        "target_actor.m": torch.lerp(target_m, m, hand.TAU),
        "target_actor.c": torch.lerp(target_c, c, hand.TAU),
    }
    for i in range(2):
        wanted[f"critic.members.{i}.w"] = w[i]
        wanted[f"target_critic.members.{i}.w"] = torch.lerp(target_w[i], w[i], hand.TAU)
    found = {name: value.tolist() for name, value in td3.state_dict().items()}
    assert found == {name: close(value.tolist()) for name, value in wanted.items()}
    metrics = td3.drain_metrics()
    assert metrics["train/critic_loss"] == close(critic_loss.item())
    assert metrics["train/actor_loss"] == close(actor_loss.item())


# ---- beside Stable-Baselines3 ----


class Layers(Network):
    """Layers of Stable-Baselines3 as a network that does not use the task."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = copy.deepcopy(nn.Sequential(*layers))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BD)


class Box4(gym.Env):
    """Spaces alone: Stable-Baselines3 builds its networks from them."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_the_updates_are_those_of_stable_baselines3(monkeypatch):
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    other = sb3.TD3(
        "MlpPolicy",
        Box4(),
        policy_kwargs={"net_arch": [16, 16]},
        learning_rate=1e-2,
        gamma=0.95,
        tau=0.1,
        target_policy_noise=0.3,
        target_noise_clip=0.4,
        policy_delay=2,
        seed=0,
        device="cpu",
        buffer_size=10,
    )
    other.set_logger(configure(None, []))
    other._n_updates = 1  # so that its first update is one of the actor's, too
    critics = iter([other.critic.qf0, other.critic.qf1])
    td3 = make_td3(
        make_spec(1),
        actor=lambda *sizes: Layers([*other.actor.mu][:-1]),  # without its tanh
        critic=lambda *sizes: Layers(next(critics)),
        discount=0.95,
        tau=0.1,
        target_std=0.3,
        target_clip=0.4,
        actor_max_grad_norm=None,
        critic_max_grad_norm=None,
        actor_optimizer=partial(Adam, lr=1e-2),
        critic_optimizer=partial(Adam, lr=1e-2),
    )
    attach(td3)
    td3.generators.normal_like = lambda _, action_RnA: torch.randn(action_RnA.shape)
    for i in range(5):
        batch = make_batch(td3.spec, rows=32, seed=i)
        samples = ReplayBufferSamples(
            observations=batch.observation_RnD[0],
            actions=batch.action_RnA[0],
            next_observations=batch.next_observation_RnD[0],
            dones=batch.terminated_Rn[0].float()[:, None],
            rewards=batch.reward_Rn[0][:, None],
        )
        monkeypatch.setattr(other.replay_buffer, "sample", lambda *args, s=samples, **kwargs: s)
        for step in (
            lambda: other.train(gradient_steps=1, batch_size=32),
            lambda: td3.training_step(batch, i),  # noqa: B023
        ):
            with torch.random.fork_rng():
                torch.manual_seed(i)
                step()
    for ours, theirs in (
        (td3.actor, other.actor.mu),
        (td3.target_actor, other.actor_target.mu),
        (td3.critic, other.critic.q_networks),
        (td3.target_critic, other.critic_target.q_networks),
    ):
        wanted = [p for network in theirs for p in network.parameters()]
        torch.testing.assert_close(list(ours.parameters()), wanted, rtol=1e-4, atol=1e-6)


# ---- acting ----


def test_each_tasks_environments_have_evenly_spread_deviations():
    std_E = spread_over_environments(torch.tensor([0, 1, 0, 2, 1, 0]), 0.1, 0.5)
    assert std_E.tolist() == close([0.1, 0.1, 0.3, 0.3, 0.5, 0.5])
    std_Rn = spread_over_environments(torch.tensor([[0, 0, 0], [2, 2, 2]]), 0.1, 0.5)
    assert std_Rn.tolist() == [close([0.1, 0.3, 0.5])] * 2


@pytest.mark.parametrize("acting", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_deviations_belong_to_environments_of_all_ranks(acting):
    found = []
    for envs in ([0, 1, 4, 5], [2, 3, 6, 7]):
        td3 = make_td3(exploration_std_min=0.0, exploration_std_max=0.3)
        td3.begin_exploring([0] * 4 + [1] * 4, envs)
        policy = td3.policy(torch.ones(4, 4), torch.tensor(acting))
        found.append(policy.log_std_BA[:, 0].exp().tolist())
    assert found == [close([0.0, 0.1, 0.0, 0.1]), close([0.2, 0.3, 0.2, 0.3])]


def test_exploring_adds_the_noise_of_each_environment():
    td3 = make_td3(exploration_std_min=0.0, exploration_std_max=2.0)
    observation_ED, task_E = np.ones((3, 4), np.float32), np.zeros(3, np.int64)
    with torch.no_grad():
        output_EA = td3.actor(torch.from_numpy(observation_ED), torch.from_numpy(task_E))
    mode_EA = td3.act(observation_ED, task_E, "exploit")
    np.testing.assert_allclose(mode_EA, output_EA.tanh(), rtol=1e-6)
    noise_EA = np.array([[0.5, -1.0], [0.3, -0.2], [3.0, 0.1]], np.float32)
    found_EA = td3.act(observation_ED, task_E, "explore", noise_EA)
    wanted_EA = mode_EA + np.array([[0.0], [1.0], [2.0]]) * noise_EA
    np.testing.assert_allclose(found_EA, wanted_EA.clip(-1, 1), rtol=1e-5, atol=1e-6)
    assert found_EA[2, 0] == 1
