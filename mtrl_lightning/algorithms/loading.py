"""The algorithm of a checkpoint; and the checks that a checkpoint is of an algorithm's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mtrl_lightning.algorithms.allocation import AllocationLimit
from mtrl_lightning.algorithms.description import describe_spec, weight_shapes
from mtrl_lightning.algorithms.rebuilding import rebuild_algorithm
from mtrl_lightning.checkpoints import check_format, load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec

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


def check_weights(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that the weights of a checkpoint are of the same network.

    Args:
        saved: the checkpoint's ``state_dict``.
        current: that of the algorithm.

    Raises:
        ConfigurationError: naming a weight of another shape.
    """
    there = weight_shapes(saved)
    here = weight_shapes(current)
    differing = [
        name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)
    ]
    if differing:
        name = differing[0]
        raise ConfigurationError(
            f"the checkpoint is of another network: {name} has shape {there.get(name, 'none')}"
            f" there and {here.get(name, 'none')} here ({len(differing)} such weights);"
            " use the config.yaml in its run's folder"
        )


def check_tasks(checkpoint: dict[str, Any], spec: EnvSpec) -> None:
    """Check that a loaded checkpoint is ours and of these tasks.

    Raises:
        ConfigurationError: if it is not.
    """
    check_format(checkpoint)
    saved = checkpoint["mtrl_lightning"]["spec"]
    names = saved["task_names"]
    if names != list(spec.task_names):
        raise ConfigurationError(
            f"the checkpoint is of other tasks: {', '.join(names)} there,"
            f" {', '.join(spec.task_names)} here; use the config.yaml in its run's folder. To"
            " evaluate some of its tasks, give validate RUN --tasks TASK ...; to train these tasks"
            " with its weights, start a new run by fit --init_from CHECKPOINT (Python: init_from)"
        )
    current = describe_spec(spec)
    for what in ("observation", "action"):
        sizes = zip(names, _sizes(saved, what), _sizes(current, what), strict=True)
        for name, saved_size, size in sizes:
            if saved_size != size:
                raise ConfigurationError(
                    f"the checkpoint is of tasks of other sizes: the {what} of {name!r} has"
                    f" {saved_size} numbers there and {size} here;"
                    " use the config.yaml in its run's folder"
                )


def _sizes(described: Mapping[str, Any], what: str) -> list[Any]:
    """Return the size of each task's observation or action, of a spec as plain values."""
    # checkpoints of earlier versions have no sizes
    sizes = described.get(f"{what}_sizes") or []
    (size, *_) = described[f"{what}_space"]["shape"]
    return list(sizes) or [size] * len(described["task_names"])
