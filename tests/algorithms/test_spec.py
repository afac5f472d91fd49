"""The spec of one task, with which networks of single tasks are built."""

from __future__ import annotations

import torch

from mtrl_lightning.networks import OneHot
from tests.helpers.algorithms import make_spec


def test_the_spec_of_one_task():
    spec = make_spec(train_tasks=(0, 2))._replace(observation_sizes=(4, 3, 2))
    one = spec.of_task(1)
    assert (one.task_names, one.train_tasks) == (("task-1",), (0,))
    assert (one.num_tasks, one.num_trained, spec.num_trained) == (1, 1, 2)
    assert (one.observation_sizes, one.action_sizes) == ((3,), ())
    assert one.observation_space == spec.observation_space
    torch.testing.assert_close(OneHot(one)(torch.tensor([0])), torch.ones(1, 1))
