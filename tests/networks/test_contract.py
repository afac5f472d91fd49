"""What every network, encoder and task conditioning keeps to, beginning with its equation."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning import networks
from tests.helpers.networks import (
    ALWAYS_FUSED,
    EQUATIONS,
    IN_DIM,
    MODULES,
    NUM_TASKS,
    TAKE_CONDITIONING,
    Dense,
    gradients_of,
    make,
    uniform,
)

GROUPS = [
    [[0, 0, 0], [1, 1, 1], [2, 2, 2]],
    [[0], [1], [2]],
    [[0, 0, 0, 0], [2, 2, 2, 2]],
    [[1, 1, 1]],
]
"""Tasks of learning batches ``[R, n]``."""
LOSSES = torch.tensor(GROUPS[0])
each_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    monkeypatch.setattr(networks.hidden, "MIN_OUTPUTS", ALWAYS_FUSED)


def call(module, task_B, order=None, seed=3):
    """Return the output for an observation of each row, in another order of the rows."""
    inputs = [uniform(task_B.numel(), IN_DIM, seed=seed)]
    inputs = [x_BD.to(next(module.parameters(), task_B * 1.0)) for x_BD in inputs]
    rows = [*([] if isinstance(module, networks.TaskConditioning) else inputs), task_B.flatten()]
    if order is None:
        return module(*(row.view(*task_B.shape, *row.shape[1:]) for row in rows))
    return module(*(row[order] for row in rows))[order.argsort()].view(*task_B.shape, -1)


def trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODULES),
        *((name, {"conditioning": Dense}) for name in TAKE_CONDITIONING),
    ],
)
def test_output_and_gradients_are_those_of_its_equation(name, options):
    module = make(name, **options).double()
    task_B = torch.tensor([2, 0, 2, 1, 1, 0, 0])
    x_BD = uniform(7, IN_DIM, seed=50).double().requires_grad_()
    is_conditioning = isinstance(module, networks.TaskConditioning)
    found_BO = module(task_B) if is_conditioning else module(x_BD, task_B)
    rows = zip(x_BD, task_B.tolist(), strict=True)
    wanted_BO = torch.stack([EQUATIONS[name](module, x_D, task) for x_D, task in rows])
    # MOORE adds a small number to the norms that it divides by
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if "moore" in name else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found_BO, wanted_BO, **tolerance)
    if found_BO.requires_grad:
        weight_BO, inputs = uniform(*found_BO.shape, seed=80), [x_BD, *module.parameters()]
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        found, wanted = (gradients_of(out, inputs, weight_BO) for out in (found_BO, wanted_BO))
        torch.testing.assert_close(found, wanted, **tolerance)
        assert all(gradient.any() for gradient in wanted[is_conditioning:])


@each_module
def test_groups_have_outputs_and_gradients_of_rows_in_any_order(name):
    module = make(name).double()
    for i, tasks in enumerate(GROUPS):
        task_Rn = torch.tensor(tasks)
        grouped_RnO = call(module, task_Rn)
        weight_RnO = uniform(*grouped_RnO.shape, seed=77).to(grouped_RnO)
        in_order_B = torch.arange(task_Rn.numel())
        shuffled_B = torch.randperm(len(in_order_B), generator=torch.Generator().manual_seed(i))
        for order_B in (in_order_B, in_order_B.flip(0), shuffled_B):
            any_RnO = call(module, task_Rn, order_B)
            torch.testing.assert_close(grouped_RnO, any_RnO, rtol=1e-6, atol=1e-7)
            if grouped_RnO.requires_grad:
                found, wanted = (
                    gradients_of(out, trained(module), weight_RnO) for out in (any_RnO, grouped_RnO)
                )
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


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
    if found.requires_grad:
        gradients = gradients_of(found.float().square(), trained(module))
        assert all(gradient.isfinite().all() for gradient in gradients)


@each_module
def test_gradients_of_many_losses_at_once_equal_single_ones(name):
    module = make(name).double()
    for task_B in (LOSSES, LOSSES.flatten()):
        loss_T = call(module, task_B).square().reshape(NUM_TASKS, -1).sum(1)
        if not loss_T.requires_grad:
            continue
        at_once = torch.autograd.grad(
            loss_T,
            trained(module),
            torch.eye(3).double(),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for task in range(NUM_TASKS):
            alone = gradients_of(loss_T[task], trained(module))
            torch.testing.assert_close([g[task] for g in at_once], list(alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlp, layer norm", "film", "moore", "paco", "separate", "soft modularization"]
)
def test_network_is_vectorized_over_parameters_and_compiled(name):
    first, second = make(name), make(name, seed=50)
    stacked = {
        key: torch.stack([value, dict(second.named_parameters())[key]])
        for key, value in first.named_parameters()
    }
    rows = uniform(*LOSSES.shape, IN_DIM), LOSSES
    both = torch.vmap(lambda p: torch.func.functional_call(first, p, rows))(stacked)
    wanted = torch.stack([first(*rows), second(*rows)])
    torch.testing.assert_close(both, wanted, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()  # compilations of other networks count towards the same limit
    compiled = torch.compile(first, backend="aot_eager", fullgraph=True)
    for given in (rows, (rows[0].flatten(0, 1), LOSSES.flatten())):
        outputs = compiled(*given), first(*given)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        found, wanted = (
            gradients_of(output.square(), trained(first), retain_graph=False) for output in outputs
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
