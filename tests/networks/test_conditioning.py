"""Task conditioning, compared with the equations row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.networks.conditioning import (
    Embedding,
    NoConditioning,
    OneHot,
    TaskConditioning,
    TaskEncoder,
)
from mtrl_lightning.networks.mlp import MLP
from tests.helpers.networks import (
    DTYPES,
    GROUPED_TASKS,
    assert_gradients_of_many_losses_at_once,
    assert_groups_equal_rows,
    assert_same_output_and_gradients,
    layers,
    randomize,
    trained,
    uniform,
)
from tests.helpers.specs import spec_of

TASK_B = torch.tensor([2, 0, 2, 1, 3, 3, 0])
KINDS = [
    pytest.param(OneHot, id="one_hot"),
    pytest.param(NoConditioning, id="nothing"),
    pytest.param(lambda spec: Embedding(spec, dim=6), id="embedding"),
    pytest.param(lambda spec: Embedding(spec, dim=6, unit_norm=True), id="unit_norm"),
    pytest.param(lambda spec: TaskEncoder(spec, width=7, out_dim=5), id="task_encoder"),
    pytest.param(lambda spec: TaskEncoder(spec, embedding=OneHot, out_dim=3), id="of_one_hot"),
]


def test_nothing_is_added_to_features_that_tell_the_task():
    nothing = NoConditioning(spec_of(3))
    assert nothing(torch.tensor([0, 2])).shape == (2, 0)
    assert nothing.out_dim == 0 and nothing.state_dict() == {}
    network = MLP(4, 2, spec_of(3), width=8, conditioning=NoConditioning, output_bound=0.5)
    x_BD = uniform(1, 4).expand(3, 4)
    assert network.trunk[0].in_features == 4
    out = network(x_BD, torch.tensor([0, 1, 2]))
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) and out.any()


def test_an_embedding_begins_normal_and_has_32_numbers():
    torch.manual_seed(0)
    embedding = Embedding(spec_of(500))
    assert embedding.out_dim == 32
    assert embedding.weight_TC.mean().item() == pytest.approx(0, abs=0.03)
    assert embedding.weight_TC.std().item() == pytest.approx(1, abs=0.03)
    # no unit length unless it is asked for
    assert embedding(torch.arange(500)).norm(dim=-1).std() > 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("unit_norm", [False, True])
def test_an_embedding_equals_a_loop_over_rows(unit_norm, dtype, tolerance):
    embedding = Embedding(spec_of(4), dim=5, unit_norm=unit_norm).to(dtype)
    rows = [embedding.weight_TC[task] for task in TASK_B.tolist()]
    wanted = torch.stack([row / (row**2).sum() ** 0.5 if unit_norm else row for row in rows])
    assert_same_output_and_gradients(embedding, embedding(TASK_B), wanted, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_task_encoder_equals_a_loop_over_rows(depth, dtype, tolerance):
    encoder = TaskEncoder(
        spec_of(4), embedding=lambda t: Embedding(t, dim=6), width=7, depth=depth, out_dim=5
    )
    randomize(encoder).to(dtype)
    linears = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == depth + 1
    wanted = torch.stack(
        [layers(encoder.embedding.weight_TC[task], linears) for task in TASK_B.tolist()]
    )
    assert_same_output_and_gradients(encoder, encoder(TASK_B), wanted, tolerance)


def test_a_task_encoder_has_the_papers_sizes():
    encoder = TaskEncoder(spec_of(10))
    shapes = {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}
    assert sorted(shapes.values()) == sorted(
        [(10, 50), (50, 50), (50,), (50, 50), (50,), (50, 50), (50,)]
    )
    assert encoder.out_dim == 50


@pytest.mark.parametrize("kind", KINDS)
def test_out_dim_is_what_comes_out_and_an_mlp_takes_it(kind):
    conditioning = kind(spec_of(4))
    assert isinstance(conditioning, TaskConditioning)
    assert conditioning(TASK_B).shape == (7, conditioning.out_dim)
    assert conditioning(TASK_B[:0]).shape == (0, conditioning.out_dim)
    network = MLP(3, 2, spec_of(4), width=8, conditioning=kind)
    assert network.trunk[0].in_features == 3 + conditioning.out_dim
    assert network(uniform(7, 3), TASK_B).shape == (7, 2)
    assert network(uniform(0, 3), TASK_B[:0]).shape == (0, 2)


@pytest.mark.parametrize("tasks", GROUPED_TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_tasks_have_the_outputs_and_gradients_of_the_same_rows_in_any_order(kind, tasks):
    assert_groups_equal_rows(randomize(kind(spec_of(4))).double(), tasks)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_gradients_of_many_losses_at_once(kind):
    conditioning = kind(spec_of(4))
    assert_gradients_of_many_losses_at_once(conditioning, conditioning(TASK_B))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_finite(kind):
    network = MLP(3, 2, spec_of(4), width=8, conditioning=kind)
    with torch.autocast("cpu", torch.bfloat16):
        out = network(uniform(7, 3), TASK_B)
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_holds_all(kind):
    before, after = randomize(kind(spec_of(4)), seed=1), randomize(kind(spec_of(4)), seed=50)
    assert not len(trained(before)) or not torch.equal(before(TASK_B), after(TASK_B))
    after.load_state_dict(before.state_dict())
    assert torch.equal(before(TASK_B), after(TASK_B))
