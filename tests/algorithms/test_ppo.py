"""PPO against an independent program with the same weights, and what it computes of an iteration.

The independent program, ``PlainPPO``, is plain PyTorch with loops; it uses none of PPO's parts.
"""

from __future__ import annotations

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

from mtrl_lightning.algorithms import LinearRate, PopArt, ReturnScale
from mtrl_lightning.gradients import Mean, PCGrad
from mtrl_lightning.networks import (
    MLP,
    AppendTask,
    Embedding,
    MultiHead,
    Standardize,
    StateDependentStd,
    StateIndependentStd,
)
from mtrl_lightning.transitions import Rollout, TransitionBatch
from mtrl_lightning.updates.learning_rate import ConstantRate
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
    generator = np.random.default_rng(seed)
    other = np.random.default_rng([seed, 1])
    task_E = np.repeat(ppo.spec.train_tasks, ENVS_PER_TASK)
    shape_ED = (len(task_E), *ppo.spec.observation_space.shape)
    observation_ED = generator.normal(mean, std, shape_ED).astype(np.float32)
    steps = []
    for _ in range(NUM_STEPS):
        action_EA, fields = ppo.act(observation_ED, task_E, "explore")
        kind_E = generator.choice(4, len(task_E), p=[1 - gap - 2 * end, end, end, gap])
        next_observation_ED = generator.normal(mean, std, shape_ED).astype(np.float32)
        step = {
            "observation": observation_ED,
            "action": action_EA,
            # tasks differ in the scale of their rewards
            "reward": (10.0**task_E * generator.normal(1, 1, len(task_E))).astype(np.float32),
            "next_observation": next_observation_ED,
            "terminated": kind_E == 1,
            "truncated": kind_E == 2,
            **fields,
        }
        is_gap_E = kind_E == 3
        steps.append({name: column.copy() for name, column in step.items()})
        for name in ("observation", "reward", "next_observation", "log_prob"):
            steps[-1][name][is_gap_E] = GARBAGE
        is_foreign_E = other.random(len(task_E)) < foreign
        sample_EA = other.normal(0, 0.5, action_EA.shape).astype(np.float32)
        steps[-1]["unclipped_action"][is_foreign_E] = sample_EA[is_foreign_E]
        # of the other policy
        steps[-1]["log_prob"][is_foreign_E] = GARBAGE
        steps[-1]["foreign"] = is_foreign_E
        steps[-1]["valid"] = ~is_gap_E
        fresh_ED = generator.normal(mean, std, shape_ED).astype(np.float32)
        observation_ED = np.where((kind_E > 0)[:, None], fresh_ED, next_observation_ED)
    columns = {
        name: torch.from_numpy(np.stack([step[name] for step in steps])) for name in steps[0]
    }
    return Rollout(columns, columns.pop("valid"), torch.from_numpy(task_E))


def rows_of(collected, num_minibatches=2, seed=0):
    """Row numbers ``[R, n]`` of an epoch's minibatches, equally many of each task."""
    generator = np.random.default_rng(seed)
    valid_SE, task_E = collected.valid_SE.numpy(), collected.task_E.numpy()
    per_task = NUM_STEPS * ENVS_PER_TASK // num_minibatches
    orders = []
    for task in np.unique(task_E):
        rows = np.flatnonzero(valid_SE & (task_E == task))
        orders.append(np.resize(generator.permutation(rows), per_task * num_minibatches))
    order_TM = np.stack(orders)
    return [
        torch.from_numpy(order_TM[:, i * per_task : (i + 1) * per_task])
        for i in range(num_minibatches)
    ]


def batch_of(collected, computed, row_Rn):
    columns = {**collected.columns, **computed}
    rows = {name: column.flatten(0, 1)[row_Rn] for name, column in columns.items()}
    task_N = collected.task_E.repeat(len(collected.valid_SE))
    core = ("observation", "action", "reward", "next_observation", "terminated")
    extra = {name: column for name, column in rows.items() if name not in core}
    return TransitionBatch(*(rows[name] for name in core), task_N[row_Rn], extra)


def all_rows(collected):
    """Row numbers ``[R, n]`` of an iteration without gaps as one minibatch."""
    num_envs = len(collected.task_E)
    num_trained = len(collected.task_E.unique())
    row_ES = torch.arange(collected.valid_SE.numel()).view(-1, num_envs).t()
    return row_ES.reshape(num_trained, -1)


def iterate(ppo, seed=0, num_epochs=2, progress=0.0, **options):
    """Make one iteration; return what was collected and computed."""
    if not callable(ppo.__dict__.get("optimizers")):
        attach(ppo)
    collected = make_collected(ppo, seed, **options)
    computed = ppo.begin_iteration(collected, progress)
    for epoch in range(num_epochs):
        for row_Rn in rows_of(collected, seed=epoch):
            if not ppo.is_iteration_over():
                ppo.training_step(batch_of(collected, computed, row_Rn), 0)
    ppo.end_iteration(collected)
    return collected, computed


def continue_optimizers(first, second):
    """Give the second the state of the first's optimizers, as a checkpoint does."""
    for old, new in zip(first.updates, second.updates, strict=True):
        new.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))


# ---- paused environments ----


@pytest.mark.parametrize("gradient", [Mean, PCGrad])
def test_transitions_count_alike_when_environments_are_paused(gradient):
    ppo = make_ppo(actor=SMALL_HEADS, critic=SMALL_HEADS, actor_gradient=gradient)
    attach(ppo)
    collected = make_collected(ppo, gap=0.0)
    collected.valid_SE[:, 1] = False  # of the first task
    computed = ppo.begin_iteration(collected, 0.0)
    row_Rn = all_rows(collected)
    row_Rn[0, NUM_STEPS:] = row_Rn[0, :NUM_STEPS]
    batch = batch_of(collected, computed, row_Rn)
    unweighted = {**computed, "weight": torch.ones_like(computed["weight"])}
    for name in ("actor_loss", "critic_loss"):
        loss_R, _ = getattr(ppo, name)(batch)
        mean_R, _ = getattr(ppo, name)(batch_of(collected, unweighted, row_Rn))
        # of one task 8 transitions, of the others 16
        torch.testing.assert_close(loss_R, torch.tensor([0.5, 1.0, 1.0]) * mean_R)
    ppo.training_step(batch, 0)


# ---- an independent program ----


class PlainPPO:
    """Multi-task PPO with PopArt in plain PyTorch: weights copied, everything else its own.

    The critic has one output layer per task, or one for all and a factor and offset per task.
    """

    def __init__(self, ppo, options) -> None:
        self.options = options
        self.names = ppo.spec.task_names
        self.has_heads = isinstance(ppo.critic, MultiHead)
        self.noise_depends_on_state = isinstance(ppo.noise, StateDependentStd)
        self.actor = self.copies(ppo.actor)
        self.log_std_TA = self.copies(ppo.noise)[0]
        self.critic = self.copies(ppo.critic)
        self.factor_T = torch.ones(NUM_TASKS, requires_grad=not self.has_heads)
        self.offset_T = torch.zeros(NUM_TASKS, requires_grad=not self.has_heads)
        self.critic_parameters = [*self.critic, self.factor_T, self.offset_T]
        if self.has_heads:
            self.critic_parameters = self.critic
        self.actor_parameters = [*self.actor, self.log_std_TA]
        adam = partial(Adam, lr=5e-4, eps=1e-5, foreach=False, fused=False)
        self.actor_optimizer = adam(self.actor_parameters)
        self.critic_optimizer = adam(self.critic_parameters)
        self.mu = [None] * NUM_TASKS
        self.nu = [None] * NUM_TASKS
        self.metrics = {}

    @staticmethod
    def copies(module):
        return [p.detach().clone().requires_grad_(True) for p in module.parameters()]

    def log(self, name, value):
        self.metrics.setdefault(f"train/{name}", []).append(float(torch.as_tensor(value).detach()))

    # -- networks --

    @staticmethod
    def layers(parameters, x):
        for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            x = torch.relu(x @ weight.T + bias)
        return x @ parameters[-2].T + parameters[-1]

    def normalized_value(self, observation, task):
        x = torch.cat([observation, torch.eye(NUM_TASKS)[task]], dim=1)
        outputs = self.layers(self.critic, x)
        if self.has_heads:
            return outputs[torch.arange(len(task)), task]
        return self.factor_T[task] * outputs[:, 0] + self.offset_T[task]

    def std(self, task):
        return math.sqrt(self.nu[task] - self.mu[task] ** 2)

    def value(self, observation, task):
        """The value of one observation, as a number."""
        with torch.no_grad():
            value = self.normalized_value(observation[None], torch.tensor([task])).item()
        if self.mu[task] is None:
            return value
        return self.std(task) * value + self.mu[task]

    def policy(self, observation, task):
        x = torch.cat([observation, torch.eye(NUM_TASKS)[task]], dim=1)
        outputs = self.layers(self.actor, x)
        if not self.noise_depends_on_state:
            return Normal(outputs, self.log_std_TA[task].exp())
        half = outputs.shape[1] // 2
        log_std = torch.clip(self.log_std_TA[task] + outputs[:, half:], -2.3, 0.4)
        return Normal(outputs[:, :half], log_std.exp())

    # -- an iteration --

    def begin_iteration(self, collected):
        self.is_first_update = True
        discount, decay = self.options["discount"], self.options["gae_lambda"]
        columns, task_E, valid_SE = collected.columns, collected.task_E.tolist(), collected.valid_SE
        num_steps, num_envs = valid_SE.shape
        observation, next_observation = columns["observation"], columns["next_observation"]
        reward, terminated = columns["reward"].tolist(), columns["terminated"].tolist()
        truncated = columns["truncated"].tolist()
        is_foreign = columns["foreign"].tolist()
        self.advantage = {}
        self.old_value = {}
        self.target = {}
        self.old_log_prob = {}
        for env in range(num_envs):
            advantage = 0.0
            for step in reversed(range(num_steps)):
                if not valid_SE[step, env]:
                    advantage = 0.0
                    continue
                task = task_E[env]
                value = self.value(observation[step, env], task)
                next_value = self.value(next_observation[step, env], task)
                delta = reward[step][env] - value
                if terminated[step][env]:
                    advantage = delta
                elif truncated[step][env]:
                    advantage = delta + discount * next_value
                else:
                    advantage = delta + discount * next_value + discount * decay * advantage
                row = step * num_envs + env
                self.advantage[row] = advantage
                self.old_value[row] = value
                self.target[row] = advantage + value
                self.old_log_prob[row] = columns["log_prob"][step, env]
                if is_foreign[step][env]:
                    own = self.policy(observation[step, env][None], torch.tensor([task]))
                    sample_A = columns["unclipped_action"][step, env]
                    self.old_log_prob[row] = own.log_prob(sample_A).sum().detach()
        for task in range(NUM_TASKS):
            rows = [row for row in self.advantage if task_E[row % num_envs] == task]
            advantages = np.array([self.advantage[row] for row in rows])
            targets = np.array([self.target[row] for row in rows])
            self.move_statistics(task, targets)
            name = self.names[task]
            self.log(f"advantage_std/{name}", advantages.std())
            explained = 1 - (targets - [self.old_value[row] for row in rows]).var() / targets.var()
            self.log(f"explained_variance/{name}", explained)
            places = [divmod(row, num_envs) for row in rows]
            foreign = np.array([is_foreign[step][env] for step, env in places])
            for row, one in zip(rows, foreign, strict=True):
                advantage = self.advantage[row]
                gain = max(advantage, 0.0) if one else advantage - advantages[~foreign].mean()
                self.advantage[row] = gain / advantages.std()

        if self.options["value_clip"] is not None:
            # the first statistics have moved the values
            for row in self.old_value:
                observation_D = observation.flatten(0, 1)[row]
                self.old_value[row] = self.value(observation_D, task_E[row % num_envs])

    def move_statistics(self, task, targets):
        """PopArt with moving averages of the first two moments, in double precision."""
        first, second = targets.mean(), (targets**2).mean()
        if self.mu[task] is None:
            self.mu[task], self.nu[task] = first, second
            return
        old_mean, old_std = self.mu[task], self.std(task)
        self.mu[task] += self.options["step_size"] * (first - self.mu[task])
        self.nu[task] += self.options["step_size"] * (second - self.nu[task])
        new_mean, new_std = self.mu[task], self.std(task)
        weight, bias = self.factor_T, self.offset_T
        if self.has_heads:
            weight, bias = self.critic[-2:]
        with torch.no_grad():
            weight[task] *= old_std / new_std
            bias[task] = (old_std * bias[task] + old_mean - new_mean) / new_std

    def task_losses(self, loss_B):
        return [part.mean() for part in loss_B.chunk(NUM_TASKS)]

    def critic_losses(self, collected, row_B):
        num_envs = len(collected.task_E)
        task_B = collected.task_E[row_B % num_envs]
        observation = collected.columns["observation"].flatten(0, 1)[row_B]
        value_B = self.normalized_value(observation, task_B)
        terms = []
        for i, (row, task) in enumerate(zip(row_B.tolist(), task_B.tolist(), strict=True)):
            target = (self.target[row] - self.mu[task]) / self.std(task)
            old = (self.old_value[row] - self.mu[task]) / self.std(task)
            term = (value_B[i] - target) ** 2
            limit = self.options["value_clip"]
            if limit is not None:
                clipped = old + torch.clip(value_B[i] - old, -limit, limit)
                term = torch.max(term, (clipped - target) ** 2)
            terms.append(term)
        return self.task_losses(torch.stack(terms))

    def update(self, collected, row_B):
        num_envs = len(collected.task_E)
        task_B = collected.task_E[row_B % num_envs]
        columns = {name: c.flatten(0, 1)[row_B] for name, c in collected.columns.items()}
        if self.is_first_update:
            self.is_first_update = False
            self.log_shares(self.critic_losses(collected, row_B))
        policy = self.policy(columns["observation"], task_B)
        log_prob_B = policy.log_prob(columns["unclipped_action"]).sum(1)
        old_log_prob_B = torch.stack([self.old_log_prob[row] for row in row_B.tolist()])
        ratio_B = torch.exp(log_prob_B - old_log_prob_B)
        clip = self.options["clip"]
        gains = []
        for i, row in enumerate(row_B.tolist()):
            advantage = self.advantage[row]
            gains.append(
                torch.min(ratio_B[i] * advantage, ratio_B[i].clip(1 - clip, 1 + clip) * advantage)
            )
        entropy_B = policy.entropy().sum(1)
        objective_B = torch.stack(gains) + self.options["entropy_coef"] * entropy_B
        actor_loss = -sum(self.task_losses(objective_B)) / NUM_TASKS
        self.step("actor", actor_loss, self.actor_parameters, self.actor_optimizer)
        with torch.no_grad():
            self.log_std_TA.clip_(-2.3, 0.4)
        critic_loss = sum(self.critic_losses(collected, row_B)) / NUM_TASKS
        self.step("critic", critic_loss, self.critic_parameters, self.critic_optimizer)
        ratio_B = torch.where(columns["foreign"], 1.0, ratio_B)
        self.log("kl", (ratio_B.double() - 1 - ratio_B.double().log()).mean())
        self.log("clip_fraction", ((ratio_B < 1 - clip) | (ratio_B > 1 + clip)).double().mean())
        self.log("entropy", entropy_B.mean())

    def step(self, name, loss, parameters, optimizer):
        optimizer.zero_grad()
        loss.backward()
        largest = self.options[f"{name}_max_grad_norm"]
        self.log(f"{name}_grad_norm", nn.utils.clip_grad_norm_(parameters, largest or math.inf))
        self.log(f"{name}_loss", loss)
        optimizer.step()

    def log_shares(self, losses):
        shared = self.critic[:-2] if self.has_heads else self.critic
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
        std_T = self.log_std_TA.exp().mean(1).tolist()
        for name, std in zip(self.names, std_T, strict=True):
            means[f"train/noise_std/{name}"] = std
        self.metrics = {}
        return means


DEFAULTS = {
    "discount": 0.9,
    "gae_lambda": 0.8,
    "clip": 0.1,
    "value_clip": None,
    "entropy_coef": 0.01,
    "actor_max_grad_norm": 0.1,
    "critic_max_grad_norm": 0.5,
    "step_size": 0.4,
}
VARIANTS = {
    "mlp": ({}, {}),
    "heads": ({}, {"critic": SMALL_HEADS}),
    "state noise": ({}, {"noise": StateDependentStd, "critic": SMALL_HEADS}),
    "value clipping": ({"value_clip": 0.05}, {}),
    "no clipping of gradients": (
        {"actor_max_grad_norm": None, "critic_max_grad_norm": None},
        {"critic": SMALL_HEADS},
    ),
    "a narrow clip": ({"clip": 0.01, "entropy_coef": 0.0}, {}),
}


@pytest.fixture(params=VARIANTS)
def pair(request):
    changes, parts = VARIANTS[request.param]
    options = {**DEFAULTS, **changes}
    numbers = {name: value for name, value in options.items() if name != "step_size"}
    scale = partial(PopArt, step_size=options["step_size"])
    ppo = make_ppo(max_kl=None, seed=2, return_scale=scale, **{**numbers, **parts})
    attach(ppo)
    return ppo, PlainPPO(ppo, options)


def assert_same_weights(ppo, plain, tolerance):
    found = [*ppo.actor.parameters(), *ppo.noise.parameters(), *ppo.critic.parameters()]
    wanted = [*plain.actor_parameters, *plain.critic]
    if not plain.has_heads:
        found += [ppo.return_scale.weight_T, ppo.return_scale.bias_T]
        wanted += [plain.factor_T, plain.offset_T]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("foreign", [0.0, 0.3])
def test_every_update_equals_that_of_an_independent_program(pair, foreign):
    ppo, plain = pair
    before = copy_of(ppo)
    for iteration in range(3):
        collected = make_collected(ppo, seed=iteration, foreign=foreign)
        assert collected.columns["foreign"].any() == (foreign > 0)
        computed = ppo.begin_iteration(collected, 0.0)
        plain.begin_iteration(collected)
        assert_same_weights(ppo, plain, 2e-6)
        for row, advantage in plain.advantage.items():
            place = divmod(row, len(collected.task_E))
            assert computed["advantage"][place].item() == pytest.approx(advantage, abs=2e-5)
            assert computed["value"][place].item() == pytest.approx(plain.old_value[row], rel=1e-4)
            assert computed["target"][place].item() == pytest.approx(
                plain.target[row], rel=1e-4, abs=1e-4
            )
        for epoch in range(2):
            for row_Rn in rows_of(collected, seed=epoch):
                ppo.training_step(batch_of(collected, computed, row_Rn), 0)
                plain.update(collected, row_Rn.flatten())
                assert_same_weights(ppo, plain, 2e-6)
        ppo.end_iteration(collected)
        metrics = ppo.drain_metrics()
        assert metrics == pytest.approx(plain.drained(), rel=1e-3, abs=1e-5)
        for name in ("actor", "critic"):  # so that a clipping that is left out would be noticed
            limit = plain.options[f"{name}_max_grad_norm"] or 0.0
            assert metrics[f"train/{name}_grad_norm"] > limit
    trained = {name for name, _ in ppo.named_parameters()}
    assert changed(ppo, before) >= trained
    assert ppo.drain_metrics() == {}


def test_losses_are_finite_for_actions_far_from_the_policy():
    ppo = make_ppo()
    attach(ppo)
    collected = make_collected(ppo, gap=0.0, foreign=0.5)
    foreign_SE = collected.columns["foreign"]
    collected.columns["unclipped_action"][foreign_SE] = 50.0
    computed = ppo.begin_iteration(collected, 0.0)
    assert (computed["log_prob"][foreign_SE] < -60).all(), "that of the own policy"
    assert (computed["advantage"][foreign_SE] == 0).any()
    with torch.no_grad():
        ppo.noise.log_std_TA += 0.5
    ratio_SE = torch.exp(ppo._log_probs(collected.columns) - computed["log_prob"])
    assert (ratio_SE[foreign_SE] == math.inf).all(), "more than single precision can hold"
    batch = batch_of(collected, computed, all_rows(collected))
    loss_R, (log_ratio_Rn, _) = ppo.actor_loss(batch)
    assert (log_ratio_Rn[batch.extra["foreign"]] == 0).all()
    loss_R.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ppo.actor.parameters())
    assert torch.isfinite(loss_R).all() and torch.isfinite(ppo.noise.log_std_TA.grad).all()


# ---- what an iteration begins with ----


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


# ---- the end of an iteration ----


def begin(**options):
    """Return PPO as an iteration begins, what was collected, and minibatches of all rows by kind.

    With a learning rate of 0 the policy stays. In ``far``, each action is ``exp(0.8)`` times as
    likely: the estimated divergence is ``exp(0.8) - 1 - 0.8 = 0.4255``. The others have NaN.
    """
    still = partial(SGD, lr=0.0)
    ppo = make_ppo(actor_optimizer=still, on_nonfinite="skip", **options)
    attach(ppo)
    collected = make_collected(ppo, gap=0.0)
    batch = batch_of(collected, ppo.begin_iteration(collected, 0.0), all_rows(collected))
    nan_Rn = torch.where(batch.task_R1 == 1, math.nan, batch.extra["advantage"])
    return (
        ppo,
        collected,
        {
            "same": batch,
            "far": batch._replace(extra={**batch.extra, "log_prob": batch.extra["log_prob"] - 0.8}),
            "advantage": batch._replace(extra={**batch.extra, "advantage": nan_Rn}),
            "observation": batch._replace(observation_RnD=batch.observation_RnD * math.nan),
        },
    )


@pytest.mark.parametrize(
    ("max_kl", "epochs", "ends"),
    [
        (0.4, ["far"], [True]),
        (0.44, ["far"], [False]),
        (None, ["far"], [False]),
        (0.2, ["same far"], [True]),  # the mean is 0.2128
        (0.22, ["same far", "far far"], [False, True]),
        *((0.4, [epoch], [True]) for epoch in ("advantage far far", "far observation far")),
        *((0.44, [epoch], [False]) for epoch in ("far far advantage", "observation far far")),
        (0.05, ["advantage advantage"], [True]),
        (0.05, ["observation observation"], [True]),
    ],
)
def test_mean_divergence_of_an_epochs_steps_ends_the_iteration(max_kl, epochs, ends):
    ppo, collected, minibatches = begin(max_kl=max_kl, num_minibatches=len(epochs[0].split()))
    for epoch, is_over in zip(epochs, ends, strict=True):
        for kind in epoch.split():
            assert not ppo.is_iteration_over()
            ppo.training_step(minibatches[kind], 0)
        assert ppo.is_iteration_over() == is_over
    if epochs == ["far"]:
        metrics = ppo.drain_metrics()
        assert metrics["train/kl"] == pytest.approx(math.exp(0.8) - 1.8, rel=1e-4)
        assert metrics["train/clip_fraction"] == 1
    ppo.guard.read()
    assert (ppo.counters.skipped_updates > 0) == ("vation" in epochs[0] or "vantage" in epochs[0])
    ppo.end_iteration(collected)
    assert not ppo.is_iteration_over()


def test_mean_divergence_continues_after_a_resumption_within_an_epoch():
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


def test_the_encoders_statistics_move_between_iterations_only():
    ppo = make_ppo(encoder=Standardize, max_kl=None)
    attach(ppo)
    means = []
    for iteration in range(3):
        collected = make_collected(ppo, iteration)
        means.append(collected.columns["observation"][collected.valid_SE].mean(0))
        before = copy_of(ppo.encoder)
        computed = ppo.begin_iteration(collected, 0.0)
        if iteration == 0:
            torch.testing.assert_close(ppo.encoder.mean_D, means[0])
        else:
            assert changed(ppo.encoder, before) == set()
        before = copy_of(ppo.encoder)
        for row_Rn in rows_of(collected):
            ppo.training_step(batch_of(collected, computed, row_Rn), 0)
            assert changed(ppo.encoder, before) == set()
        ppo.end_iteration(collected)
        torch.testing.assert_close(ppo.encoder.mean_D, torch.stack(means).mean(0))
        assert ppo.encoder.count == len(means)
        assert ppo.num_iterations == len(means)


@pytest.mark.parametrize("noise", [StateIndependentStd, StateDependentStd])
@pytest.mark.parametrize("per_task", [False, True])
def test_ratios_start_from_one_behind_moving_statistics(per_task, noise):
    ppo = make_ppo(
        encoder=partial(Standardize, per_task=per_task, num_updates=2), noise=noise, max_kl=None
    )
    attach(ppo)
    for iteration in range(4):
        before = copy_of(ppo.encoder)
        collected = make_collected(ppo, iteration, mean=5.0, std=20.0)
        sampled_SE = collected.columns["log_prob"].clone()
        computed = ppo.begin_iteration(collected, 0.0)
        assert bool(changed(ppo.encoder, before)) == (iteration == 0)
        assert torch.equal(collected.columns["log_prob"], sampled_SE)
        batches = [batch_of(collected, computed, row_Rn) for row_Rn in rows_of(collected)]
        for batch in batches:
            _, (log_ratio_Rn, _) = ppo.actor_loss(batch)
            assert (log_ratio_Rn.abs() <= 1e-4).all()
        for batch in batches:
            ppo.training_step(batch, 0)
        ppo.end_iteration(collected)
        assert bool(changed(ppo.encoder, before)) == (iteration < 2)


def test_the_critics_loss_alone_trains_the_encoder():
    for part, trains in (("critic", True), ("actor", False)):
        frozen = "actor" if part == "critic" else "critic"
        ppo = make_ppo(
            encoder=partial(AppendTask, conditioning=partial(Embedding, dim=3)),
            max_kl=None,
            **{f"{frozen}_optimizer": partial(SGD, lr=0.0)},
        )
        encoder, moved = copy_of(ppo.encoder), copy_of(ppo.get_submodule(part))
        collected, computed = iterate(ppo)
        assert bool(changed(ppo.encoder, encoder)) == trains
        assert changed(ppo.get_submodule(part), moved) == set(moved)
    ppo.zero_grad()
    batch = batch_of(collected, computed, rows_of(collected)[0])
    ppo.actor_loss(batch)[0].sum().backward()
    assert all(parameter.grad is None for parameter in ppo.encoder.parameters())
    ppo.critic_loss(batch)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in ppo.encoder.parameters())


# ---- learning rates ----


def learning_rates(ppo):
    return [group["lr"] for update in ppo.updates for group in update.optimizer.param_groups]


def test_the_factors_of_the_schedules_by_hand():
    assert [LinearRate().factor(x) for x in (0, 0.25, 1)] == [1, 0.75, 0]
    assert [LinearRate(0.2).factor(x) for x in (0, 0.5, 1)] == pytest.approx([1, 0.6, 0.2])
    assert [LinearRate(3.0).factor(x) for x in (0, 0.5, 1)] == [1, 2, 3]
    assert [ConstantRate().factor(x) for x in (0, 0.5, 1)] == [1, 1, 1]


def test_learning_rates_follow_the_schedule_after_a_resumption():
    def make():
        return make_ppo(
            learning_rate=partial(LinearRate, final=0.5),
            actor_optimizer=partial(Adam, lr=0.01),
            critic_optimizer=partial(Adam, lr=0.04),
        )

    first = make()
    attach(first)
    assert learning_rates(first) == [0.01, 0.04]
    for progress, factor in ((0.0, 1), (0.5, 0.75), (0.5, 0.75), (1.0, 0.5)):
        iterate(first, progress=progress)
        assert learning_rates(first) == pytest.approx([0.01 * factor, 0.04 * factor])
    second = make()
    attach(second)
    continue_optimizers(first, second)
    assert learning_rates(second) == pytest.approx([0.005, 0.02])
    iterate(second, progress=0.2)
    assert learning_rates(second) == pytest.approx([0.009, 0.036])


# ---- acting ----

OBSERVATION_ED = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
TASK_E = np.arange(60) % NUM_TASKS


def test_exploring_returns_clipped_samples_with_their_densities():
    ppo = make_ppo(seed=3, actor=partial(MLP, width=16, depth=2, output_bound=1.0))
    with torch.no_grad():
        ppo.noise.log_std_TA.copy_(torch.tensor([[0.1, -0.3], [-1.0, 0.2], [0.3, -2.0]]))
        mean_EA = ppo.actor(torch.from_numpy(OBSERVATION_ED), torch.from_numpy(TASK_E))
        log_std_EA = ppo.noise.log_std_TA[TASK_E]
    assert (mean_EA.abs() > 1).any()
    exploited_EA = ppo.act(OBSERVATION_ED, TASK_E, "exploit")
    np.testing.assert_allclose(exploited_EA, mean_EA.clamp(-1, 1).numpy(), rtol=1e-5, atol=1e-6)
    action_EA, fields = ppo.act(OBSERVATION_ED, TASK_E, "explore")
    assert [field.name for field in ppo.policy_fields] == list(fields)
    for field in ppo.policy_fields:
        assert fields[field.name].shape == (60, *field.shape)
        assert fields[field.name].dtype == field.dtype
    sample_EA = fields["unclipped_action"]
    assert 0.1 < (np.abs(sample_EA) > 1).mean() < 0.9
    assert np.array_equal(action_EA, np.clip(sample_EA, -1, 1))
    wanted_E = Normal(mean_EA, log_std_EA.exp()).log_prob(torch.from_numpy(sample_EA)).sum(1)
    assert fields["log_prob"] == pytest.approx(wanted_E.numpy(), rel=1e-4, abs=1e-5)
    drawn_EA = ((torch.from_numpy(sample_EA) - mean_EA) / log_std_EA.exp()).numpy()
    assert drawn_EA.mean() == pytest.approx(0, abs=5 / math.sqrt(120))
    assert drawn_EA.std() == pytest.approx(1, abs=5 / math.sqrt(240))


# ---- resets ----


@pytest.mark.parametrize("critic", [SMALL_HEADS, partial(MLP, width=16, depth=2)])
def test_a_reset_gives_other_weights_and_keeps_the_statistics(critic):
    ppo = make_ppo(
        critic=critic, encoder=Standardize, noise=partial(StateIndependentStd, initial=-0.5)
    )
    for seed in range(2):
        iterate(ppo, seed)
    before = copy_of(ppo)
    ppo.reset_networks()
    scale = ppo.return_scale
    assert all(torch.equal(before[f"return_scale.{n}"], b) for n, b in scale.named_buffers())
    assert changed(ppo.encoder, {n: before[f"encoder.{n}"] for n in ppo.encoder.state_dict()}) == (
        set()
    )
    assert ppo.noise.log_std_TA.tolist() == [[-0.5] * 2] * 3
    # outputs near 0 are values near the mean of the returns
    collected = make_collected(ppo, gap=0.0)
    value_SE = ppo.begin_iteration(collected, 0.0)["value"]
    mean_E = before["return_scale.mean_T"][collected.task_E]
    std_E = before["return_scale.variance_T"].sqrt()[collected.task_E]
    assert ((value_SE - mean_E).abs() < 2 * std_E).all()


# ---- precision ----


class TypeSpy(MLP):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.seen = set()

    def forward(self, x_BD, task_B):
        out = super().forward(x_BD, task_B)
        if torch.is_grad_enabled():
            self.seen.add(out.dtype)
        return out


@pytest.mark.parametrize("noise", [StateIndependentStd, StateDependentStd])
def test_ratio_of_an_unchanged_policy_is_one_in_half_precision(noise):
    actor_types, critic_types = set(), set()
    ppo = make_ppo(
        actor=partial(TypeSpy, width=16, depth=2, output_bound=0.3),
        critic=partial(TypeSpy, width=16, depth=2, output_bound=0.3),
        noise=noise,
    )
    ppo.actor.seen, ppo.critic.seen = actor_types, critic_types
    attach(ppo)
    collected = make_collected(ppo)
    computed = ppo.begin_iteration(collected, 0.0)
    batch = batch_of(collected, computed, rows_of(collected)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (log_ratio_Rn, _) = ppo.actor_loss(batch)
        bound_Rn = 1e-5 + 1e-5 * batch.extra["log_prob"].abs()
        assert (log_ratio_Rn.abs() <= bound_Rn).all()
        ppo.training_step(batch, 0)
    assert actor_types == {torch.float32}
    assert critic_types == {torch.bfloat16}, "the critic ran in half precision"
    metrics = ppo.drain_metrics()
    assert metrics["train/kl"] < 1e-9
    assert metrics["train/clip_fraction"] == 0
    assert {p.dtype for p in ppo.parameters()} == {torch.float32}
    assert all(value.isfinite().all() for value in ppo.state_dict().values())
