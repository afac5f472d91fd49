"""Check the saved states of optimizers before PyTorch takes them.

PyTorch's fused kernels write as many numbers into a state as its parameter has, without a look at
the state's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from mtrl_lightning.errors import ConfigurationError

IMPLEMENTATIONS = ("foreach", "fused")
"""Options that choose how a step is computed; a continued run keeps the checkpoint's."""


def check_optimizer(
    saved: Any,
    optimizer: Optimizer,
    parameters: Sequence[Parameter],
    make_optimizer: Callable[[Sequence[Parameter]], Optimizer],
) -> None:
    """Check that a saved state fits an optimizer.

    Args:
        saved: the optimizer's ``state_dict`` when it was saved.
        optimizer: which is to continue with it.
        parameters: of the optimizer, in its order.
        make_optimizer: builds an optimizer of the same kind; its state after one step shows what a
            state of these parameters looks like.
    """
    current = optimizer.state_dict()["param_groups"]
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(current):
        raise _of_another(f"{len(saved_groups)} groups of parameters there, {len(current)} here")
    for found_group, own_group in zip(saved_groups, current, strict=True):
        _check_group(found_group, own_group)
    if saved["state"]:
        template = _state_after_a_step(parameters, make_optimizer)
        for index, entry in saved["state"].items():
            if index not in template:
                raise _of_another(f"a state of parameter {index!r}")
            _check_entry(index, entry, template[index])


def replace_options(saved: Any, optimizer: Optimizer) -> None:
    """Replace the options of a saved state by an optimizer's own.

    A schedule's factor of the learning rate stays.

    Args:
        saved: the optimizer's ``state_dict`` when it was saved; it fits.
        optimizer: which is to continue with it.
    """
    current = optimizer.state_dict()["param_groups"]
    for found_group, own_group in zip(saved["param_groups"], current, strict=True):
        initial = found_group.get("initial_lr")
        factor = found_group["lr"] / initial if initial else 1.0
        for name, value in own_group.items():
            if name not in (*IMPLEMENTATIONS, "params"):
                found_group[name] = value
        if initial is not None:
            found_group["initial_lr"] = own_group["lr"]
            found_group["lr"] = factor * own_group["lr"]


def _check_group(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    # whoever changes learning rates adds numbers, such as initial_lr
    unknown = [name for name, value in found.items() if name not in own and not _is_number(value)]
    # versions of PyTorch add switches
    missing = [name for name, value in own.items() if name not in found and not _is_switch(value)]
    if unknown or missing:
        raise _of_another(f"the options {', '.join(found)} there, {', '.join(own)} here")
    if found.get("foreach") and found.get("fused"):
        raise _of_another("both foreach and fused there")
    for name, value in found.items():
        if name in own and not _is_alike(name, value, own[name]):
            raise _of_another(f"{name} {str(value)[:60]} there, {str(own[name])[:60]} here")


def _is_switch(value: Any) -> bool:
    return value is None or type(value) is bool


def _is_alike(name: str, found: Any, own: Any) -> bool:
    """Return whether an option may differ so: numbers may, switches may not."""
    if name in IMPLEMENTATIONS:
        return _is_switch(found)
    if _is_number(own):
        return _is_number(found)
    if name == "betas":
        return len(found) == len(own) and all(_is_number(value) for value in found)
    return found == own


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and bool(value.isfinite())
    return type(value) in (int, float) and math.isfinite(value)


def _state_after_a_step(
    parameters: Sequence[Parameter], make_optimizer: Callable[[Sequence[Parameter]], Optimizer]
) -> dict[int, Any]:
    placeholders = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for placeholder in placeholders:
        placeholder.grad = torch.zeros_like(placeholder)
    optimizer = make_optimizer(placeholders)
    optimizer.step()
    return optimizer.state_dict()["state"]


def _check_entry(index: int, found: Mapping[str, Any], template: Mapping[str, Any]) -> None:
    if found.keys() != template.keys():
        raise _of_another(
            f"the state of parameter {index} has {', '.join(found)} there,"
            f" {', '.join(template)} here"
        )
    for name, value in template.items():
        there = _kind(found[name])
        here = _kind(value)
        if there != here:
            raise _of_another(f"{name} of parameter {index} is {there} there and {here} here")


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _of_another(difference: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint's state of an optimizer does not fit this run's ({difference}): use the"
        " config.yaml in its run's folder, or another checkpoint"
    )
