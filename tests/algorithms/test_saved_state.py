"""Checkpoints that an algorithm does not restore."""

from __future__ import annotations

from functools import partial

import pytest

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Standardize
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, train
from tests.helpers.checkpoints import checkpoint_of


def of_tasks(*names):
    return {"spec": make_spec(len(names))._replace(task_names=names)}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (of_tasks("task-0", "task-1", "push"), "push"),
        (of_tasks("task-0", "task-1"), "task-2"),
        (of_tasks("task-1", "task-0", "task-2"), "task-1"),
        ({"actor": partial(MLP, width=24, depth=2)}, "actor.trunk.0.weight"),
        ({"num_critics": 3}, "critic.members.2.trunk.0.weight"),
        ({"num_critics": 1}, "critic.members.1.trunk.0.weight"),
        ({"encoder": Standardize}, "encoder.mean_D"),
        ({"spec": make_spec()._replace(action_sizes=(2, 2, 1))}, "action"),
    ],
)
def test_other_tasks_and_networks_are_refused_and_change_nothing(options, word):
    checkpoint = checkpoint_of(train(make_sac(seed=3), 2))
    sac, reference = make_sac(seed=5, **options), make_sac(seed=5, **options)
    with pytest.raises(ConfigurationError, match=word):
        sac.on_load_checkpoint(checkpoint)
    assert sac.counters == reference.counters
    assert sac.drain_metrics() == {}
    assert changed(train(sac, 1), copy_of(train(reference, 1))) == set()
