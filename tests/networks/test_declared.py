"""Networks that forget to declare what single tasks have for themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import (
    Network,
)
from mtrl_lightning.networks.multi_head import LinearHeads
from tests.helpers.specs import spec_of


class Table(Network):
    """Gates of each task's own; nothing is declared."""

    def __init__(self, in_dim, out_dim, spec, *, width=6):
        super().__init__()
        self.trunk = nn.Linear(in_dim, width)
        self.gate_TH = nn.Parameter(torch.randn(spec.num_tasks, width))
        self.head = nn.Linear(width, out_dim)

    def forward(self, x_BD, task_B):
        return self.head(self.trunk(x_BD).relu() * self.gate_TH[task_B].sigmoid())


class TableOfColumns(Table):
    def __init__(self, in_dim, out_dim, spec, *, width=6):
        super().__init__(in_dim, out_dim, spec, width=width)
        self.gate_TH = nn.Parameter(torch.randn(width, spec.num_tasks))

    def forward(self, x_BD, task_B):
        return self.head(self.trunk(x_BD).relu() * self.gate_TH.t()[task_B].sigmoid())


class ListOfHeads(Network):
    def __init__(self, in_dim, out_dim, spec):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(in_dim, out_dim) for _ in range(spec.num_tasks))

    def forward(self, x_BD, task_B):
        outputs = torch.stack([head(x_BD) for head in self.heads], -2)
        return outputs.take_along_dim(task_B[..., None, None], -2).squeeze(-2)


class OwnTasksOnly(Table):
    def own_tasks(self, train_tasks):
        return train_tasks


class SharedOnly(Table):
    def shared_parameters(self):
        yield from self.trunk.parameters()
        yield from self.head.parameters()


class Complete(SharedOnly, OwnTasksOnly):
    pass


class WithLinearHeads(Network):
    """The heads declare whose they are, the network does not."""

    def __init__(self, in_dim, out_dim, spec):
        super().__init__()
        self.trunk = nn.Linear(in_dim, 6)
        self.heads = LinearHeads(6, out_dim, spec.num_tasks, 0.1)

    def forward(self, x_BD, task_B):
        return self.heads(self.trunk(x_BD).relu(), task_B)


@pytest.mark.parametrize("num_tasks", [2, 3, 6])
@pytest.mark.parametrize(
    "kind", [Table, TableOfColumns, ListOfHeads, SharedOnly, OwnTasksOnly, WithLinearHeads]
)
def test_a_network_that_forgets_to_declare_is_refused_at_construction(kind, num_tasks):
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError):
        kind(4, 2, spec_of(num_tasks))
    kind(4, 2, spec_of(1))  # there is no other task


class RowsOnly(Table):
    """Append the task in the second dimension, which is not the features' in a learning batch."""

    def __init__(self, in_dim, out_dim, spec):
        super().__init__(in_dim + spec.num_tasks, out_dim, spec)

    def forward(self, x_BD, task_B):
        code_BT = torch.nn.functional.one_hot(task_B, len(self.gate_TH))
        return super().forward(torch.cat([x_BD, code_BT], 1), task_B)


class Flattened(Table):
    def forward(self, x_BD, task_B):
        return super().forward(x_BD.flatten(0, -2), task_B.flatten())


@pytest.mark.parametrize("kind", [RowsOnly, Flattened])
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_a_network_that_takes_no_learning_batch_is_refused_at_construction(kind, num_tasks):
    with pytest.raises(ConfigurationError, match=kind.__name__):
        kind(4, 2, spec_of(num_tasks))


def test_the_check_draws_nothing_and_leaves_the_network_as_it_is():
    class WithStatistics(Complete):
        def __init__(self, in_dim, out_dim, spec):
            super().__init__(in_dim, out_dim, spec)
            self.norm = nn.BatchNorm1d(in_dim)
            self.drop = nn.Dropout(0.5)
            self.drawn = torch.get_rng_state()

        def forward(self, x_BD, task_B):
            return super().forward(self.drop(self.norm(x_BD.flatten(0, -2)).view_as(x_BD)), task_B)

    network = WithStatistics(4, 2, spec_of(3))
    assert torch.equal(torch.get_rng_state(), network.drawn)
    assert network.norm.num_batches_tracked == 0
    assert all(module.training for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())
