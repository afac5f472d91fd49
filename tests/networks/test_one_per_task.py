"""One network of any architecture per task."""

from functools import partial

import pytest
import torch

from mtrl_lightning.networks import MLP, OnePerTask, PaCo
from tests.helpers.networks import IN_DIM, NUM_TASKS, OUT_DIM, uniform
from tests.helpers.specs import spec_of


def make(architecture=MLP, tasks=None, spec=None, **options):
    network = partial(architecture, width=8, depth=2, **options)
    return OnePerTask(IN_DIM, OUT_DIM, spec or spec_of(NUM_TASKS), make=network, tasks=tasks)


@pytest.mark.parametrize("tasks", [(0, 2), (2, 0), (2,)])
def test_rows_and_groups_of_the_named_tasks_use_their_networks(tasks):
    network = make(tasks=tasks)
    assert len(network.members) == len(tasks)
    for own in (tasks, tasks[-1:], tasks[:1]):
        task_Rn = torch.tensor(own)[:, None].expand(-1, 3)
        x_RnD = uniform(len(own), 3, IN_DIM)
        found_RnO = network(x_RnD, task_Rn)
        reversed_BO = network(x_RnD.flatten(0, 1).flip(0), task_Rn.flatten().flip(0)).flip(0)
        torch.testing.assert_close(reversed_BO.view_as(found_RnO), found_RnO)
        for place, task in enumerate(own):
            member = network.networks[tasks.index(task)]
            wanted_nO = member(x_RnD[place], torch.zeros(3, dtype=torch.int64))
            torch.testing.assert_close(found_RnO[place], wanted_nO)


@pytest.mark.parametrize(
    ("train_tasks", "tasks"), [((0, 1, 2), None), ((0, 2), None), ((0, 2), (0, 2))]
)
def test_each_trained_network_masks_and_repairs_by_its_own_loss(train_tasks, tasks):
    spec = spec_of(NUM_TASKS, train_tasks=train_tasks)
    network = make(PaCo, tasks, spec, max_loss=1.0)
    seen = []
    for task, member in zip(tasks or range(NUM_TASKS), network.networks, strict=True):
        member.after_step = lambda loss, task_R, _, task=task: seen.append(
            (task, loss.tolist(), task_R.tolist())
        )
    losses = [0.5, 3.0, 0.25][: len(train_tasks)]
    loss_R = torch.tensor(losses)
    assert network.mask_losses(loss_R).tolist() == [0.5, 0, 0.25][: len(train_tasks)]
    network.after_step(loss_R, torch.tensor(train_tasks), torch.Generator())
    assert seen == [(task, [loss], [0]) for task, loss in zip(train_tasks, losses, strict=True)]
