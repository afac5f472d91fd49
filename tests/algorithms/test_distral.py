"""Distral's update against plain PyTorch, and what trains, acts and sees what."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence
from torch.optim import SGD

from mtrl_lightning.algorithms import MeanReward
from mtrl_lightning.gradients import Mean, PCGrad
from mtrl_lightning.networks import (
    MixtureOfEncoders,
    MLPEncoder,
    Network,
    Standardize,
    UniformGate,
)
from mtrl_lightning.updates.generators import Generators
from tests.helpers import by_hand as hand
from tests.helpers.algorithms import (
    OBSERVATION_ED,
    attach,
    changed,
    copy_of,
    make_distral,
    make_spec,
    train,
)

# ---- one update ----

KAPPA, OMEGA = 0.4, 0.3
SEED = 5
ACTORS = [[0.2, -0.5, 0.3], [-0.6, 0.1, -0.2], [0.1, 0.4, 0.5]]
"""Mean, log standard deviation and slope of two tasks' policies and the distilled one."""
CRITICS = [[[0.4, -0.8, 0.1], [0.5, 0.2, 0.3]], [[0.3, 1.2, -0.2], [-0.1, 0.6, 0.2]]]
"""The first critics of both tasks, then the second ones."""
TARGETS = [[[0.7, -0.3, 0.5], [0.2, 0.1, -0.4]], [[-0.2, 0.9, 1.1], [0.6, -0.5, 0.3]]]


class HandActor(Network):
    """Mean ``w0 + w2 s`` and log standard deviation ``w1`` for any task."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weights))

    def forward(self, x_BD, task_B):
        return torch.stack(mean_and_log_std(self.w, x_BD[..., 0]), dim=-1)


def mean_and_log_std(w, x):
    mean = w[..., 0] + w[..., 2] * x
    return mean, w[..., 1].expand_as(mean)


class PlainUpdate:
    """First the critics, then the policies, then the distilled one: each task has networks."""

    def __init__(self) -> None:
        actors, distilled, w = hand.numbers(ACTORS[:2], ACTORS[2], CRITICS)
        (target_w,) = hand.numbers(TARGETS)
        observation, action, reward, next_observation, terminated, task = hand.rows()
        stream = Generators(SEED).get("learn", torch.device("cpu"))
        next_noise, noise = (torch.randn(4, 1, generator=stream).flatten() for _ in range(2))

        def policies(actors, x):
            return mean_and_log_std(actors[task], x), mean_and_log_std(distilled, x)

        def draw(x, noise):
            """Actions, their log densities, and ``kappa log pi_0 - (kappa + omega) log pi``."""
            own, (mean, log_std) = policies(actors, x)
            action, log_prob = hand.squashed(*own, noise)
            density = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
            distilled_log_prob = density.log_prob(action)
            return action, log_prob, KAPPA * distilled_log_prob - (KAPPA + OMEGA) * log_prob

        def smallest(w, x, action):
            return torch.stack(
                [hand.q_values(w[:, t], x, action)[:, row] for row, t in enumerate(task)], 1
            )

        with torch.no_grad():
            next_action, _, bonus = draw(next_observation, next_noise)
            next_q = smallest(target_w, next_observation, next_action).amin(0)
            target = reward + hand.DISCOUNT * ~terminated * (next_q + bonus)
        q = smallest(w, observation, action)
        self.critic_loss_R = hand.task_means(((q - target) ** 2).sum(0))
        # a task's own networks learn from its own loss alone
        (self.critics,), _ = hand.descend(self.critic_loss_R.sum(), w)

        action, log_prob, bonus = draw(observation, noise)
        q = smallest(self.critics.detach(), observation, action).amin(0)
        self.actor_loss_R = hand.task_means(-bonus - q)
        self.entropy = -log_prob.mean().item()
        (self.actors,), _ = hand.descend(self.actor_loss_R.sum(), actors)

        own, zero = policies(self.actors.detach(), observation)
        normals = [Normal(mean, log_std.exp()) for mean, log_std in (own, zero)]
        self.kl_R = hand.task_means(kl_divergence(*normals))
        (self.distilled,), _ = hand.descend(self.kl_R.mean(), distilled)


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


def test_update_is_that_of_plain_pytorch():
    wanted = PlainUpdate()
    actors, critics = iter(ACTORS), iter([*CRITICS[0], *CRITICS[1]])
    sgd = partial(SGD, lr=hand.LEARNING_RATE)
    distral = make_distral(
        make_spec(2, obs_dim=1, action_dim=1),
        actor=lambda *sizes: HandActor(next(actors)),
        critic=lambda *sizes: hand.HandCritic(next(critics)),
        kappa=KAPPA,
        omega=OMEGA,
        discount=hand.DISCOUNT,
        actor_max_grad_norm=None,
        critic_max_grad_norm=None,
        distilled_max_grad_norm=None,
        actor_optimizer=sgd,
        critic_optimizer=sgd,
        distilled_optimizer=sgd,
        seed=SEED,
    )
    attach(distral)
    with torch.no_grad():
        for critic, weights in zip(distral.target_critic.members, TARGETS, strict=True):
            for network, weight in zip(critic.networks, weights, strict=True):
                network.w.copy_(torch.tensor(weight))
    distral.training_step(hand.BATCH, 0)
    for i, critic in enumerate(distral.critic.members):
        for t, network in enumerate(critic.networks):
            assert network.w.tolist() == close(wanted.critics[i, t].tolist())
    for t, network in enumerate(distral.actor.networks):
        assert network.w.tolist() == close(wanted.actors[t].tolist())
    assert distral.distilled.network.w.tolist() == close(wanted.distilled.tolist())
    metrics = distral.drain_metrics()
    kl = wanted.kl_R.mean().item()
    expected = {
        "train/critic_loss": wanted.critic_loss_R.mean().item(),
        "train/actor_loss": wanted.actor_loss_R.mean().item(),
        "train/entropy": wanted.entropy,
        "train/distilled_loss": kl,
        "train/distral_kl": kl,
        "train/distral_kl/task-0": wanted.kl_R[0].item(),
        "train/distral_kl/task-1": wanted.kl_R[1].item(),
    }
    assert {name: metrics[name] for name in expected} == close(expected)
    others = {"train/q", *(f"train/{name}_grad_norm" for name in ("critic", "actor", "distilled"))}
    assert set(metrics) == {*expected, *others}


# ---- who sees and trains what ----


@pytest.mark.parametrize("encoder", [Standardize, partial(MLPEncoder, width=8, out_dim=5)])
def test_the_distilled_policy_acts_on_tasks_that_are_not_trained(encoder):
    distral = train(make_distral(make_spec(4, train_tasks=(0, 2)), encoder=encoder), 3)
    task_E = np.array([0, 1, 2, 3, 3, 1])
    action_EA = distral.act(OBSERVATION_ED, task_E, "exploit")
    with torch.no_grad():
        given = torch.from_numpy(OBSERVATION_ED), torch.from_numpy(task_E)
        z_BZ = distral.encoder.shared_features(*given)
        distilled_EA = distral.distilled(z_BZ)[:, :2].tanh()
        any_task = torch.zeros(6, dtype=torch.int64)
        own_EA = [net(z_BZ, any_task)[:, :2].tanh() for net in distral.actor.networks]
    for row, task in enumerate(task_E):
        wanted = own_EA[task // 2] if task in (0, 2) else distilled_EA
        np.testing.assert_allclose(action_EA[row], wanted[row], rtol=1e-5, atol=1e-6)


def test_gradient_methods_combine_what_the_tasks_share():
    encoder = partial(
        MixtureOfEncoders, num_experts=2, assignment=UniformGate, width=6, depth=1, out_dim=5
    )
    methods = {"actor_gradient": PCGrad, "critic_gradient": PCGrad}
    distral = make_distral(encoder=encoder, reward_scale=MeanReward, **methods)
    for update, method, network in (
        (distral.critic_update, distral.critic_gradient, distral.encoder),
        (distral.distilled_update, distral.actor_gradient, distral.distilled),
    ):
        assert update.method is method
        assert update.task_parameters.shared == list(network.parameters())
    before = copy_of(distral.encoder)
    train(distral, 2)
    assert changed(distral.encoder, before) == set(before)
    # without an encoder, the critics share nothing
    assert type(make_distral(**methods).critic_update.method) is Mean


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_the_gradient_of_each_task_is_clipped_separately(part):
    options = {f"{part}_optimizer": partial(SGD, lr=1.0), f"{part}_max_grad_norm": 1e-3}
    distral = make_distral(omega=1.0, **options)
    before = copy_of(distral)
    train(distral, 1)
    steps = {name: p.detach() - before[name] for name, p in distral.named_parameters()}
    for task in distral.spec.task_names:
        own = [
            step.flatten()
            for name, step in steps.items()
            if name.startswith(f"{part}.") and f".{task}." in name
        ]
        assert torch.cat(own).norm().item() == pytest.approx(1e-3, rel=2e-3)
    assert distral.drain_metrics()[f"train/{part}_grad_norm"] > 0.01, "before it is clipped"
