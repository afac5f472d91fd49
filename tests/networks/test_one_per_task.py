"""One network of any architecture per task, and one for all tasks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning.networks import MLP, MultiHead, OneForAll, OnePerTask, PaCo, Separate
from tests.helpers.networks import (
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    assert_equals_row_by_row,
    uniform,
)
from tests.helpers.specs import spec_of

SMALL = {"width": 8, "depth": 2}


def make(architecture=MLP, tasks=None, **options):
    torch.manual_seed(0)
    network = partial(architecture, **SMALL, **options)
    return OnePerTask(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), make=network, tasks=tasks)


# the others are those of a conditioning, and of architectures that are compiled and vectorized


@pytest.mark.parametrize("architecture", [MLP, MultiHead, Separate])
def test_each_row_gets_the_output_of_its_tasks_network(architecture):
    def slow(network, x_D, task):
        return network.networks[task](x_D[None], torch.tensor([0]))[0]

    assert_equals_row_by_row(make(architecture), slow)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_network_accepts_other_tasks():
    network = make()
    x_BD = uniform(3, IN_DIM)
    traced = torch.jit.trace(network, (x_BD, torch.tensor([0, 1, 2])))
    for tasks in ([2, 0, 0], [1, 1, 1], [2, 1, 0]):
        task_B = torch.tensor(tasks)
        torch.testing.assert_close(traced(x_BD, task_B), network(x_BD, task_B))


def test_only_the_tasks_that_are_named_have_a_network():
    network = make(tasks=(2, 0))
    x_BD = uniform(4, IN_DIM)
    found_BO = network(x_BD, torch.tensor([2, 1, 0, 2]))
    for row, place in ((0, 0), (2, 1), (3, 0)):
        wanted = network.networks[place](x_BD[row : row + 1], torch.tensor([0]))[0]
        torch.testing.assert_close(found_BO[row], wanted)
    in_order_BO = network(x_BD, torch.tensor([2, 2, 0, 0]))
    torch.testing.assert_close(in_order_BO[0], found_BO[0])
    torch.testing.assert_close(in_order_BO[2], found_BO[2])
    assert len(network.members) == 2


def test_each_network_masks_and_repairs_by_its_own_loss():
    network = make(PaCo, max_loss=1.0)
    loss_R = torch.tensor([0.5, 3.0, 0.25])
    assert network.mask_losses(loss_R).tolist() == [0.5, 0, 0.25]
    seen = []
    for place, member in enumerate(network.networks):
        member.after_step = lambda loss, task, _, place=place: seen.append(
            (place, loss.tolist(), task.tolist())
        )
    network.after_step(loss_R, torch.tensor([0, 1, 2]), torch.Generator())
    assert seen == [(0, [0.5], [0]), (1, [3.0], [0]), (2, [0.25], [0])]


def test_losses_reach_the_networks_of_trained_tasks():
    spec = spec_of(NUM_TASKS, train_tasks=(0, 2))
    make_member = partial(PaCo, **SMALL, max_loss=1.0)
    network = OnePerTask(IN_DIM, OUT_DIM, spec, make=make_member)
    first, untrained, last = network.networks
    last._max_loss = 10.0
    loss_R = torch.tensor([3.0, 3.0])
    assert network.mask_losses(loss_R).tolist() == [0, 3.0]
    seen = []
    first.after_step = lambda loss, *_: seen.append(("first", loss.item()))
    untrained.after_step = lambda loss, *_: seen.append(("untrained", loss.item()))
    last.after_step = lambda loss, *_: seen.append(("last", loss.item()))
    network.after_step(torch.tensor([0.5, 0.25]), torch.tensor([0, 2]), torch.Generator())
    assert seen == [("first", 0.5), ("last", 0.25)]


def test_one_network_for_all_sees_no_task():
    network = OneForAll(IN_DIM, OUT_DIM, spec_of(3), make=partial(MultiHead, **SMALL))
    x_BD = uniform(5, IN_DIM)
    task_B = torch.zeros(5, dtype=torch.int64)
    assert torch.equal(network(x_BD), network.network(x_BD[None], task_B[None])[0])
    torch.testing.assert_close(network(x_BD), network.network(x_BD, task_B))
    x_RnD = uniform(3, 4, IN_DIM)
    rows_BO = network(x_RnD.flatten(0, 1))
    assert torch.equal(network(x_RnD), rows_BO.view(3, 4, OUT_DIM)), "as rows in any order"


@pytest.mark.parametrize("tasks", [(0, 2), (1, 2), (2,)])
def test_groups_of_the_tasks_that_are_named_use_their_networks(tasks):
    network = make(tasks=tasks)
    for own in (tasks, tasks[-1:], tasks[:1]):
        task_Rn = torch.tensor(own)[:, None].expand(-1, 3)
        x_RnD = uniform(len(own), 3, IN_DIM)
        found_RnO = network(x_RnD, task_Rn)
        for place, task in enumerate(own):
            member = network.networks[tasks.index(task)]
            wanted_nO = member(x_RnD[place], torch.zeros(3, dtype=torch.int64))
            torch.testing.assert_close(found_RnO[place], wanted_nO)
