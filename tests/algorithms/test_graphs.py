"""Updates that are recorded and replayed equal those that are made one by one, in every bit.

A recorder on the CPU stands for CUDA graphs (``tests/helpers/recorder.py``): it makes the recorded
operations again, and no line of Python. The updates take the way that they take on a GPU.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mtrl_lightning import networks
from mtrl_lightning.algorithms import (
    Categorical,
    NormalizeObservation,
    ReturnRange,
    RewardScale,
    actor_critic,
    ppo,
)
from mtrl_lightning.auxiliaries import HiPBMDP, Reconstruction
from mtrl_lightning.gradients import (
    FAMO,
    AlignedMTL,
    CAGrad,
    FairGrad,
    GradNorm,
    NashMTL,
    PCGrad,
    aligned_mtl,
    cagrad,
    fairgrad,
)
from mtrl_lightning.gradients.task_gradients import TaskGradients, batched_gradients
from mtrl_lightning.learning import graph, metrics
from mtrl_lightning.learning import update as updating
from mtrl_lightning.learning.graph import UPDATES_PER_GRAPH, OnlyOn
from mtrl_lightning.learning.learning_rate import LinearRate
from mtrl_lightning.replay.static_batches import StaticBatches
from mtrl_lightning.types import OwedUpdates
from tests.helpers.algorithms import (
    attach,
    make_batch,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
)
from tests.helpers.networks import Branching, Counting
from tests.helpers.recorder import CPURecorder, recorded_graphs
from tests.helpers.runs import assert_same

CPU = torch.device("cpu")
ONE_BY_ONE = 1
SEVERAL = UPDATES_PER_GRAPH + 1


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let the device decide whether a step is left out, and take gradients in one pass.

    Gradient methods compute their weights as there.
    """
    monkeypatch.setattr(updating, "decides_on_device", lambda device: True)

    def at_once(method, function, dim, *rows):
        return function(*rows)

    def in_one_pass(loss_R, parameters, mean_weight_R=None, retain_graph=False):
        trained = [*parameters.shared, *parameters.own]
        gradients = batched_gradients(loss_R, trained, retain_graph)
        num_shared = len(parameters.shared)
        weight_R = loss_R.new_full((len(loss_R),), 1 / len(loss_R))
        if mean_weight_R is not None:
            weight_R = mean_weight_R.to(loss_R)
        means = [torch.tensordot(weight_R, gradient, 1) for gradient in gradients[num_shared:]]
        return TaskGradients(parameters, gradients[:num_shared], means)

    monkeypatch.setattr(TaskGradients, "from_losses", in_one_pass)
    for module in (actor_critic, ppo):
        monkeypatch.setattr(module, "per_task_forward", at_once)
    for module in (aligned_mtl, cagrad, fairgrad):
        monkeypatch.setattr(module, "is_readable", lambda x: False)


def batches_of(algorithm):
    for seed in itertools.count():
        yield make_batch(algorithm.spec, seed=seed)


def end_of(algorithm):
    """Return all that updates change."""
    algorithm.guard.read()
    return {
        "modules": dict(algorithm.state_dict()),
        "optimizers": [update.optimizer.state_dict() for update in algorithm.updates],
        "metrics": algorithm.mean_metrics.state_dict(),
        "generators": algorithm.generators.state_dict(),
        "counters": algorithm.counters.state_dict(),
    }


def made_one_by_one(make, num_updates):
    algorithm, _ = with_graphs(make)  # whose optimizers have rates in single precision
    batches = batches_of(algorithm)
    for i in range(num_updates):
        algorithm.training_step(next(batches), i)
    return algorithm


def with_graphs(make):
    algorithm = make()
    recorder = CPURecorder()
    algorithm.graphs = recorded_graphs(algorithm, recorder)
    attach(algorithm)
    return algorithm, recorder


def made_by_graphs(make, num_updates, at_once, source=None):
    algorithm, recorder = with_graphs(make)
    batches = batches_of(algorithm)
    source = source or StaticBatches(lambda: next(batches), CPU)
    done = 0
    while done < num_updates:
        num = min(at_once, num_updates - done)
        algorithm.training_step(OwedUpdates(source, num), done)
        done += num
    return algorithm, recorder


def assert_equal_updates(make, num_updates=10, at_once=SEVERAL, num_graphs=None):
    wanted = made_one_by_one(make, num_updates)
    found, recorder = made_by_graphs(make, num_updates, at_once)
    graphs = found.graphs.updates
    assert graphs.reason == ""
    assert len(recorder.recordings) == graphs.num_graphs
    assert graphs.num_graphs == num_graphs if num_graphs else graphs.num_graphs > 0
    assert_same(end_of(found), end_of(wanted))


@pytest.mark.parametrize(
    ("options", "at_once", "num_graphs"),
    [
        ({}, ONE_BY_ONE, 1),
        ({}, SEVERAL, 2),
        ({"actor_every": 2}, SEVERAL, 4),
    ],
)
def test_sac(options, at_once, num_graphs):
    assert_equal_updates(partial(make_sac, **options), 15, at_once, num_graphs)


@pytest.mark.slow
def test_each_pattern_of_due_parts_has_a_graph():
    make = partial(make_sac, actor_every=2, target_every=3)
    assert_equal_updates(make, 22, ONE_BY_ONE, 4)


def test_td3_whose_target_is_delayed():
    assert_equal_updates(partial(make_td3, actor_every=2), 10, ONE_BY_ONE, 2)


def network(name, **options):
    small = partial(getattr(networks, name), width=8, depth=1, **options)
    return {"actor": small, "critic": small}


NETWORKS = ("MultiHead", "FiLM", "PaCo", "MOORE", "SoftModularization")
PARTS = {
    **{
        name: network(name) for name in ("MultiHead", "FiLM", "PaCo", "MOORE", "SoftModularization")
    },
    "FAMO": {"actor_gradient": FAMO, "critic_gradient": FAMO},
    "Standardize": {"encoder": partial(networks.Standardize, num_updates=3)},
    "Standardize per task": {
        "encoder": partial(networks.Standardize, num_updates=3, per_task=True)
    },
    "auxiliaries": {
        "encoder": partial(networks.MLPEncoder, width=8, context=networks.Embedding),
        "auxiliaries": [HiPBMDP, Reconstruction],
    },
    "mixture": {
        "encoder": partial(networks.MixtureOfEncoders, num_experts=2, width=6, depth=1, out_dim=5)
    },
    "Categorical": {"value": partial(Categorical, num_bins=11)},
    "transforms": {"reward_scale": ReturnRange, "transforms": [NormalizeObservation]},
    "PCGrad, GradNorm": {"actor_gradient": PCGrad, "critic_gradient": GradNorm},
    "CAGrad": {"actor_gradient": CAGrad, "critic_gradient": partial(CAGrad, num_sampled=2)},
    "FairGrad, Aligned-MTL": {"actor_gradient": FairGrad, "critic_gradient": AlignedMTL},
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_distral, make_bc])
def test_other_algorithms(make):
    assert_equal_updates(make, 8)


@pytest.mark.parametrize(("at_once", "first"), [(ONE_BY_ONE, 2), (UPDATES_PER_GRAPH, 4)])
def test_updates_are_recorded_once_two_of_their_kind_were_made(at_once, first):
    sac, recorder = with_graphs(make_sac)
    batches = batches_of(sac)
    source = StaticBatches(lambda: next(batches), CPU)
    while not recorder.recordings:
        made = sac.counters.updates
        sac.training_step(OwedUpdates(source, at_once), 0)
    assert made == first


def test_kinds_beyond_the_most_graphs_are_made_one_by_one_which_is_said_once(monkeypatch):
    monkeypatch.setattr(graph, "MOST_GRAPHS", 1)
    make = partial(make_sac, actor_every=2)
    with pytest.warns(UserWarning) as caught:
        assert_equal_updates(make, 10, ONE_BY_ONE, 1)
    said = [str(one.message) for one in caught if "compile graph" in str(one.message)]
    assert len(said) == 1 and "1 graphs are kept, and updates of further kinds" in said[0]


@pytest.mark.parametrize("make", [make_sac, make_bc])
def test_nothing_is_recorded_while_statistics_move(make):
    encoder = partial(networks.Standardize, num_updates=5)
    assert_equal_updates(partial(make, encoder=encoder), 8, ONE_BY_ONE, 1)


def in_bf16():
    sac = make_sac()
    sac.training_step = torch.autocast("cpu", torch.bfloat16)(sac.training_step)
    return sac


def test_updates_within_one_autocast_do_not_share_its_rounded_weights():
    assert_equal_updates(in_bf16, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    assert_equal_updates(partial(make_sac, **PARTS[name]), 8)


def ppo_batches(algorithm):
    for seed in itertools.count():
        batch = make_batch(algorithm.spec, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randn(batch.reward_Rn.shape, generator=generator) for _ in range(4)]
        names = ("advantage", "value", "target", "log_prob")
        extra = dict(zip(names, draws, strict=True))
        extra["unclipped_action"] = batch.action_RnA * 1.5
        extra["foreign"] = torch.rand(batch.reward_Rn.shape, generator=generator) < 0.2
        yield batch._replace(extra=extra)


@pytest.mark.parametrize("at_once", [ONE_BY_ONE, SEVERAL])
def test_ppo(at_once, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "batches_of", ppo_batches)
    make = partial(make_ppo, num_steps=8, num_minibatches=5)
    assert_equal_updates(make, 15, at_once, 1 if at_once == ONE_BY_ONE else 2)


class Replacing(RewardScale):
    """Replaces a buffer."""

    def __init__(self, spec):
        super().__init__(spec)
        self.register_buffer("factor_T", torch.ones(spec.num_tasks))

    def begin_learning(self, mean_reward_R):
        self.factor_T = self.factor_T * 2

    def factors(self):
        return self.factor_T


def test_a_part_that_reads_a_number_is_named_and_made_one_by_one():
    make = partial(make_sac, actor=partial(Branching, width=8))
    wanted = made_one_by_one(make, 5)
    with pytest.warns(UserWarning, match=r"one by one, because Branching.forward \(networks.py"):
        found, recorder = made_by_graphs(make, 5, ONE_BY_ONE)
    assert recorder.recordings == [] and found.graphs.updates.num_graphs == 0
    assert_same(end_of(found), end_of(wanted))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"critic_gradient": NashMTL}, "NashMTL of critic computes on the host"),
        ({"actor_optimizer": SGD}, "SGD of actor cannot be recorded: choose another optimizer"),
        ({"actor_optimizer": Adam}, "Adam of actor is not fused: give it fused: true"),
    ],
)
def test_what_cannot_be_recorded_is_known_before_the_first_update(options, reason):
    with pytest.warns(UserWarning, match=f"one by one, because {reason}"):
        sac, recorder = with_graphs(partial(make_sac, **options))
    batches = batches_of(sac)
    sac.training_step(OwedUpdates(StaticBatches(lambda: next(batches), CPU), 4), 0)
    assert sac.counters.updates == 4 and recorder.recordings == []


def test_a_recording_that_fails_leaves_no_outcome_behind():
    """One of several updates: the first is without the actor, and the second fails after it."""
    sac, _ = with_graphs(partial(make_sac, actor_every=2))
    step = sac.targets.step

    def failing():
        step()
        if _get_current_dispatch_mode() is not None and "actor" in sac.guard._outcomes:
            sac.guard._outcomes["actor"][0].fill_(1.0)  # as in memory that no kernel has written
            raise RuntimeError("it cannot be recorded")

    sac.targets.step = failing
    batches = batches_of(sac)
    source = StaticBatches(lambda: next(batches), CPU)
    with pytest.warns(UserWarning, match="it cannot be recorded"):
        for num in (1, UPDATES_PER_GRAPH, UPDATES_PER_GRAPH):
            sac.training_step(OwedUpdates(source, num), 0)
    sac.guard.read()


def test_rates_are_changed_in_place_and_saved_as_they_were_given():
    sac, _ = with_graphs(make_sac)
    optimizer = sac.actor_update.optimizer
    (group,) = optimizer.param_groups
    rate = group["lr"]
    LinearRate(0.0).set(sac.updates, 0.5)
    assert group["lr"] is rate and float(rate) == pytest.approx(1.5e-4)
    saved = optimizer.state_dict()["param_groups"][0]
    assert (saved["lr"], saved["initial_lr"], saved["capturable"]) == (1.5e-4, 3e-4, False)
    optimizer.load_state_dict(optimizer.state_dict())
    (group,) = optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor) and group["capturable"] is True
    assert optimizer.state_dict()["param_groups"][0] == saved


def test_an_operation_on_another_device_is_refused():
    meta = torch.zeros(3, device="meta")
    with OnlyOn("meta"):
        (meta * 2 + 1).sum().sqrt()
        torch.where(meta > 0, meta, 1.0)
        with pytest.raises(RuntimeError, match="uses a tensor on the cpu"):
            meta.copy_(torch.zeros(3))
        with pytest.raises(RuntimeError, match="uses a tensor on the cpu"):
            torch.randperm(3)


def test_the_comparison_shows_a_state_in_python_that_no_replay_moves():
    with pytest.raises(AssertionError, match=r"checkpoint\.modules\.actor"):
        assert_equal_updates(partial(make_sac, actor=partial(Counting, width=8)), 6)


def test_a_buffer_that_is_replaced_is_named_and_updates_go_on_one_by_one():
    make = partial(make_sac, reward_scale=Replacing)
    wanted = made_one_by_one(make, 4)
    found, _ = made_by_graphs(make, 4, ONE_BY_ONE)
    assert found.graphs.updates.num_graphs == 1
    batches = [make_batch(found.spec, seed=seed) for seed in (7, 8)]
    for algorithm in (wanted, found):
        algorithm.begin_learning(None)
    for batch in batches:
        wanted.training_step(batch, 0)
    given = iter(batches)
    with pytest.warns(UserWarning, match=r"the buffer transforms\.0\.factor_T was replaced"):
        found.training_step(OwedUpdates(StaticBatches(lambda: next(given), CPU), 2), 0)
    assert found.graphs.updates.num_graphs == 0
    assert_same(end_of(found), end_of(wanted))


def test_graphs_are_recorded_again_after_a_reset():
    def both(make_some):
        algorithm = make_some(5)
        algorithm.reset_networks()
        return algorithm

    wanted = both(lambda num: made_one_by_one(make_sac, num))
    found = both(lambda num: made_by_graphs(make_sac, num, ONE_BY_ONE)[0])
    assert found.graphs.updates.num_graphs == 0
    batches = [make_batch(found.spec, seed=seed) for seed in range(5)]
    for batch in batches:
        wanted.training_step(batch, 0)
    given = iter(batches)
    found.training_step(OwedUpdates(StaticBatches(lambda: next(given), CPU), 5), 0)
    assert found.graphs.updates.num_graphs == 1
    assert_same(end_of(found), end_of(wanted))


def test_steps_that_a_graph_leaves_out_are_counted_also_where_outcomes_fill_their_room(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_PENDING", 6)
    make = partial(make_sac, on_nonfinite="skip")

    def batches(algorithm):
        for seed in itertools.count():
            batch = make_batch(algorithm.spec, seed=seed)
            if seed in (5, 9):  # made by a graph, the second one where the room is used up
                batch.reward_Rn[0, 0] = float("inf")
            yield batch

    monkeypatch.setattr(sys.modules[__name__], "batches_of", batches)
    found, _ = made_by_graphs(make, 14, SEVERAL)
    ends = [end_of(found), end_of(made_one_by_one(make, 14))]
    for end in ends:
        end.pop("metrics")  # means over steps that are not finite
    assert_same(*ends)
    assert found.graphs.updates.num_graphs == 2 and found.counters.skipped_updates == 2
