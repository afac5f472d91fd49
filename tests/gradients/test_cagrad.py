"""CAGrad's sampled tasks, and gradients that allow no step; its update is in test_torchjd.py."""

import torch

from mtrl_lightning.gradients.cagrad import CAGrad
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of


def test_fast_treats_the_tasks_that_were_not_drawn_as_one():
    gradients, order = random_gradients(6), torch.randperm(6, generator=generator())
    found = update(CAGrad(spec_of(6), num_sampled=2), gradients, generator())
    gradients[order[2:]] = gradients[order[2:]].mean(0)
    assert_near(found, update(CAGrad(spec_of(6)), gradients), atol=1e-4)
    assert_near(update(CAGrad(spec_of(6), num_sampled=6), gradients), found, atol=1e-4)


def generator():
    return torch.Generator().manual_seed(3)


def test_worst_task_stays_where_not_all_can_improve():
    # (2, 0) and (-1, 0) allow no step in the first direction, so the dual's g_w is zero; g_0 is (1,
    # 1) / 3
    gradients = [[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]
    assert_near(update(CAGrad(spec_of(3), c=0.9), gradients), [0.0, 1 / 3 / 1.9], atol=1e-3)
