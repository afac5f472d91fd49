"""Checkpoints that an algorithm does not restore, and new options of optimizers."""

import pytest
import torch
from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.updates.update import check_fused_state, replace_options
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
        ({"spec": make_spec()._replace(action_sizes=(2, 2, 1))}, "action"),
    ],
)
def test_other_tasks_are_refused_and_change_nothing(options, word):
    checkpoint = checkpoint_of(train(make_sac(seed=3), 2))
    sac, reference = make_sac(seed=5, **options), make_sac(seed=5, **options)
    with pytest.raises(ConfigurationError, match=word):
        sac.on_load_checkpoint(checkpoint)
    assert sac.counters == reference.counters
    assert sac.drain_metrics() == {}
    assert changed(train(sac, 1), copy_of(train(reference, 1))) == set()


# ---- states of optimizers ----


def test_fused_kernels_get_no_state_of_another_shape():
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    check_fused_state(saved, optimizer)
    saved["state"][0]["exp_avg"] = torch.zeros(6)
    with pytest.raises(ConfigurationError, match="exp_avg"):
        check_fused_state(saved, optimizer)


def test_new_options_keep_the_factor_of_a_schedule():
    parameters = [nn.Parameter(torch.zeros(2))]
    state = torch.optim.Adam(parameters, lr=0.1, eps=1e-5).state_dict()
    state["param_groups"][0] |= {"initial_lr": 0.1, "lr": 0.025}
    replace_options(state, torch.optim.Adam(parameters, lr=0.2, eps=1e-3))
    group = state["param_groups"][0]
    assert (group["initial_lr"], group["lr"], group["eps"]) == (0.2, 0.05, 1e-3)
