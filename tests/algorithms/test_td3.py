"""TD3's update against plain PyTorch, and its exploration.

What it shares with SAC is tested with SAC; the matrix has both.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import Scalar
from mtrl_lightning.algorithms.td3 import spread_over_environments
from mtrl_lightning.updates.generators import Generators
from tests.helpers import by_hand as hand
from tests.helpers.algorithms import make_td3

STD, CLIP = 0.2, 0.15
TARGET_M, TARGET_C = [1.9, -0.1], -0.4
SEED = 5


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


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
        assert (next_action.abs() > 1).any()
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


def test_each_tasks_environments_have_evenly_spread_deviations():
    std_E = spread_over_environments(torch.tensor([0, 1, 0, 2, 1, 0]), 0.1, 0.5)
    assert std_E.tolist() == close([0.1, 0.1, 0.3, 0.3, 0.5, 0.5])


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
