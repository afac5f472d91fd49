"""Actions computed by graphs equal those computed without, in every bit.

A recorder on the CPU stands for CUDA graphs (``tests/helpers/recorder.py``): it makes the recorded
operations again, and no line of Python.
"""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import NormalizeObservation
from mtrl_lightning.learning import graph
from mtrl_lightning.learning.graph import WARM_UPS
from mtrl_lightning.replay.static_batches import StaticBatches
from tests.helpers.algorithms import (
    attach,
    make_batch,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
    pixel_spec,
    train,
)
from tests.helpers.networks import Branching, Convolutions, Counting
from tests.helpers.recorder import CPURecorder, recorded_graphs
from tests.helpers.runs import assert_same

TASK_E = np.repeat(np.arange(3), 2)
MIXED_E = np.array([2, 0, 1, 0])


def with_graphs(algorithm):
    algorithm.graphs = recorded_graphs(algorithm)
    return algorithm


def without_acting_graphs(algorithm):
    """Give an algorithm the optimizers of one with graphs: rates in single precision."""
    algorithm = with_graphs(algorithm)
    algorithm.graphs.acting._is_refused = lambda task_E: True
    return algorithm


def observations(algorithm, seed, task_E=TASK_E):
    space = algorithm.spec.observation_space
    generator = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        return generator.integers(256, size=(len(task_E), *space.shape), dtype=np.uint8)
    return generator.normal(size=(len(task_E), *space.shape))


def acted(algorithm, num, mode="explore", task_E=TASK_E, noise=False, first=0):
    """Return copies of the actions for different observations: a graph overwrites its own."""
    found = []
    for seed in range(first, first + num):
        observation_ED = observations(algorithm, seed, task_E)
        more = {}
        if noise:
            shape = (len(task_E), algorithm.action_dim)
            more["noise_EA"] = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        output = algorithm.act(observation_ED, task_E, mode, **more)
        action_EA, fields = output if isinstance(output, tuple) else (output, {})
        found.append((action_EA.copy(), {name: x_E.copy() for name, x_E in fields.items()}))
    return found


def acted_in_all_modes(algorithm):
    """Return actions in all modes in turn, with new weights in between, and the generators."""
    found = [acted(algorithm, 5), acted(algorithm, 4, "exploit")]
    if algorithm.collection is None:
        train(algorithm, 2)
    found += [
        acted(algorithm, 3, first=5),
        acted(algorithm, 2, "random"),
        acted(algorithm, 4, "exploit", first=4),
        acted(algorithm, 4, noise=True),
        acted(algorithm, 4, task_E=MIXED_E),
        acted(algorithm, 2, first=8),
    ]
    return found, algorithm.generators.state_dict()


def padded_spec():
    return make_spec(action_dim=3)._replace(action_sizes=(3, 1, 2))


def small(name):
    return {"actor": partial(getattr(networks, name), width=8, depth=1)}


MAKERS = {
    "SAC": make_sac,
    "padded actions": lambda: make_sac(padded_spec()),
    "Standardize": lambda: make_sac(encoder=partial(networks.Standardize, num_updates=3)),
    "NormalizeObservation": lambda: make_sac(transforms=[NormalizeObservation]),
    "embeddings": lambda: make_sac(
        encoder=partial(networks.MLPEncoder, width=8, context=networks.Embedding)
    ),
    "pixels": lambda: make_sac(pixel_spec(), encoder=Convolutions),
    "TD3": make_td3,
    "Distral": make_distral,
    "PPO": make_ppo,
    "BC": make_bc,
    **{name: partial(make_sac, **small(name)) for name in ("MultiHead", "MOORE", "PaCo", "FiLM")},
}


@pytest.mark.parametrize("name", MAKERS)
def test_all_actions_equal_those_without_graphs(name):
    plain = without_acting_graphs(MAKERS[name]())
    graphed = with_graphs(MAKERS[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(acted_in_all_modes(graphed), acted_in_all_modes(plain))
    # exploring and exploiting, with noise that is given, and for other tasks
    assert graphed.graphs.acting.num_graphs == 4
    assert graphed.graphs.acting.reason == ""


@pytest.mark.parametrize("name", MAKERS)
def test_all_actions_equal_those_of_an_algorithm_that_has_no_graphs(name):
    plain = MAKERS[name]()
    graphed = with_graphs(MAKERS[name]())
    assert plain.graphs is None

    def in_turn(algorithm):
        options = (
            {},
            {"mode": "exploit"},
            {"noise": True},
            {"task_E": MIXED_E},
            {"mode": "random"},
        )
        found = [acted(algorithm, 4, **more) for more in options]
        return found, algorithm.generators.state_dict()

    assert_same(in_turn(graphed), in_turn(plain))
    assert graphed.graphs.acting.num_graphs == 4


def test_a_graph_is_recorded_after_two_calls_of_its_kind():
    sac = with_graphs(make_sac())
    acted(sac, WARM_UPS)
    assert sac.graphs.acting.num_graphs == 0
    acted(sac, 1)
    assert sac.graphs.acting.num_graphs == 1
    acted(sac, WARM_UPS, "exploit")
    assert sac.graphs.acting.num_graphs == 1


def test_a_graph_answers_each_observation_with_another_action():
    sac = with_graphs(make_sac())
    actions = [action_EA for action_EA, _ in acted(sac, 6, "exploit")]
    assert len({action_EA.tobytes() for action_EA in actions}) == 6


@pytest.mark.parametrize(("untrained_tasks", "num_graphs"), [("mean", 1), ("own", 2)])
def test_untrained_tasks_that_get_the_mean_have_no_graph(untrained_tasks, num_graphs):
    """The number of rows to replace is not known on the device."""
    spec = make_spec(train_tasks=[0, 1])
    make = partial(
        make_sac, spec, actor=partial(networks.MultiHead, width=8), untrained_tasks=untrained_tasks
    )
    plain = make()
    graphed = with_graphs(make())
    for task_E in (TASK_E, np.array([0, 0, 1, 1])):
        wanted = acted(plain, 4, "exploit", task_E)
        assert_same(acted(graphed, 4, "exploit", task_E), wanted)
    assert graphed.graphs.acting.num_graphs == num_graphs
    assert graphed.graphs.acting.reason == ""


def test_the_comparison_shows_a_state_in_python_that_no_replay_moves():
    make = partial(make_sac, actor=partial(Counting, width=8))
    with pytest.raises(AssertionError):
        assert_same(acted(with_graphs(make()), 6), acted(make(), 6))


def test_a_policy_that_reads_a_number_is_named_once_and_acts_without_graphs():
    make = partial(make_sac, actor=partial(Branching, width=8))
    plain = make()
    graphed = with_graphs(make())
    before = "actions are computed without graphs where Branching.forward"
    with pytest.warns(UserWarning, match=rf"{before} \(networks.py") as warned:
        found = [acted(graphed, 8, mode) for mode in ("explore", "exploit")]
    assert len(warned) == 1
    assert_same(found, [acted(plain, 8, mode) for mode in ("explore", "exploit")])
    assert graphed.graphs.acting.num_graphs == 0


class BranchingForOneTask(networks.MLP):
    """Reads a number where all rows are of one task."""

    def forward(self, x_BD, task_B):
        y_BO = super().forward(x_BD, task_B)
        return -y_BO if len(task_B) == 1 and float(x_BD.detach().sum()) > 1e9 else y_BO


def test_a_kind_that_cannot_be_recorded_leaves_graphs_to_the_others():
    """The failure replaces states of generators on a GPU, so the others are recorded again."""

    def in_turn(sac):
        found = []
        for _ in range(3):
            found += acted(sac, 4) + acted(sac, 4, "exploit", np.array([1, 1]))
        return found

    make = partial(make_sac, actor=partial(BranchingForOneTask, width=8))
    graphed = with_graphs(make())
    with pytest.warns(UserWarning, match=r"BranchingForOneTask\.forward") as warned:
        found = in_turn(graphed)
    assert len(warned) == 1
    assert_same(found, in_turn(make()))
    assert graphed.graphs.acting.num_graphs == 1
    assert len(graphed.graphs.acting._capture.recordings) == 2


@pytest.mark.parametrize(
    "context", [torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]
)
def test_calls_within_inference_mode_or_autocast_have_no_graph(context):
    sac = with_graphs(make_sac())
    with context():
        acted(sac, 4)
    assert sac.graphs.acting.num_graphs == 0
    acted(sac, 4)
    assert sac.graphs.acting.num_graphs == 1


def test_dropout_is_as_the_modules_mode_says():
    class Dropping(networks.MLP):
        def forward(self, x_BD, task_B):
            y_BO = super().forward(x_BD, task_B)
            return y_BO * (1.0 if not self.training else 0.5)

    sac = with_graphs(make_sac(actor=partial(Dropping, width=8)))
    plain = make_sac(actor=partial(Dropping, width=8))
    for training in (True, False, True):
        for algorithm in (sac, plain):
            algorithm.train(training)
        assert_same(acted(sac, 4, "exploit"), acted(plain, 4, "exploit"))
    assert sac.graphs.acting.num_graphs == 2


def test_a_buffer_that_is_replaced_ends_the_graphs():
    def replaced(sac):
        found = acted(sac, 4)
        sac.encoder.mean_D = torch.ones_like(sac.encoder.mean_D)
        return found + acted(sac, 4, first=4)

    make = partial(make_sac, encoder=networks.Standardize)
    wanted = replaced(make())
    sac = with_graphs(make())
    with pytest.warns(UserWarning, match=r"the buffer encoder\.mean_D was replaced"):
        assert_same(replaced(sac), wanted)


def test_more_groups_of_environments_than_graphs_are_said_once(monkeypatch):
    monkeypatch.setattr(graph, "MOST_GRAPHS", 1)
    plain = make_sac()
    graphed = with_graphs(make_sac())
    groups = [np.array([0, 1, 2]), np.array([1, 2]), np.array([2])]
    with pytest.warns(
        UserWarning, match="1 graphs are kept, and actions of further kinds"
    ) as warned:
        found = [acted(graphed, 4, task_E=task_E) for task_E in groups]
    assert len(warned) == 1
    assert_same(found, [acted(plain, 4, task_E=task_E) for task_E in groups])
    assert graphed.graphs.acting.num_graphs == 1


def test_graphs_are_recorded_again_after_a_reset_and_with_new_optimizers():
    def both(sac):
        attach(sac)
        found = acted(sac, 4)
        sac.reset_networks()
        return found + acted(sac, 4)

    sac = make_sac()
    wanted = both(sac)
    graphed = with_graphs(make_sac())
    assert_same(both(graphed), wanted)
    assert graphed.graphs.acting.num_graphs == 1
    graphed.reset_networks()
    assert graphed.graphs.acting.num_graphs == 0
    acted(graphed, 4)
    attach(graphed)
    assert graphed.graphs.acting.num_graphs == 0


def test_updates_do_not_draw_from_the_generator_of_acting():
    """Where a recording of updates fails, its generators get other states than those of graphs."""
    sac = make_sac()
    acted(sac, 1)
    train(sac, 1)
    acting = sac.generators.get("act", torch.device("cpu"))
    recorded = []

    class Recorder(CPURecorder):
        def record(self, function, generators):
            recorded.extend(generators)
            return super().record(function, generators)

    updates = graph.UpdateGraphs(sac, Recorder())
    batch = make_batch(sac.spec)
    with pytest.warns(UserWarning, match="made one by one"):  # the CPU waits for the norm
        updates.make(StaticBatches(lambda: batch, torch.device("cpu")), WARM_UPS + 1)
    assert recorded and all(generator is not acting for generator in recorded)


def test_no_graph_is_left_after_a_fit():
    sac = with_graphs(make_sac())
    sac.teardown("fit")
    assert sac.graphs is None
