"""What every network, encoder and task conditioning keeps to."""

import pytest
import torch

from mtrl_lightning import networks
from tests.helpers.networks import (
    ALWAYS_FUSED,
    EQUATIONS,
    IN_DIM,
    MODULES,
    TAKE_CONDITIONING,
    gradients_of,
    make,
    uniform,
)

ANY_ORDER = [2, 0, 2, 1, 1, 0, 0]
GROUPS = [[[0, 0], [1, 1], [2, 2]], [[0], [1], [2]], [[0, 0], [2, 2]], [[1, 1, 1]]]
"""Tasks of learning batches ``[R, n]``."""
each_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    monkeypatch.setattr(networks.hidden, "MIN_OUTPUTS", ALWAYS_FUSED)


def call(module, x_BD, task_B):
    is_conditioning = isinstance(module, networks.TaskConditioning)
    return module(task_B) if is_conditioning else module(x_BD, task_B)


def trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODULES),
        *((name, {"conditioning": networks.Embedding}) for name in TAKE_CONDITIONING),
    ],
)
def test_outputs_and_gradients_are_those_of_its_equation(name, options):
    module = make(name, **options).double()
    is_conditioning = isinstance(module, networks.TaskConditioning)
    # MOORE adds a small number to the norms that it divides by
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if "moore" in name else {"rtol": 1e-11, "atol": 1e-11}
    for tasks in (ANY_ORDER, *GROUPS):
        task_B = torch.tensor(tasks)
        x_BD = uniform(*task_B.shape, IN_DIM, seed=50).double().requires_grad_()
        found_BO = call(module, x_BD, task_B)
        rows = zip(x_BD.flatten(0, -2), task_B.flatten().tolist(), strict=True)
        wanted_BO = torch.stack([EQUATIONS[type(module)](module, x_D, task) for x_D, task in rows])
        wanted_BO = wanted_BO.view(*task_B.shape, -1)
        torch.testing.assert_close(found_BO, wanted_BO, **tolerance)
        if not found_BO.requires_grad:
            continue
        weight_BO, inputs = uniform(*found_BO.shape, seed=80), [x_BD, *trained(module)]
        found, wanted = (gradients_of(out, inputs, weight_BO) for out in (found_BO, wanted_BO))
        torch.testing.assert_close(found, wanted, **tolerance)
        assert tasks != ANY_ORDER or all(gradient.any() for gradient in wanted[is_conditioning:])


@each_module
def test_empty_batch_passes_and_half_precision_is_close(name):
    module = make(name)
    task_Rn = torch.tensor(GROUPS[0])
    x_RnD = uniform(3, 2, IN_DIM, seed=3)
    exact = call(module, x_RnD, task_Rn)
    assert exact.shape[-1] == getattr(module, "out_dim", exact.shape[-1])
    with torch.autocast("cpu", torch.bfloat16):
        found = call(module, x_RnD, task_Rn)
        rows, empty = (call(module, x_RnD[0, :n], task_Rn[0, :n]) for n in (2, 0))
    assert empty.shape == (0, exact.shape[-1])
    if isinstance(module, networks.Network):
        assert found.dtype == rows.dtype == empty.dtype == torch.bfloat16
    largest = max(exact.abs().amax().item(), 1) if exact.numel() else 1
    torch.testing.assert_close(found.float(), exact, rtol=0.1, atol=0.1 * largest)
    if found.requires_grad:
        gradients = gradients_of(found.float().square(), trained(module))
        assert all(gradient.isfinite().all() for gradient in gradients)
