"""``torch.compile`` as an option of an algorithm."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError

Compile = Literal["none", "default", "graph", "cudagraphs"]
F = TypeVar("F", bound=Callable[..., object])


def compile_mode(how: Compile) -> Compile:
    """Return the option, ``graph`` for its previous name ``cudagraphs``.

    Raises:
        ConfigurationError: if it is unknown.
    """
    one_of(get_args(Compile), compile=how)
    if how != "cudagraphs":
        return how
    rank_zero_warn("compile: cudagraphs means graph now, which records whole updates")
    return "graph"


def compiled(function: F, how: Compile) -> F:
    """Return the function, compiled if that was asked for.

    Without gradients, as when a gradient method computes losses a second time, the function is
    called as it is: compiling it for that case, too, would cost more than it saves.
    """
    if how != "default":
        return function
    fast = torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return fast(*args) if torch.is_grad_enabled() else function(*args)

    return call  # type: ignore[return-value]


def check_compile(how: str, device: torch.device, is_one_pass: bool = True) -> None:
    """Check that the machine can compile for the device.

    Args:
        how: the option.
        device: that trains.
        is_one_pass: whether every loss is differentiated once.

    Raises:
        ConfigurationError: naming the option to change.
    """
    if how == "graph":
        if device.type != "cuda":
            raise ConfigurationError(
                "compile graph needs a CUDA device: set model.init_args.compile to none or default"
            )
        return
    if how != "none" and not is_one_pass:
        raise ConfigurationError(
            f"compile {how} cannot be differentiated task by task, as the gradient method does:"
            " set compile to none, or the gradient methods to Mean or FAMO"
        )
    if how == "default" and device.type == "cpu" and not _is_there("CXX", "g++", "clang++", "cl"):
        raise ConfigurationError(
            "compile default needs a C++ compiler on the CPU: install g++, or set compile to none"
        )
    has_triton = importlib.util.find_spec("triton") is not None
    if (
        how != "none"
        and device.type == "cuda"
        and not (has_triton and _is_there("CC", "cc", "gcc", "clang"))
    ):
        raise ConfigurationError(
            f"compile {how} needs Triton, which comes with PyTorch for CUDA, and a C compiler:"
            " install them, or set compile to none"
        )


def _is_there(variable: str, *compilers: str) -> bool:
    """Return whether a compiler is installed, from an environment variable or one of these."""
    return any(name and shutil.which(name) for name in (os.environ.get(variable, ""), *compilers))
