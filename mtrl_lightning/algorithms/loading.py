"""Build the algorithm of a checkpoint, with its weights and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mtrl_lightning.algorithms.allocation import AllocationLimit
from mtrl_lightning.algorithms.rebuilding import rebuild_algorithm
from mtrl_lightning.checkpoints import load_checkpoint

if TYPE_CHECKING:
    from mtrl_lightning.algorithms.algorithm import Algorithm

A = TypeVar("A", bound="Algorithm")


def load_algorithm(
    kind: type[A],
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    strict: bool = True,
    trust: Sequence[str] = (),
    overrides: Mapping[str, Any],
) -> A:
    """Build the algorithm that a checkpoint describes, with its weights and its state.

    Args:
        kind: the class that the caller asked for.
        path: the checkpoint.
        device: of the weights.
        strict: whether all weights have to be those of the checkpoint.
        trust: further modules and packages whose classes the checkpoint may use.
        overrides: arguments of the constructor in place of the saved ones.

    Raises:
        ConfigurationError: if the checkpoint cannot be used.
    """
    checkpoint = load_checkpoint(path)
    checkpoint.pop("optimizer_states", None)  # a run that starts with these weights has new ones
    state = checkpoint["mtrl_lightning"]
    state.pop("global_generators", None)  # the generators of this process stay as they are
    with AllocationLimit.of_file(Path(path).stat().st_size):
        algorithm = rebuild_algorithm(state, kind, trust, overrides)
    algorithm.on_load_checkpoint(checkpoint)
    algorithm.load_state_dict(checkpoint["state_dict"], strict=strict)
    return algorithm.to(device)
