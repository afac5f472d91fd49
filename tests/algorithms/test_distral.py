"""Distral's update against plain PyTorch, and what trains, acts and sees what."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence
from torch.optim import SGD

from mtrl_lightning.algorithms import MeanReward
from mtrl_lightning.gradients import Mean, PCGrad
from mtrl_lightning.networks import (
    MixtureOfEncoders,
    MLPEncoder,
    Standardize,
    UniformGate,
)
from tests.helpers import plain
from tests.helpers.algorithms import (
    OBSERVATION_ED,
    changed,
    copy_of,
    make_batch,
    make_distral,
    make_spec,
    train,
)

KAPPA, OMEGA = 0.4, 0.3


def close(value):
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def test_update_is_that_of_plain_pytorch():
    """First critics and encoder, then the policies, then the distilled one."""
    distral, parts = plain.prepared(
        make_distral,
        kappa=KAPPA,
        omega=OMEGA,
        distilled_max_grad_norm=None,
        distilled_optimizer=plain.sgd,
    )
    actors, distilled = parts["actor"].networks, parts["distilled"].network
    encoder, target_encoder = parts["encoder"], parts["target_encoder"]
    critics, target_critics = (
        list(zip(*(member.networks for member in parts[name].members), strict=True))
        for name in ("critic", "target_critic")
    )
    batch = make_batch(distral.spec)
    next_noise_RnA, noise_RnA = plain.noises(batch.action_RnA)
    distral.training_step(batch, 0)
    none_n = torch.zeros(batch.task_Rn.shape[1], dtype=torch.int64)

    def draw(task, z_nZ, noise_nA):
        """Actions, their log densities, and ``kappa log pi_0 - (kappa + omega) log pi``."""
        action_nA, log_prob_n = plain.squashed(actors[task](z_nZ, none_n), noise_nA)
        mean_nA, log_std_nA = distilled(z_nZ, none_n).detach().chunk(2, -1)
        density = TransformedDistribution(Normal(mean_nA, log_std_nA.exp()), TanhTransform())
        distilled_n = density.log_prob(action_nA).sum(-1)
        return action_nA, log_prob_n, KAPPA * distilled_n - (KAPPA + OMEGA) * log_prob_n

    losses = []
    for t in range(3):
        with torch.no_grad():
            next_nD = batch.next_observation_RnD[t]
            action_nA, _, bonus_n = draw(t, encoder(next_nD, none_n), next_noise_RnA[t])
            z_nZ = target_encoder(next_nD, none_n)
            value_n = plain.values(target_critics[t], z_nZ, action_nA, none_n).amin(0) + bonus_n
            target_n = batch.reward_Rn[t] + plain.DISCOUNT * ~batch.terminated_Rn[t] * value_n
        z_nZ = encoder(batch.observation_RnD[t], none_n)
        q_Qn = plain.values(critics[t], z_nZ, batch.action_RnA[t], none_n)
        losses.append((q_Qn - target_n).square().sum(0).mean())
    # a task's own networks learn from its own loss alone
    plain.descend(sum(losses), parts["critic"], encoder)
    metrics = {"train/critic_loss": sum(losses) / 3}

    log_probs, losses = [], []
    for t in range(3):
        z_nZ = encoder(batch.observation_RnD[t], none_n).detach()
        action_nA, log_prob_n, bonus_n = draw(t, z_nZ, noise_RnA[t])
        smallest_n = plain.values(critics[t], z_nZ, action_nA, none_n).amin(0)
        losses.append((-bonus_n - smallest_n).mean())
        log_probs.append(log_prob_n)
    plain.descend(sum(losses), parts["actor"])
    metrics |= {"train/actor_loss": sum(losses) / 3}
    metrics |= {"train/entropy": -torch.stack(log_probs).mean()}

    losses = []
    for t in range(3):
        z_nZ = encoder(batch.observation_RnD[t], none_n).detach()
        outputs = actors[t](z_nZ, none_n).detach(), distilled(z_nZ, none_n)
        means = [output_nO.chunk(2, -1) for output_nO in outputs]
        normals = [Normal(mean_nA, log_std_nA.exp()) for mean_nA, log_std_nA in means]
        losses.append(kl_divergence(*normals).sum(-1).mean())
        metrics[f"train/distral_kl/task-{t}"] = losses[-1]
    plain.descend(sum(losses) / 3, parts["distilled"])
    metrics |= dict.fromkeys(("train/distilled_loss", "train/distral_kl"), sum(losses) / 3)
    plain.move_targets(parts)
    plain.assert_same_weights(distral, parts)
    found = distral.drain_metrics()
    wanted = {name: value.item() for name, value in metrics.items()}
    assert {name: found.pop(name) for name in wanted} == close(wanted)
    others = {f"train/{name}_grad_norm" for name in ("critic", "actor", "distilled")}
    assert set(found) == {"train/q", *others}


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
