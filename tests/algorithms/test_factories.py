"""Factories that receive the spec, and what is refused in their place."""

from __future__ import annotations

import torch

from mtrl_lightning.networks import (
    MLP,
    OneHot,
)
from mtrl_lightning.spec import EnvSpec
from tests.helpers.algorithms import make_sac, make_spec


def test_a_factory_receives_the_names_and_the_trained_tasks():
    received: list[EnvSpec] = []

    def noting(in_dim: int, out_dim: int, spec: EnvSpec) -> MLP:
        received.append(spec)
        return MLP(in_dim, out_dim, spec, width=4)

    spec = make_spec(train_tasks=(0, 2))
    sac = make_sac(spec, actor=noting)
    assert received == [spec]
    assert sac.actor_gradient.num_trained == 2


def test_the_spec_of_one_task():
    spec = make_spec(train_tasks=(0, 2))._replace(observation_sizes=(4, 3, 2))
    one = spec.of_task(1)
    assert (one.task_names, one.train_tasks) == (("task-1",), (0,))
    assert (one.num_tasks, one.num_trained, spec.num_trained) == (1, 1, 2)
    assert (one.observation_sizes, one.action_sizes) == ((3,), ())
    assert one.observation_space == spec.observation_space
    torch.testing.assert_close(OneHot(one)(torch.tensor([0])), torch.ones(1, 1))
