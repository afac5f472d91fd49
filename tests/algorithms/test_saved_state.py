"""Checkpoints that an algorithm does not restore, and new options of optimizers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.algorithms.state import check_optimizer, replace_options
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


# ---- states of optimizers ----

OPTIMIZERS = [
    partial(torch.optim.Adam, lr=1e-3, fused=True),
    partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    partial(torch.optim.AdamW, lr=torch.tensor(1e-3), capturable=False),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.RMSprop, lr=0.1, centered=True),
    partial(torch.optim.Adafactor, lr=0.1),
]


def trained(make):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (4,), (1,))]
    optimizer = make(parameters)
    for parameter in parameters[:2]:  # the last one has no state
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_only_its_own_state_fits_every_optimizer(make):
    parameters, optimizer = trained(make)
    check_optimizer(optimizer.state_dict(), make(parameters))
    if make is not OPTIMIZERS[0]:
        _, other = trained(OPTIMIZERS[0])
        with pytest.raises(ConfigurationError, match="does not fit"):
            check_optimizer(other.state_dict(), optimizer)


@pytest.mark.parametrize("value", [torch.zeros(6), torch.zeros(3, 2, dtype=torch.float64)])
def test_fused_kernels_get_no_state_of_another_shape_or_type(value):
    _, optimizer = trained(OPTIMIZERS[0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = value
    with pytest.raises(ConfigurationError, match="exp_avg"):
        check_optimizer(saved, optimizer)


def test_new_options_keep_the_factor_of_a_schedule():
    parameters = [nn.Parameter(torch.zeros(2))]
    state = torch.optim.Adam(parameters, lr=0.1, eps=1e-5).state_dict()
    state["param_groups"][0] |= {"initial_lr": 0.1, "lr": 0.025}
    replace_options(state, torch.optim.Adam(parameters, lr=0.2, eps=1e-3))
    group = state["param_groups"][0]
    assert (group["initial_lr"], group["lr"], group["eps"]) == (0.2, 0.05, 1e-3)
