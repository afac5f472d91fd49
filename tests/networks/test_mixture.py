"""Mixtures of encoders and how tasks weigh them, beside the equations row by row."""

from __future__ import annotations

import inspect
import json
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning.networks.conditioning import Embedding, TaskEncoder
from mtrl_lightning.networks.language import DESCRIPTIONS
from mtrl_lightning.networks.mixture import (
    WORDS,
    Attention,
    Clusters,
    MixtureOfEncoders,
    OneHotGate,
    TopKGate,
    UniformGate,
)
from tests.helpers.networks import (
    DTYPES,
    assert_same_output_and_gradients,
    layers,
    perceptron,
    randomize,
    uniform,
)
from tests.helpers.specs import spec_of

SPACE = Box(-np.inf, np.inf, (5,), np.float32)
NAMES = ["reach-v3", "door-open-v3", "push-v3", "drawer-close-v3"]
GROUPS = [["open", "close"], ["push", "pull"], ["reach", "drawer"], ["door", "puck"]]
CLUSTER_WEIGHTS = [
    [0, 0, 1, 0],
    [1 / 3, 1 / 3, 0, 1 / 3],
    [0, 1 / 2, 0, 1 / 2],
    [1 / 3, 1 / 3, 1 / 3, 0],
]
TASK_B = torch.tensor([2, 0, 2, 1, 3, 3, 0])
K = 4


def embedded(assignment, **settings):
    return partial(assignment, conditioning=partial(Embedding, dim=3), width=6, **settings)


def clusters(num_experts, spec):
    return Clusters(num_experts, spec, words=GROUPS)


KINDS = [
    pytest.param(OneHotGate, id="identity"),
    pytest.param(UniformGate, id="ensemble"),
    pytest.param(clusters, id="cluster"),
    pytest.param(TopKGate, id="gate"),
    pytest.param(embedded(TopKGate), id="gate of an embedding"),
    pytest.param(Attention, id="attention"),
    pytest.param(embedded(Attention, temperature=0.3), id="attention of an embedding"),
]


def make(assignment, seed=0, **settings):
    settings = {"num_experts": K, "width": 6, "depth": 2, "out_dim": 3, **settings}
    mixture = MixtureOfEncoders(spec_of(NAMES, SPACE), assignment=assignment, **settings)
    return randomize(mixture, seed)


def slow_weights(assignment, task):
    """``a(task)`` from the definition of each assignment."""
    if isinstance(assignment, OneHotGate):
        return [float(k == task) for k in range(K)]
    if isinstance(assignment, UniformGate):
        return [1 / K] * K
    if isinstance(assignment, Clusters):
        return CLUSTER_WEIGHTS[task]
    parts = assignment.scores
    told_C = parts.conditioning(torch.tensor([task]))[0].detach()
    score_K = layers(told_C, [parts.hidden[0], parts.hidden[2], parts.output])
    if isinstance(assignment, Attention):
        power_K = torch.stack([torch.exp(score / assignment._temperature) for score in score_K])
        return power_K / power_K.sum()
    best = sorted(range(K), key=lambda k: -score_K[k].item())[:2]
    total = sum(torch.exp(score_K[k]) for k in best)
    return [torch.exp(score_K[k]) / total if k in best else 0.0 for k in range(K)]


def slow(mixture, x_BD, task_B):
    rows = []
    for x_D, task in zip(x_BD, task_B.tolist(), strict=True):
        weight_K = slow_weights(mixture.assignment, task)
        rows.append(sum(weight_K[k] * perceptron(mixture.experts, k, x_D) for k in range(K)))
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_equals_a_loop_over_rows_and_experts(kind, dtype, tolerance):
    mixture, x_BD = make(kind).to(dtype), uniform(7, 5, seed=9).to(dtype)
    if kind is clusters:
        tolerance = max(tolerance, 1e-6)  # the table's thirds are float32
    assert_same_output_and_gradients(
        mixture, mixture(x_BD, TASK_B), slow(mixture, x_BD, TASK_B), tolerance
    )


@pytest.mark.parametrize("num_chosen", [1, 2, 3, 4])
def test_a_gate_chooses_as_many_experts_as_it_is_told(num_chosen):
    weight_TK = make(lambda k, t: TopKGate(k, t, num_chosen=num_chosen)).assignment(torch.arange(4))
    assert (weight_TK > 0).sum(-1).tolist() == [num_chosen] * 4


@pytest.mark.parametrize("assignment", [TopKGate, Attention])
@pytest.mark.parametrize(
    "told_by", [lambda n: Embedding(n, dim=3), lambda n: TaskEncoder(n, width=6)]
)
def test_what_tells_the_task_is_detached_and_all_else_learns(assignment, told_by):
    mixture = make(lambda t, k: assignment(t, k, conditioning=told_by))
    told = mixture.assignment.scores.conditioning
    assert not any(parameter.requires_grad for parameter in told.parameters())
    told.requires_grad_(True)  # whoever does this must not train it either
    mixture(uniform(7, 5), TASK_B).square().sum().backward()
    learns = {
        id(parameter)
        for parameter in mixture.parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    assert not any(id(parameter) in learns for parameter in told.parameters())
    others = set(map(id, mixture.parameters())) - set(map(id, told.parameters()))
    assert others == learns


def test_words_are_whole_and_in_names_or_descriptions(tmp_path):
    path = tmp_path / "descriptions.json"
    path.write_text(json.dumps({"opener-v1": "Do it, SLOWLY.", "swing_up": "Unclosed."}))
    assignment = Clusters(
        3,
        spec_of(["opener-v3", "swing_up", "open-close"]),
        words=[["open", "slowly"], ["swing"], ["close", "up"]],
        descriptions=str(path),
    )
    assert assignment(torch.arange(3)).tolist() == [[1, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]


def test_the_default_words_tell_every_described_task():
    names = list(json.loads(DESCRIPTIONS.read_text()))
    assignment = Clusters(10, spec_of(names))
    weight_TK = assignment(torch.arange(len(names)))
    assert (weight_TK > 0).any(0).all()
    verbs = [group[0] for group in WORDS]
    used = {
        name: {verbs[k] for k in weight_K.nonzero()[:, 0]}
        for name, weight_K in zip(names, weight_TK, strict=True)
    }
    assert used["reach-v3"] == {"reach"}
    assert used["drawer-close-v3"] == {"close", "push"}
    assert used["window-open-v3"] == {"open", "push"}
    assert used["peg-insert-side-v3"] == {"pick", "insert"}
    assert used["button-press-topdown-v3"] == {"press"}
    assert used["cartpole-swingup"] == {"turn", "stand"}
    words = [word for group in WORDS for word in group]
    assert len(set(words)) == len(words)


def test_the_sizes_are_mtrls():
    defaults = {
        name: p.default for name, p in inspect.signature(MixtureOfEncoders).parameters.items()
    }
    assert [defaults[name] for name in ("num_experts", "width", "depth", "out_dim")] == [
        10,
        50,
        2,
        50,
    ]
    assert inspect.signature(TopKGate).parameters["num_chosen"].default == 2
    assert inspect.signature(Attention).parameters["temperature"].default == 1
