"""What stands for tasks that are evaluated without being trained."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning.networks import (
    CARE,
    MLP,
    MOORE,
    AppendTask,
    Attention,
    Embedding,
    FiLM,
    Language,
    MeanOfTrained,
    MixtureOfEncoders,
    MultiHead,
    NoConditioning,
    OneHot,
    OneHotGate,
    PaCo,
    SoftModularization,
    StateDependentStd,
    StateIndependentStd,
    TaskEncoder,
    TopKGate,
)
from mtrl_lightning.networks.experts import TaskExperts
from mtrl_lightning.networks.multi_head import LinearHeads
from tests.helpers.networks import randomize, uniform
from tests.helpers.specs import spec_of

TRAINED = (0, 2, 3)
NUM_TASKS = 5
"""The tasks 1 and 4 are not trained."""
TASK_B = torch.tensor([4, 0, 1, 3, 1, 2])
UNTRAINED_B = torch.tensor([True, False, True, False, True, False])
SPACE = Box(-1.0, 1.0, (6,), np.float32)


def acting(module, *args):
    """Return what a module gives a policy."""
    with torch.no_grad(), MeanOfTrained(module, NUM_TASKS, TRAINED).applied():
        return module(*args)


def assert_mean(module, *features):
    """Compare each row with the mean over the trained tasks, or with the task's own."""
    with torch.no_grad():
        own_B = module(*features, TASK_B)
        per_task = [module(*features, torch.full_like(TASK_B, task)) for task in TRAINED]
    mean_B = sum(per_task) / len(TRAINED)
    wanted_B = torch.where(UNTRAINED_B[:, None], mean_B, own_B)
    found_B = acting(module, *features, TASK_B)
    torch.testing.assert_close(found_B, wanted_B, rtol=1e-5, atol=1e-6)
    assert (found_B - own_B).abs().amax(1)[UNTRAINED_B].min() > 1e-3, "not their own parameters"
    assert torch.equal(module(*features, TASK_B), own_B), "only while a policy acts"
    # rows in groups
    task_Tn = torch.arange(NUM_TASKS)[:, None].expand(-1, 3)
    groups = [uniform(NUM_TASKS, 3, feature.shape[-1], seed=1) for feature in features]
    found_Tn = acting(module, *groups, task_Tn)
    rows_B = acting(module, *(group.flatten(0, 1) for group in groups), task_Tn.flatten())
    assert found_Tn.shape[:2] == task_Tn.shape
    torch.testing.assert_close(found_Tn.flatten(0, 1), rows_B, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        OneHot(spec_of(NUM_TASKS)),
        Embedding(spec_of(NUM_TASKS), dim=3),
        Embedding(spec_of(NUM_TASKS), dim=3, unit_norm=True),
        TaskEncoder(spec_of(NUM_TASKS), width=7, out_dim=3),
        OneHotGate(NUM_TASKS, spec_of(NUM_TASKS)),
        StateIndependentStd(spec_of(NUM_TASKS, action_dim=3)),
        StateDependentStd(spec_of(NUM_TASKS, action_dim=3)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_untrained_tasks_input_is_the_mean_of_the_trained_tasks(module):
    assert_mean(randomize(module))


@pytest.mark.parametrize(
    "module",
    [
        LinearHeads(6, 2, NUM_TASKS, 0.1),
        TaskExperts(NUM_TASKS, 6, 2, width=7, depth=1, output_bound=0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_heads_outputs_are_averaged(module):
    assert_mean(randomize(module), uniform(len(TASK_B), 6))


def test_a_multi_head_network_by_hand():
    """The trunk gets the mean of the one-hot vectors, and the heads' outputs are averaged."""
    network = randomize(MultiHead(6, 2, spec_of(NUM_TASKS), width=7, depth=2))
    x_BD = uniform(3, 6)
    shares_T = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]) / 3
    with torch.no_grad():
        h_BH = network.trunk(torch.cat([x_BD, shares_T.expand(3, -1)], dim=1))
        y_BTO = torch.nn.functional.linear(h_BH, network.heads.weight, network.heads.bias)
        wanted_BO = y_BTO.unflatten(-1, (NUM_TASKS, 2))[:, list(TRAINED)].mean(1)
    found_BO = acting(network, x_BD, torch.tensor([1, 4, 1]))
    torch.testing.assert_close(found_BO, wanted_BO, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        partial(MLP, width=8, depth=1),
        partial(MLP, width=8, depth=1, conditioning=partial(Embedding, dim=3)),
        partial(MultiHead, width=8, depth=1),
        partial(MultiHead, width=8, depth=1, head_width=4),
        partial(MOORE, width=8, depth=2, num_experts=2),
        partial(PaCo, width=8, depth=1, num_sets=2),
        partial(FiLM, width=8, depth=1),
        partial(SoftModularization, width=8, depth=2, num_modules=2, embedding_dim=8),
    ],
    ids=["mlp", "embedding", "heads", "hidden_heads", "moore", "paco", "film", "soft"],
)
def test_no_network_uses_parameters_of_untrained_tasks(make):
    assert_untrained_tasks_are_alike(randomize(make(6, 2, spec_of(NUM_TASKS))))


def assert_untrained_tasks_are_alike(network):
    x_BD = uniform(1, 6).expand(2, -1)
    task_B = torch.tensor([1, 4])
    own_BO = network(x_BD, task_B)
    assert not torch.allclose(own_BO[0], own_BO[1], atol=1e-4), "their parameters differ"
    found_BO = acting(network, x_BD, task_B)
    torch.testing.assert_close(found_BO[0], found_BO[1], rtol=1e-5, atol=1e-6)
    grouped_BO = acting(network, x_BD[:, None], task_B[:, None])[:, 0]
    torch.testing.assert_close(grouped_BO, found_BO, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        partial(AppendTask, conditioning=partial(Embedding, dim=3)),
        partial(CARE, num_experts=2, width=8, conditioning=partial(Embedding, dim=3)),
        partial(MixtureOfEncoders, num_experts=NUM_TASKS, width=8, assignment=OneHotGate),
        partial(MixtureOfEncoders, num_experts=3, width=8, assignment=TopKGate),
        partial(MixtureOfEncoders, num_experts=3, width=8, assignment=Attention),
    ],
    ids=["append", "care", "own_expert", "gate", "attention"],
)
def test_no_encoder_uses_parameters_of_untrained_tasks(make):
    assert_untrained_tasks_are_alike(randomize(make(spec_of(NUM_TASKS, SPACE))))


def test_a_network_without_task_input_needs_nothing():
    network = MLP(6, 2, spec_of(NUM_TASKS), width=8, depth=1, conditioning=NoConditioning)
    assert MeanOfTrained(network, NUM_TASKS, TRAINED).replaced == []


def test_a_description_is_a_tasks_own_where_the_file_has_one(tmp_path):
    path = tmp_path / "embeddings.json"
    path.write_text(json.dumps({"a": [1, 0], "b": [0, 3], "c": [0, 1], "d": [5, 5]}))

    def made(names):
        spec = spec_of(names, train_tasks=(0, 2))
        language = partial(Language, path=str(path))
        return randomize(TaskEncoder(spec, embedding=language, width=4, out_dim=2))

    module = made(["a", "b", "c", "unseen"])
    parts = MeanOfTrained(module, 4, (0, 2))
    assert parts.replaced == ["TaskEncoder", "Language"]
    task_B = torch.arange(4)
    with torch.no_grad(), parts.applied():
        embedding_BC = module.embedding(task_B)
        output_BC = module(task_B)
    own_BC = module(task_B)
    assert embedding_BC.tolist() == [[1, 0], [0, 3], [0, 1], [0.5, 0.5]]
    assert torch.equal(output_BC[:3], own_BC[:3]), "b is not trained, and has a description"
    torch.testing.assert_close(output_BC[3], own_BC[[0, 2]].mean(0))
    assert MeanOfTrained(made(["a", "b", "c", "d"]), 4, (0, 2)).replaced == []
