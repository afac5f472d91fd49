"""The saved state of an optimizer fits its parameters, and may get new options."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.algorithms.state import check_optimizer, replace_options
from mtrl_lightning.errors import ConfigurationError

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
