"""A run starts from a trained policy: what is copied, tasks being matched by name."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from examples.custom_network import GatedMLP
from mtrl_lightning import ToyReach
from mtrl_lightning.algorithms import (
    Algorithm,
    BehaviourCloning,
    Categorical,
    NormalizeReward,
    PopArt,
    ReturnRange,
    ReturnScale,
    RewardScale,
    Scalar,
)
from mtrl_lightning.algorithms.arguments import rebuild
from mtrl_lightning.algorithms.starting import start_from
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradNorm
from mtrl_lightning.networks import (
    CARE,
    MLP,
    MOORE,
    AppendTask,
    Embedding,
    FiLM,
    Language,
    MixtureOfEncoders,
    MLPEncoder,
    MultiHead,
    Network,
    NoConditioning,
    OneHot,
    OneHotGate,
    PaCo,
    Separate,
    SoftModularization,
    Standardize,
    StateDependentStd,
    StateIndependentStd,
    TaskAxis,
    TaskConditioning,
    TaskEncoder,
    TopKGate,
)
from mtrl_lightning.policy import LoadedPolicy, load_policy
from mtrl_lightning.runs import best_checkpoint
from tests.helpers.algorithms import (
    changed,
    copy_of,
    make_batch,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
    small_mlp,
    train,
)
from tests.helpers.checkpoints import checkpoint_of

TOY = ToyReach(6).spec
THERE = TOY._replace(task_names=("goal-0", "goal-1", "goal-2", "goal-3"), train_tasks=(0, 1, 2, 3))
HERE = TOY._replace(task_names=("goal-3", "goal-5", "goal-1"), train_tasks=(0, 1, 2))
COMMON = {0: 3, 2: 1}
"""Indices here and there of the tasks that both have; task 1 here is new."""
SMALL = {"width": 8, "depth": 2, "output_bound": 0.3}


def spec_of(*names, trained=None):
    return TOY._replace(
        task_names=names, train_tasks=tuple(range(len(names))) if trained is None else trained
    )


def small(kind, **options):
    return partial(kind, **{**SMALL, **options})


def networks(kind, **options):
    return {"actor": small(kind, **options), "critic": small(kind, **options)}


def trained(make, spec=THERE, **options):
    """Return an algorithm whose weights and statistics are all random."""
    algorithm = make(spec, seed=1, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in algorithm.state_dict().items():
            if (isinstance(buffer, torch.Tensor) and "mean" in name) or "variance" in name:
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return algorithm


def started(make, source, spec=HERE, new_tasks="fresh", **options):
    """Return an algorithm as it was before and one that has started, and the table."""
    fresh = make(spec, seed=2, **options)
    algorithm = make(spec, seed=2, **options)
    table = start_from(algorithm, checkpoint_of(source), new_tasks)
    return fresh, algorithm, table


def actions(algorithm, task, num_rows=16):
    observation = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(3))
    task_B = torch.full((num_rows,), task)
    policy = algorithm.policy(observation, task_B)
    noise = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(4))
    return torch.cat([policy.mode(), policy.sample(noise)[0]])


def assert_acts_as(algorithm, source, common=None):
    with torch.no_grad():
        for here, there in (COMMON if common is None else common).items():
            torch.testing.assert_close(
                actions(algorithm, here), actions(source, there), rtol=0, atol=1e-6
            )


class Table(TaskConditioning):
    """Has a vector of each task that it does not declare."""

    def __init__(self, spec):
        super().__init__(spec)
        self.out_dim = 5
        self.table = torch.nn.Embedding(spec.num_tasks, 5)

    def forward(self, task_B):
        return self.table(task_B)


class DeclaredTable(Table):
    """Declares them."""

    def task_axes(self):
        return {"table.weight": TaskAxis()}


class PlainOneHot(TaskConditioning):
    """Gives a one-hot, and does not say so."""

    def __init__(self, spec):
        super().__init__(spec)
        self.out_dim = spec.num_tasks

    def forward(self, task_B):
        return torch.nn.functional.one_hot(task_B, self.num_tasks).float()


class DeclaredOneHot(PlainOneHot):
    """Says so."""

    def columns(self, weight, start=0):
        return {weight: TaskAxis(1, start)}


NONE = {"conditioning": NoConditioning}
POLICIES = {
    "one-hot MLP": networks(MLP),
    "residual": networks(MLP, residual=True),
    "multi-head": networks(MultiHead),
    "wide heads": networks(MultiHead, head_width=5),
    "soft modularization": networks(SoftModularization, embedding_dim=8),
    "film": networks(FiLM),
    "paco": networks(PaCo),
    "moore": networks(MOORE),
    "separate": networks(Separate),
    "embedding": {**networks(MLP), "conditioning": partial(Embedding, dim=5)},
    "task encoder": {**networks(MLP), "conditioning": partial(TaskEncoder, width=5)},
    "encoded one-hot": {
        **networks(MultiHead),
        "conditioning": partial(TaskEncoder, width=5, embedding=OneHot),
    },
    "language": {**networks(PaCo, max_loss=None), "conditioning": Language},
    "appended embedding": {
        **networks(MLP),
        **NONE,
        "encoder": partial(AppendTask, conditioning=partial(Embedding, dim=5)),
    },
    "care": {**networks(MLP), **NONE, "encoder": partial(CARE, num_experts=3, width=6)},
    "gate": {
        **networks(MLP),
        "encoder": partial(MixtureOfEncoders, num_experts=3, width=6, assignment=TopKGate),
    },
    "projection": {**networks(MOORE), "encoder": partial(MLPEncoder, width=8, out_dim=5)},
    "statistics": {**networks(MLP), "encoder": partial(Standardize, per_task=True)},
    "shared statistics": {**networks(MLP), "encoder": Standardize},
    "own embedding": {**networks(MLP), "conditioning": DeclaredTable},
    "own one-hot": {**networks(MLP), "conditioning": DeclaredOneHot},
    "own network": {"actor": partial(GatedMLP, width=8), "critic": partial(GatedMLP, width=8)},
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_policy_acts_on_common_tasks_as_it_did(options):
    source = trained(make_sac, **options)
    _, algorithm, table = started(make_sac, source, **options)
    assert_acts_as(algorithm, source)
    assert not torch.allclose(actions(source, 1), actions(source, 3), atol=1e-3)
    assert "Tasks copied: goal-3, goal-1\nNew tasks: goal-5" in table
    assert "Left out, not in this run: goal-0, goal-2" in table
    assert "critic" in table and "fresh: " not in table
    train(algorithm, 1)  # all is consistent
    # shapes do not tell as many tasks in another order apart
    as_many = spec_of("goal-3", "goal-5", "goal-1", "goal-7")
    _, algorithm, _ = started(make_sac, source, as_many, **options)
    assert_acts_as(algorithm, source)


def test_a_policy_of_the_package_starts_a_run_of_other_tasks():
    policy = load_policy("mt10")
    checkpoint = load_checkpoint(best_checkpoint("mt10"))
    names = ("door-open-v3", "coffee-button-v3", "reach-v3")
    spec = policy.spec._replace(task_names=names, train_tasks=(0, 1, 2))
    algorithm = rebuild(checkpoint["hyper_parameters"], spec, Algorithm)
    table = start_from(algorithm, checkpoint)
    observation = np.random.default_rng(0).normal(size=(9, 39)).astype(np.float32)
    for name in ("door-open-v3", "reach-v3"):
        found = LoadedPolicy(algorithm).act(observation, name)
        np.testing.assert_allclose(found, policy.act(observation, name), rtol=0, atol=1e-6)
    assert "New tasks: coffee-button-v3" in table


def test_each_task_may_have_an_expert_of_its_own():
    mixtures = [
        partial(MixtureOfEncoders, num_experts=number, width=6, assignment=OneHotGate)
        for number in (THERE.num_tasks, HERE.num_tasks)
    ]
    source = trained(make_sac, encoder=mixtures[0])
    _, algorithm, _ = started(make_sac, source, encoder=mixtures[1])
    assert_acts_as(algorithm, source)


@pytest.mark.parametrize("make", [make_td3, make_ppo, make_distral])
def test_other_algorithms_act_on_common_tasks_as_they_did(make):
    source = trained(make)
    _, algorithm, table = started(make, source)
    assert_acts_as(algorithm, source)
    assert "fresh: " not in table


def test_the_weights_of_a_multi_head_network_by_name():
    source = trained(make_sac, **networks(MultiHead))
    fresh, algorithm, _ = started(make_sac, source, **networks(MultiHead))
    there, here, initial = (a.state_dict() for a in (source, algorithm, fresh))
    assert here.keys() == there.keys()
    for part, num_features, num_outputs in (
        ("actor", 2, 4),
        ("critic.members.0", 4, 1),
        ("critic.members.1", 4, 1),
        ("target_critic.members.1", 4, 1),
    ):
        of_online = part.replace("target_", "")
        for name in ("trunk.0.bias", "trunk.2.weight", "trunk.2.bias"):
            assert torch.equal(here[f"{part}.{name}"], there[f"{of_online}.{name}"])
        columns = (f"{part}.trunk.0.weight", f"{of_online}.trunk.0.weight")
        assert here[columns[0]].shape == (8, num_features + 3)
        assert torch.equal(here[columns[0]][:, :num_features], there[columns[1]][:, :num_features])
        for name in ("heads.weight", "heads.bias"):
            heads = here[f"{part}.{name}"].unflatten(0, (3, num_outputs))
            heads_there = there[f"{of_online}.{name}"].unflatten(0, (4, num_outputs))
            initial_heads = initial[f"{part}.{name}"].unflatten(0, (3, num_outputs))
            assert torch.equal(heads[1], initial_heads[1])
            for task, task_there in COMMON.items():
                assert torch.equal(heads[task], heads_there[task_there])
                column = here[columns[0]][:, num_features + task]
                assert torch.equal(column, there[columns[1]][:, num_features + task_there])
        new_column = here[columns[0]][:, num_features + 1]
        assert torch.equal(new_column, initial[columns[0]][:, num_features + 1])
    assert torch.equal(
        here["temperature.log_alpha"][[0, 2]], there["temperature.log_alpha"][[3, 1]]
    )
    assert here["temperature.log_alpha"][1] == initial["temperature.log_alpha"][1]


def test_a_new_task_starts_from_the_mean_of_the_trained_ones():
    there = THERE._replace(train_tasks=(0, 1, 3))
    source = trained(make_ppo, there, **networks(MultiHead))
    _, algorithm, _ = started(make_ppo, source, new_tasks="mean", **networks(MultiHead))
    assert_acts_as(algorithm, source)
    rows = [0, 1, 3]
    heads = source.actor.heads.weight.view(4, 2, 8)
    torch.testing.assert_close(algorithm.actor.heads.weight.view(3, 2, 8)[1], heads[rows].mean(0))
    columns = source.actor.trunk[0].weight[:, 2:]
    found = algorithm.actor.trunk[0].weight[:, 3]
    torch.testing.assert_close(found, columns[:, rows].mean(1))
    torch.testing.assert_close(algorithm.noise.log_std_TA[1], source.noise.log_std_TA[rows].mean(0))
    assert algorithm.return_scale.mean_T[1] == 0, "statistics are the task's own"


@pytest.mark.parametrize("make_network", [MLP, MultiHead])
def test_popart_keeps_the_values_of_common_tasks(make_network):
    source = trained(make_ppo, **networks(make_network))
    source.return_scale.is_known_T.fill_(True)
    fresh, algorithm, _ = started(make_ppo, source, **networks(make_network))
    for name, value in algorithm.return_scale.state_dict().items():
        there = source.return_scale.state_dict()[name]
        assert torch.equal(value[[0, 2]], there[[3, 1]]), name
        assert torch.equal(value[1], fresh.return_scale.state_dict()[name][1]), name
    observation = torch.randn(5, 2)
    with torch.no_grad():
        for here, there in COMMON.items():
            values = [
                one.return_scale.denormalize(
                    one._normalized_values(observation, torch.full((5,), task)),
                    torch.full((5,), task),
                )
                for one, task in ((algorithm, here), (source, there))
            ]
            torch.testing.assert_close(*values)


def test_new_tasks_observe_statistics_and_common_ones_keep_them():
    encoder = partial(Standardize, per_task=True, num_updates=3)
    source = train(trained(make_sac, encoder=encoder), 4)
    _, algorithm, _ = started(make_sac, source, encoder=encoder)
    before = copy_of(algorithm.encoder)
    for name in ("mean_TD", "variance_TD"):
        assert torch.equal(before[name][[0, 2]], getattr(source.encoder, name)[[3, 1]])
    assert torch.equal(before["mean_TD"], copy_of(algorithm.target_encoder)["mean_TD"])
    pooled = source.encoder.mean_TD[[3, 1]].mean(0)
    torch.testing.assert_close(before["mean_TD"][1], pooled)
    batches = [make_batch(HERE, seed=seed) for seed in range(5)]
    has_changed = [algorithm.encoder.observe(b.observation_RnD, b.task_Rn) for b in batches]
    assert has_changed == [True] * 3 + [False] * 2
    after = copy_of(algorithm.encoder)
    assert torch.equal(after["mean_TD"][[0, 2]], before["mean_TD"][[0, 2]])
    rows = torch.cat([batch.observation_RnD[1] for batch in batches[:3]])
    torch.testing.assert_close(after["mean_TD"][1], rows.mean(0))
    # a run that starts from this one keeps all of them
    _, again, _ = started(make_sac, algorithm, encoder=encoder)
    assert changed(again.encoder, after) == set()


def test_statistics_of_transforms_are_copied_without_episodes():
    options = {"reward_scale": partial(NormalizeReward, discount=0.99)}
    source = make_sac(THERE, **options)
    rng = np.random.default_rng(0)
    for transform in source.transforms:
        transform.moments.add(rng.normal(3.0, 2.0, 40), np.repeat(np.arange(4), 10))
        transform._use_moments()
    source.transforms[0]._return_E = np.array([5.0])
    _, algorithm, _ = started(make_sac, source, **options)
    assert_acts_as(algorithm, source)
    assert not algorithm.transforms[0]._return_E.any()
    for here, there in zip(algorithm.transforms, source.transforms, strict=True):
        assert here.moments.count_T.tolist() == [10, 0, 10]
        assert torch.equal(here.moments.mean_T[[0, 2]], there.moments.mean_T[[3, 1]])
        assert torch.equal(here.moments.variance_T[[0, 2]], there.moments.variance_T[[3, 1]])
    largest = trained(make_sac, reward_scale=ReturnRange)
    largest.transforms[0].largest_T = torch.arange(4.0)
    _, algorithm, _ = started(make_sac, largest, reward_scale=ReturnRange)
    assert algorithm.transforms[0].largest_T.tolist() == [3, 0, 1]


def test_counters_optimizers_and_generators_start_anew():
    source = train(trained(make_sac, critic_gradient=GradNorm), 3)
    fresh, algorithm, table = started(make_sac, source, critic_gradient=GradNorm)
    assert algorithm.counters == fresh.counters
    assert algorithm.generators.state_dict() == fresh.generators.state_dict()
    assert all(not optimizer.state for optimizer in algorithm.configure_optimizers())
    assert changed(algorithm.critic_gradient, copy_of(fresh.critic_gradient)) == set()
    assert "fresh: a gradient method's state is a run's own" in table


def test_a_task_that_was_not_trained_counts_as_new():
    source = trained(make_sac, THERE._replace(train_tasks=(0, 1, 2)), **networks(MultiHead))
    fresh, algorithm, table = started(make_sac, source, **networks(MultiHead))
    assert_acts_as(algorithm, source, {2: 1})
    assert torch.equal(algorithm.actor.heads.bias[:4], fresh.actor.heads.bias[:4])
    assert "New tasks, not trained in the checkpoint: goal-3" in table


def test_a_policy_of_other_tasks_gives_what_they_share():
    source = trained(make_sac, **networks(MultiHead))
    other = spec_of("goal-8", "goal-9")
    _, algorithm, table = started(make_sac, source, other, **networks(MultiHead))
    assert torch.equal(algorithm.actor.trunk[2].weight, source.actor.trunk[2].weight)
    assert "Tasks copied" not in table
    with pytest.raises(ConfigurationError):
        started(make_sac, trained(make_sac, **networks(Separate)), other, **networks(Separate))
    # the distilled policy is of no task
    source = trained(make_distral)
    fresh, algorithm, table = started(make_distral, source, other)
    assert changed(algorithm.distilled, copy_of(source.distilled)) == set()
    assert changed(algorithm.actor, copy_of(fresh.actor)) == set()
    assert "distilled" in table


def test_a_policy_without_a_critic_gives_actor_and_encoder():
    encoder = partial(Standardize, per_task=True)
    source = trained(BehaviourCloning, actor=small(MLP), encoder=encoder)
    fresh, algorithm, table = started(make_sac, source, actor=small(MLP), encoder=encoder)
    assert_acts_as(algorithm, source)
    assert changed(algorithm.critic, copy_of(fresh.critic)) == set()
    assert "fresh: the checkpoint is of BehaviourCloning" in table
    _, back, table = started(BehaviourCloning, algorithm, actor=small(MLP), encoder=encoder)
    assert_acts_as(back, algorithm, {0: 0, 2: 2})
    assert "left out: this run has none" in table
    # with the clipped Gaussian of PPO
    source = trained(BehaviourCloning, actor=small(MLP), noise=StateIndependentStd)
    _, algorithm, table = started(make_ppo, source, actor=small(MLP))
    assert_acts_as(algorithm, source)


def test_a_critic_of_another_size_is_fresh():
    source = trained(make_sac, actor=small(MLP), critic=small(MLP, width=9))
    fresh, algorithm, table = started(make_sac, source, **networks(MLP))
    assert_acts_as(algorithm, source)
    assert changed(algorithm.critic, copy_of(fresh.critic)) == set()
    assert changed(algorithm.target_critic, copy_of(fresh.critic)) == set()
    shapes = "has the shape (9, 8) there, (8, 8) here, for as many tasks"
    assert f"fresh: critic.members.0.trunk.0.weight {shapes}" in table


OF_RETURNS = {
    "PopArt there": (make_ppo, {"return_scale": PopArt}, {"return_scale": ReturnScale}),
    "PopArt here": (make_ppo, {"return_scale": ReturnScale}, {"return_scale": PopArt}),
    "normalized there": (make_sac, {"reward_scale": NormalizeReward}, {}),
    "normalized here": (make_sac, {}, {"reward_scale": NormalizeReward}),
    "bound": (
        make_sac,
        {"reward_scale": partial(ReturnRange, bound=1.0)},
        {"reward_scale": partial(ReturnRange, bound=10.0)},
    ),
    "value": (
        make_sac,
        {"value": partial(Categorical, bound=5.0)},
        {"value": partial(Categorical, bound=10.0)},
    ),
    "discount": (make_ppo, {"discount": 0.9}, {"discount": 0.99}),
}


@pytest.mark.parametrize(("make", "there", "here"), OF_RETURNS.values(), ids=OF_RETURNS)
def test_a_critic_of_returns_of_another_scale_is_fresh(make, there, here):
    source = trained(make, **there)
    fresh, algorithm, table = started(make, source, **here)
    assert_acts_as(algorithm, source)
    assert changed(algorithm.critic, copy_of(fresh.critic)) == set()
    if make is make_ppo:
        assert changed(algorithm.return_scale, copy_of(fresh.return_scale)) == set()
    assert "fresh: the policy's returns have another scale" in table


class Looked(MLP):
    """Has a table that it forgets to declare."""

    def __init__(self, in_dim, out_dim, spec, **options):
        super().__init__(in_dim, out_dim, spec, **options)
        self.scale_T = torch.nn.Parameter(torch.ones(spec.num_tasks))

    def forward(self, x_BD, task_B):
        return super().forward(x_BD, task_B) * self.scale_T[task_B][..., None]


class Plain(Network):
    """Does not see the task, and does not say so."""

    def __init__(self, in_dim, out_dim, spec):
        super().__init__()
        self.layer = torch.nn.Linear(in_dim, out_dim)

    def forward(self, x_BD, task_B):
        return self.layer(x_BD)


BOX = Box(-1.0, 1.0, (3,), np.float32)
REFUSED = {
    "TD3 to PPO": (make_td3, {}, make_ppo, {}, {}),
    "PPO to TD3": (make_ppo, {}, make_td3, {}, {}),
    "SAC to PPO": (make_sac, {}, make_ppo, {"noise": StateDependentStd}, {}),
    "TD3 to cloning": (
        make_td3,
        {},
        BehaviourCloning,
        {"actor": small_mlp, "noise": StateIndependentStd},
        {},
    ),
    "width": (make_sac, networks(MLP), make_sac, networks(MLP, width=9), {}),
    "depth": (make_sac, networks(MLP), make_sac, networks(MLP, depth=1), {}),
    "class": (make_sac, networks(MLP), make_sac, networks(MultiHead), {}),
    "conditioning": (make_sac, {}, make_sac, {"conditioning": partial(Embedding, dim=4)}, {}),
    "encoder": (make_sac, {}, make_sac, {"encoder": Standardize}, {}),
    "no encoder": (make_sac, {"encoder": Standardize}, make_sac, {}, {}),
    "observations": (make_sac, {}, make_sac, {}, {"observation_space": BOX}),
    "actions": (make_sac, {}, make_sac, {}, {"action_space": BOX}),
}


@pytest.mark.parametrize(
    ("make_source", "there", "make", "here", "spec"), REFUSED.values(), ids=REFUSED
)
def test_a_policy_that_does_not_fit_is_refused(make_source, there, make, here, spec):
    source = trained(make_source, **there)
    with pytest.raises(ConfigurationError):
        started(make, source, HERE._replace(**spec), **here)


@pytest.mark.parametrize(
    "options",
    [
        {"actor": small(Looked)},
        {"actor": Plain},
        {"encoder": AppendTask},
        {**networks(MLP), "conditioning": Table},
        {**networks(MLP), "conditioning": PlainOneHot},
    ],
)
def test_task_axes_have_to_be_declared_where_tasks_differ(options):
    source = trained(make_sac, **options)
    with pytest.raises(ConfigurationError):
        started(make_sac, source, **options)
    with pytest.raises(ConfigurationError):
        permuted = spec_of(*reversed(THERE.task_names))
        started(make_sac, source, permuted, **options)
    _, algorithm, _ = started(make_sac, source, THERE, **options)
    assert_acts_as(algorithm, source, {1: 1, 3: 3})


def test_returns_of_given_and_of_default_options_are_compared():
    source = trained(make_sac, discount=0.99, reward_scale=RewardScale, value=Scalar)
    algorithm = make_sac(HERE, seed=2)
    before = copy_of(algorithm.critic)
    start_from(algorithm, checkpoint_of(source), "fresh")
    assert changed(algorithm.critic, before) != set()
