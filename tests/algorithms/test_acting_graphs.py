"""Actions that are chosen by graphs equal those that are chosen without, in every bit.

A recorder on the CPU stands for CUDA graphs (``tests/helpers/recorder.py``): it makes the recorded
operations again, and no line of Python.
"""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from mtrl_lightning import networks
from mtrl_lightning.algorithms import NormalizeObservation
from mtrl_lightning.learning import graph
from mtrl_lightning.learning.acting_graphs import ActingGraphs
from mtrl_lightning.learning.graph import WARM_UPS
from tests.helpers.algorithms import (
    attach,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
    pixel_spec,
    train,
)
from tests.helpers.networks import Convolutions
from tests.helpers.recorder import CPURecorder
from tests.helpers.runs import assert_same

TASK_E = np.repeat(np.arange(3), 2)
MIXED_E = np.array([2, 0, 1, 0])


def with_graphs(algorithm):
    parts = nn.ModuleDict({**algorithm.acting_modules(), "transforms": algorithm.transforms})
    algorithm.acting_graphs = ActingGraphs(parts, CPURecorder(), torch.device("cpu"))
    return algorithm


def observations(algorithm, seed, task_E=TASK_E):
    space = algorithm.spec.observation_space
    generator = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        return generator.integers(256, size=(len(task_E), *space.shape), dtype=np.uint8)
    return generator.normal(size=(len(task_E), *space.shape))


def choices(algorithm, num, mode="explore", task_E=TASK_E, noise=False, first=0):
    """Return copies of the choices for different observations: a graph writes into its own."""
    found = []
    for seed in range(first, first + num):
        given_ED = observations(algorithm, seed, task_E)
        more = {}
        if noise:
            shape = (len(task_E), algorithm.action_dim)
            more["noise_EA"] = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        chosen = algorithm.act(given_ED, task_E, mode, **more)
        action_EA, fields = chosen if isinstance(chosen, tuple) else (chosen, {})
        found.append((action_EA.copy(), {name: x_E.copy() for name, x_E in fields.items()}))
    return found


def every_choice(algorithm):
    """Return choices in all modes in turn, with new weights in between, and the generators."""
    found = [choices(algorithm, 5), choices(algorithm, 4, "exploit")]
    if algorithm.collection is None:
        train(algorithm, 2)
    found += [
        choices(algorithm, 3, first=5),
        choices(algorithm, 2, "random"),
        choices(algorithm, 4, "exploit", first=4),
        choices(algorithm, 4, noise=True),
        choices(algorithm, 4, task_E=MIXED_E),
        choices(algorithm, 2, first=8),
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
def test_all_choices_equal_those_without_graphs(name):
    plain = MAKERS[name]()
    graphed = with_graphs(MAKERS[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(every_choice(graphed), every_choice(plain))
    # exploring and exploiting, with noise that is given, and for other tasks
    assert graphed.acting_graphs.num_graphs == 4
    assert graphed.acting_graphs.reason == ""


def test_a_graph_is_recorded_after_two_choices_of_its_kind():
    sac = with_graphs(make_sac())
    choices(sac, WARM_UPS)
    assert sac.acting_graphs.num_graphs == 0
    choices(sac, 1)
    assert sac.acting_graphs.num_graphs == 1
    choices(sac, WARM_UPS, "exploit")
    assert sac.acting_graphs.num_graphs == 1


def test_what_is_chosen_by_a_graph_is_new_each_time():
    """The policy is asked by the graph: no choice is a former one."""
    sac = with_graphs(make_sac())
    actions = [action_EA for action_EA, _ in choices(sac, 6, "exploit")]
    assert len({action_EA.tobytes() for action_EA in actions}) == 6


def test_untrained_tasks_are_left_out():
    spec = make_spec(train_tasks=[0, 1])
    plain, graphed = make_sac(spec), with_graphs(make_sac(spec))
    for task_E, num_graphs in ((TASK_E, 0), (np.array([0, 0, 1, 1]), 1)):
        found = choices(graphed, 4, "exploit", task_E)
        assert_same(found, choices(plain, 4, "exploit", task_E))
        assert graphed.acting_graphs.num_graphs == num_graphs


class Branching(networks.MLP):
    """Reads a number."""

    def forward(self, x_BD, task_B):
        y_BO = super().forward(x_BD, task_B)
        return y_BO if float(x_BD.detach().sum()) > -1e9 else -y_BO


class Counting(networks.MLP):
    """Has a state in Python, which no graph knows of."""

    calls = 0

    def forward(self, x_BD, task_B):
        self.calls += 1
        return super().forward(x_BD, task_B) * (1 + 0.01 * self.calls)


def test_the_comparison_shows_a_state_in_python_that_no_replay_moves():
    make = partial(make_sac, actor=partial(Counting, width=8))
    with pytest.raises(AssertionError):
        assert_same(choices(with_graphs(make()), 6), choices(make(), 6))


def test_a_policy_that_reads_a_number_is_named_once_and_chooses_without_a_graph():
    make = partial(make_sac, actor=partial(Branching, width=8))
    wanted = choices(make(), 8)
    sac = with_graphs(make())
    before = "actions are chosen without a graph, because Branching.forward"
    with pytest.warns(UserWarning, match=rf"{before} \(test_acting_graphs.py") as warned:
        found = choices(sac, 8)
    assert len(warned) == 1
    assert_same(found, wanted)
    assert sac.acting_graphs.num_graphs == 0


def test_a_buffer_that_is_replaced_ends_the_graphs():
    def replaced(sac):
        found = choices(sac, 4)
        sac.encoder.mean_D = torch.ones_like(sac.encoder.mean_D)
        return found + choices(sac, 4, first=4)

    make = partial(make_sac, encoder=networks.Standardize)
    wanted = replaced(make())
    sac = with_graphs(make())
    with pytest.warns(UserWarning, match=r"the buffer encoder\.mean_D was replaced"):
        assert_same(replaced(sac), wanted)


def test_more_groups_of_environments_than_graphs_are_said_once(monkeypatch):
    monkeypatch.setattr(graph, "MOST_GRAPHS", 1)
    plain, graphed = make_sac(), with_graphs(make_sac())
    groups = [np.array([0, 1, 2]), np.array([1, 2]), np.array([2])]
    with pytest.warns(UserWarning, match="1 graphs are kept, and for further groups") as warned:
        found = [choices(graphed, 4, task_E=task_E) for task_E in groups]
    assert len(warned) == 1
    assert_same(found, [choices(plain, 4, task_E=task_E) for task_E in groups])
    assert graphed.acting_graphs.num_graphs == 1


def test_graphs_are_recorded_again_after_a_reset_and_with_new_optimizers():
    def both(sac):
        attach(sac)
        found = choices(sac, 4)
        sac.reset_networks()
        return found + choices(sac, 4)

    sac = make_sac()
    wanted = both(sac)
    graphed = with_graphs(make_sac())
    assert_same(both(graphed), wanted)
    assert graphed.acting_graphs.num_graphs == 1
    graphed.reset_networks()
    assert graphed.acting_graphs.num_graphs == 0
    graphed.graphs = graph.UpdateGraphs(graphed, CPURecorder())
    choices(graphed, 4)
    attach(graphed)
    assert graphed.acting_graphs.num_graphs == 0


def test_a_policy_that_was_moved_elsewhere_chooses_there():
    sac = with_graphs(make_sac())
    choices(sac, 4)
    sac.acting_graphs.device = torch.device("cuda")  # that of the graphs
    sac.actor.requires_grad_(False)
    for weight in sac.actor.parameters():
        weight.set_(torch.zeros_like(weight))
    ((action_EA, _),) = choices(sac, 1, "exploit")
    assert (action_EA == 0).all()
