"""What belongs to single tasks, and what is derived from it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning import networks
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import Embedding, TaskAxis, TaskEncoder
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
EMBEDDING = {"conditioning": partial(Embedding, dim=3)}
SMALL = {"width": 8, "depth": 2}
mlp, heads, film, soft, moore, paco, separate = (
    partial(kind, **SMALL)
    for kind in (
        networks.MLP,
        networks.MultiHead,
        networks.FiLM,
        partial(networks.SoftModularization, embedding_dim=7),
        networks.MOORE,
        networks.PaCo,
        networks.Separate,
    )
)


def projected(in_dim, out_dim, spec):
    return networks.ProjectedNetwork(
        networks.Projection(7, in_dim), separate(in_dim, out_dim, spec)
    )


OF_TASKS = {
    "mlp": (mlp, "", "head.weight"),
    "mlp of an embedding": (partial(mlp, **EMBEDDING), "", "head.weight"),
    "heads": (heads, "heads.weight heads.bias", "trunk.2.weight"),
    "hidden heads": (partial(heads, head_width=4), "heads.experts.", "trunk.2.weight"),
    "film": (film, "modulation.weight", "head.weight"),
    "film of an embedding": (partial(film, **EMBEDDING), "", "head.weight"),
    "soft modularization": (soft, "task_encoder.weight", "head.weight"),
    "moore": (moore, "mixture.weight heads.", "experts.weights.1"),
    "moore of an embedding": (partial(moore, **EMBEDDING), "heads.", "experts.weights.1"),
    "paco": (paco, "composition.weight", "weights.2"),
    "separate": (separate, "own.", None),
    "projection": (projected, "network.own.", "projection.linear.weight"),
    "one per task": (partial(networks.OnePerTask, make=heads), "members.", None),
}
WITHOUT_MEAN = ("hidden heads", "separate", "projection", "one per task")


def network(name):
    return OF_TASKS[name][0](4, 2, SPEC)


def mixture(assignment, **options):
    return networks.MixtureOfEncoders(SPEC, width=8, assignment=assignment, **options)


@pytest.mark.parametrize(("make", "own", "last"), OF_TASKS.values(), ids=OF_TASKS)
def test_tasks_share_parameters_without_a_task_axis(make, own, last):
    network = make(4, 2, SPEC)
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
    one = networks.OneForAll(4, 2, SPEC, make=heads)
    assert task_axes(one) == {}, "the network was built for a single task"


def test_a_multi_head_network_is_filled_by_hand():
    network, x_BD, trained = randomize(heads(4, 2, SPEC)), uniform(3, 4), list(TRAINED)
    with torch.no_grad():
        columns_HT = network.trunk[0].weight[:, 4:]
        first_BH = x_BD @ network.trunk[0].weight[:, :4].t() + network.trunk[0].bias
        first_BH = (first_BH + columns_HT[:, trained].mean(1)).relu()
        h_BH = (first_BH @ network.trunk[2].weight.t() + network.trunk[2].bias).relu()
        y_BTO = nn.functional.linear(h_BH, network.heads.weight, network.heads.bias)
        wanted_BO = y_BTO.unflatten(-1, (NUM_TASKS, 2))[:, trained].mean(1)
        before_BO = network(x_BD, torch.tensor(TRAINED))
    UNTRAINED.fill({"network": network})
    found_BO = network(x_BD, torch.tensor([1, 4, 1]))
    torch.testing.assert_close(found_BO, wanted_BO, rtol=1e-5, atol=1e-6)
    assert torch.equal(network(x_BD, torch.tensor(TRAINED)), before_BO)


def test_inputs_and_deviations_are_filled():
    for module in (Embedding(SPEC, dim=3), networks.StateIndependentStd(SPEC)):
        wanted = randomize(module)(torch.tensor(TRAINED)).mean(0)
        UNTRAINED.fill({"network": module})
        assert torch.equal(module(torch.tensor([1, 4])), wanted.expand(2, -1))


@pytest.mark.parametrize(
    "make",
    [
        *(partial(network, name) for name in OF_TASKS if name not in WITHOUT_MEAN),
        lambda: mlp(4, 2, SPEC, conditioning=partial(TaskEncoder, width=7, out_dim=3)),
        lambda: networks.AppendTask(SPEC),
        lambda: networks.MLPEncoder(SPEC, width=8, out_dim=5, context=TaskEncoder),
        lambda: networks.CARE(SPEC, num_experts=2, width=8, **EMBEDDING),
        lambda: mixture(networks.TopKGate, num_experts=3),
        lambda: mixture(networks.Attention, num_experts=3),
    ],
)
def test_untrained_tasks_are_alike_once_filled(make):
    module, x_BD, task_B = randomize(make()), uniform(1, 4).expand(2, -1), torch.tensor([1, 4])
    own_BO = module(x_BD, task_B)
    assert not torch.allclose(own_BO[0], own_BO[1], atol=1e-4)
    UNTRAINED.fill({"network": module})
    found_BO = module(x_BD, task_B)
    torch.testing.assert_close(found_BO[0], found_BO[1], rtol=1e-5, atol=1e-6)


def test_layers_of_single_tasks_have_no_mean():
    one_hot = mixture(networks.OneHotGate, num_experts=NUM_TASKS)
    for module in (*map(network, WITHOUT_MEAN), one_hot):
        with pytest.raises(ConfigurationError, match="actor"):
            UNTRAINED.check({"actor": module})
    UNTRAINED.check({"actor": network("heads")})


def test_a_description_is_a_tasks_own_where_the_file_has_one(tmp_path):
    path = tmp_path / "embeddings.json"
    path.write_text(json.dumps({"a": [1, 0], "b": [0, 3], "c": [0, 1], "d": [5, 5]}))
    spec = spec_of(["a", "b", "c", "unseen"], train_tasks=(0, 2))
    embedding = partial(networks.Language, path=str(path))
    module = TaskEncoder(spec, embedding=embedding, width=4, out_dim=2)
    UntrainedTasks(spec, "mean").fill({"encoder": module})
    found = module.embedding(torch.arange(4)).tolist()
    assert found == [[1, 0], [0, 3], [0, 1], [0.5, 0.5]]
