"""SAC's update against plain PyTorch with a dummy actor and critic, and what trains, acts, draws.

What is in ``ActorCritic`` is tested here; ``test_td3.py`` has what is TD3's own.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.auxiliaries import LossInputs
from mtrl_lightning.gradients import Mean
from mtrl_lightning.networks import MLP, MultiHead, Network, Standardize
from mtrl_lightning.networks.task_axes import TaskAxis, shared_parameters
from mtrl_lightning.updates.generators import Generators
from tests.helpers import by_hand as hand
from tests.helpers.algorithms import (
    changed,
    copy_of,
    make_batch,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
    small_mlp,
    train,
)
from tests.helpers.sac import (
    FULL,
    OBSERVATION_ED,
    TASK_E,
    Embedding,
    LinearEncoder,
    Reconstruction,
    TypeSpy,
    act,
    fit,
    still,
)

ALPHA = [0.5, 0.2]
TARGET_ENTROPY = [-0.7, -0.3]
SEED = 5


class Recorder(Mean):
    """Notes what it is called with."""

    def __init__(self, spec, log: list) -> None:
        super().__init__(spec)
        self.log = log

    def backward(self, loss_R, parameters, generator) -> None:
        self.log.append((loss_R.detach().clone(), parameters))
        loss_R.mean().backward()  # also to parameters of others, if they are in the graph

    def metrics(self):
        return {"conflicts": torch.tensor(float(len(self.log)))}


def recorded(make, **options):
    log = []
    method = partial(Recorder, log=log)
    return make(actor_gradient=method, critic_gradient=method, **options), log


# ---- one update ----


class PlainUpdate:
    """First critics and encoder, then the actor on their new weights, then the rest."""

    def __init__(self) -> None:
        m, s, c, k, w, alpha = hand.numbers(hand.M, hand.S, hand.C, hand.K, hand.CRITICS, ALPHA)
        log_alpha = alpha.detach().log().requires_grad_()
        target_w, target_k = hand.numbers(hand.TARGET_CRITICS, hand.TARGET_K)
        observation, action, reward, next_observation, terminated, task = hand.rows()
        alpha_B = alpha.detach()[task]
        stream = Generators(SEED).get("learn", torch.device("cpu"))
        next_noise, noise = (torch.randn(4, 1, generator=stream).flatten() for _ in range(2))

        with torch.no_grad():
            next_z = k * next_observation
            next_action, log_prob = hand.squashed(m[task] + c * next_z, s[task], next_noise)
            next_q = hand.q_values(target_w, target_k * next_observation, next_action).amin(0)
            target = reward + hand.DISCOUNT * ~terminated * (next_q - alpha_B * log_prob)
        q = hand.q_values(w, k * observation, action)
        self.q = q.mean().item()
        self.critic_loss_R = hand.task_means(((q - target) ** 2).sum(0))
        (w, k), self.critic_grad_norm = hand.descend(self.critic_loss_R.mean(), w, k)

        z = (k * observation).detach()
        action, log_prob = hand.squashed(m[task] + c * z, s[task], noise)
        q = hand.q_values(w.detach(), z, action).amin(0)
        self.actor_loss_R = hand.task_means(alpha_B * log_prob - q)
        (m, s, c), self.actor_grad_norm = hand.descend(self.actor_loss_R.mean(), m, s, c)

        self.entropy = -log_prob.mean().item()
        miss = hand.task_means(log_prob.detach()) + torch.tensor(TARGET_ENTROPY)
        self.temperature_loss = (-log_alpha * miss).mean()
        (log_alpha,), _ = hand.descend(self.temperature_loss, log_alpha)
        self.alpha = log_alpha.exp().tolist()
        self.weights = {
            "actor.m": m,
            "actor.s": s,
            "actor.c": c,
            "encoder.k": k,
            "temperature.log_alpha": log_alpha,
            "target_encoder.k": torch.lerp(target_k, k, hand.TAU),
        }
        for i in range(2):
            self.weights[f"critic.members.{i}.w"] = w[i]
            self.weights[f"target_critic.members.{i}.w"] = torch.lerp(target_w[i], w[i], hand.TAU)


def close(value, rel=2e-5):
    return pytest.approx(value, rel=rel, abs=1e-6)


def test_update_is_that_of_plain_pytorch():
    wanted = PlainUpdate()
    sac, log = recorded(
        partial(hand.by_hand, make_sac),
        temperature_optimizer=partial(SGD, lr=hand.LEARNING_RATE),
        seed=SEED,
    )
    with torch.no_grad():
        sac.temperature.log_alpha.copy_(torch.tensor(ALPHA).log())
        sac.target_entropy_T.copy_(torch.tensor(TARGET_ENTROPY))
    sac.training_step(hand.BATCH, 0)
    weights = {n: p for n, p in sac.state_dict().items() if "gradient" not in n}
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: close(value.tolist()) for name, value in wanted.weights.items()
    }
    trained = [sac.encoder.k, *(member.w for member in sac.critic.members)]
    for parameter, old in zip(trained, (hand.K, *hand.CRITICS), strict=True):
        new = torch.tensor(old) - hand.LEARNING_RATE * parameter.grad
        assert new.tolist() == close(parameter.tolist()), "no gradient of the actor's loss"
    losses = [loss_R.tolist() for loss_R, _ in log]
    assert losses == [close(wanted.critic_loss_R.tolist()), close(wanted.actor_loss_R.tolist())]
    assert sac.drain_metrics() == close(
        {
            "train/critic_loss": wanted.critic_loss_R.mean().item(),
            "train/q": wanted.q,
            "train/critic_grad_norm": wanted.critic_grad_norm,
            "train/actor_loss": wanted.actor_loss_R.mean().item(),
            "train/actor_grad_norm": wanted.actor_grad_norm,
            "train/temperature_loss": wanted.temperature_loss.item(),
            "train/entropy": wanted.entropy,
            "train/temperature/task-0": wanted.alpha[0],
            "train/temperature/task-1": wanted.alpha[1],
            "train/critic_conflicts": 1,
            "train/actor_conflicts": 2,
        }
    )
    assert sac.drain_metrics() == {}


def test_gradient_methods_see_trained_tasks_and_shared_weights():
    sac, log = recorded(partial(make_sac, make_spec(4, train_tasks=(0, 2, 3))), **FULL)
    train(sac, 2)
    members = [p for member in sac.critic.members for p in shared_parameters(member)]
    shared = [[*sac.encoder.parameters(), *members], shared_parameters(sac.actor)]
    for (_, parameters), wanted in zip(log, shared * 2, strict=True):
        assert [id(p) for p in parameters.shared] == [id(p) for p in wanted]
    # the last hidden layers, before the heads
    sizes = [[tuple(p.shape) for p in parameters.last_shared] for _, parameters in log[:2]]
    assert sizes == [[(16, 16)] * 2, [(16, 16)]]
    assert [len(loss_R) for loss_R, _ in log] == [3] * 4
    alphas = sac.temperature.values().tolist()
    assert [alpha == 1 for alpha in alphas] == [False, True, False, False]


class FrozenEmbedding(Embedding):
    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.table.requires_grad_(False)


def test_what_a_network_freezes_stays_frozen():
    frozen = partial(MLP, width=8, depth=1, output_bound=0.3, conditioning=FrozenEmbedding)
    sac = make_sac(actor=frozen, critic=frozen)
    tables = nn.ModuleList(net.conditioning.table for net in (sac.actor, *sac.critic.members))
    before = copy_of(tables)
    train(sac, 3)
    assert changed(tables, before) == set()
    assert not any(parameter.requires_grad for parameter in tables.parameters())


# ---- schedules, clipping, auxiliaries ----


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
    # the critics' gradient is that of critics and encoder together
    parts = {"critic": [sac.critic, sac.encoder], "actor": [sac.actor]}
    before = copy.deepcopy(parts)
    train(sac, 1)
    metrics = sac.drain_metrics()
    for (name, modules), limit in zip(parts.items(), limits, strict=True):
        norm = metrics[f"train/{name}_grad_norm"]
        assert norm > 0.01, "the metric is the norm before clipping"
        steps = [
            (new - old).flatten()
            for module, other in zip(modules, before[name], strict=True)
            for new, old in zip(module.parameters(), other.parameters(), strict=True)
        ]
        wanted = min(norm, limit or math.inf)
        assert torch.cat(steps).norm().item() == pytest.approx(wanted, rel=2e-3)


def test_auxiliary_follows_its_mean_loss_with_adam():
    auxiliaries = [partial(Reconstruction, learning_rate=0.02)]
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


class Counted(Standardize):
    """Counts the batches that it observes."""

    num_observed = 0

    def observe(self, observation_BD, task_B):
        self.num_observed += 1
        return super().observe(observation_BD, task_B)


@pytest.mark.parametrize("target_every", [1, 4])
def test_a_batch_is_observed_once_and_targets_use_its_statistics(target_every):
    moments = []

    class Noting(SAC):
        def critic_target(self, *arguments):
            moments.append((self.target_encoder.mean_D.clone(), self.target_encoder.variance_D))
            return super().critic_target(*arguments)

    encoder = partial(Counted, num_updates=2)
    networks = {"actor": small_mlp, "critic": small_mlp, "encoder": encoder}
    sac = train(Noting(make_spec(), target_every=target_every, **networks), 3)
    assert (sac.encoder.num_observed, sac.target_encoder.num_observed) == (3, 0)
    rows = [make_batch(sac.spec, seed=i).observation_RnD.flatten(0, 1) for i in range(3)]
    for seen, (mean_D, _) in zip((1, 2, 2), moments, strict=True):
        torch.testing.assert_close(mean_D, torch.cat(rows[:seen]).mean(0))
    torch.testing.assert_close(moments[-1][1], torch.cat(rows[:2]).var(0, correction=0))


def test_through_a_trainer_the_weights_are_the_same():
    through, without = make_sac(**FULL), make_sac(**FULL)
    fit(through, 6)
    train(without, 6)
    assert changed(through, copy_of(without)) == set()
    assert through.counters.updates == 6


def test_in_half_precision_the_losses_are_single_and_finite():
    seen = set()
    spy = partial(TypeSpy, seen=seen)
    sac, log = recorded(make_sac, actor=spy, critic=spy, encoder=LinearEncoder)
    before = copy_of(sac)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(sac, 5)
    assert seen == {torch.bfloat16}, "the networks ran in half precision"
    assert {loss_R.dtype for loss_R, _ in log} == {torch.float32}
    assert all(math.isfinite(value) for value in sac.drain_metrics().values())
    assert all(value.isfinite().all() for value in sac.state_dict().values())
    assert {p.dtype for p in sac.parameters()} == {torch.float32}
    assert changed(sac, before) == set(before)


# ---- acting ----


class ByTask(Network):
    """Means and log standard deviations that depend on the task alone."""

    def __init__(self, in_dim, out_dim, spec) -> None:
        super().__init__()
        rows = [[-0.5, 0.2, -1.0, -2.0], [0.3, 0.0, -0.5, -1.5], [0.0, 1.0, 0.0, -1.0]]
        self.table = nn.Parameter(torch.tensor(rows))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.table[task_B]

    def task_axes(self):
        return {"table": TaskAxis()}


@pytest.mark.parametrize(("low", "high"), [(-20.0, 2.0), (-20.0, -1.5), (-0.7, 2.0)])
def test_exploring_squashes_mean_plus_noise_of_clamped_std(low, high):
    sac = make_sac(actor=ByTask, log_std_min=low, log_std_max=high)
    mean_EA, log_std_EA = sac.actor.table.detach()[TASK_E].chunk(2, 1)
    std_EA = log_std_EA.clamp(low, high).exp()
    sac.seed_actions(5)
    noise_EA = torch.randn(6, 2, generator=torch.Generator().manual_seed(5))
    for found, wanted in (
        (act(sac, "explore")[0], (mean_EA + std_EA * noise_EA).tanh()),
        (act(sac, "exploit")[0], mean_EA.tanh()),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["explore", "exploit"])
@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
@pytest.mark.parametrize(
    ("task_E", "other", "rows"),
    [([0, 0, 2, 2], 1, (2, 2)), ([1, 1, 1, 1], 0, (1, 4)), ([2, 2, 0, 0], 1, (4,))],
)
def test_environments_in_task_order_are_computed_in_groups(task_E, other, rows, make, mode):
    seen = []

    class Seeing(MultiHead):
        def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(task_B.shape))
            return super().forward(x_BD, task_B)

    spec = make_spec(3, train_tasks=(0, 2))._replace(action_sizes=(2, 1, 1))
    algorithm = make(spec, actor=partial(Seeing, width=8, depth=1, output_bound=0.3))
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
    used, fresh = (make_sac(actor=partial(MultiHead, width=8, depth=1)) for _ in range(2))
    task_E = np.repeat(np.arange(3), 2)  # computed in groups, and then no longer
    used.act(OBSERVATION_ED, task_E, "exploit")
    task_E[:] = [2, 0, 1, 1, 0, 2]
    found, expected = (sac.act(OBSERVATION_ED, task_E, "exploit") for sac in (used, fresh))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("mode", ["explore", "random"])
def test_training_and_acting_draw_from_streams_of_their_own(mode):
    first, second = make_sac(seed=3, actor_optimizer=still), make_sac(seed=3, actor_optimizer=still)
    train(first, 2)
    assert np.array_equal(act(first, mode), act(second, mode))
    train(second, 2)
    act(first, mode, times=5)
    assert changed(train(first, 2, first=2), copy_of(train(second, 2, first=2))) == set()


def test_random_actions_are_uniform():
    sac, count = make_sac(), 20_000
    drawn = sac.act(np.zeros((count, 4), np.float32), np.zeros(count, np.int64), "random")
    for axis in range(2):
        counts, _ = np.histogram(drawn[:, axis], bins=20, range=(-1, 1))
        assert counts.sum() == count
        chi_square = ((counts - count / 20) ** 2 / (count / 20)).sum()
        assert abs(chi_square - 19) < 5 * math.sqrt(2 * 19)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / math.sqrt(count)
