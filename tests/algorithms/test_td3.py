"""TD3: target, smoothing and losses by hand and beside Stable-Baselines3, exploration, options.

What it shares with SAC is tested with SAC; the matrix has both.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from mtrl_lightning.algorithms import Scalar, losses
from mtrl_lightning.algorithms.td3 import spread_over_environments
from mtrl_lightning.networks import Encoder, Network
from mtrl_lightning.networks.task_axes import TaskAxis
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_spec,
    make_td3,
)
from tests.helpers.sac import HandCritic

DISCOUNT, TAU, LEARNING_RATE = 0.9, 0.25, 0.1
STD, CLIP = 0.2, 0.15
CRITICS = [[0.4, -0.8, 0.1], [0.3, 1.2, -0.2]]
TARGET_CRITICS = [[0.7, -0.3, 0.5], [-0.2, 0.9, 1.1]]
TARGET_M, TARGET_C, TARGET_K = [0.5, -0.1], -0.4, 0.8
NOISE = [[0.4, -2.0], [1.5, 0.1]]
BATCH = TransitionBatch(
    observation_RnD=torch.tensor([[[0.5], [-1.2]], [[0.3], [2.0]]]),
    action_RnA=torch.tensor([[[0.1], [-0.7]], [[0.9], [0.4]]]),
    reward_Rn=torch.tensor([[1.0, -0.5], [2.0, 0.3]]),
    next_observation_RnD=torch.tensor([[[0.7], [-0.9]], [[1.1], [-0.2]]]),
    terminated_Rn=torch.tensor([[False, True], [False, False]]),
    task_Rn=torch.tensor([[0, 0], [1, 1]]),
)
ROWS = [(task, row) for task in range(2) for row in range(2)]
"""Tasks and rows of the batch."""


class HandActor(Network):
    """Outputs ``m_t + c z``."""

    def __init__(self, in_dim: int, out_dim: int, spec: EnvSpec) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor([0.2, -0.6]))
        self.c = nn.Parameter(torch.tensor(0.3))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return (self.m[task_B] + self.c * x_BD[..., 0])[..., None]

    def task_axes(self) -> dict[str, TaskAxis]:
        return {"m": TaskAxis()}


class HandEncoder(Encoder):
    """``z = k s``."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.out_dim = 1
        self.k = nn.Parameter(torch.tensor(1.5))

    def forward(self, observation_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.k * observation_BD


def hand_td3(**options):
    weights = iter(CRITICS)
    sgd = partial(SGD, lr=LEARNING_RATE)
    given = {
        "actor": HandActor,
        "critic": lambda in_dim, out_dim, spec: HandCritic(next(weights)),
        "encoder": HandEncoder,
        "discount": DISCOUNT,
        "tau": TAU,
        "target_std": STD,
        "target_clip": CLIP,
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
        "actor_optimizer": sgd,
        "critic_optimizer": sgd,
    }
    td3 = make_td3(make_spec(2, obs_dim=1, action_dim=1), **{**given, **options})
    with torch.no_grad():
        td3.target_encoder.k.fill_(TARGET_K)
        td3.target_actor.m.copy_(torch.tensor(TARGET_M))
        td3.target_actor.c.fill_(TARGET_C)
        for member, weight in zip(td3.target_critic.members, TARGET_CRITICS, strict=True):
            member.w.copy_(torch.tensor(weight))
    attach(td3)
    td3.generators.normal_like = lambda *_: torch.tensor(NOISE)[..., None]
    return td3


def targets_by_hand(reduction=min):
    found = []
    for task, row in ROWS:
        z = TARGET_K * BATCH.next_observation_RnD[task, row].item()
        noise = max(-CLIP, min(CLIP, STD * NOISE[task][row]))
        action = max(-1.0, min(1.0, math.tanh(TARGET_M[task] + TARGET_C * z) + noise))
        q = reduction([w[0] * z + w[1] * action + w[2] for w in TARGET_CRITICS])
        alive = not BATCH.terminated_Rn[task, row]
        found.append(BATCH.reward_Rn[task, row].item() + DISCOUNT * alive * q)
    return found


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


# ---- by hand ----


def test_the_noise_and_the_smoothed_action_are_clipped():
    action_RnA = torch.tensor([[[0.5], [0.5]], [[0.95], [-0.99]]])
    noise_RnA = torch.tensor([[[1.0], [9.0]], [[1.0], [-9.0]]])
    smoothed_RnA = losses.smoothed_action(action_RnA, noise_RnA, std=0.2, clip=0.5)
    assert smoothed_RnA.shape == action_RnA.shape
    assert smoothed_RnA.flatten().tolist() == close([0.7, 1.0, 1.0, -1.0])
    assert losses.smoothed_action(action_RnA, noise_RnA, 0.2, 0.3)[0, 1].item() == close(0.8)


@pytest.mark.parametrize(
    ("value", "reduction"),
    [(Scalar, min), (partial(Scalar, reduction="mean"), lambda qs: sum(qs) / len(qs))],
)
def test_the_critics_learn_the_target_computed_by_hand(value, reduction):
    td3 = hand_td3(value=value)
    target = td3.critic_target(BATCH, torch.tensor(NOISE)[..., None])
    assert not target.next_output_QRnO.requires_grad and not target.next_cost_Rn.any()
    loss_R, _ = td3.critic_loss(BATCH, target)
    wanted = [0.0, 0.0]
    for (task, row), y in zip(ROWS, targets_by_hand(reduction), strict=True):
        z = 1.5 * BATCH.observation_RnD[task, row].item()
        a = BATCH.action_RnA[task, row].item()
        for w in CRITICS:
            wanted[task] += (w[0] * z + w[1] * a + w[2] - y) ** 2 / 2
    assert loss_R.tolist() == close(wanted)


def test_actor_follows_the_first_critic_and_targets_move():
    td3 = hand_td3()
    td3.training_step(BATCH, 0)
    # the critics and the encoder are those after their own step
    w0, w1, w2 = td3.critic.members[0].w.tolist()
    k = td3.encoder.k.item()
    gradient_m, gradient_c, loss = [0.0, 0.0], 0.0, 0.0
    for task, row in ROWS:
        z = k * BATCH.observation_RnD[task, row].item()
        a = math.tanh([0.2, -0.6][task] + 0.3 * z)
        loss -= (w0 * z + w1 * a + w2) / 4
        slope = -w1 * (1 - a**2) / 4
        gradient_m[task] += slope
        gradient_c += slope * z
    m = [0.2 - LEARNING_RATE * gradient_m[0], -0.6 - LEARNING_RATE * gradient_m[1]]
    c = 0.3 - LEARNING_RATE * gradient_c
    assert td3.actor.m.tolist() == close(m) and td3.actor.c.item() == close(c)
    assert td3.drain_metrics()["train/actor_loss"] == close(loss)
    moved = [old + TAU * (new - old) for old, new in zip(TARGET_M, m, strict=True)]
    assert td3.target_actor.m.tolist() == close(moved)
    assert td3.target_encoder.k.item() == close(TARGET_K + TAU * (k - TARGET_K))
    for member, target, old in zip(
        td3.critic.members, td3.target_critic.members, TARGET_CRITICS, strict=True
    ):
        wanted = [t + TAU * (w - t) for t, w in zip(old, member.w.tolist(), strict=True)]
        assert target.w.tolist() == close(wanted)


def test_actor_and_targets_are_updated_every_second_time():
    td3 = make_td3()
    attach(td3)
    for i in range(4):
        before = copy_of(td3)
        td3.training_step(make_batch(td3.spec, seed=i), i)
        names = {name.split(".")[0] for name in changed(td3, before)}
        delayed = {"actor", "target_actor", "target_critic"} if i % 2 == 0 else set()
        assert names == {"critic"} | delayed


# ---- beside Stable-Baselines3 ----


class Layers(Network):
    """Layers of Stable-Baselines3 as a network that does not use the task."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BD)


def without_tanh(layers: nn.Sequential) -> nn.Sequential:
    assert isinstance(layers[-1], nn.Tanh)
    return layers[:-1]


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

    def copied(layers):
        twin = nn.Sequential(*layers)
        return Layers(copy.deepcopy(twin))

    critics = iter([other.critic.qf0, other.critic.qf1])
    td3 = make_td3(
        make_spec(1),
        actor=lambda in_dim, out_dim, spec: copied(without_tanh(other.actor.mu)),
        critic=lambda in_dim, out_dim, spec: copied(next(critics)),
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
        columns = {
            "observations": batch.observation_RnD[0],
            "actions": batch.action_RnA[0],
            "next_observations": batch.next_observation_RnD[0],
            "dones": batch.terminated_Rn[0].float()[:, None],
            "rewards": batch.reward_Rn[0][:, None],
        }
        samples = ReplayBufferSamples(**columns)
        monkeypatch.setattr(other.replay_buffer, "sample", lambda *args, s=samples, **kwargs: s)
        with torch.random.fork_rng():
            torch.manual_seed(i)
            other.train(gradient_steps=1, batch_size=32)
        with torch.random.fork_rng():
            torch.manual_seed(i)
            td3.training_step(batch, i)
    pairs = [
        (td3.actor, other.actor.mu),
        (td3.target_actor, other.actor_target.mu),
        *zip(td3.critic.members, (other.critic.qf0, other.critic.qf1), strict=True),
        (td3.target_critic.members[0], other.critic_target.qf0),
        (td3.target_critic.members[1], other.critic_target.qf1),
    ]
    for ours, theirs in pairs:
        for parameter, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-6)


# ---- acting ----


def test_each_tasks_environments_have_evenly_spread_deviations():
    std_E = spread_over_environments(torch.tensor([0, 1, 0, 2, 1, 0]), 0.1, 0.5)
    assert std_E.tolist() == close([0.1, 0.1, 0.3, 0.3, 0.5, 0.5])
    std_Rn = spread_over_environments(torch.tensor([[0, 0, 0], [2, 2, 2]]), 0.1, 0.5)
    assert std_Rn.shape == (2, 3)
    assert std_Rn.flatten().tolist() == close([0.1, 0.3, 0.5, 0.1, 0.3, 0.5])


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
    td3 = make_td3(exploration_std_min=0.0, exploration_std_max=0.2)
    task_E = np.array([0] * 3)
    observation_ED = np.ones((3, 4), np.float32)
    mode_EA = td3.act(observation_ED, task_E, "exploit")
    td3.seed_actions(5)
    noise_EA = torch.randn(3, 2, generator=torch.Generator().manual_seed(5)).numpy()
    wanted_EA = mode_EA + np.array([[0.0], [0.1], [0.2]]) * noise_EA
    found_EA = td3.act(observation_ED, task_E, "explore")
    np.testing.assert_allclose(found_EA, wanted_EA.clip(-1, 1), rtol=1e-5, atol=1e-6)
    assert np.array_equal(found_EA[0], mode_EA[0])
    td3.seed_actions(5)
    assert np.array_equal(td3.act(observation_ED, task_E, "explore"), found_EA)
    with torch.no_grad():
        output_BA = td3.actor(torch.tensor(observation_ED), torch.tensor(task_E))
    np.testing.assert_allclose(mode_EA, output_BA.tanh().numpy(), rtol=1e-6)
