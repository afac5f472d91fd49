"""Optimizers whose steps a CUDA graph can replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mtrl_lightning.learning.learning_rate import RATE
from mtrl_lightning.learning.update import Update, skips_on_device

_ORIGINAL_CAPTURABLE = "was_capturable"
"""In a group of parameters: its option before it was changed here."""


def make_capturable(update: Update) -> str:
    """Let the device count an optimizer's steps, and have its learning rates.

    In checkpoints the optimizer is as it was, so that they load whether graphs are used or not.

    Args:
        update: whose optimizer was just built.

    Returns:
        Why it cannot be; empty if it can.
    """
    optimizer = update.optimizer
    assert optimizer is not None, "configure_optimizer comes before"
    if update.method.solves_on_host:
        return f"{type(update.method).__name__} of {update.name} computes on the host"
    name = f"{type(optimizer).__name__} of {update.name}"
    if not all("capturable" in group for group in optimizer.param_groups):
        return f"{name} cannot be recorded: choose another optimizer, such as Adam"
    if not skips_on_device(optimizer):
        return f"{name} is not fused: give it fused: true"
    _convert(optimizer)
    optimizer.register_state_dict_post_hook(_as_it_was)
    optimizer.register_load_state_dict_post_hook(_convert)
    # PyTorch warns of steps that are not recorded, as the first ones are
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return ""


def _convert(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if _ORIGINAL_CAPTURABLE not in group:
            group[_ORIGINAL_CAPTURABLE] = group["capturable"]
            group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            device = group["params"][0].device
            group[RATE] = group["lr"]
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def _as_it_was(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    for group in state["param_groups"]:
        group["capturable"] = group.pop(_ORIGINAL_CAPTURABLE)
        if RATE in group:
            group["lr"] = group.pop(RATE)
    return state
