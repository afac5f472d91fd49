"""The state of an algorithm in a checkpoint: saved, checked, restored, and split among ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms.description import (
    INIT_ARGS,
    argument_of,
    cannot_rebuild,
    is_plain,
)
from mtrl_lightning.algorithms.optimizer_states import check_optimizer, replace_options
from mtrl_lightning.checkpoints import FORMAT, check_format
from mtrl_lightning.checks import count, restoring
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.targets import weight_shapes
from mtrl_lightning.learning.update import Update
from mtrl_lightning.ranks.share import Rules, Share
from mtrl_lightning.saved_spec import describe_spec
from mtrl_lightning.spec import EnvSpec

if TYPE_CHECKING:
    from mtrl_lightning.algorithms.algorithm import Algorithm

NUMPY_BUFFER = 624
"""Numbers in the buffer of NumPy's global generator, an MT19937."""


def save_state(algorithm: Algorithm, checkpoint: dict[str, Any]) -> None:
    """Add an algorithm's description and state; keep hyper-parameters of plain values."""
    algorithm.guard.read()  # skipped steps are counted on the device until it is read
    checkpoint["mtrl_lightning"] = {
        "format": FORMAT,
        "algorithm": algorithm.description,
        "spec": describe_spec(algorithm.spec),
        "counters": algorithm.counters.state_dict(),
        "generators": algorithm.generators.state_dict(),
        "global_generators": global_generators(),
        "metrics": algorithm.mean_metrics.state_dict(),
    }
    checkpoint["hyper_parameters"] = {
        name: value
        for name, value in checkpoint.get("hyper_parameters", {}).items()
        if is_plain(value)
    }


def warn_of_unknown_arguments(algorithm: Algorithm) -> None:
    """Warn of arguments that a checkpoint of the algorithm cannot rebuild."""
    for argument, text in cannot_rebuild(algorithm.description[INIT_ARGS]).items():
        rank_zero_warn(
            f"a checkpoint cannot rebuild {argument}, {text},"
            " because no module has it under that name:"
            f" give {argument_of(argument)}=... to load_policy and load_from_checkpoint,"
            " or define it in a module"
        )


class SavedOptimizers(NamedTuple):
    """The states of the updates' optimizers in a checkpoint."""

    states: Sequence[Any]
    """The ``state_dict`` of each."""
    has_new_options: bool
    """Whether options such as the learning rate are those of this run."""

    def check(self, updates: Sequence[Update]) -> None:
        """Check the states before they are loaded into the updates' optimizers."""
        with restoring("states of the optimizers"):
            for update, state in zip(updates, self.states, strict=True):
                assert update.optimizer is not None
                check_optimizer(state, update.optimizer, update.parameters, update.make_optimizer)
                if self.has_new_options:
                    replace_options(state, update.optimizer)


def restore_state(algorithm: Algorithm, checkpoint: dict[str, Any]) -> SavedOptimizers | None:
    """Restore the state that ``save_state`` added; weights and optimizers are Lightning's part.

    Returns:
        The states of the optimizers, to check when these are built; None without.

    Raises:
        ConfigurationError: if the checkpoint is damaged, or of other tasks or another network.
    """
    with restoring("state of the algorithm"):
        check_tasks(checkpoint, algorithm.spec)
        check_weights(checkpoint["state_dict"], algorithm.state_dict())
        state = checkpoint["mtrl_lightning"]
        algorithm.counters.load_state_dict(state["counters"])
        algorithm.generators.load_state_dict(state["generators"])
        if "global_generators" in state:  # left out by load_algorithm
            restore_global_generators(state["global_generators"])
        algorithm.mean_metrics.load_state_dict(state["metrics"])
    if checkpoint.get("optimizer_states") is None:  # left out by load_algorithm
        return None
    has_new_options = state.get("algorithm") != algorithm.description
    return SavedOptimizers(checkpoint["optimizer_states"], has_new_options)


def global_generators() -> dict[str, Any]:
    """Return the states of this process' generators, which only a user's code samples from."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "python": random.getstate(),
    }


def restore_global_generators(state: dict[str, Any]) -> None:
    """Restore ``global_generators``; those of devices only where there are as many."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    kind, keys, position, *rest = state["numpy"]
    # NumPy reads its buffer at this place without a check
    count(position, "position in NumPy's generator", NUMPY_BUFFER)
    np.random.set_state((kind, keys, position, *rest))
    random.setstate(state["python"])


def reshard_state(
    algorithm: Algorithm, states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return the part of the state that differs between ranks, from those of all saved ranks."""
    rules: Rules = {
        "generators": partial(algorithm.generators.reshard, share=share),
        "global_generators": lambda of_ranks: of_ranks[share.rank % len(of_ranks)],
        "metrics": partial(algorithm.mean_metrics.reshard, share=share),
    }
    return share.join("the algorithm", states, rules)


def reshard_extra_states(
    algorithm: Algorithm, states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return a rank's extra states of modules; those without ``reshard`` are equal on all ranks."""
    modules = dict(algorithm.named_modules(remove_duplicate=False))
    resharded = {}
    for name in states[0]:
        of_ranks = [state[name] for state in states]
        rule = getattr(modules.get(name.rpartition(".")[0]), "reshard", None)
        resharded[name] = of_ranks[0] if rule is None else rule(of_ranks, share)
    return resharded


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
    """Check that a loaded checkpoint is ours and of these tasks."""
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
