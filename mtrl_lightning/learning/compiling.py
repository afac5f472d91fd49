"""The option ``compile`` on a run's device: a check, and the graphs that it asks for.

The option's values and ``torch.compile`` of losses are in ``update.py``, which needs no graphs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.acting_graphs import Acting, ActingGraphs
from mtrl_lightning.learning.capturable import make_capturable
from mtrl_lightning.learning.graph import CudaCapture, Learner, UpdateGraphs
from mtrl_lightning.learning.update import Update
from mtrl_lightning.ranks import distributed


class AlgorithmGraphs:
    """The CUDA graphs of an algorithm.

    Args:
        updates: records whole updates, and replays them.
        acting: records and replays the computation of actions.
    """

    def __init__(self, updates: UpdateGraphs, acting: ActingGraphs) -> None:
        self.updates = updates
        self.acting = acting

    def prepare(self, updates: Sequence[Update]) -> None:
        """Receive the updates whose optimizers were just built, and make their steps recordable."""
        self.forget()
        reasons = [make_capturable(update) for update in updates]
        if any(reasons):
            self.updates.give_up(next(filter(None, reasons)))

    def forget(self) -> None:
        """Drop all graphs, because tensors were replaced: they are recorded again."""
        self.updates.forget()
        self.acting.forget()


class HasGraphs(Learner, Acting, Protocol):
    """An algorithm whose updates and actions graphs can compute."""

    compile_mode: str
    updates: list[Update]
    graphs: AlgorithmGraphs | None


def prepare_device(algorithm: HasGraphs, device: torch.device) -> None:
    """Check before training that an algorithm's option works on the device; make its graphs.

    Raises:
        ConfigurationError: if it does not.
    """
    is_one_pass = all(update.method.is_one_pass for update in algorithm.updates)
    check_compile(algorithm.compile_mode, device, is_one_pass)
    algorithm.graphs = None
    if algorithm.compile_mode != "graph":
        return
    if distributed.world_size() > 1:
        rank_zero_warn("compile graph has no effect with several processes")
        return
    updates = UpdateGraphs(algorithm, CudaCapture(device))
    algorithm.graphs = AlgorithmGraphs(updates, ActingGraphs(algorithm, CudaCapture(device)))


def check_compile(how: str, device: torch.device, is_one_pass: bool = True) -> None:
    """Check that the machine can compile for the device.

    Args:
        how: the option.
        device: that trains.
        is_one_pass: whether every loss is differentiated once.
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
