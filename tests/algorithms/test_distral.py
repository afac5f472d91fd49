"""Distral's update by hand, its limits, and what trains, acts and sees what."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from mtrl_lightning.algorithms import (
    SAC,
    Categorical,
    Distral,
    FixedTemperature,
    MeanReward,
)
from mtrl_lightning.gradients import Mean, PCGrad
from mtrl_lightning.networks import (
    MixtureOfEncoders,
    MLPEncoder,
    Network,
    Standardize,
    UniformGate,
)
from mtrl_lightning.policy import load_policy
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.generators import Generators
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_distral,
    make_spec,
    small_mlp,
    train,
)
from tests.helpers.checkpoints import save
from tests.helpers.gradients import METHODS
from tests.helpers.padding import NETWORKS
from tests.helpers.sac import BATCH, HandCritic, draw_action

# ---- one update by hand ----

KAPPA = 0.4
OMEGA = 0.3
DISCOUNT = 0.9
LEARNING_RATE = 0.1
SEED = 5
ACTORS = [(0.2, -0.5, 0.3), (-0.6, 0.1, -0.2), (0.1, 0.4, 0.5)]
"""Mean, log standard deviation and slope of two tasks' policies and the distilled one."""
CRITICS = [[0.4, -0.8, 0.1], [0.5, 0.2, 0.3], [0.3, 1.2, -0.2], [-0.1, 0.6, 0.2]]
"""The first critics of both tasks, then the second ones."""
TARGETS = [[0.7, -0.3, 0.5], [0.2, 0.1, -0.4], [-0.2, 0.9, 1.1], [0.6, -0.5, 0.3]]


class HandActor(Network):
    """Mean ``m + c s`` and log standard deviation ``l`` for any task."""

    def __init__(self, numbers) -> None:
        super().__init__()
        self.m, self.l, self.c = (nn.Parameter(torch.tensor(number)) for number in numbers)

    def forward(self, x_BD, task_B):
        mean_B = self.m + self.c * x_BD[..., 0]
        return torch.stack([mean_B, self.l.expand_as(mean_B)], dim=-1)


def hand_distral():
    actors, critics = iter(ACTORS), iter(CRITICS)
    sgd = partial(SGD, lr=LEARNING_RATE)
    distral = Distral(
        make_spec(2, obs_dim=1, action_dim=1),
        actor=lambda *sizes: HandActor(next(actors)),
        critic=lambda *sizes: HandCritic(next(critics)),
        kappa=KAPPA,
        omega=OMEGA,
        discount=DISCOUNT,
        actor_max_grad_norm=None,
        critic_max_grad_norm=None,
        distilled_max_grad_norm=None,
        actor_optimizer=sgd,
        critic_optimizer=sgd,
        distilled_optimizer=sgd,
        seed=SEED,
    )
    networks = [network for critic in distral.target_critic.members for network in critic.networks]
    with torch.no_grad():
        for network, weights in zip(networks, TARGETS, strict=True):
            network.w.copy_(torch.tensor(weights))
    attach(distral)
    return distral


def q_of(weights, observation, action):
    return weights[0] * observation + weights[1] * action + weights[2]


def log_normal(u, mean, log_std):
    return -0.5 * ((u - mean) / math.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)


class ByHand:
    """One update in plain numbers, two rows of each task."""

    def __init__(self) -> None:
        stream = Generators(SEED).get("learn", torch.device("cpu"))
        next_noise, noise = (torch.randn(4, 1, generator=stream)[:, 0].tolist() for _ in range(2))
        rows = list(zip(*(field.flatten(0, 1).tolist() for field in BATCH[:-1]), strict=True))
        m0, l0, c0 = ACTORS[2]

        self.critic_loss = 0.0
        gradient_w = [[0.0] * 3 for _ in CRITICS]
        for ((obs,), (action,), reward, (next_obs,), terminated, task), eps in zip(
            rows, next_noise, strict=True
        ):
            m, log_std, c = ACTORS[task]
            mean = m + c * next_obs
            next_action, log_prob, _, _ = draw_action(mean, log_std, eps)
            u = mean + math.exp(log_std) * eps
            squash = math.log(1 - next_action**2)
            distilled_log_prob = log_normal(u, m0 + c0 * next_obs, l0) - squash
            next_q = min(q_of(TARGETS[i + task], next_obs, next_action) for i in (0, 2))
            value = next_q + KAPPA * distilled_log_prob - (KAPPA + OMEGA) * log_prob
            target = reward + DISCOUNT * (0 if terminated else value)
            for i in (task, task + 2):
                error = q_of(CRITICS[i], obs, action) - target
                self.critic_loss += error**2 / 4  # mean of the tasks' means
                for j, x in enumerate((obs, action, 1.0)):
                    gradient_w[i][j] += 2 * error * x / 2  # of the task's own mean
        self.critics = [
            [v - LEARNING_RATE * g for v, g in zip(w, row, strict=True)]
            for w, row in zip(CRITICS, gradient_w, strict=True)
        ]

        self.actor_loss = 0.0
        self.entropy = 0.0
        gradients = [[0.0] * 3 for _ in range(2)]
        for ((obs,), _, _, _, _, task), eps in zip(rows, noise, strict=True):
            m, log_std, c = ACTORS[task]
            mean = m + c * obs
            a, log_prob, da, dlog_prob = draw_action(mean, log_std, eps)
            std = math.exp(log_std)
            u = mean + std * eps
            mean0 = m0 + c0 * obs
            distilled_log_prob = log_normal(u, mean0, l0) - math.log(1 - a**2)
            q, slope = min(
                (q_of(self.critics[i], obs, a), self.critics[i][1]) for i in (task, task + 2)
            )
            loss = (KAPPA + OMEGA) * log_prob - KAPPA * distilled_log_prob - q
            self.actor_loss += loss / 4
            self.entropy -= log_prob / 4
            by_u = -(u - mean0) / math.exp(l0) ** 2 + 2 * a  # of log pi_0(a), through the action
            du = (1.0, std * eps)
            to_mean, to_log_std = (
                (KAPPA + OMEGA) * dlog_prob[k] - KAPPA * by_u * du[k] - slope * da[k]
                for k in range(2)
            )
            for j, g in enumerate((to_mean, to_log_std, to_mean * obs)):
                gradients[task][j] += g / 2
        self.actors = [
            [v - LEARNING_RATE * g for v, g in zip(numbers, row, strict=True)]
            for numbers, row in zip(ACTORS[:2], gradients, strict=True)
        ]

        self.kl_T = [0.0, 0.0]
        gradient = [0.0] * 3
        for (obs,), _, _, _, _, task in rows:
            m, log_std, c = self.actors[task]  # after their step
            variance, variance0 = math.exp(2 * log_std), math.exp(2 * l0)
            shift = m + c * obs - (m0 + c0 * obs)
            kl = l0 - log_std + (variance + shift**2) / (2 * variance0) - 0.5
            self.kl_T[task] += kl / 2
            to_mean = -shift / variance0
            to_log_std = 1 - (variance + shift**2) / variance0
            for j, g in enumerate((to_mean, to_log_std, to_mean * obs)):
                gradient[j] += g / 4  # of the mean over the tasks
        self.distilled = [v - LEARNING_RATE * g for v, g in zip(ACTORS[2], gradient, strict=True)]


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


def numbers_of(network):
    return [parameter.item() for parameter in (network.m, network.l, network.c)]


def test_an_update_is_the_one_computed_by_hand():
    wanted = ByHand()
    distral = hand_distral()
    distral.training_step(BATCH, 0)
    found = [network.w.tolist() for critic in distral.critic.members for network in critic.networks]
    for weights, other in zip(found, wanted.critics, strict=True):
        assert weights == close(other)
    for network, other in zip(distral.actor.networks, wanted.actors, strict=True):
        assert numbers_of(network) == close(other)
    assert numbers_of(distral.distilled.network) == close(wanted.distilled)
    metrics = distral.drain_metrics()
    kl = sum(wanted.kl_T) / 2
    expected = {
        "train/critic_loss": wanted.critic_loss,
        "train/actor_loss": wanted.actor_loss,
        "train/entropy": wanted.entropy,
        "train/distilled_loss": kl,
        "train/distral_kl": kl,
        "train/distral_kl/task-0": wanted.kl_T[0],
        "train/distral_kl/task-1": wanted.kl_T[1],
    }
    assert {name: metrics[name] for name in expected} == close(expected)
    others = {"train/q", *(f"train/{name}_grad_norm" for name in ("critic", "actor", "distilled"))}
    assert set(metrics) == {*expected, *others}


# ---- the limits of kappa ----


def rows_of(batch, index):
    """Return a task's rows, as a batch of this task alone."""
    columns = [column[index : index + 1] for column in batch[:6]]
    return TransitionBatch(*columns)._replace(task_Rn=torch.zeros_like(columns[5]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"actor_every": 2, "value": partial(Categorical, num_bins=11), "num_critics": 1},
        {"actor": NETWORKS["multi_head"], "critic": NETWORKS["paco"], "actor_gradient": PCGrad},
    ],
)
def test_with_kappa_0_each_task_has_a_separate_sac(options):
    """Each task's own SAC has the same weights at first, the same rows and the same noise.

    A product of several tasks rounds as that of one task on most processors, and not on all.
    """
    rows = 5
    distral = make_distral(kappa=0.0, omega=0.2, **options)
    alone = []
    for place in range(3):
        own = {name: value for name, value in options.items() if name != "actor_gradient"}
        given = {"actor": small_mlp, "critic": small_mlp, **own}
        sac = SAC(make_spec(1), temperature=partial(FixedTemperature, value=0.2), **given)
        pairs = [(sac.actor, distral.actor.networks[place])]
        for name in ("critic", "target_critic"):
            pairs += zip(
                getattr(sac, name).members,
                [member.networks[place] for member in getattr(distral, name).members],
                strict=True,
            )
        for network, other in pairs:
            network.load_state_dict(other.state_dict())
        attach(sac)
        alone.append((sac, pairs))
    attach(distral)
    for i in range(6):
        batch = make_batch(distral.spec, rows, seed=i)
        generator = torch.Generator().manual_seed(i)
        noises = [torch.randn(batch.action_RnA.shape, generator=generator) for _ in range(2)]
        given = iter(noises)
        distral.generators.normal_like = lambda *_, given=given: next(given)
        distral.training_step(batch, i)
        for place, (sac, _) in enumerate(alone):
            own = iter([noise[place : place + 1] for noise in noises])
            sac.generators.normal_like = lambda *_, own=own: next(own)
            sac.training_step(rows_of(batch, place), i)
    for _, pairs in alone:
        for network, other in pairs:
            torch.testing.assert_close(
                dict(network.named_parameters()),
                dict(other.named_parameters()),
                rtol=1e-5,
                atol=1e-6,
            )
    metrics = [sac.drain_metrics()["train/entropy"] for sac, _ in alone]
    assert distral.drain_metrics()["train/entropy"] == pytest.approx(sum(metrics) / 3, rel=1e-5)


# ---- who sees and trains what ----


@pytest.mark.parametrize("architecture", ["mlp", "multi_head", "moore", "separate"])
def test_no_network_depends_on_the_task(architecture):
    network = NETWORKS[architecture]
    distral = make_distral(actor=network, critic=network)
    observation_BD = torch.randn(6, 4)
    policies = [distral.distilled_policy(observation_BD, torch.full((6,), t)) for t in range(3)]
    for policy in policies[1:]:
        assert torch.equal(policy.mean_BA, policies[0].mean_BA)
        assert torch.equal(policy.log_std_BA, policies[0].log_std_BA)
    alone = SAC(make_spec(1), actor=network, critic=network)

    def shapes(module):
        return [parameter.shape for parameter in module.parameters()]

    for member in (*distral.actor.networks, distral.distilled.network):
        assert shapes(member) == shapes(alone.actor)
    for critic in distral.critic.members:
        assert [shapes(member) for member in critic.networks] == [
            shapes(alone.critic.members[0]) for _ in range(3)
        ]


OBSERVATION_ED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize("encoder", [Standardize, partial(MLPEncoder, width=8, out_dim=5)])
def test_the_distilled_policy_acts_on_tasks_that_are_not_trained(tmp_path, encoder):
    spec = make_spec(4, train_tasks=(0, 2))
    distral = train(make_distral(spec, encoder=encoder), 3)
    task_E = np.array([0, 1, 2, 3, 3, 1])
    action_EA = distral.act(OBSERVATION_ED, task_E, "exploit")
    with torch.no_grad():
        z_BZ = distral.encoder.shared_features(
            torch.from_numpy(OBSERVATION_ED), torch.from_numpy(task_E)
        )
        distilled_EA = distral.distilled(z_BZ)[:, :2].tanh().numpy()
        own_EA = [
            distral.actor.networks[place](z_BZ, torch.zeros(6, dtype=torch.int64))[:, :2].tanh()
            for place in range(2)
        ]
    for row, task in enumerate(task_E):
        wanted = own_EA[task // 2].numpy() if task in (0, 2) else distilled_EA
        np.testing.assert_allclose(action_EA[row], wanted[row], rtol=1e-5, atol=1e-6)
    assert distral.untrained.summary == (
        "Evaluated without training: task-1, task-3. The distilled policy acts on them"
    )
    assert make_distral().untrained.summary == ""
    policy = load_policy(save(distral, tmp_path), trust=["tests"])
    assert np.array_equal(policy.act(OBSERVATION_ED, task_E), action_EA)
    assert np.array_equal(distral.act(OBSERVATION_ED[:1], np.array([3]), "exploit")[0].shape, (2,))


# ---- parts ----


@pytest.mark.parametrize(("method", "architecture"), list(zip(METHODS, NETWORKS, strict=True)))
def test_architectures_learn_with_every_gradient_method(method, architecture):
    network = NETWORKS[architecture]
    gradient = METHODS[method]
    distral = make_distral(
        actor=network, critic=network, actor_gradient=gradient, critic_gradient=gradient
    )
    before = copy_of(distral)
    train(distral, 2)
    assert all(math.isfinite(value) for value in distral.drain_metrics().values())
    moved = changed(distral, before)
    for part in ("actor.members.task-0.", "actor.members.task-2.", "critic.", "distilled."):
        assert any(name.startswith(part) for name in moved), part
    parameters = distral.distilled_update.task_parameters
    assert parameters.own == [] and parameters.shared == list(distral.distilled.parameters())
    assert distral.distilled_update.method is distral.actor_gradient
    assert type(distral.critic_update.method) is Mean, "the critics share nothing"


def test_shared_encoder_learns_with_the_critics_gradient_method():
    encoder = partial(
        MixtureOfEncoders, num_experts=2, assignment=UniformGate, width=6, depth=1, out_dim=5
    )
    distral = make_distral(encoder=encoder, critic_gradient=PCGrad, reward_scale=MeanReward)
    assert distral.critic_update.method is distral.critic_gradient
    assert distral.critic_update.task_parameters.shared == list(distral.encoder.parameters())
    before = copy_of(distral.encoder)
    train(distral, 2)
    assert changed(distral.encoder, before) == set(before)
    observation_BD = make_batch(distral.spec).observation_RnD.flatten(0, 1)
    tasks = (torch.full((len(observation_BD),), task) for task in range(2))
    policies = [distral.distilled_policy(observation_BD, task_B) for task_B in tasks]
    torch.testing.assert_close(policies[0].mean_BA, policies[1].mean_BA)


def test_the_gradient_of_each_task_is_clipped_apart():
    unit = partial(SGD, lr=1.0)
    distral = make_distral(
        actor_optimizer=unit, actor_max_grad_norm=1e-3, critic_optimizer=unit, omega=1.0
    )
    before = copy_of(distral)
    train(distral, 1)
    for place, network in enumerate(distral.actor.networks):
        squares = [
            (p.detach() - before[f"actor.members.task-{place}.network.{name}"])
            .double()
            .square()
            .sum()
            for name, p in network.named_parameters()
        ]
        assert math.sqrt(sum(squares)) == pytest.approx(1e-3, rel=2e-3)
    assert distral.drain_metrics()["train/actor_grad_norm"] > 0.01, "before it is clipped"
