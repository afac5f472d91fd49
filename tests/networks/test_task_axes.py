"""What belongs to single tasks, and what is derived from it."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import (
    CARE,
    MLP,
    MOORE,
    AppendTask,
    Attention,
    Embedding,
    FiLM,
    Language,
    MixtureOfEncoders,
    MultiHead,
    OneForAll,
    OneHotGate,
    OnePerTask,
    PaCo,
    ProjectedNetwork,
    Projection,
    Separate,
    SoftModularization,
    StateIndependentStd,
    TaskAxis,
    TaskEncoder,
    TopKGate,
)
from mtrl_lightning.networks.task_axes import (
    UntrainedTasks,
    last_shared_weight,
    shared_parameters,
    task_axes,
)
from tests.helpers.networks import randomize, uniform
from tests.helpers.specs import spec_of

TRAINED = (0, 2, 3)
NUM_TASKS = 5
"""The tasks 1 and 4 are not trained."""
SPEC = spec_of(NUM_TASKS)
UNTRAINED = UntrainedTasks(spec_of(NUM_TASKS, train_tasks=TRAINED), "mean")
SPACE = Box(-1.0, 1.0, (6,), np.float32)
EMBEDDING = partial(Embedding, dim=3)
SMALL = {"width": 8, "depth": 2}


def projected(in_dim, out_dim, spec):
    return ProjectedNetwork(Projection(7, in_dim), Separate(in_dim, out_dim, spec, **SMALL))


OF_TASKS = {
    "mlp": (partial(MLP, **SMALL), "", "head.weight"),
    "embedding": (partial(MLP, **SMALL, conditioning=EMBEDDING), "", "head.weight"),
    "heads": (partial(MultiHead, **SMALL), "heads.weight heads.bias", "trunk.2.weight"),
    "hidden heads": (partial(MultiHead, **SMALL, head_width=4), "heads.experts.", "trunk.2.weight"),
    "film": (partial(FiLM, **SMALL), "modulation.weight", "head.weight"),
    "film of an embedding": (partial(FiLM, **SMALL, conditioning=EMBEDDING), "", "head.weight"),
    "soft modularization": (
        partial(SoftModularization, **SMALL, embedding_dim=7),
        "task_encoder.weight",
        "head.weight",
    ),
    "moore": (partial(MOORE, **SMALL), "mixture.weight heads.", "experts.weights.1"),
    "moore of an embedding": (
        partial(MOORE, **SMALL, conditioning=EMBEDDING),
        "heads.",
        "experts.weights.1",
    ),
    "paco": (partial(PaCo, **SMALL), "composition.weight", "weights.2"),
    "separate": (partial(Separate, **SMALL), "own.", None),
    "projection": (projected, "network.own.", "projection.linear.weight"),
    "one per task": (partial(OnePerTask, make=partial(MultiHead, **SMALL)), "members.", None),
}


@pytest.mark.parametrize(("make", "own", "last"), OF_TASKS.values(), ids=OF_TASKS)
def test_tasks_share_parameters_without_a_task_axis(make, own, last):
    network = make(6, 2, SPEC)
    shared = {id(parameter) for parameter in shared_parameters(network)}
    parameters = dict(network.named_parameters())
    of_tasks = {name for name, parameter in parameters.items() if id(parameter) not in shared}
    assert of_tasks == {name for name in parameters if name.startswith(tuple(own.split()))}
    weight = last_shared_weight(network)
    assert weight is (None if last is None else network.get_parameter(last))


def test_outer_declarations_take_precedence():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Embedding(SPEC, dim=3)

        def task_axes(self):
            return {"inner.weight_TC": None, "other": TaskAxis(1)}

    assert task_axes(Outer(), "outer.") == {"outer.other": TaskAxis(1)}
    one = OneForAll(6, 2, SPEC, make=partial(MultiHead, **SMALL))
    assert task_axes(one) == {}, "the network was built for a single task"


def test_a_multi_head_network_is_filled_by_hand():
    network = randomize(MultiHead(6, 2, SPEC, width=7, depth=2))
    x_BD = uniform(3, 6)
    trained = list(TRAINED)
    with torch.no_grad():
        columns_HT = network.trunk[0].weight[:, 6:]
        first_BH = x_BD @ network.trunk[0].weight[:, :6].t() + network.trunk[0].bias
        first_BH = (first_BH + columns_HT[:, trained].mean(1)).relu()
        h_BH = (first_BH @ network.trunk[2].weight.t() + network.trunk[2].bias).relu()
        y_BTO = torch.nn.functional.linear(h_BH, network.heads.weight, network.heads.bias)
        wanted_BO = y_BTO.unflatten(-1, (NUM_TASKS, 2))[:, trained].mean(1)
        before_BO = network(x_BD, torch.tensor([0, 2, 3]))
    UNTRAINED.fill({"network": network})
    found_BO = network(x_BD, torch.tensor([1, 4, 1]))
    torch.testing.assert_close(found_BO, wanted_BO, rtol=1e-5, atol=1e-6)
    assert torch.equal(network(x_BD, torch.tensor([0, 2, 3])), before_BO)


def test_inputs_and_deviations_are_filled():
    modules = [Embedding(SPEC, dim=3), StateIndependentStd(spec_of(NUM_TASKS, action_dim=3))]
    for module in map(randomize, modules):
        wanted = module(torch.tensor(TRAINED)).mean(0)
        UNTRAINED.fill({"network": module})
        assert torch.equal(module(torch.tensor([1, 4])), wanted.expand(2, -1))


@pytest.mark.parametrize(
    "module",
    [
        *(make(6, 2, SPEC) for name, (make, *_) in OF_TASKS.items() if name in ("mlp", "heads")),
        *(make(6, 2, SPEC) for name, (make, *_) in OF_TASKS.items() if "film" in name),
        *(make(6, 2, SPEC) for name, (make, *_) in OF_TASKS.items() if "moore" in name),
        OF_TASKS["soft modularization"][0](6, 2, SPEC),
        OF_TASKS["paco"][0](6, 2, SPEC),
        MLP(6, 2, SPEC, width=8, conditioning=partial(TaskEncoder, width=7, out_dim=3)),
        AppendTask(spec_of(NUM_TASKS, SPACE)),
        CARE(spec_of(NUM_TASKS, SPACE), num_experts=2, width=8, conditioning=EMBEDDING),
        MixtureOfEncoders(spec_of(NUM_TASKS, SPACE), num_experts=3, width=8, assignment=TopKGate),
        MixtureOfEncoders(spec_of(NUM_TASKS, SPACE), num_experts=3, width=8, assignment=Attention),
    ],
    ids=lambda module: type(module).__name__,
)
def test_untrained_tasks_are_alike_once_filled(module):
    randomize(module)
    x_BD = uniform(1, 6).expand(2, -1)
    task_B = torch.tensor([1, 4])
    own_BO = module(x_BD, task_B)
    assert not torch.allclose(own_BO[0], own_BO[1], atol=1e-4)
    UNTRAINED.fill({"network": module})
    found_BO = module(x_BD, task_B)
    torch.testing.assert_close(found_BO[0], found_BO[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["hidden heads", "separate", "one per task"])
def test_layers_of_single_tasks_have_no_mean(name):
    mixture = partial(MixtureOfEncoders, num_experts=NUM_TASKS, assignment=OneHotGate)
    for module in (OF_TASKS[name][0](6, 2, SPEC), mixture(spec_of(NUM_TASKS, SPACE))):
        with pytest.raises(ConfigurationError, match="actor"):
            UNTRAINED.check({"actor": module})
    UNTRAINED.check({"actor": OF_TASKS["heads"][0](6, 2, SPEC)})


def test_a_description_is_a_tasks_own_where_the_file_has_one(tmp_path):
    path = tmp_path / "embeddings.json"
    path.write_text(json.dumps({"a": [1, 0], "b": [0, 3], "c": [0, 1], "d": [5, 5]}))
    spec = spec_of(["a", "b", "c", "unseen"], train_tasks=(0, 2))
    module = TaskEncoder(spec, embedding=partial(Language, path=str(path)), width=4, out_dim=2)
    UntrainedTasks(spec, "mean").fill({"encoder": module})
    found = module.embedding(torch.arange(4)).tolist()
    assert found == [[1, 0], [0, 3], [0, 1], [0.5, 0.5]]
