"""The option ``compile`` of an algorithm: losses compiled with ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from mtrl_lightning.updates.update import Update

Compile = Literal["default", "reduce-overhead", "max-autotune"]
"""Mode of ``torch.compile``."""
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, mode: Compile | None) -> F:
    """Compile a loss function with ``torch.compile`` unless the mode is None.

    With gradients disabled, as when a gradient method recomputes losses, the original function is
    called: a second compilation would cost more than it saves.
    """
    if mode is None:
        return function
    fast = torch.compile(function, mode=mode)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return fast(*args) if torch.is_grad_enabled() else function(*args)

    return call  # type: ignore[return-value]


def begin_compiled_update(updates: Sequence[Update]) -> None:
    """Let CUDA graphs of ``torch.compile`` overwrite the results of the last update.

    Args:
        updates: updates whose parameters' gradients are among these results and are cleared.
    """
    for update in updates:
        for parameter in update.parameters:
            parameter.grad = None
    torch.compiler.cudagraph_mark_step_begin()
