"""What every algorithm is: a LightningModule that acts, counts and checks the checkpoints it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.state import (
    Generators,
    MeanMetrics,
    global_generators,
    restore_global_generators,
)
from mtrl_lightning.counters import Counters, Stopwatch
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schema import Field
from mtrl_lightning.types import EnvSpec, Mode, Transitions

FORMAT = 2
"""Version of what a checkpoint holds."""


class Algorithm(LightningModule):
    """Base of all algorithms; also a ``Policy``.

    Args:
        spec: the tasks.
        seed: of the generators.
    """

    policy_fields: tuple[Field, ...] = ()
    """Further fields of a transition that ``act`` returns beside the actions."""

    def __init__(self, spec: EnvSpec, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.spec = spec
        self.counters = Counters()
        self.stopwatch = Stopwatch()
        self.mean_metrics = MeanMetrics()
        self.generators = Generators(seed)
        self.reward_scale = RewardScale(spec)

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]``."""
        raise NotImplementedError

    def check_device(self, device: torch.device) -> None:
        """Check before training that what was asked for can be done on the device.

        Raises:
            ConfigurationError: if it cannot.
        """

    def observe(self, transitions: Transitions) -> None:
        """Hear of the transitions of one vector step, as they happen."""
        self.reward_scale.observe(transitions)

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Hear of each trained task's mean reward in the replay, before the first update and at each reset."""
        self.reward_scale.rescale(mean_reward_R)

    def reset_networks(self) -> None:
        """Begin anew with other weights; what was seen stays.

        Raises:
            ConfigurationError: if the algorithm cannot.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot begin anew: set resets.every to null"
        )

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics, averaged since the last call."""
        return {f"train/{name}": value for name, value in self.mean_metrics.drain().items()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: evaluation runs episodes, see ``callbacks/evaluation.py``."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters, generators, metrics and the tasks; keep only hyper-parameters of plain values."""
        checkpoint["mtrl_lightning"] = {
            "format": FORMAT,
            "task_names": list(self.spec.task_names),
            "train_tasks": list(self.spec.train_tasks),
            "protocol": dict(self.spec.protocol),
            "counters": self.counters.state_dict(),
            "generators": self.generators.state_dict(),
            "global_generators": global_generators(),
            "metrics": self.mean_metrics.state_dict(),
        }
        given = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {
            name: value for name, value in given.items() if _is_plain(value)
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what ``on_save_checkpoint`` added.

        Raises:
            ConfigurationError: if the checkpoint is of other tasks or of another network.
        """
        check_tasks(checkpoint, self.spec)
        self._check_weights(checkpoint["state_dict"])
        state = checkpoint["mtrl_lightning"]
        self.counters.load_state_dict(state["counters"])
        self.generators.load_state_dict(state["generators"])
        restore_global_generators(state["global_generators"])
        self.mean_metrics.load_state_dict(state["metrics"])

    def _check_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = {name: _shape(value) for name, value in self.state_dict().items()}
        given = {name: _shape(value) for name, value in weights.items()}
        wrong = [
            name
            for name in [*own, *(n for n in given if n not in own)]
            if own.get(name) != given.get(name)
        ]
        if wrong:
            name = wrong[0]
            raise ConfigurationError(
                f"the checkpoint is of another network: {name} has shape {given.get(name, 'none')}"
                " there and"
                f" {own.get(name, 'none')} here ({len(wrong)} such weights); use the config.yaml in"
                " its run's folder"
            )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()  # a module's extra state


def check_format(checkpoint: dict[str, Any]) -> None:
    """Check that a loaded checkpoint is ours and can be read.

    Raises:
        ConfigurationError: if it is not.
    """
    own = checkpoint.get("mtrl_lightning") if isinstance(checkpoint, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ConfigurationError(
            "the checkpoint was not written by mtrl_lightning: give one of a run's checkpoints"
        )
    found = own["format"]
    if found != FORMAT:
        raise ConfigurationError(
            f"the checkpoint has format {found}, this version reads {FORMAT}: use the version that"
            " wrote it"
        )


def check_tasks(checkpoint: dict[str, Any], spec: EnvSpec) -> None:
    """Check that a loaded checkpoint is ours and of these tasks.

    Raises:
        ConfigurationError: if it is not.
    """
    check_format(checkpoint)
    state = checkpoint["mtrl_lightning"]
    if state["task_names"] != list(spec.task_names):
        raise ConfigurationError(
            f"the checkpoint is of other tasks: {', '.join(state['task_names'])} there,"
            f" {', '.join(spec.task_names)} here; use the config.yaml in its run's folder"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (
        str,
        int,
        float,
        bool,
    )  # NumPy's numbers are subclasses, and no plain values
