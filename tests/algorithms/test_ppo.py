"""PPO against an independent program with the same weights, and what it computes of an iteration.

The independent program, ``PlainPPO``, is plain PyTorch with loops; it uses none of PPO's parts.

Shapes: ``B`` rows of an iteration, step after step.
"""

import copy
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.optim import SGD, Adam

from mtrl_lightning import networks
from mtrl_lightning.algorithms import LinearRate, PopArt, ReturnScale, advantages
from mtrl_lightning.gradients import PCGrad
from mtrl_lightning.networks import MultiHead, Standardize, StateDependentStd, StateIndependentStd
from mtrl_lightning.networks.network import shared_parameters
from mtrl_lightning.transitions import Rollout, TransitionBatch
from tests.helpers.algorithms import attach, changed, copy_of, make_ppo, make_spec

NUM_TASKS, NUM_STEPS, ENVS_PER_TASK = 3, 8, 2
GARBAGE = 1e4
"""In the rows of transitions that never happened."""
SMALL_HEADS = partial(MultiHead, width=16, depth=2, output_bound=0.3)


def make_collected(ppo, seed=0, gap=0.1, end=0.12, mean=0.0, std=1.0, foreign=0.0):
    """Random transitions of an iteration, with the actions of the present policy.

    An observation is the successor of the row before, unless an episode has ended in between or
    the environment was rebuilt. A fraction of the rows is another policy's.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    task_E = torch.tensor(ppo.spec.train_tasks).repeat_interleave(ENVS_PER_TASK)
    shape = (NUM_STEPS, len(task_E))
    kind_SE = torch.from_numpy(random.choice(4, shape, p=[1 - gap - 2 * end, end, end, gap]))
    is_foreign_SE = torch.from_numpy(random.random(shape) < foreign)
    is_gap_SE = kind_SE == 3
    observation_SED = mean + std * torch.randn(NUM_STEPS + 1, len(task_E), 4, generator=generator)
    fresh_SED = mean + std * torch.randn(*shape, 4, generator=generator)
    next_observation_SED = torch.where((kind_SE == 0)[..., None], observation_SED[1:], fresh_SED)
    with torch.no_grad():
        policy = ppo.policy(observation_SED[:-1].flatten(0, 1), task_E.repeat(NUM_STEPS))
        noise_BA = torch.randn(policy.mean_BA.shape, generator=generator)
        action_BA, fields = ppo.explore(policy, noise_BA)
    columns = {
        "observation": observation_SED[:-1].clone(),
        "next_observation": next_observation_SED,
        # tasks differ in the scale of their rewards
        "reward": 10.0**task_E * (0.3 + torch.randn(shape, generator=generator)),
        "terminated": kind_SE == 1,
        "truncated": kind_SE == 2,
        "foreign": is_foreign_SE,
        "action": action_BA.unflatten(0, shape),
        **{name: column.unflatten(0, shape) for name, column in fields.items()},
    }
    for name in ("observation", "reward", "next_observation", "log_prob"):
        columns[name][is_gap_SE] = GARBAGE
    columns["log_prob"][is_foreign_SE] = GARBAGE  # of the other policy
    sample_SEA = 0.5 * torch.randn(*shape, 2, generator=generator)
    columns["unclipped_action"][is_foreign_SE] = sample_SEA[is_foreign_SE]
    return Rollout(columns, ~is_gap_SE, task_E)


def rows_of(collected, num_minibatches=2, seed=0):
    """Row numbers ``[R, n]`` of an epoch's minibatches, equally many of each task."""
    random = np.random.default_rng(seed)
    per_task = NUM_STEPS * ENVS_PER_TASK // num_minibatches
    orders = []
    for task in collected.task_E.unique():
        rows = np.flatnonzero(collected.valid_SE & (collected.task_E == task))
        orders.append(np.resize(random.permutation(rows), per_task * num_minibatches))
    return torch.from_numpy(np.stack(orders)).split(per_task, 1)


def batch_of(collected, computed, row_Rn):
    columns = {**collected.columns, **computed}
    rows = {name: column.flatten(0, 1)[row_Rn] for name, column in columns.items()}
    core = ("observation", "action", "reward", "next_observation", "terminated")
    extra = {name: column for name, column in rows.items() if name not in core}
    task_B = collected.task_E.repeat(NUM_STEPS)
    return TransitionBatch(*(rows[name] for name in core), task_B[row_Rn], extra)


def iterate(ppo, seed=0, progress=0.0):
    """Make one iteration of two epochs."""
    if not callable(ppo.__dict__.get("optimizers")):
        attach(ppo)
    collected = make_collected(ppo, seed)
    computed = ppo.begin_iteration(collected, progress)
    for epoch in range(2):
        for row_Rn in rows_of(collected, seed=epoch):
            if not ppo.is_iteration_over():
                ppo.training_step(batch_of(collected, computed, row_Rn), 0)
    ppo.end_iteration(collected)


class PlainPPO:
    """Multi-task PPO with PopArt in plain PyTorch, with copies of the networks.

    The critic has one output layer per task, or one for all and a factor and offset per task.
    """

    def __init__(self, ppo, options) -> None:
        self.options = options
        self.names = ppo.spec.task_names
        self.has_heads = isinstance(ppo.critic, MultiHead)
        self.noise_depends_on_state = isinstance(ppo.noise, StateDependentStd)
        self.actor, noise, self.critic = map(copy.deepcopy, (ppo.actor, ppo.noise, ppo.critic))
        self.log_std_TA = noise.log_std_TA
        self.actor_parameters = [*self.actor.parameters(), self.log_std_TA]
        self.factor_T = torch.ones(NUM_TASKS, requires_grad=not self.has_heads)
        self.offset_T = torch.zeros(NUM_TASKS, requires_grad=not self.has_heads)
        scale = [] if self.has_heads else [self.factor_T, self.offset_T]
        self.critic_parameters = [*self.critic.parameters(), *scale]
        adam = partial(Adam, lr=5e-4, eps=1e-5, foreach=False, fused=False)
        self.optimizers = {
            "actor": adam(self.actor_parameters),
            "critic": adam(self.critic_parameters),
        }
        # moments of the returns; values are those of outputs until the first are known
        self.mu_T = torch.zeros(NUM_TASKS, dtype=torch.float64)
        self.nu_T = torch.ones(NUM_TASKS, dtype=torch.float64)
        self.is_first_iteration = True
        self.metrics = {}

    def log(self, name, value):
        self.metrics.setdefault(f"train/{name}", []).append(float(torch.as_tensor(value).detach()))

    # -- networks --

    def normalized_value(self, observation, task):
        return self.factor_T[task] * self.critic(observation, task)[:, 0] + self.offset_T[task]

    @property
    def std_T(self):
        return torch.sqrt(self.nu_T - self.mu_T**2)

    @torch.no_grad()
    def value(self, observation, task):
        return self.std_T[task] * self.normalized_value(observation, task) + self.mu_T[task]

    def policy(self, observation, task):
        outputs = self.actor(observation, task)
        if not self.noise_depends_on_state:
            return Normal(outputs, self.log_std_TA[task].exp())
        half = outputs.shape[1] // 2
        log_std = torch.clip(self.log_std_TA[task] + outputs[:, half:], -2.3, 0.4)
        return Normal(outputs[:, :half], log_std.exp())

    # -- an iteration --

    def begin_iteration(self, collected):
        self.is_first_update = True
        discount, decay = self.options["discount"], self.options["gae_lambda"]
        self.column = {name: c.flatten(0, 1) for name, c in collected.columns.items()}
        self.task_B = collected.task_E.repeat(NUM_STEPS)
        is_valid_B, is_foreign_B = collected.valid_SE.flatten(), self.column["foreign"]
        observation = self.column["observation"]
        value_B = self.value(observation, self.task_B)
        next_value_B = self.value(self.column["next_observation"], self.task_B)
        advantage_B = torch.zeros(len(value_B), dtype=torch.float64)
        num_envs = len(collected.task_E)
        for row in reversed(range(len(advantage_B))):
            advantage_B[row] = self.column["reward"][row] - value_B[row]
            following = row + num_envs
            if not self.column["terminated"][row]:
                advantage_B[row] += discount * next_value_B[row]
                is_cut = self.column["truncated"][row] or following >= len(advantage_B)
                if not is_cut and is_valid_B[following]:
                    advantage_B[row] += discount * decay * advantage_B[following]
        self.target_B = advantage_B + value_B
        self.old_log_prob_B = self.column["log_prob"].clone()
        with torch.no_grad():
            own = self.policy(observation, self.task_B).log_prob(self.column["unclipped_action"])
        self.old_log_prob_B[is_foreign_B] = own.sum(1)[is_foreign_B]
        self.advantage_B = torch.full_like(advantage_B, math.nan)
        for task, name in enumerate(self.names):
            is_own_B = is_valid_B & (self.task_B == task)
            advantages, targets = advantage_B[is_own_B], self.target_B[is_own_B]
            self.move_statistics(task, targets)
            self.log(f"advantage_std/{name}", advantages.std(correction=0))
            residuals = targets - value_B[is_own_B]
            self.log(f"explained_variance/{name}", 1 - residuals.var() / targets.var())
            own_mean = advantage_B[is_own_B & ~is_foreign_B].mean()
            gains = torch.where(
                is_foreign_B[is_own_B], advantages.clip(min=0), advantages - own_mean
            )
            self.advantage_B[is_own_B] = gains / advantages.std(correction=0)
        self.is_first_iteration = False

    def move_statistics(self, task, targets):
        """PopArt with moving averages of the first two moments, in double precision."""
        first, second = targets.mean(), (targets**2).mean()
        if self.is_first_iteration:
            self.mu_T[task], self.nu_T[task] = first, second
            return
        old_mean, old_std = self.mu_T[task].clone(), self.std_T[task]
        self.mu_T[task] += self.options["step_size"] * (first - self.mu_T[task])
        self.nu_T[task] += self.options["step_size"] * (second - self.nu_T[task])
        new_mean, new_std = self.mu_T[task], self.std_T[task]
        weight, bias = self.factor_T, self.offset_T
        if self.has_heads:
            weight, bias = self.critic.heads.weight, self.critic.heads.bias
        with torch.no_grad():
            weight[task] *= old_std / new_std
            bias[task] = (old_std * bias[task] + old_mean - new_mean) / new_std

    def critic_losses(self, row_B):
        """Return each task's loss."""
        task_B = self.task_B[row_B]
        value_B = self.normalized_value(self.column["observation"][row_B], task_B)
        target_B = (self.target_B[row_B] - self.mu_T[task_B]) / self.std_T[task_B]
        error_B = (value_B - target_B) ** 2
        return error_B.view(NUM_TASKS, -1).mean(1)

    def update(self, row_B):
        rows = {name: column[row_B] for name, column in self.column.items()}
        if self.is_first_update:
            self.is_first_update = False
            self.log_shares(self.critic_losses(row_B))
        clip = self.options["clip"]
        policy = self.policy(rows["observation"], self.task_B[row_B])
        log_prob_B = policy.log_prob(rows["unclipped_action"]).sum(1)
        ratio_B = torch.exp(log_prob_B - self.old_log_prob_B[row_B])
        advantage_B, entropy_B = self.advantage_B[row_B], policy.entropy().sum(1)
        gain_B = torch.min(ratio_B * advantage_B, ratio_B.clip(1 - clip, 1 + clip) * advantage_B)
        objective_B = gain_B + self.options["entropy_coef"] * entropy_B
        # each task has the same number of rows, so that the mean is that of the tasks
        self.step("actor", -objective_B.mean(), self.actor_parameters)
        with torch.no_grad():
            self.log_std_TA.clip_(-2.3, 0.4)
        self.step("critic", self.critic_losses(row_B).mean(), self.critic_parameters)
        ratio_B = torch.where(rows["foreign"], 1.0, ratio_B).double()
        self.log("kl", (ratio_B - 1 - ratio_B.log()).mean())
        self.log("clip_fraction", ((ratio_B < 1 - clip) | (ratio_B > 1 + clip)).double().mean())
        self.log("entropy", entropy_B.mean())

    def step(self, name, loss, parameters):
        self.optimizers[name].zero_grad()
        loss.backward()
        largest = self.options[f"{name}_max_grad_norm"]
        self.log(f"{name}_grad_norm", nn.utils.clip_grad_norm_(parameters, largest or math.inf))
        self.log(f"{name}_loss", loss)
        self.optimizers[name].step()

    def log_shares(self, losses):
        shared = shared_parameters(self.critic)
        vectors = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, shared, retain_graph=True)
            vectors.append(torch.cat([gradient.flatten() for gradient in gradients]))
        total = sum(vector.norm() for vector in vectors)
        for name, vector in zip(self.names, vectors, strict=True):
            self.log(f"critic_gradient_share/{name}", vector.norm() / total)
        cosines = [torch.cosine_similarity(a, b, 0) for a, b in itertools.combinations(vectors, 2)]
        self.log("critic_cosine", sum(cosines) / len(cosines))
        self.log("critic_conflicts", sum(cosine < 0 for cosine in cosines) / len(cosines))

    def drained(self):
        means = {name: sum(values) / len(values) for name, values in self.metrics.items()}
        for name, std in zip(self.names, self.log_std_TA.exp().mean(1).tolist(), strict=True):
            means[f"train/noise_std/{name}"] = std
        self.metrics = {}
        return means


DEFAULTS = {
    "discount": 0.9,
    "gae_lambda": 0.8,
    "clip": 0.1,
    "entropy_coef": 0.01,
    "actor_max_grad_norm": 0.1,
    "critic_max_grad_norm": 0.5,
}
STEP_SIZE = 0.4
HEADS = {"critic": SMALL_HEADS}
UNCLIPPED = {"actor_max_grad_norm": None, "critic_max_grad_norm": None}
VARIANTS = {
    "mlp": (0.0, {}, {}),
    "reuse": (0.3, {}, {}),
    "heads": (0.0, {}, HEADS),
    "state noise": (0.3, {}, {**HEADS, "noise": StateDependentStd}),
    "no clipping of gradients": (0.3, UNCLIPPED, HEADS),
    "a narrow clip": (0.0, {"clip": 0.01, "entropy_coef": 0.0}, {}),
}
"""Fraction of rows of another policy, numbers and parts."""


def assert_same_weights(ppo, plain):
    found = [*ppo.actor.parameters(), *ppo.noise.parameters(), *ppo.critic.parameters()]
    wanted = [*plain.actor_parameters, *plain.critic_parameters]
    if not plain.has_heads:
        found += [ppo.return_scale.weight_T, ppo.return_scale.bias_T]
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("foreign", "numbers", "parts"), VARIANTS.values(), ids=VARIANTS)
def test_every_update_equals_that_of_an_independent_program(foreign, numbers, parts):
    options = {**DEFAULTS, **numbers}
    scale = partial(PopArt, step_size=STEP_SIZE)
    ppo = make_ppo(max_kl=None, seed=2, return_scale=scale, **options, **parts)
    attach(ppo)
    plain = PlainPPO(ppo, {**options, "step_size": STEP_SIZE})
    before = copy_of(ppo)
    for iteration in range(3):
        collected = make_collected(ppo, seed=iteration, foreign=foreign)
        foreign_SE = collected.columns["foreign"] & collected.valid_SE
        computed = ppo.begin_iteration(collected, 0.0)
        assert (computed["advantage"][foreign_SE] == 0).any() == (foreign > 0)
        plain.begin_iteration(collected)
        assert_same_weights(ppo, plain)
        for name, rtol, atol in (("advantage", 0.0, 2e-5), ("target", 1e-4, 1e-4)):
            torch.testing.assert_close(
                computed[name][collected.valid_SE].double(),
                getattr(plain, f"{name}_B")[collected.valid_SE.flatten()],
                rtol=rtol,
                atol=atol,
            )
        for epoch in range(2):
            for row_Rn in rows_of(collected, seed=epoch):
                ppo.training_step(batch_of(collected, computed, row_Rn), 0)
                plain.update(row_Rn.flatten())
                assert_same_weights(ppo, plain)
        ppo.end_iteration(collected)
        metrics = ppo.drain_metrics()
        assert metrics == pytest.approx(plain.drained(), rel=1e-3, abs=1e-5)
        for name in ("actor", "critic"):  # so that a clipping that is left out would be noticed
            assert metrics[f"train/{name}_grad_norm"] > (options[f"{name}_max_grad_norm"] or 0.0)
    assert changed(ppo, before) >= {name for name, _ in ppo.named_parameters()}
    assert ppo.drain_metrics() == {}


def test_transitions_count_alike_when_environments_are_paused():
    ppo = make_ppo(actor=SMALL_HEADS, critic=SMALL_HEADS, actor_gradient=PCGrad)
    attach(ppo)
    collected = make_collected(ppo, gap=0.0)
    collected.valid_SE[:, 1] = False  # of the first task
    computed = ppo.begin_iteration(collected, 0.0)
    unweighted = {**computed, "weight": torch.ones_like(computed["weight"])}
    (row_Rn,) = rows_of(collected, num_minibatches=1)
    for name in ("actor_loss", "critic_loss"):
        loss_R, _ = getattr(ppo, name)(batch_of(collected, computed, row_Rn))
        mean_R, _ = getattr(ppo, name)(batch_of(collected, unweighted, row_Rn))
        # of one task 8 transitions, of the others 16
        torch.testing.assert_close(loss_R, torch.tensor([0.5, 1.0, 1.0]) * mean_R)


def test_losses_are_finite_for_actions_far_from_the_policy():
    ppo = make_ppo()
    attach(ppo)
    collected = make_collected(ppo, gap=0.0, foreign=0.5)
    computed = ppo.begin_iteration(collected, 0.0)
    batch = batch_of(collected, computed, rows_of(collected, num_minibatches=1)[0])
    is_foreign_Rn = batch.extra["foreign"]
    assert (batch.extra["advantage"][is_foreign_Rn] == 0).any()
    # the ratio is more than single precision can hold
    batch.extra["log_prob"][is_foreign_Rn] -= 200
    loss_R, (log_ratio_Rn, _) = ppo.actor_loss(batch)
    assert (log_ratio_Rn[is_foreign_Rn] == 0).all()
    loss_R.sum().backward()
    assert loss_R.isfinite().all()
    assert all(p.grad.isfinite().all() for p in [*ppo.actor.parameters(), ppo.noise.log_std_TA])


def test_equal_advantages_are_no_reason_to_learn():
    ppo = make_ppo(return_scale=ReturnScale)
    attach(ppo)
    with torch.no_grad():
        for parameter in ppo.critic.parameters():
            parameter.zero_()
    collected = make_collected(ppo, gap=0.0)
    collected.columns["terminated"].fill_(True)
    collected.columns["reward"].fill_(1.0)
    computed = ppo.begin_iteration(collected, 0.0)
    assert (computed["target"] == 1).all() and not computed["advantage"].any()


def test_only_the_trained_tasks_have_statistics():
    ppo = make_ppo(make_spec(4, train_tasks=(1, 3)), critic=SMALL_HEADS)
    before = copy_of(ppo.critic)
    iterate(ppo)
    assert ppo.return_scale.is_known_T.tolist() == [False, True, False, True]
    heads = (ppo.critic.heads.weight != before["heads.weight"]).any(1)
    assert heads.tolist() == [False, True, False, True]
    names = {name.split("/")[-1] for name in ppo.drain_metrics() if name.count("/") == 2}
    assert names == {"task-1", "task-3"}


def test_divergence_and_clip_fraction_by_hand():
    # (exp(x) - 1) - x = x^2 / 2 + x^3 / 6 + ...
    found, _ = advantages.kl_and_clip_fraction(torch.full((4,), 1e-3), 0.2, torch.ones(1))
    assert found.item() == pytest.approx(0.5e-6, rel=1e-3)
    log_ratio_N = torch.tensor([0.6, 0.82, 1.0, 1.18, 1.22]).log()
    weight_N = torch.tensor([0.5, 1.0, 1, 1, 1])
    _, fraction = advantages.kl_and_clip_fraction(log_ratio_N, 0.2, weight_N)
    assert fraction.item() == pytest.approx(1.5 / 4.5)


def begin(**options):
    """Return PPO as an iteration begins, what was collected, and minibatches of all rows by kind.

    With a learning rate of 0 the policy stays. In ``far``, each action is ``exp(0.8)`` times as
    likely: the estimated divergence is ``exp(0.8) - 1 - 0.8 = 0.4255``. The others have NaN.
    """
    ppo = make_ppo(actor_optimizer=partial(SGD, lr=0.0), on_nonfinite="skip", **options)
    attach(ppo)
    collected = make_collected(ppo, gap=0.0)
    (row_Rn,) = rows_of(collected, num_minibatches=1)
    batch = batch_of(collected, ppo.begin_iteration(collected, 0.0), row_Rn)

    def with_column(name, value_Rn):
        return batch._replace(extra={**batch.extra, name: value_Rn})

    nan_Rn = torch.where(batch.task_R1 == 1, math.nan, batch.extra["advantage"])
    minibatches = {
        "same": batch,
        "far": with_column("log_prob", batch.extra["log_prob"] - 0.8),
        "advantage": with_column("advantage", nan_Rn),
        "observation": batch._replace(observation_RnD=batch.observation_RnD * math.nan),
    }
    return ppo, collected, minibatches


@pytest.mark.parametrize(
    ("max_kl", "epochs", "ends"),
    [
        (0.4, ["far"], [True]),
        (None, ["far"], [False]),
        (0.2, ["same far"], [True]),  # the mean is 0.2128
        (0.22, ["same far", "far far"], [False, True]),
        # skipped steps do not count, unless there are no others
        (0.4, ["advantage far far"], [True]),
        (0.44, ["far observation far"], [False]),
        (0.05, ["advantage observation"], [True]),
    ],
)
def test_mean_divergence_of_an_epochs_steps_ends_the_iteration(max_kl, epochs, ends):
    ppo, collected, minibatches = begin(max_kl=max_kl, num_minibatches=len(epochs[0].split()))
    for epoch, is_over in zip(epochs, ends, strict=True):
        for kind in epoch.split():
            assert not ppo.is_iteration_over()
            ppo.training_step(minibatches[kind], 0)
        assert ppo.is_iteration_over() == is_over
    ppo.end_iteration(collected)
    assert not ppo.is_iteration_over()


def test_mean_divergence_continues_after_resuming_in_an_epoch():
    options = {"max_kl": 0.2, "num_minibatches": 3}
    whole, _, minibatches = begin(**options)
    whole.training_step(minibatches["advantage"], 0)
    whole.training_step(minibatches["far"], 1)
    resumed, _, _ = begin(**options)
    resumed.load_state_dict(whole.state_dict())
    for ppo in (whole, resumed):
        assert not ppo.is_iteration_over()
        ppo.training_step(minibatches["same"], 2)
        assert ppo.is_iteration_over(), "the mean of 0.4255 and 0 is above 0.2"


def test_ratios_start_from_one_as_statistics_move_in_between():
    encoder = partial(Standardize, num_updates=2)
    ppo = make_ppo(encoder=encoder, noise=StateDependentStd, max_kl=None)
    attach(ppo)
    means = []
    for iteration in range(3):
        before = copy_of(ppo.encoder)
        collected = make_collected(ppo, iteration, mean=5.0, std=2.0)
        means.append(collected.columns["observation"][collected.valid_SE].mean(0))
        computed = ppo.begin_iteration(collected, 0.0)
        assert bool(changed(ppo.encoder, before)) == (iteration == 0)
        batches = [batch_of(collected, computed, row_Rn) for row_Rn in rows_of(collected)]
        for batch in batches:
            _, (log_ratio_Rn, _) = ppo.actor_loss(batch)
            assert (log_ratio_Rn.abs() <= 1e-4).all()
        for batch in batches:
            ppo.training_step(batch, 0)
        ppo.end_iteration(collected)
        assert bool(changed(ppo.encoder, before)) == (iteration < 2)
    torch.testing.assert_close(ppo.encoder.mean_D, torch.stack(means[:2]).mean(0))


def test_the_critics_loss_alone_trains_the_encoder():
    ppo = make_ppo(encoder=partial(networks.AppendTask, conditioning=networks.Embedding))
    attach(ppo)
    collected = make_collected(ppo)
    batch = batch_of(collected, ppo.begin_iteration(collected, 0.0), rows_of(collected)[0])
    ppo.actor_loss(batch)[0].sum().backward()
    assert all(parameter.grad is None for parameter in ppo.encoder.parameters())
    ppo.critic_loss(batch)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in ppo.encoder.parameters())


def test_learning_rates_follow_the_schedule():
    assert LinearRate().factor(0.25) == 0.75
    ppo = make_ppo(
        learning_rate=partial(LinearRate, final=0.5),
        actor_optimizer=partial(Adam, lr=0.01),
        critic_optimizer=partial(Adam, lr=0.04),
    )
    optimizers = attach(ppo)
    for progress, factor in ((0.0, 1), (0.5, 0.75), (1.0, 0.5)):
        iterate(ppo, progress=progress)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert rates == pytest.approx([0.01 * factor, 0.04 * factor])


def test_a_reset_keeps_the_statistics():
    noise = partial(StateIndependentStd, initial=-0.5)
    ppo = make_ppo(encoder=Standardize, noise=noise, critic=partial(networks.Separate, width=8))
    for seed in range(2):
        iterate(ppo, seed)
    buffers = {name: buffer.clone() for name, buffer in ppo.named_buffers()}
    ppo.reset_networks()
    for name, buffer in ppo.named_buffers():
        assert torch.equal(buffers[name], buffer)
    assert ppo.noise.log_std_TA.tolist() == [[-0.5] * 2] * 3


def test_ratio_of_an_unchanged_policy_is_one_in_half_precision():
    ppo = make_ppo(noise=StateDependentStd)
    attach(ppo)
    collected = make_collected(ppo)
    computed = ppo.begin_iteration(collected, 0.0)
    batch = batch_of(collected, computed, rows_of(collected)[0])
    seen = []
    for network in (ppo.actor, ppo.critic):
        network.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (log_ratio_Rn, _) = ppo.actor_loss(batch)
        bound_Rn = 1e-5 + 1e-5 * batch.extra["log_prob"].abs()
        assert (log_ratio_Rn.abs() <= bound_Rn).all()
        ppo.critic_loss(batch)
        assert seen == [torch.float32, torch.bfloat16], "the critic ran in half precision"
        ppo.training_step(batch, 0)
    metrics = ppo.drain_metrics()
    assert metrics["train/kl"] < 1e-9 and metrics["train/clip_fraction"] == 0
    assert {p.dtype for p in ppo.parameters()} == {torch.float32}
    assert all(value.isfinite().all() for value in ppo.state_dict().values())
