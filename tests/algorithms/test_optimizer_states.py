"""What a file says of an optimizer fits its parameters before PyTorch's kernels write into it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.algorithms.optimizer_states import check_optimizer, replace_options
from mtrl_lightning.errors import ConfigurationError

OPTIMIZERS = [
    partial(torch.optim.Adam, lr=1e-3, fused=True),
    partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    partial(torch.optim.AdamW, lr=torch.tensor(1e-3), capturable=False),
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.RMSprop, lr=0.1, centered=True),
    partial(torch.optim.Adafactor, lr=0.1),
]


def trained(make):
    parameters = [
        nn.Parameter(torch.ones(3, 2)),
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(1)),
    ]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters[:2]:  # the last one has no state
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameters, optimizer


@pytest.fixture
def adam():
    parameters, optimizer = trained(OPTIMIZERS[0])
    return partial(
        check_optimizer, optimizer=optimizer, parameters=parameters, make_optimizer=OPTIMIZERS[0]
    ), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_its_own_state_fits_every_optimizer(make):
    parameters, optimizer = trained(make)
    check_optimizer(optimizer.state_dict(), make(parameters), parameters, make)


def test_numbers_may_differ(adam):
    check, saved = adam
    saved["param_groups"][0] |= {"lr": 7.0, "eps": 1, "betas": [0.5, 0.6], "fused": None}
    saved["param_groups"][0]["initial_lr"] = 0.1
    del saved["param_groups"][0]["decoupled_weight_decay"]  # of an earlier version of PyTorch
    check(saved)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1),
        torch.zeros(3, 2, 1),
        torch.zeros(2, 3),
        torch.zeros(6),
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros((), dtype=torch.int64),
        3.0,
        None,
    ],
)
def test_a_state_has_the_sizes_and_types_of_its_parameter(adam, name, value):
    check, saved = adam
    saved["state"][0][name] = value
    with pytest.raises(ConfigurationError, match=f"{name} of parameter 0 is"):
        check(saved)


@pytest.mark.parametrize("index", [3, -1, "0", None])
def test_a_state_belongs_to_a_parameter(adam, index):
    check, saved = adam
    saved["state"][index] = saved["state"][0]
    with pytest.raises(ConfigurationError, match="a state of parameter"):
        check(saved)


def test_a_state_has_all_names(adam):
    check, saved = adam
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ConfigurationError, match="parameter 0 has step, exp_avg_sq there"):
        check(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": "fast"},
        {"lr": float("nan")},
        {"lr": None},
        {"betas": (0.9,)},
        {"betas": (0.9, "x")},
        {"amsgrad": True},
        {"differentiable": True},
        {"capturable": 1.5},
        {"foreach": True},
        {"fused": "yes"},
        {"params": [0, 1, 1]},
        {"evil": "evil"},
    ],
)
def test_options_are_of_their_kind(adam, change):
    check, saved = adam
    saved["param_groups"][0] |= change
    with pytest.raises(ConfigurationError, match="does not fit"):
        check(saved)


@pytest.mark.parametrize("name", ["lr", "betas", "params"])
def test_no_number_is_missing(adam, name):
    check, saved = adam
    del saved["param_groups"][0][name]
    with pytest.raises(ConfigurationError, match="the options"):
        check(saved)


def test_there_are_as_many_groups(adam):
    check, saved = adam
    saved["param_groups"] *= 2
    with pytest.raises(ConfigurationError, match="2 groups of parameters there, 1 here"):
        check(saved)


def test_new_options_keep_the_factor_of_a_schedule():
    parameters = [nn.Parameter(torch.zeros(2))]
    state = torch.optim.Adam(parameters, lr=0.1, eps=1e-5).state_dict()
    state["param_groups"][0] |= {"initial_lr": 0.1, "lr": 0.025}
    replace_options(state, torch.optim.Adam(parameters, lr=0.2, eps=1e-3))
    group = state["param_groups"][0]
    assert (group["initial_lr"], group["lr"], group["eps"]) == (0.2, 0.05, 1e-3)
