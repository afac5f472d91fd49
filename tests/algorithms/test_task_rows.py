"""A graph for each task's rows: the same numbers, and passes that keep to their own task."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.gradients import FAMO, Mean, PCGrad, per_task_forward
from mtrl_lightning.networks import MLP, MOORE, FiLM, MultiHead, PaCo, SoftModularization
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, train
from tests.helpers.networks import uniform
from tests.helpers.specs import spec_of
from tests.helpers.tiers import slow_unless

T, ROWS = 3, 4


class Noting(nn.Linear):
    """Note the rows of every call, and of every backward pass that enters."""

    def __init__(self):
        super().__init__(2, 2)
        self.calls, self.entered = [], []

    def forward(self, x_RnD):
        out_RnD = super().forward(x_RnD)
        call = len(self.calls)
        self.calls.append(x_RnD.shape[:2])
        out_RnD.register_hook(
            lambda gradient: None if gradient is None else self.entered.append(call)
        )
        return out_RnD


@pytest.mark.parametrize("method", [PCGrad(spec_of(T)), None])
def test_each_backward_pass_enters_only_its_tasks_graph(method):
    network = Noting()
    x_RnD = uniform(T, ROWS, 2)
    out_RnD = per_task_forward(method, network, 0, x_RnD)
    assert network.calls == [(1, ROWS)] * T
    torch.testing.assert_close(out_RnD, nn.functional.linear(x_RnD, network.weight, network.bias))
    loss_R = out_RnD.square().flatten(1).mean(1)
    for task in range(T):
        (found,) = torch.autograd.grad(loss_R[task], network.weight, retain_graph=True)
        alone = nn.functional.linear(x_RnD[task], network.weight, network.bias).square().mean()
        torch.testing.assert_close(found, torch.autograd.grad(alone, network.weight)[0])
    assert network.entered == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "device"),
    [(Mean, "cpu"), (FAMO, "cpu"), (PCGrad, "meta"), (lambda spec: None, "meta")],
)
def test_one_pass_methods_and_gpus_compute_all_rows_at_once(method, device):
    network = Noting().to(device)
    per_task_forward(method(spec_of(T)), network, 0, uniform(T, ROWS, 2).to(device))
    assert network.calls == [(T, ROWS)]


class Apart(Mean):
    """The mean, by a method that says that it takes the tasks one by one."""

    is_one_pass = False


NORMALIZED = partial(MLP, layer_norm=True)
NETWORKS = [NORMALIZED, MultiHead, FiLM, PaCo, MOORE, SoftModularization]


@pytest.mark.parametrize("network", slow_unless((NORMALIZED, MultiHead), NETWORKS))
def test_an_update_is_the_same_task_by_task(network):
    small = partial(network, width=16, depth=2, output_bound=0.3)
    make = partial(make_sac, make_spec(4, train_tasks=(0, 1, 3)), actor=small, critic=small)
    whole, apart = make(), make(actor_gradient=Apart, critic_gradient=Apart)
    before = copy_of(whole)
    for sac in (whole, apart):
        train(sac, 2)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert changed(whole, before) >= {name for name in before if name.startswith("actor.")}
