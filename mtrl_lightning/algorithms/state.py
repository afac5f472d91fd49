"""The state of an algorithm in a checkpoint: saved, checked and restored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mtrl_lightning.checkpoints import FORMAT
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.state import PER_RANK
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.updates.targets import weight_shapes
from mtrl_lightning.updates.update import Update

if TYPE_CHECKING:
    from mtrl_lightning.algorithms.algorithm import Algorithm

NUMPY_BUFFER = 624
"""Numbers in the buffer of NumPy's global generator, an MT19937."""
IMPLEMENTATIONS = ("foreach", "fused")
"""Optimizer options that select its implementation; a resumed run keeps the checkpoint's."""


def save_state(algorithm: Algorithm, checkpoint: dict[str, Any]) -> None:
    """Add an algorithm's arguments and state."""
    algorithm.guard.read()  # skipped steps are counted on the device until it is read
    checkpoint["mtrl_lightning"] = {
        "format": FORMAT,
        "spec": algorithm.spec.to_dict(),
        "counters": algorithm.counters.state_dict(),
        "generators": algorithm.generators.state_dict(),
        "global_generators": {PER_RANK: {distributed.rank(): global_generators()}},
        "metrics": algorithm.mean_metrics.state_dict(),
        "num_processes": distributed.world_size(),
    }
    if algorithm.data_name:
        checkpoint["mtrl_lightning"]["data"] = algorithm.data_name
    # a subclass may have added unconverted arguments with save_hyperparameters
    checkpoint["hyper_parameters"] = algorithm.hyper_parameters


class SavedOptimizers(NamedTuple):
    """The states of the updates' optimizers in a checkpoint."""

    states: Sequence[Any]
    """The ``state_dict`` of each."""
    has_new_options: bool
    """Whether to use this run's options, such as the learning rate."""

    def check(self, updates: Sequence[Update]) -> None:
        """Check the states before they are loaded into the updates' optimizers."""
        for update, state in zip(updates, self.states, strict=True):
            assert update.optimizer is not None
            check_optimizer(state, update.optimizer)
            if self.has_new_options:
                replace_options(state, update.optimizer)


def restore_state(algorithm: Algorithm, checkpoint: dict[str, Any]) -> SavedOptimizers | None:
    """Restore the state that ``save_state`` added; Lightning restores weights and optimizers.

    Returns:
        The optimizers' states, to check once the optimizers are built; None if left out.
    """
    check_tasks(checkpoint, algorithm.spec)
    check_weights(checkpoint["state_dict"], algorithm.state_dict())
    state = checkpoint["mtrl_lightning"]
    saved_data = state.get("data", "none")
    if algorithm.data_name not in ("", saved_data):
        raise ConfigurationError(
            f"the checkpoint has the state of {saved_data}, but this run has the data module"
            f" {algorithm.data_name}: resume with the original data module"
        )
    algorithm.counters.load_state_dict(state["counters"])
    algorithm.generators.load_state_dict(state["generators"])
    if "global_generators" in state:  # left out by load_from_checkpoint
        own = state["global_generators"][PER_RANK].get(distributed.rank())
        if own is not None:
            restore_global_generators(own)
    algorithm.mean_metrics.load_state_dict(state["metrics"])
    if checkpoint.get("optimizer_states") is None:  # left out by load_from_checkpoint
        return None
    has_new_options = checkpoint["hyper_parameters"] != algorithm.hyper_parameters
    return SavedOptimizers(checkpoint["optimizer_states"], has_new_options)


def global_generators() -> dict[str, Any]:
    """Return the states of this process' global generators, which only user code samples from."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "python": random.getstate(),
    }


def restore_global_generators(state: dict[str, Any]) -> None:
    """Restore ``global_generators``; those of devices only if their number is the same."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    kind, keys, position, *rest = state["numpy"]
    if not 0 <= position <= NUMPY_BUFFER:  # NumPy does not check it before reading its buffer
        raise ValueError(f"the position in NumPy's generator is {position}")
    np.random.set_state((kind, keys, position, *rest))
    random.setstate(state["python"])


def check_weights(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that the weights of a checkpoint have the same names and shapes.

    Args:
        saved: the checkpoint's ``state_dict``.
        current: the algorithm's ``state_dict``.
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
            f" instead of {here.get(name, 'none')} ({len(differing)} such weights);"
            " use the config.yaml in its run's folder"
        )


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Check that a saved state belongs to the same kind of optimizer and the same parameters.

    PyTorch's fused kernels do not check that state and parameter have the same size, and could
    write out of bounds.

    Args:
        saved: the saved ``state_dict``.
        optimizer: the optimizer that will load it.
    """
    for found, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for name, value in own.items():
            is_switch = value is None or isinstance(value, bool)
            if name not in found and not is_switch:  # versions of PyTorch add switches
                raise _of_another(f"{name} is missing")
            is_other = is_switch and found.get(name, value) != value
            if is_other and name not in IMPLEMENTATIONS:
                raise _of_another(f"{name} is {found[name]} instead of {value}")
        parameters = zip(found["params"], own["params"], strict=True)
        for index, parameter in parameters if found.get("fused") else ():
            for name, value in saved["state"].get(index, {}).items():
                if name == "step" or not isinstance(value, Tensor):
                    continue
                if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
                    raise _of_another(f"{name} of parameter {index} has another shape or type")


def _of_another(difference: str) -> ConfigurationError:
    return ConfigurationError(
        f"an optimizer state in the checkpoint does not fit this run's optimizer ({difference}):"
        " use the config.yaml in its run's folder, or another checkpoint"
    )


def replace_options(saved: Any, optimizer: Optimizer) -> None:
    """Replace the options of a saved state with an optimizer's own.

    The factor by which a schedule has scaled the learning rate is kept.

    Args:
        saved: the saved ``state_dict``, which has passed ``check_optimizer``.
        optimizer: the optimizer that will load it.
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


def check_tasks(checkpoint: dict[str, Any], spec: EnvSpec) -> None:
    """Check that a loaded checkpoint has these tasks."""
    saved = EnvSpec.from_dict(checkpoint["mtrl_lightning"]["spec"])
    if saved.task_names != spec.task_names:
        raise ConfigurationError(
            f"the checkpoint is of other tasks: {', '.join(saved.task_names)} instead of"
            f" {', '.join(spec.task_names)}; use the config.yaml in its run's folder. To evaluate"
            " some of its tasks, use validate RUN --tasks TASK ...; to train these tasks with its"
            " weights, start a new run with fit --init_from CHECKPOINT (Python: init_from)"
        )
    kinds: tuple[Literal["observation", "action"], ...] = ("observation", "action")
    for kind in kinds:
        for task, name in enumerate(spec.task_names):
            there, here = saved.shape_of(kind, task), spec.shape_of(kind, task)
            if there != here:
                raise ConfigurationError(
                    f"the checkpoint is of tasks of other sizes: the {kind} of {name!r} has shape"
                    f" {there} in the checkpoint and {here} in this run;"
                    " use the config.yaml in its run's folder"
                )
