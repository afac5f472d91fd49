"""A run starts from a trained policy: what is copied, tasks being matched by name."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from examples.custom_network import GatedMLP
from mtrl_lightning import networks
from mtrl_lightning.algorithms import (
    Categorical,
    MeanReward,
    NormalizeReward,
    PopArt,
    ReturnRange,
    ReturnScale,
    RewardScale,
    Scalar,
)
from mtrl_lightning.algorithms.starting import start_from
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradNorm
from mtrl_lightning.networks import MLP, MultiHead, Standardize
from tests.helpers.algorithms import (
    MIXTURE,
    NAMES,
    STACKS,
    changed,
    checkpoint_of,
    copy_of,
    make_batch,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
    train,
)
from tests.helpers.specs import spec_of

THERE = spec_of([*NAMES, "door-close-v3"])
HERE = spec_of(["door-close-v3", "reach-wall-v3", "push-v3"])
AS_MANY = spec_of([*HERE.task_names, "push-wall-v3"])
PERMUTED = spec_of(THERE.task_names[::-1])
OTHER = spec_of(["reach-wall-v3", "push-wall-v3"])
COMMON = {0: 3, 2: 1}
"""Indices here and there of the tasks that both have; task 1 here is new."""


def both(kind, **options):
    return dict.fromkeys(("actor", "critic"), partial(kind, width=8, **options))


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


def actions(algorithm, task):
    generator = torch.Generator().manual_seed(3)
    observation_BD, noise_BA = (torch.randn(16, n, generator=generator) for n in (4, 2))
    policy = algorithm.policy(observation_BD, torch.full((16,), task))
    return torch.cat([policy.mode(), policy.sample(noise_BA)[0]])


def assert_acts_as(algorithm, source, common=None):
    with torch.no_grad():
        for here, there in (COMMON if common is None else common).items():
            torch.testing.assert_close(
                actions(algorithm, here), actions(source, there), rtol=0, atol=1e-6
            )


class DeclaredDense(networks.Embedding):
    """Not of the package; its vectors are declared."""


class Dense(networks.Embedding):
    """Does not say that each task has a vector."""

    task_axes = None


class DeclaredOneHot(networks.OneHot):
    """Says only that it is a one-hot."""

    task_axes = None


class PlainOneHot(DeclaredOneHot):
    """Does not say so."""

    columns = networks.TaskConditioning.columns


POLICIES = {
    **{name: options for name, options in STACKS.items() if name != "mixture, one-hot"},
    "embedding": {**STACKS["mlp"], "conditioning": partial(networks.Embedding, dim=5)},
    "encoded one-hot": {
        **STACKS["multi-head"],
        "conditioning": partial(networks.TaskEncoder, width=5, embedding=networks.OneHot),
    },
    "projection": {**STACKS["moore"], "encoder": partial(networks.MLPEncoder, width=8, out_dim=5)},
    "shared statistics": {**STACKS["mlp"], "encoder": Standardize},
    "own embedding": {**STACKS["mlp"], "conditioning": DeclaredDense},
    "own one-hot": {**STACKS["mlp"], "conditioning": DeclaredOneHot},
    "own network": both(GatedMLP),
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_policy_acts_on_common_tasks_as_it_did(options):
    source = trained(make_sac, **options)
    _, algorithm, table = started(make_sac, source, **options)
    assert_acts_as(algorithm, source)
    assert not torch.allclose(actions(source, 1), actions(source, 3), atol=1e-3)
    assert "Tasks copied: door-close-v3, push-v3\nNew tasks: reach-wall-v3" in table
    train(algorithm, 1)  # all is consistent
    # shapes do not tell as many tasks in another order apart
    _, algorithm, _ = started(make_sac, source, AS_MANY, **options)
    assert_acts_as(algorithm, source)


def test_each_task_may_have_an_expert_of_its_own():
    experts = partial(MIXTURE, assignment=networks.OneHotGate)
    source = trained(make_sac, encoder=partial(experts, num_experts=4))
    _, algorithm, _ = started(make_sac, source, encoder=experts)
    assert_acts_as(algorithm, source)


@pytest.mark.parametrize("make", [make_td3, make_ppo, make_distral])
def test_other_algorithms_act_on_common_tasks_as_they_did(make):
    source = trained(make)
    _, algorithm, _ = started(make, source)
    assert_acts_as(algorithm, source)


def test_a_task_that_was_not_trained_counts_as_new():
    source = trained(make_sac, THERE._replace(train_tasks=(0, 1, 2)), **both(MultiHead))
    fresh, algorithm, _ = started(make_sac, source, **both(MultiHead))
    assert_acts_as(algorithm, source, {2: 1})
    assert torch.equal(algorithm.actor.heads.bias[:4], fresh.actor.heads.bias[:4])


def test_a_policy_of_other_tasks_gives_what_they_share():
    source = trained(make_sac, **both(MultiHead))
    _, algorithm, _ = started(make_sac, source, OTHER, **both(MultiHead))
    assert torch.equal(algorithm.actor.trunk[2].weight, source.actor.trunk[2].weight)
    own = both(networks.Separate)
    with pytest.raises(ConfigurationError):
        started(make_sac, trained(make_sac, **own), OTHER, **own)
    # the distilled policy is of no task
    source = trained(make_distral)
    fresh, algorithm, _ = started(make_distral, source, OTHER)
    assert changed(algorithm.distilled, copy_of(source.distilled)) == set()
    assert changed(algorithm.actor, copy_of(fresh.actor)) == set()


def test_critics_and_temperatures_of_common_tasks_are_copied():
    source = trained(make_sac, **both(MultiHead))
    fresh, algorithm, _ = started(make_sac, source, **both(MultiHead))
    x_BD = torch.randn(5, 6)
    for here, there in COMMON.items():
        wanted = source.critic(x_BD, torch.full((5,), there))
        for critic in (algorithm.critic, algorithm.target_critic):
            torch.testing.assert_close(critic(x_BD, torch.full((5,), here)), wanted)
        assert algorithm.temperature.log_alpha[here] == source.temperature.log_alpha[there]
    # the new task's heads and its column of the one-hot
    assert algorithm.temperature.log_alpha[1] == fresh.temperature.log_alpha[1]
    for network, initial, num_outputs in (
        (algorithm.actor, fresh.actor, 4),
        (algorithm.critic.members[1], fresh.critic.members[1], 1),
    ):
        is_new = slice(num_outputs, 2 * num_outputs)
        assert torch.equal(network.heads.weight[is_new], initial.heads.weight[is_new])
        assert torch.equal(network.heads.bias[is_new], initial.heads.bias[is_new])
        assert torch.equal(network.trunk[0].weight[:, -2], initial.trunk[0].weight[:, -2])


def test_a_new_task_starts_from_the_mean_of_the_trained_ones():
    there = THERE._replace(train_tasks=(0, 1, 3))
    source = trained(make_ppo, there, **both(MultiHead))
    _, algorithm, _ = started(make_ppo, source, new_tasks="mean", **both(MultiHead))
    assert_acts_as(algorithm, source)
    rows = [0, 1, 3]
    heads = source.actor.heads.weight.view(4, 2, 8)
    torch.testing.assert_close(algorithm.actor.heads.weight.view(3, 2, 8)[1], heads[rows].mean(0))
    columns = source.actor.trunk[0].weight[:, 4:]
    found = algorithm.actor.trunk[0].weight[:, 5]
    torch.testing.assert_close(found, columns[:, rows].mean(1))
    torch.testing.assert_close(algorithm.noise.log_std_TA[1], source.noise.log_std_TA[rows].mean(0))
    assert algorithm.return_scale.mean_T[1] == 0, "statistics are the task's own"


@pytest.mark.parametrize("make_network", [MLP, MultiHead])
def test_popart_keeps_the_values_of_common_tasks(make_network):
    source = trained(make_ppo, **both(make_network))
    source.return_scale.is_known_T.fill_(True)
    fresh, algorithm, _ = started(make_ppo, source, **both(make_network))
    for name, value in algorithm.return_scale.state_dict().items():
        there = source.return_scale.state_dict()[name]
        assert torch.equal(value[[0, 2]], there[[3, 1]]), name
        assert torch.equal(value[1], fresh.return_scale.state_dict()[name][1]), name
    observation_BD = torch.randn(5, 4)

    @torch.no_grad()
    def values(ppo, task):
        task_B = torch.full((5,), task)
        scale = ppo.return_scale
        return scale.denormalize(scale(ppo.critic(observation_BD, task_B), task_B), task_B)

    for here, there in COMMON.items():
        torch.testing.assert_close(values(algorithm, here), values(source, there))


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


def test_statistics_of_reward_scales_are_copied_without_episodes():
    source = make_sac(THERE, reward_scale=NormalizeReward)
    there = {name: torch.rand(4).double() for name in ("count", "mean", "variance")}
    source.transforms[0].set_extra_state({**there, "per_env": {"returns": [1.0] * 4}})
    _, algorithm, _ = started(make_sac, source, reward_scale=NormalizeReward)
    here = algorithm.transforms[0].get_extra_state()
    assert here.pop("per_env") == {"returns": []}
    for name, new in (("count", 0), ("mean", 0), ("variance", 1)):
        assert here[name].tolist() == [there[name][3], new, there[name][1]]
    for kind, name, new in ((ReturnRange, "largest_T", 0), (MeanReward, "factor_T", 1)):
        source = trained(make_sac, reward_scale=kind)
        setattr(source.transforms[0], name, torch.arange(4.0))
        _, algorithm, _ = started(make_sac, source, reward_scale=kind)
        assert getattr(algorithm.transforms[0], name).tolist() == [3, new, 1]


def test_counters_optimizers_and_generators_start_anew():
    source = train(trained(make_sac, critic_gradient=GradNorm), 3)
    fresh, algorithm, _ = started(make_sac, source, critic_gradient=GradNorm)
    assert algorithm.counters == fresh.counters
    assert algorithm.generators.state_dict() == fresh.generators.state_dict()
    assert all(not optimizer.state for optimizer in algorithm.configure_optimizers())
    assert changed(algorithm.critic_gradient, copy_of(fresh.critic_gradient)) == set()


def test_a_policy_without_a_critic_gives_actor_and_encoder():
    encoder = partial(Standardize, per_task=True)
    source = trained(make_bc, encoder=encoder)
    fresh, algorithm, _ = started(make_sac, source, encoder=encoder)
    assert_acts_as(algorithm, source)
    assert changed(algorithm.critic, copy_of(fresh.critic)) == set()
    _, back, _ = started(make_bc, algorithm, encoder=encoder)
    assert_acts_as(back, algorithm, {0: 0, 2: 2})
    # with the clipped Gaussian of PPO
    source = trained(make_bc, noise=networks.StateIndependentStd)
    _, algorithm, _ = started(make_ppo, source)
    assert_acts_as(algorithm, source)


CRITICS = {
    "size": (make_sac, "critic", partial(MLP, width=9), partial(MLP, width=8)),
    "PopArt there": (make_ppo, "return_scale", PopArt, ReturnScale),
    "PopArt here": (make_ppo, "return_scale", ReturnScale, PopArt),
    "normalized there": (make_sac, "reward_scale", NormalizeReward, RewardScale),
    "normalized here": (make_sac, "reward_scale", RewardScale, NormalizeReward),
    "bound": (make_sac, "reward_scale", partial(ReturnRange, bound=1.0), ReturnRange),
    "value": (make_sac, "value", partial(Categorical, bound=5.0), Categorical),
    "discount": (make_ppo, "discount", 0.9, 0.99),
}


@pytest.mark.parametrize(("make", "option", "there", "here"), CRITICS.values(), ids=CRITICS)
def test_critics_of_another_size_or_scale_are_fresh(make, option, there, here):
    source = trained(make, **{option: there})
    fresh, algorithm, _ = started(make, source, **{option: here})
    assert_acts_as(algorithm, source)
    for name in ("critic", "target_critic", "return_scale"):
        if name in dict(algorithm.named_children()):
            part, initial = algorithm.get_submodule(name), fresh.get_submodule(name)
            assert changed(part, copy_of(initial)) == set()


def test_returns_of_given_and_of_default_options_are_compared():
    source = trained(make_sac, discount=0.99, reward_scale=RewardScale, value=Scalar)
    fresh, algorithm, _ = started(make_sac, source)
    assert changed(algorithm.critic, copy_of(fresh.critic)) != set()


class Looked(MLP):
    """Has a table that it forgets to declare."""

    def __init__(self, in_dim, out_dim, spec):
        super().__init__(in_dim, out_dim, spec, width=8)
        self.scale_T = torch.nn.Parameter(torch.ones(spec.num_tasks))

    def forward(self, x_BD, task_B):
        return super().forward(x_BD, task_B) * self.scale_T[task_B][..., None]


class Plain(networks.Network):
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
    "SAC to PPO": (make_sac, {}, make_ppo, {"noise": networks.StateDependentStd}, {}),
    "TD3 to cloning": (make_td3, {}, make_bc, {"noise": networks.StateIndependentStd}, {}),
    "width": (make_sac, both(MLP), make_sac, {"actor": partial(MLP, width=9)}, {}),
    "conditioning": (make_sac, {}, make_sac, {"conditioning": networks.Embedding}, {}),
    "encoder": (make_sac, {}, make_sac, {"encoder": Standardize}, {}),
    "no encoder": (make_sac, {"encoder": Standardize}, make_sac, {}, {}),
    "observations": (make_sac, {}, make_sac, {}, {"observation_space": BOX}),
    "actions": (make_sac, {}, make_sac, {}, {"action_space": BOX}),
    "a task's actions": (make_sac, {}, make_sac, {}, {"action_sizes": (1, 2, 2)}),
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
        {"actor": Looked},
        {"actor": Plain},
        {"encoder": networks.AppendTask},
        {**both(MLP), "conditioning": Dense},
        {**both(MLP), "conditioning": PlainOneHot},
    ],
)
def test_task_axes_have_to_be_declared_where_tasks_differ(options):
    source = trained(make_sac, **options)
    for spec in (HERE, PERMUTED):
        with pytest.raises(ConfigurationError):
            started(make_sac, source, spec, **options)
    _, algorithm, _ = started(make_sac, source, THERE, **options)
    assert_acts_as(algorithm, source, {1: 1, 3: 3})
