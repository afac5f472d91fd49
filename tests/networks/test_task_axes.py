"""What belongs to single tasks, and what is derived from it."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning import networks
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import Embedding, TaskAxis, TaskEncoder
from mtrl_lightning.networks.network import (
    UntrainedTasks,
    last_shared_weight,
    shared_parameters,
    task_axes,
)
from tests.helpers.networks import NETWORKS, randomize, uniform
from tests.helpers.specs import spec_of

TRAINED = (0, 2, 3)
NUM_TASKS = 5
"""The tasks 1 and 4 are not trained."""
SPEC = spec_of(NUM_TASKS)
UNTRAINED = UntrainedTasks(spec_of(NUM_TASKS, train_tasks=TRAINED), "mean")
EMBEDDING = {"conditioning": partial(Embedding, dim=3)}


def projected(in_dim, out_dim, spec):
    network = NETWORKS["separate"](in_dim, out_dim, spec)
    return networks.ProjectedNetwork(networks.Projection(7, in_dim), network)


OF_TASKS = [
    ("mlp", {}, "", "head.weight"),
    ("mlp", EMBEDDING, "", "head.weight"),
    ("multi-head", {}, "heads.weight heads.bias", "trunk.2.weight"),
    ("multi-head, residual", {}, "heads.experts.", "trunk.4.3.weight"),
    ("film", {}, "modulation.weight", "head.weight"),
    ("film", EMBEDDING, "", "head.weight"),
    ("soft modularization", {}, "task_encoder.weight", "head.weight"),
    ("moore", {}, "mixture.weight heads.", "experts.weights.2"),
    ("moore", EMBEDDING, "heads.", "experts.weights.2"),
    ("paco", {}, "composition.weight", "weights.2"),
    ("separate", {}, "own.", None),
    ("projection", {}, "network.own.", "projection.linear.weight"),
    ("one per task", {"make": NETWORKS["multi-head"]}, "members.", None),
]
"""Networks, their parameters of single tasks, and the last weight that the tasks share."""
WITHOUT_MEAN = ("multi-head, residual", "separate", "projection", "one per task")


def network(name, **options):
    return {**NETWORKS, "projection": projected}[name](4, 2, SPEC, **options)


def mixture(assignment, **options):
    return networks.MixtureOfEncoders(SPEC, width=8, assignment=assignment, **options)


@pytest.mark.parametrize(("name", "options", "own", "last"), OF_TASKS)
def test_tasks_share_parameters_without_a_task_axis(name, options, own, last):
    made = network(name, **options)
    shared = {id(parameter) for parameter in shared_parameters(made)}
    parameters = dict(made.named_parameters())
    of_tasks = {name for name, parameter in parameters.items() if id(parameter) not in shared}
    assert of_tasks == {name for name in parameters if name.startswith(tuple(own.split()))}
    assert last_shared_weight(made) is (last and made.get_parameter(last))


def test_outer_declarations_take_precedence():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Embedding(SPEC, dim=3)

        def task_axes(self):
            return {"inner.weight_TC": None, "other": TaskAxis(1)}

    assert task_axes(Outer(), "outer.") == {"outer.other": TaskAxis(1)}
    one = networks.OneForAll(4, 2, SPEC, make=NETWORKS["multi-head"])
    assert task_axes(one) == {}, "the network was built for a single task"


def test_a_multi_head_network_is_filled_by_hand():
    heads, x_BD, trained = randomize(network("multi-head")), uniform(3, 4), list(TRAINED)
    first, _, second, _ = heads.trunk
    first_BH = nn.functional.linear(x_BD, first.weight[:, :4], first.bias)
    first_BH = (first_BH + first.weight[:, 4:][:, trained].mean(1)).relu()
    y_BTO = nn.functional.linear(second(first_BH).relu(), heads.heads.weight, heads.heads.bias)
    wanted_BO = y_BTO.unflatten(-1, (NUM_TASKS, 2))[:, trained].mean(1)
    before_BO = heads(x_BD, torch.tensor(TRAINED))
    UNTRAINED.fill({"network": heads})
    found_BO = heads(x_BD, torch.tensor([1, 4, 1]))
    torch.testing.assert_close(found_BO, wanted_BO, rtol=1e-5, atol=1e-6)
    assert torch.equal(heads(x_BD, torch.tensor(TRAINED)), before_BO)


def test_inputs_and_deviations_are_filled():
    for module in (Embedding(SPEC, dim=3), networks.StateIndependentStd(SPEC)):
        wanted = randomize(module)(torch.tensor(TRAINED)).mean(0)
        UNTRAINED.fill({"network": module})
        assert torch.equal(module(torch.tensor([1, 4])), wanted.expand(2, -1))


@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(network, name, **options)
            for name, options, *_ in OF_TASKS
            if name not in WITHOUT_MEAN
        ),
        lambda: network("mlp", conditioning=partial(TaskEncoder, width=7, out_dim=3)),
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
    UNTRAINED.check({"actor": network("multi-head")})


def test_a_description_is_a_tasks_own_where_the_file_has_one(tmp_path):
    path = tmp_path / "embeddings.json"
    path.write_text(json.dumps({"a": [1, 0], "b": [0, 3], "c": [0, 1], "d": [5, 5]}))
    spec = spec_of(["a", "b", "c", "unseen"], train_tasks=(0, 2))
    embedding = partial(networks.Language, path=str(path))
    module = TaskEncoder(spec, embedding=embedding, width=4, out_dim=2)
    UntrainedTasks(spec, "mean").fill({"encoder": module})
    found = module.embedding(torch.arange(4)).tolist()
    assert found == [[1, 0], [0, 3], [0, 1], [0.5, 0.5]]
