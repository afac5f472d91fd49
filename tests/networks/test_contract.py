"""What every network, encoder, task conditioning and assignment keeps to."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.networks.task_axes import shared_parameters
from tests.helpers.networks import ALWAYS_FUSED, IN_DIM, NUM_TASKS, OUT_DIM, Dense, randomize
from tests.helpers.networks import uniform as draw
from tests.helpers.specs import spec_of

SPEC = spec_of(["reach-v3", "door-open-v3", "push-v3"])
SMALL = {"width": 8, "depth": 2, "output_bound": 0.5}
SOFT = {"num_modules": 2, "embedding_dim": 5}
NETWORKS = {
    "mlp": partial(networks.MLP, **SMALL),
    "mlp, layer norm": partial(networks.MLP, layer_norm=True, **SMALL),
    "mlp, residual": partial(networks.MLP, residual=True, **SMALL),
    "multi-head": partial(networks.MultiHead, **SMALL),
    "multi-head of one output": lambda in_dim, _, spec, **options: networks.MultiHead(
        in_dim, 1, spec, **{**SMALL, **options}
    ),
    "multi-head, residual": partial(networks.MultiHead, head_width=6, residual=True, **SMALL),
    "film": partial(networks.FiLM, **SMALL),
    "film, scalar": partial(networks.FiLM, scalar=True, **SMALL),
    "moore": partial(networks.MOORE, width=12, depth=3, num_experts=4, output_bound=0.5),
    "moore, shallow": partial(networks.MOORE, width=12, depth=1, num_experts=2, output_bound=0.5),
    "paco": partial(networks.PaCo, num_sets=4, max_loss=None, **SMALL),
    "separate": partial(networks.Separate, **SMALL),
    "soft modularization": partial(networks.SoftModularization, **SMALL, **SOFT),
    "soft modularization, deep": partial(
        networks.SoftModularization, **{**SMALL, **SOFT, "depth": 4}
    ),
    "one per task": partial(networks.OnePerTask, make=partial(networks.MLP, **SMALL)),
}
EXPERTS = {"num_experts": 3, "width": 6, "depth": 1, "out_dim": 5}
BY_EMBEDDING = {"conditioning": partial(networks.Embedding, dim=3), "width": 6}
ENCODERS = {
    "care": partial(networks.CARE, context_dim=5, **EXPERTS),
    "care of an embedding": partial(
        networks.CARE, conditioning=networks.Embedding, context_dim=5, **EXPERTS
    ),
    **{
        f"mixture, {name}": partial(networks.MixtureOfEncoders, assignment=assignment, **EXPERTS)
        for name, assignment in {
            "one-hot": networks.OneHotGate,
            "uniform": networks.UniformGate,
            "clusters": partial(networks.Clusters, words=[["reach"], ["push", "open"], ["door"]]),
            "gate": networks.TopKGate,
            "gate of an embedding": partial(networks.TopKGate, **BY_EMBEDDING),
            "attention": networks.Attention,
            "attention of an embedding": partial(
                networks.Attention, temperature=0.3, **BY_EMBEDDING
            ),
        }.items()
    },
}
CONDITIONINGS = {
    "one-hot": networks.OneHot,
    "none": networks.NoConditioning,
    "embedding": partial(networks.Embedding, dim=6),
    "embedding, unit norm": partial(networks.Embedding, dim=6, unit_norm=True),
    "task encoder": partial(networks.TaskEncoder, width=7, out_dim=5),
    "task encoder of a one-hot": partial(
        networks.TaskEncoder, embedding=networks.OneHot, out_dim=3
    ),
}
MODULES = {**NETWORKS, **ENCODERS, **CONDITIONINGS}
TAKE_CONDITIONING = [name for name in NETWORKS if name not in ("separate", "one per task")]
GROUPS = [
    [[0, 0, 0], [1, 1, 1], [2, 2, 2]],
    [[0], [1], [2]],
    [[0, 0, 0, 0], [2, 2, 2, 2]],
    [[1, 1, 1]],
]
"""Tasks of learning batches ``[R, n]``."""
LOSSES = torch.tensor(GROUPS[0])
each_module = pytest.mark.parametrize("name", MODULES)
each_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    monkeypatch.setattr(networks.hidden, "MIN_OUTPUTS", ALWAYS_FUSED)


def make(name, seed=0, **options):
    sizes = (IN_DIM, OUT_DIM) if name in NETWORKS else ()
    return randomize(MODULES[name](*sizes, SPEC, **options), seed)


def call(module, task_B, order=None, seed=3):
    """Return the output for an observation of each row, in another order of the rows."""
    inputs = [draw(task_B.numel(), IN_DIM, seed=seed).to(next(module.parameters(), task_B * 1.0))]
    rows = [*([] if isinstance(module, networks.TaskConditioning) else inputs), task_B.flatten()]
    if order is None:
        return module(*(row.view(*task_B.shape, *row.shape[1:]) for row in rows))
    return module(*(row[order] for row in rows))[order.argsort()].view(*task_B.shape, -1)


def gradients_of(module, loss, **options):
    parameters = [p for p in module.parameters() if p.requires_grad]
    given = {"allow_unused": True, "materialize_grads": True, "retain_graph": True, **options}
    return torch.autograd.grad(loss, parameters, **given) if parameters else ()


@each_module
def test_groups_have_outputs_and_gradients_of_rows_in_any_order(name):
    module = make(name).double()
    for i, tasks in enumerate(GROUPS):
        task_Rn = torch.tensor(tasks)
        grouped_RnO = call(module, task_Rn)
        weight_RnO = draw(*grouped_RnO.shape, seed=77).to(grouped_RnO)
        wanted = gradients_of(module, (grouped_RnO * weight_RnO).sum())
        in_order_B = torch.arange(task_Rn.numel())
        shuffled_B = torch.randperm(len(in_order_B), generator=torch.Generator().manual_seed(i))
        for order_B in (in_order_B, in_order_B.flip(0), shuffled_B):
            any_RnO = call(module, task_Rn, order_B)
            torch.testing.assert_close(grouped_RnO, any_RnO, rtol=1e-6, atol=1e-7)
            found = gradients_of(module, (any_RnO * weight_RnO).sum())
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@each_module
def test_every_parameter_learns(name):
    module, task_B = make(name), torch.arange(30) % NUM_TASKS
    if any(p.requires_grad for p in module.parameters()):
        call(module, task_B).square().sum().backward()
    assert [n for n, p in module.named_parameters() if p.requires_grad and not p.grad.any()] == []


@pytest.mark.parametrize("name", TAKE_CONDITIONING)
def test_another_conditioning_replaces_the_one_hot(name):
    network = make(name, conditioning=Dense)
    call(network, torch.arange(30) % NUM_TASKS).square().sum().backward()
    assert [n for n, p in network.named_parameters() if not p.grad.any()] == []
    assert any(p is network.conditioning.table.weight for p in shared_parameters(network))


@each_module
def test_empty_batch_passes_and_half_precision_is_close(name):
    module = make(name)
    exact = call(module, LOSSES)
    assert exact.shape[-1] == getattr(module, "out_dim", exact.shape[-1])
    with torch.autocast("cpu", torch.bfloat16):
        found, rows, empty = (call(module, t) for t in (LOSSES, LOSSES[0], LOSSES[0][:0]))
    assert empty.shape == (0, exact.shape[-1])
    if isinstance(module, networks.Network):
        assert found.dtype == rows.dtype == empty.dtype == torch.bfloat16
    largest = max(exact.abs().amax().item(), 1) if exact.numel() else 1
    torch.testing.assert_close(found.float(), exact, rtol=0.1, atol=0.1 * largest)
    assert all(g.isfinite().all() for g in gradients_of(module, found.float().square().sum()))


@each_module
def test_gradients_of_many_losses_at_once_equal_single_ones(name):
    module = make(name).double()
    for task_B in (LOSSES, LOSSES.flatten()):
        loss_T = call(module, task_B).square().reshape(NUM_TASKS, -1).sum(1)
        at_once = (
            gradients_of(module, loss_T, grad_outputs=torch.eye(3).double(), is_grads_batched=True)
            if loss_T.requires_grad
            else ()
        )
        for task in range(NUM_TASKS if at_once else 0):
            alone = gradients_of(module, loss_T[task])
            torch.testing.assert_close([g[task] for g in at_once], list(alone))


@each_module
def test_loaded_state_gives_the_same_outputs(name):
    before, after = make(name), make(name, seed=50)
    if gradients_of(before, call(before, LOSSES).sum()):
        assert not torch.equal(call(before, LOSSES), call(after, LOSSES))
    after.load_state_dict(before.state_dict())
    assert torch.equal(call(before, LOSSES), call(after, LOSSES))


@each_network
def test_one_task_with_one_feature_is_enough(name):
    options = (
        {"num_experts": 1} if "moore" in name else {"embedding_dim": 1} if "soft" in name else {}
    )
    sizes = {"width": 1, "depth": 1} if name != "one per task" else {}
    network = NETWORKS[name](1, 1, spec_of(1), **options, **sizes)
    assert network(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)).shape == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "one per task"])
def test_network_is_vectorized_over_parameters_and_compiled(name):
    first, second = make(name), make(name, seed=50)
    stacked = {
        key: torch.stack([value, dict(second.named_parameters())[key]])
        for key, value in first.named_parameters()
    }
    rows = draw(*LOSSES.shape, IN_DIM), LOSSES
    both = torch.vmap(lambda p: torch.func.functional_call(first, p, rows))(stacked)
    wanted = torch.stack([first(*rows), second(*rows)])
    torch.testing.assert_close(both, wanted, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()  # compilations of other networks count towards the same limit
    compiled = torch.compile(first, backend="aot_eager", fullgraph=True)
    for given in (rows, (rows[0].flatten(0, 1), LOSSES.flatten())):
        outputs = compiled(*given), first(*given)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        found, wanted = (
            gradients_of(first, output.square().sum(), retain_graph=False) for output in outputs
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
