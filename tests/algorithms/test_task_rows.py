"""A graph for each task's rows: the same numbers, and passes that keep to their own task."""

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


@pytest.mark.parametrize(
    ("method", "device", "calls"),
    [
        (PCGrad(spec_of(T)), "cpu", [(1, ROWS)] * T),
        (None, "cpu", [(1, ROWS)] * T),
        (Mean(spec_of(T)), "cpu", [(T, ROWS)]),
        (FAMO(spec_of(T)), "cpu", [(T, ROWS)]),
        (PCGrad(spec_of(T)), "meta", [(T, ROWS)]),
        (None, "meta", [(T, ROWS)]),
    ],
)
def test_each_task_has_a_graph_where_losses_are_differentiated_one_by_one(method, device, calls):
    network, found, entered = nn.Linear(2, 2, device=device), [], []

    def note(module, given, output):
        found.append(given[0].shape[:2])
        output.register_hook(lambda gradient: (gradient is not None and entered.append(1)) or None)

    network.register_forward_hook(note)
    output_RnD = per_task_forward(method, network, 0, uniform(T, ROWS, 2).to(device))
    assert found == calls
    for number, loss in enumerate(output_RnD.sum((1, 2)), 1):
        torch.autograd.grad(loss, network.weight, retain_graph=True)
        assert len(entered) == number, "a pass enters the graph of its own task alone"


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
