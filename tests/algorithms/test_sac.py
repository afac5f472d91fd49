"""SAC's update by hand with a dummy actor and critic, and what trains, acts and draws what."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from mtrl_lightning.algorithms import Temperature
from mtrl_lightning.auxiliaries import LossInputs
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.networks import MLP, Encoder, MultiHead, Network, Standardize
from mtrl_lightning.networks.task_axes import TaskAxis, shared_parameters
from mtrl_lightning.updates.generators import Generators
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
    train,
)
from tests.helpers.sac import (
    BATCH,
    FULL,
    OBSERVATION_ED,
    TASK_E,
    Embedding,
    HandCritic,
    Reconstruction,
    act,
    draw_action,
    fit,
    linear_encoder,
    still,
)

NUM_TASKS = 2
LEARNING_RATE = 0.1
DISCOUNT = 0.9
TAU = 0.25
ALPHA = 0.5
TARGET_ENTROPY = -0.7
SEED = 5


class HandActor(Network):
    """Mean ``m[task] + c z`` and log standard deviation ``s[task]``."""

    def __init__(self, in_dim, out_dim, spec) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor([0.2, -0.6]))
        self.s = nn.Parameter(torch.tensor([-0.5, 0.1]))
        self.c = nn.Parameter(torch.tensor(0.3))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.m[task_B] + self.c * x_BD[..., 0], self.s[task_B]], dim=-1)

    def task_axes(self):
        return {"m": TaskAxis(), "s": TaskAxis()}


class HandEncoder(Encoder):
    """``z = k s``."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.out_dim = 1
        self.k = nn.Parameter(torch.tensor(1.5))

    def forward(self, observation_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.k * observation_BD


CRITICS = [[0.4, -0.8, 0.1], [0.3, 1.2, -0.2]]
TARGET_CRITICS = [[0.7, -0.3, 0.5], [-0.2, 0.9, 1.1]]
TARGET_K = 0.8


def hand_sac(**options):
    weights = iter(CRITICS)
    sgd = partial(SGD, lr=LEARNING_RATE)
    given = {
        "actor": HandActor,
        "critic": lambda *sizes: HandCritic(next(weights)),
        "encoder": HandEncoder,
        "temperature": partial(Temperature, initial=ALPHA),
        "discount": DISCOUNT,
        "tau": TAU,
        "target_entropy": TARGET_ENTROPY,
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
        "actor_optimizer": sgd,
        "critic_optimizer": sgd,
        "temperature_optimizer": sgd,
        "seed": SEED,
    }
    sac = make_sac(make_spec(NUM_TASKS, obs_dim=1, action_dim=1), **{**given, **options})
    with torch.no_grad():
        sac.target_encoder.k.fill_(TARGET_K)
        for member, weight in zip(sac.target_critic.members, TARGET_CRITICS, strict=True):
            member.w.copy_(torch.tensor(weight))
    attach(sac)
    return sac


class ByHand:
    """One update in plain numbers.

    First critics and encoder, then the actor on their new weights, then the rest.
    """

    def __init__(self) -> None:
        m = [0.2, -0.6]
        s = [-0.5, 0.1]
        c = 0.3
        k = 1.5
        stream = Generators(SEED).get("learn", torch.device("cpu"))
        next_noise, noise = (torch.randn(4, 1, generator=stream)[:, 0].tolist() for _ in range(2))
        rows = list(zip(*(field.flatten(0, 1).tolist() for field in BATCH[:-1]), strict=True))
        n, B = 2, 4

        gradient_w, gradient_k = [[0.0] * 3 for _ in CRITICS], 0.0
        self.critic_loss_T, self.q = [0.0] * NUM_TASKS, 0.0
        for ((obs,), (action,), reward, (next_obs,), terminated, task), eps in zip(
            rows, next_noise, strict=True
        ):
            next_action, next_log_prob, _, _ = draw_action(m[task] + c * k * next_obs, s[task], eps)
            next_q = min(
                w[0] * TARGET_K * next_obs + w[1] * next_action + w[2] for w in TARGET_CRITICS
            )
            target = reward + DISCOUNT * (0 if terminated else 1) * (next_q - ALPHA * next_log_prob)
            for i, w in enumerate(CRITICS):
                error = w[0] * k * obs + w[1] * action + w[2] - target
                self.q += (error + target) / (2 * B)
                self.critic_loss_T[task] += error**2 / n
                for j, x in enumerate((k * obs, action, 1.0)):
                    gradient_w[i][j] += 2 * error * x / B
                gradient_k += 2 * error * w[0] * obs / B
        self.critic_grad_norm = math.sqrt(
            sum(g**2 for row in gradient_w for g in row) + gradient_k**2
        )
        self.critics = [
            [v - LEARNING_RATE * g for v, g in zip(w, row, strict=True)]
            for w, row in zip(CRITICS, gradient_w, strict=True)
        ]
        self.k = k - LEARNING_RATE * gradient_k

        gradient_m = [0.0, 0.0]
        gradient_s = [0.0, 0.0]
        gradient_c = 0.0
        self.actor_loss_T, mean_log_prob_T = [0.0] * NUM_TASKS, [0.0] * NUM_TASKS
        for ((obs,), _, _, _, _, task), eps in zip(rows, noise, strict=True):
            z = self.k * obs
            a, log_prob, da, dlog_prob = draw_action(m[task] + c * z, s[task], eps)
            q, slope = min((w[0] * z + w[1] * a + w[2], w[1]) for w in self.critics)
            self.actor_loss_T[task] += (ALPHA * log_prob - q) / n
            mean_log_prob_T[task] += log_prob / n
            to_mean, to_log_std = (
                (ALPHA * d - slope * e) / B for d, e in zip(dlog_prob, da, strict=True)
            )
            gradient_m[task] += to_mean
            gradient_s[task] += to_log_std
            gradient_c += to_mean * z
        self.actor_grad_norm = math.sqrt(sum(g**2 for g in (*gradient_m, *gradient_s, gradient_c)))
        self.m = [v - LEARNING_RATE * g for v, g in zip(m, gradient_m, strict=True)]
        self.s = [v - LEARNING_RATE * g for v, g in zip(s, gradient_s, strict=True)]
        self.c = c - LEARNING_RATE * gradient_c

        miss_T = [log_prob + TARGET_ENTROPY for log_prob in mean_log_prob_T]
        self.temperature_loss_T = [-math.log(ALPHA) * miss for miss in miss_T]
        self.log_alpha = [math.log(ALPHA) + LEARNING_RATE * miss / NUM_TASKS for miss in miss_T]
        self.entropy = -sum(mean_log_prob_T) / NUM_TASKS
        self.target_critics = [
            [t + TAU * (w - t) for t, w in zip(old, new, strict=True)]
            for old, new in zip(TARGET_CRITICS, self.critics, strict=True)
        ]
        self.target_k = TARGET_K + TAU * (self.k - TARGET_K)


@pytest.fixture(scope="module")
def wanted():
    return ByHand()


def close(value, rel=2e-5):
    return pytest.approx(value, rel=rel, abs=1e-6)


def test_update_is_the_one_computed_by_hand():
    wanted = ByHand()
    sac, log = recorded(hand_sac)
    sac.training_step(BATCH, 0)
    for member, weights in zip(sac.critic.members, wanted.critics, strict=True):
        assert member.w.tolist() == close(weights)
    assert sac.encoder.k.item() == close(wanted.k), "of the critics' loss alone"
    assert sac.actor.m.tolist() == close(wanted.m)
    assert sac.actor.s.tolist() == close(wanted.s)
    assert sac.actor.c.item() == close(wanted.c)
    assert sac.temperature.log_alpha.tolist() == close(wanted.log_alpha)
    for member, weights in zip(sac.target_critic.members, wanted.target_critics, strict=True):
        assert member.w.tolist() == close(weights)
    assert sac.target_encoder.k.item() == close(wanted.target_k)
    assert [call["name"] for call in log] == ["critic", "actor"], "none for the temperature"
    assert log[0]["loss_T"].tolist() == close(wanted.critic_loss_T)
    assert log[1]["loss_T"].tolist() == close(wanted.actor_loss_T)
    metrics = sac.drain_metrics()
    assert metrics == close(
        {
            "train/critic_loss": sum(wanted.critic_loss_T) / 2,
            "train/q": wanted.q,
            "train/critic_grad_norm": wanted.critic_grad_norm,
            "train/actor_loss": sum(wanted.actor_loss_T) / 2,
            "train/temperature_loss": sum(wanted.temperature_loss_T) / 2,
            "train/entropy": wanted.entropy,
            "train/actor_grad_norm": wanted.actor_grad_norm,
            "train/temperature/task-0": math.exp(wanted.log_alpha[0]),
            "train/temperature/task-1": math.exp(wanted.log_alpha[1]),
            "train/critic_conflicts": 1,
            "train/actor_conflicts": 2,
        }
    )
    assert sac.drain_metrics() == {}


class Recorder(GradientMethod):
    """Note what a gradient method is given, and what it leaves in the gradients of others."""

    def __init__(self, spec, name: str, log: list) -> None:
        super().__init__(spec)
        self.name = name
        self.log = log
        self.sac = []

    def backward(self, loss_T: torch.Tensor, parameters, generator) -> None:
        (sac,) = self.sac
        mine = sac.actor if self.name == "actor" else nn.ModuleList([sac.critic, sac.encoder])
        others = [p for p in sac.parameters() if id(p) not in {id(q) for q in mine.parameters()}]
        before = [None if p.grad is None else p.grad.clone() for p in others]
        clear = all(p.grad is None or not p.grad.any() for p in mine.parameters())
        loss_T.mean().backward()
        after = [p.grad for p in others]
        kept = all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(after, before, strict=True)
        )
        note = {
            "name": self.name,
            "num_trained": self.num_trained,
            "loss_T": loss_T.detach().clone(),
        }
        self.log.append(
            {**note, "shared": [id(p) for p in parameters.shared], "clear": clear, "kept": kept}
        )

    def metrics(self) -> dict[str, torch.Tensor]:
        return {"conflicts": torch.tensor(float(len(self.log)))}


def recorded(make, **options):
    log = []
    sac = make(
        actor_gradient=partial(Recorder, name="actor", log=log),
        critic_gradient=partial(Recorder, name="critic", log=log),
        **options,
    )
    for method in (sac.actor_gradient, sac.critic_gradient):
        method.sac.append(sac)
    return sac, log


def test_gradient_method_changes_only_its_own_gradients():
    sac, log = recorded(partial(make_sac, **FULL))
    train(sac, 3)
    critic = [
        id(p)
        for p in (
            *sac.encoder.parameters(),
            *(p for member in sac.critic.members for p in shared_parameters(member)),
        )
    ]
    actor = [id(p) for p in shared_parameters(sac.actor)]
    assert [call["name"] for call in log] == ["critic", "actor"] * 3
    assert [call["shared"] for call in log] == [critic, actor] * 3
    assert all(call["clear"] for call in log), "gradients are cleared before"
    assert all(call["kept"] for call in log), (
        "no loss leaves gradients with the parameters of another"
    )


def test_gradient_methods_work_on_the_trained_tasks_alone():
    sac, log = recorded(partial(make_sac, make_spec(4, train_tasks=(0, 2, 3))))
    train(sac, 1)
    assert {call["num_trained"] for call in log} == {3}
    assert {len(call["loss_T"]) for call in log} == {3}
    assert len(sac.temperature.values()) == 4


def test_temperatures_of_tasks_that_are_not_trained_stay():
    sac = train(make_sac(make_spec(4, train_tasks=(0, 2, 3))), 3)
    assert [value == 1 for value in sac.temperature.values().tolist()] == [
        False,
        True,
        False,
        False,
    ]


class FrozenEmbedding(Embedding):
    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.table.requires_grad_(False)


def test_what_a_network_freezes_stays_frozen():
    frozen = partial(MLP, width=8, depth=1, output_bound=0.3, conditioning=FrozenEmbedding)
    sac = make_sac(actor=frozen, critic=frozen)
    tables = [
        sac.actor.conditioning.table,
        *(member.conditioning.table for member in sac.critic.members),
    ]
    before = [copy_of(table) for table in tables]
    train(sac, 3)
    assert [changed(table, values) for table, values in zip(tables, before, strict=True)] == [
        set()
    ] * 3


def updates_that_change(module, sac, count=7):
    attach(sac)
    seen = []
    for i in range(count):
        before = copy_of(module)
        train(sac, 1, first=i)
        seen.append(bool(changed(module, before)))
    return [i for i, moved in enumerate(seen) if moved]


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("actor", "actor_every"),
        ("temperature", "actor_every"),
        ("target_critic", "target_every"),
        ("target_encoder", "target_every"),
    ],
)
def test_part_is_updated_as_often_as_asked(part, option):
    sac = make_sac(**{option: 3}, **FULL)
    assert updates_that_change(getattr(sac, part), sac) == [0, 3, 6]
    sac = make_sac(**{option: 3}, **FULL)
    sac.counters.updates = 2
    assert updates_that_change(getattr(sac, part), sac, count=5) == [1, 4]
    sac = make_sac(**{option: 3}, **FULL)
    assert updates_that_change(sac.critic, sac, count=4) == [0, 1, 2, 3]


def step_norm(modules, before):
    squares = [
        (value - old[name]).double().square().sum()
        for module, old in zip(modules, before, strict=True)
        for name, value in module.state_dict().items()
    ]
    return math.sqrt(sum(squares))


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
@pytest.mark.parametrize("which", ["critic", "actor"])
def test_a_gradient_is_clipped_to_its_norm_and_the_other_is_not(which, max_norm):
    def unit(parameters):
        return SGD(parameters, lr=1.0)

    options = {
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
        f"{which}_max_grad_norm": max_norm,
    }
    sac = make_sac(actor_optimizer=unit, critic_optimizer=unit, **FULL, **options)
    # the critics' gradient is that of critics and encoder together
    parts = {"critic": [sac.critic, sac.encoder], "actor": [sac.actor]}
    before = {name: [copy_of(module) for module in modules] for name, modules in parts.items()}
    train(sac, 1)
    metrics = sac.drain_metrics()
    for name, modules in parts.items():
        norm = metrics[f"train/{name}_grad_norm"]
        assert norm > 0.01, "the metric is the norm before clipping"
        clipped = min(norm, max_norm) if name == which and max_norm is not None else norm
        assert step_norm(modules, before[name]) == pytest.approx(clipped, rel=2e-3)


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_auxiliary_and_encoder_are_trained_on_schedule(every, wanted):
    for part in (lambda sac: sac.auxiliaries[0], lambda sac: sac.encoder):
        auxiliaries = [partial(Reconstruction, every=every)]
        sac = make_sac(critic_optimizer=still, auxiliaries=auxiliaries, **FULL)
        assert updates_that_change(part(sac), sac) == wanted


def test_auxiliary_follows_its_mean_loss_with_adam():
    sac = make_sac(
        critic_optimizer=still, auxiliaries=[partial(Reconstruction, learning_rate=0.02)], **FULL
    )
    alone, encoder = copy.deepcopy(sac.auxiliaries[0]), copy.deepcopy(sac.encoder)
    parameters = [*encoder.parameters(), *alone.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02, fused=True)
    for i in range(3):
        optimizer.zero_grad()
        alone.loss(make_batch(sac.spec, seed=i), LossInputs(encoder, None, None)).mean().backward()
        optimizer.step()
    train(sac, 3)
    assert (
        changed(sac.auxiliaries[0], copy_of(alone))
        == changed(sac.encoder, copy_of(encoder))
        == set()
    )


@pytest.mark.parametrize("target_every", [1, 4])
def test_a_batch_is_observed_once_and_targets_use_its_statistics(monkeypatch, target_every):
    sac = make_sac(encoder=partial(Standardize, num_updates=2), target_every=target_every)
    observed, observe, critic_target = [], Standardize.observe, sac._critic_target
    moments = []

    def counted(encoder, *batch):
        observed.append(encoder)
        return observe(encoder, *batch)

    def checked(*arguments):
        moments.append((sac.target_encoder.mean_D.clone(), sac.target_encoder.variance_D.clone()))
        return critic_target(*arguments)

    monkeypatch.setattr(Standardize, "observe", counted)
    sac._critic_target = checked
    train(sac, 3)
    assert observed == [sac.encoder] * 3, "of two encoders with the same statistics one"
    rows = [make_batch(sac.spec, seed=i).observation_RnD.flatten(0, 1) for i in range(3)]
    for seen, (mean_D, variance_D) in zip((1, 2, 2), moments, strict=True):
        joined = torch.cat(rows[:seen])
        torch.testing.assert_close(mean_D, joined.mean(0))
        torch.testing.assert_close(variance_D, joined.var(0, correction=0))


def test_building_does_not_seed_the_gpu_generator(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    make_sac(seed=3)
    assert seeds == []


def test_through_a_trainer_the_weights_are_the_same():
    through, without = make_sac(**FULL), make_sac(**FULL)
    fit(through, 6)
    train(without, 6)
    assert changed(through, copy_of(without)) == set()
    assert through.counters.updates == 6


def test_exploiting_takes_tanh_of_the_mean():
    sac = make_sac(**FULL)
    observation, task = torch.from_numpy(OBSERVATION_ED), torch.from_numpy(TASK_E)
    mean = sac.actor(sac.encoder(observation, task), task)[:, :2]
    assert np.array_equal(act(sac, "exploit")[0], mean.tanh().detach().numpy())


@pytest.mark.parametrize("mode", ["explore", "exploit"])
@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
@pytest.mark.parametrize(
    ("task_E", "rows"),
    [
        ([0, 0, 2, 2], (2, 2)),
        ([1, 1, 1, 1], (1, 4)),
        ([2, 2, 0, 0], (4,)),
        ([0, 1, 2, 2], (4,)),
    ],
)
def test_environments_in_task_order_are_computed_in_groups(task_E, rows, make, mode):
    seen = []

    class Seeing(MultiHead):
        def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(task_B.shape))
            return super().forward(x_BD, task_B)

    spec = make_spec(3, train_tasks=(0, 2))._replace(action_sizes=(2, 1, 1))
    algorithm = make(spec, actor=partial(Seeing, width=8, depth=1, output_bound=0.3))
    seen.clear()

    def acted() -> list[np.ndarray]:
        algorithm.seed_actions(3)
        output = algorithm.act(OBSERVATION_ED[:4], np.array(task_E), mode)
        action_EA, fields = output if isinstance(output, tuple) else (output, {})
        return [action_EA, *fields.values()]

    grouped = acted()
    assert seen == [rows]
    algorithm._acting_tasks = lambda task_E, device: torch.from_numpy(task_E)
    in_any_order = acted()
    assert seen == [rows, (4,)]
    for found, wanted in zip(grouped, in_any_order, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_an_array_of_tasks_may_be_written_into_after_acting():
    algorithm = make_sac(make_spec(3), actor=partial(MultiHead, width=8, depth=1))
    task_E = np.array([0, 1, 2, 2])
    expected = algorithm.act(OBSERVATION_ED[:4], task_E, "exploit")
    task_E[:] = [2, 0, 1, 1]
    found = algorithm.act(OBSERVATION_ED[:4], np.array([0, 1, 2, 2]), "exploit")
    assert np.array_equal(found, expected)


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


class ByTask(Network):
    """Means and log standard deviations that depend on the task alone."""

    def __init__(self, in_dim, out_dim, spec) -> None:
        super().__init__()
        rows = [[-0.5, 0.2, -1.0, -2.0], [0.3, 0.0, -0.5, -1.5], [0.0, 1.0, 0.0, -1.0]]
        self.table = nn.Parameter(torch.tensor(rows)[:, :out_dim])

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.table[task_B]

    def task_axes(self):
        return {"table": TaskAxis()}


@pytest.mark.parametrize("task", [0, 1, 2])
def test_exploring_draws_from_the_policy_of_the_task(task):
    sac, count = make_sac(actor=ByTask), 20_000
    action = sac.act(np.zeros((count, 4), np.float32), np.full(count, task), "explore").astype(
        np.float64
    )
    mean, log_std = np.split(sac.actor.table[task].detach().numpy(), 2)
    drawn = (np.arctanh(action) - mean) / np.exp(log_std)
    assert drawn.mean(0) == pytest.approx([0, 0], abs=5 / math.sqrt(count))
    assert drawn.std(0) == pytest.approx([1, 1], abs=5 / math.sqrt(2 * count))
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize(
    ("low", "high", "deviation"), [(-20.0, -3.0, math.exp(-3)), (1.0, 2.0, math.exp(1))]
)
def test_the_deviation_is_clamped(low, high, deviation):
    sac, count = make_sac(actor=ByTask, log_std_min=low, log_std_max=high), 4_000
    action = sac.act(np.zeros((count, 4), np.float32), np.full(count, 1), "explore")
    # its mean is 0, and half of a normal distribution lies within 0.6745 deviations
    assert np.median(np.abs(action[:, 1])) == pytest.approx(math.tanh(0.6745 * deviation), rel=0.06)


class TypeSpy(MLP):
    seen: ClassVar[set[torch.dtype]] = set()

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        out = super().forward(x_BD, task_B)
        self.seen.add(out.dtype)
        return out


def test_in_half_precision_the_losses_are_single_and_finite():
    spy = partial(TypeSpy, width=16, depth=2, output_bound=0.3)
    sac, log = recorded(make_sac, actor=spy, critic=spy, encoder=linear_encoder)
    TypeSpy.seen.clear()
    before = copy_of(sac)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(sac, 5)
    assert TypeSpy.seen == {torch.bfloat16}, "the networks ran in half precision"
    assert {call["loss_T"].dtype for call in log} == {torch.float32}
    assert all(math.isfinite(value) for value in sac.drain_metrics().values())
    assert all(value.isfinite().all() for value in sac.state_dict().values())
    assert {p.dtype for p in sac.parameters()} == {torch.float32}
    assert changed(sac, before) == set(before)


@pytest.mark.parametrize(
    ("action_dim", "given", "used"), [(2, None, -2.0), (4, None, -4.0), (4, -1.5, -1.5), (2, 0, 0)]
)
def test_default_target_entropy_is_minus_the_action_dim(action_dim, given, used):
    sac = make_sac(make_spec(action_dim=action_dim), target_entropy=given)
    assert sac.target_entropy_T.tolist() == [used] * 3
    assert "target_entropy_T" not in sac.state_dict()
