"""Updates of SAC, TD3 and Distral against plain PyTorch, and what trains, acts, draws."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence
from torch.optim import SGD

from mtrl_lightning.algorithms import ManualWeights, MeanReward, Scalar
from mtrl_lightning.algorithms.td3 import spread_over_environments
from mtrl_lightning.auxiliaries import Auxiliary, LossInputs, Reconstruction
from mtrl_lightning.gradients import Mean, PCGrad
from mtrl_lightning.networks import MLP, Embedding, MLPEncoder, MultiHead, Standardize
from mtrl_lightning.networks.network import shared_parameters
from mtrl_lightning.utils.devices import CPU
from tests.helpers import plain
from tests.helpers.algorithms import (
    FULL,
    OBSERVATION_ED,
    TASK_E,
    changed,
    copy_of,
    make_batch,
    make_distral,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
    train,
)

still = partial(SGD, lr=0.0)


def test_sac_updates_as_plain_pytorch():
    """First critics and encoder, then the actor on their new weights, then the rest."""
    weighting = partial(ManualWeights, weights={"task-0": 4.0})
    options = {"temperature_optimizer": plain.sgd, "task_weighting": weighting}
    sac, parts = plain.prepared(make_sac, encoder_tau=0.5, **options)
    with torch.no_grad():
        for temperature in (sac.temperature, parts["temperature"]):
            temperature.log_alpha.copy_(torch.tensor([0.5, 0.2, 0.9]).log())
        sac.target_entropy_T.copy_(torch.tensor([-0.7, -0.3, -1.0]))
    actor, critic, encoder = (parts[name] for name in ("actor", "critic", "encoder"))
    log_alpha_T = parts["temperature"].log_alpha
    alpha_R1 = log_alpha_T.detach().exp()[:, None].clone()
    weight_R = torch.tensor([2.0, 0.5, 0.5])
    batch = make_batch(sac.spec)
    task_Rn = batch.task_Rn
    next_noise_RnA, noise_RnA = plain.noises(batch.action_RnA)
    sac.training_step(batch, 0)

    with torch.no_grad():
        output_RnO = actor(encoder(batch.next_observation_RnD, task_Rn), task_Rn)
        action_RnA, log_prob_Rn = plain.squashed(output_RnO, next_noise_RnA)
        z_RnZ = parts["target_encoder"](batch.next_observation_RnD, task_Rn)
        next_q_QRn = plain.values(parts["target_critic"].members, z_RnZ, action_RnA, task_Rn)
        value_Rn = next_q_QRn.amin(0) - alpha_R1 * log_prob_Rn
        target_Rn = batch.reward_Rn + plain.DISCOUNT * ~batch.terminated_Rn * value_Rn
    z_RnZ = encoder(batch.observation_RnD, task_Rn)
    q_QRn = plain.values(critic.members, z_RnZ, batch.action_RnA, task_Rn)
    critic_loss_R = (q_QRn - target_Rn).square().sum(0).mean(1)
    critic_norm = plain.descend((weight_R * critic_loss_R).mean(), critic, encoder)

    z_RnZ = encoder(batch.observation_RnD, task_Rn).detach()
    action_RnA, log_prob_Rn = plain.squashed(actor(z_RnZ, task_Rn), noise_RnA)
    smallest_Rn = plain.values(critic.members, z_RnZ, action_RnA, task_Rn).amin(0)
    actor_loss_R = (alpha_R1 * log_prob_Rn - smallest_Rn).mean(1)
    actor_norm = plain.descend((weight_R * actor_loss_R).mean(), actor)

    miss_R = log_prob_Rn.detach().mean(1) + sac.target_entropy_T
    temperature_loss = -(log_alpha_T * miss_R).mean()
    plain.descend(temperature_loss, parts["temperature"])
    plain.move_targets(parts, encoder_tau=0.5)
    plain.assert_same_weights(sac, parts)
    alphas = log_alpha_T.exp().tolist()
    wanted = {
        "train/critic_loss": critic_loss_R.mean().item(),
        "train/q": q_QRn.mean().item(),
        "train/critic_grad_norm": critic_norm,
        "train/actor_loss": actor_loss_R.mean().item(),
        "train/actor_grad_norm": actor_norm,
        "train/temperature_loss": temperature_loss.item(),
        "train/entropy": -log_prob_Rn.mean().item(),
        **{f"train/temperature/task-{task}": alphas[task] for task in range(3)},
    }
    assert sac.drain_metrics() == pytest.approx(wanted, rel=1e-4)
    assert sac.drain_metrics() == {}


def test_gradient_methods_get_trained_tasks_and_shared_weights():
    sac = train(make_sac(make_spec(4, train_tasks=(0, 2, 3)), **FULL), 1)
    critics = [p for member in sac.critic.members for p in shared_parameters(member)]
    for update, shared, num_last in (
        (sac.critic_update, [*sac.encoder.parameters(), *critics], 2),
        (sac.actor_update, shared_parameters(sac.actor), 1),
    ):
        found = update.task_parameters
        assert list(map(id, found.shared)) == list(map(id, shared))
        # the last hidden layers, before the heads
        assert [p.shape for p in found.last_shared] == [(16, 16)] * num_last
    alphas = sac.temperature.values().tolist()
    assert [alpha == 1 for alpha in alphas] == [False, True, False, False]


def test_what_a_network_freezes_stays_frozen():
    sac = make_sac(conditioning=lambda spec: Embedding(spec).requires_grad_(False))
    tables = nn.ModuleList(net.conditioning for net in (sac.actor, *sac.critic.members))
    before = copy_of(tables)
    train(sac, 3)
    assert changed(tables, before) == set()
    assert not any(parameter.requires_grad for parameter in tables.parameters())


@pytest.mark.parametrize(
    ("optimizer", "moved"),
    [
        ({}, {"critic": "23456789", "encoder": "23456789", "target_critic": "2468"}),
        # only the auxiliary trains the encoder
        ({"critic_optimizer": still}, {"critic": "", "encoder": "48", "target_critic": ""}),
    ],
)
def test_parts_are_updated_at_their_intervals(optimizer, moved):
    auxiliaries = [partial(Reconstruction, every=4)]
    sac = make_sac(actor_every=3, target_every=2, auxiliaries=auxiliaries, **FULL, **optimizer)
    sac.counters.updates = 2
    wanted = {"actor": "369", "temperature": "369", "auxiliaries": "48", **moved}
    seen = dict.fromkeys(wanted, "")
    for i in range(2, 10):
        before = copy_of(sac)
        train(sac, 1, first=i)
        names = {name.split(".")[0] for name in changed(sac, before)}
        for part in names & wanted.keys():
            seen[part] += str(i)
    assert seen == wanted


@pytest.mark.parametrize("limits", [(None, None), (1e-3, None), (None, 1e-3), (1e6, 1e6)])
def test_gradients_of_critics_and_actor_are_clipped_separately(limits):
    unit = partial(SGD, lr=1.0)
    sac = make_sac(
        critic_optimizer=unit,
        actor_optimizer=unit,
        critic_max_grad_norm=limits[0],
        actor_max_grad_norm=limits[1],
        **FULL,
    )
    before = copy_of(sac)
    train(sac, 1)
    metrics = sac.drain_metrics()
    # the critics' gradient is that of critics and encoder together
    parts = {"critic": ("critic.", "encoder."), "actor": ("actor.",)}
    for (name, prefixes), limit in zip(parts.items(), limits, strict=True):
        norm = metrics[f"train/{name}_grad_norm"]
        assert norm > 0.01, "the metric is the norm before clipping"
        steps = [
            (parameter - before[key]).flatten()
            for key, parameter in sac.named_parameters()
            if key.startswith(prefixes)
        ]
        wanted = min(norm, limit or math.inf)
        assert torch.cat(steps).norm().item() == pytest.approx(wanted, rel=2e-3)


def test_auxiliary_follows_its_mean_loss_with_adam():
    auxiliaries = [partial(Reconstruction, learning_rate=0.02, weight_decay=0.0)]
    sac = make_sac(critic_optimizer=still, auxiliaries=auxiliaries, **FULL)
    alone, encoder = copy.deepcopy(sac.auxiliaries[0]), copy.deepcopy(sac.encoder)
    parameters = [*encoder.parameters(), *alone.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02, fused=True)
    for i in range(3):
        optimizer.zero_grad()
        alone.loss(make_batch(sac.spec, seed=i), LossInputs(encoder, None, None)).mean().backward()
        optimizer.step()
    train(sac, 3)
    assert changed(sac.auxiliaries[0], copy_of(alone)) == set()
    assert changed(sac.encoder, copy_of(encoder)) == set()


class Noting(Auxiliary):
    """Notes what it is called with."""

    def loss(self, batch, inputs):
        self.inputs = inputs
        return inputs.encoder(batch.observation_RnD, batch.task_Rn).square().mean((1, 2))

    def metrics(self):
        return {"every": torch.tensor(float(self.every))}


def test_auxiliaries_of_one_class_have_separate_generators():
    sac = train(make_sac(auxiliaries=[Noting, partial(Noting, every=2)], **FULL), 3)
    for i, auxiliary in enumerate(sac.auxiliaries):
        encoder, target_encoder, generator = auxiliary.inputs
        assert encoder is sac.encoder and target_encoder is sac.target_encoder
        assert generator is sac.generators.get(f"auxiliary_{i}", CPU)
    assert sac.generators.per_rank >= {"auxiliary_0", "auxiliary_1"}
    metrics = sac.drain_metrics()
    assert (metrics["train/every_0"], metrics["train/every_1"]) == (1.0, 2.0)
    assert {"train/noting_0_loss", "train/noting_1_loss"} <= metrics.keys()


@pytest.mark.parametrize("target_every", [1, 4])
def test_a_batch_is_observed_once_and_targets_use_its_statistics(target_every):
    sac = make_sac(encoder=partial(Standardize, num_updates=2), target_every=target_every)
    means = []
    sac.target_critic.register_forward_pre_hook(
        lambda *_: means.append(sac.target_encoder.mean_D.clone())
    )
    train(sac, 3)
    rows = [make_batch(sac.spec, seed=i).observation_RnD.flatten(0, 1) for i in range(3)]
    for num_seen, mean_D in zip((1, 2, 2), means, strict=True):
        torch.testing.assert_close(mean_D, torch.cat(rows[:num_seen]).mean(0))


def test_exploring_squashes_mean_plus_noise_of_clamped_std():
    sac = make_sac(log_std_min=0.5, log_std_max=0.7)
    with torch.no_grad():
        output_EO = sac.actor(torch.from_numpy(OBSERVATION_ED), torch.from_numpy(TASK_E))
    mean_EA, log_std_EA = output_EO.chunk(2, 1)
    assert (log_std_EA < 0.5).any() and (log_std_EA > 0.7).any()
    sac.seed_actions(5)
    noise_EA = torch.randn(6, 2, generator=torch.Generator().manual_seed(5))
    for mode, wanted in (
        ("explore", (mean_EA + log_std_EA.clamp(0.5, 0.7).exp() * noise_EA).tanh()),
        ("exploit", mean_EA.tanh()),
    ):
        found = sac.act(OBSERVATION_ED, TASK_E, mode)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["explore", "exploit"])
@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
@pytest.mark.parametrize(
    ("task_E", "other", "rows"),
    [([0, 0, 2, 2], 1, (2, 2)), ([1, 1, 1, 1], 0, (1, 4)), ([2, 2, 0, 0], 1, (4,))],
)
def test_environments_in_task_order_are_computed_in_groups(task_E, other, rows, make, mode):
    spec = make_spec(3, train_tasks=(0, 2))._replace(action_sizes=(2, 1, 1))
    algorithm = make(spec, actor=partial(MultiHead, width=8, depth=1, output_bound=0.3))
    seen = []
    algorithm.actor.register_forward_pre_hook(lambda module, given: seen.append(given[1].shape))
    noise_EA = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)

    def acted(first, tasks) -> list[np.ndarray]:
        """Actions and fields of the rows from the first one on."""
        output = algorithm.act(OBSERVATION_ED[first:5], np.array(tasks), mode, noise_EA[first:])
        action_EA, fields = output if isinstance(output, tuple) else (output, {})
        return [action_EA, *fields.values()]

    grouped = acted(1, task_E)
    in_any_order = acted(0, [other, *task_E])
    assert seen == [rows, (5,)]
    for found, wanted in zip(grouped, in_any_order, strict=True):
        np.testing.assert_allclose(found, wanted[1:], rtol=1e-5, atol=1e-6)


def test_an_array_of_tasks_may_be_written_into_after_acting():
    sac = make_sac(actor=partial(MultiHead, width=8, depth=1))
    task_E = np.repeat(np.arange(3), 2)  # computed in groups, and then no longer
    sac.act(OBSERVATION_ED, task_E, "exploit")
    task_E[:] = [2, 0, 1, 1, 0, 2]
    found = sac.act(OBSERVATION_ED, task_E, "exploit")
    np.testing.assert_allclose(found, sac.act(OBSERVATION_ED, task_E.copy(), "exploit"), rtol=1e-5)
    assert not np.allclose(found, sac.act(OBSERVATION_ED, np.repeat(np.arange(3), 2), "exploit"))


def test_random_actions_are_uniform():
    drawn = make_sac().act(np.zeros((20_000, 4), np.float32), np.zeros(20_000, np.int64), "random")
    for axis in range(2):
        assert kstest(drawn[:, axis], "uniform", (-1, 2)).pvalue > 1e-4
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.035  # five standard deviations


STD, CLIP = 0.2, 0.15


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_td3_updates_as_plain_pytorch(reduction):
    value = partial(Scalar, reduction=reduction)
    actor = partial(MLP, width=8, depth=1)  # without a bound of its outputs
    options = {"target_std": STD, "target_clip": CLIP, "value": value, "actor": actor}
    td3, parts = plain.prepared(make_td3, encoder_tau=0.5, **options)
    with torch.no_grad():
        for target in (td3.target_actor, parts["target_actor"]):
            target.head.bias.copy_(torch.tensor([0.1, 1.8]))
    actor, critic, encoder = (parts[name] for name in ("actor", "critic", "encoder"))
    batch = make_batch(td3.spec)
    task_Rn = batch.task_Rn
    noise_RnA = (STD * plain.noises(batch.action_RnA)[0]).clip(-CLIP, CLIP)
    assert (noise_RnA.abs() < CLIP).any() and (noise_RnA.abs() == CLIP).any()
    td3.training_step(batch, 0)

    with torch.no_grad():
        z_RnZ = parts["target_encoder"](batch.next_observation_RnD, task_Rn)
        next_action_RnA = parts["target_actor"](z_RnZ, task_Rn).tanh() + noise_RnA
        assert (next_action_RnA.abs() > 1).any()
        action_RnA = next_action_RnA.clip(-1, 1)
        next_q_QRn = plain.values(parts["target_critic"].members, z_RnZ, action_RnA, task_Rn)
        next_q_Rn = next_q_QRn.amin(0) if reduction == "min" else next_q_QRn.mean(0)
        target_Rn = batch.reward_Rn + plain.DISCOUNT * ~batch.terminated_Rn * next_q_Rn
    z_RnZ = encoder(batch.observation_RnD, task_Rn)
    q_QRn = plain.values(critic.members, z_RnZ, batch.action_RnA, task_Rn)
    critic_loss = (q_QRn - target_Rn).square().sum(0).mean()
    plain.descend(critic_loss, critic, encoder)
    # the actor follows the first critic
    z_RnZ = encoder(batch.observation_RnD, task_Rn).detach()
    action_RnA = actor(z_RnZ, task_Rn).tanh()
    actor_loss = -plain.values(critic.members[:1], z_RnZ, action_RnA, task_Rn).mean()
    plain.descend(actor_loss, actor)
    plain.move_targets(parts, encoder_tau=0.5)
    plain.assert_same_weights(td3, parts)
    metrics = td3.drain_metrics()
    assert metrics["train/critic_loss"] == close(critic_loss.item())
    assert metrics["train/actor_loss"] == close(actor_loss.item())


@pytest.mark.parametrize("acting", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_deviations_are_spread_over_environments_of_all_ranks(acting):
    found = []
    for envs in ([0, 1, 4, 5], [2, 3, 6, 7]):
        td3 = make_td3(exploration_std_min=0.0, exploration_std_max=0.3)
        td3.begin_exploring([0] * 4 + [1] * 4, envs)
        policy = td3.policy(torch.ones(4, 4), torch.tensor(acting))
        found.append(policy.log_std_BA[:, 0].exp().tolist())
    assert found == [close([0.0, 0.1, 0.0, 0.1]), close([0.2, 0.3, 0.2, 0.3])]
    # in any order; one alone has the mean
    std_E = spread_over_environments(torch.tensor([0, 1, 0, 2, 1, 0]), 0.1, 0.5)
    assert std_E.tolist() == close([0.1, 0.1, 0.3, 0.3, 0.5, 0.5])


def test_exploring_adds_the_noise_of_each_environment():
    td3 = make_td3(exploration_std_min=0.0, exploration_std_max=2.0)
    observation_ED = np.ones((3, 4), np.float32)
    task_E = np.zeros(3, np.int64)
    with torch.no_grad():
        output_EA = td3.actor(torch.from_numpy(observation_ED), torch.from_numpy(task_E))
    mode_EA = td3.act(observation_ED, task_E, "exploit")
    np.testing.assert_allclose(mode_EA, output_EA.tanh(), rtol=1e-6)
    noise_EA = np.array([[0.5, -1.0], [0.3, -0.2], [3.0, 0.1]], np.float32)
    found_EA = td3.act(observation_ED, task_E, "explore", noise_EA)
    wanted_EA = mode_EA + np.array([[0.0], [1.0], [2.0]]) * noise_EA
    np.testing.assert_allclose(found_EA, wanted_EA.clip(-1, 1), rtol=1e-5, atol=1e-6)
    assert found_EA[2, 0] == 1


KAPPA, OMEGA = 0.4, 0.3


def near(value):
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def test_distral_updates_as_plain_pytorch():
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

    log_probs = []
    losses = []
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
    assert {name: found.pop(name) for name in wanted} == near(wanted)
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
    methods = {"actor_gradient": PCGrad, "critic_gradient": PCGrad}
    distral = make_distral(encoder=plain.OPTIONS["encoder"], reward_scale=MeanReward, **methods)
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
