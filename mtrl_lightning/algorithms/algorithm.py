"""What every algorithm is: a LightningModule that acts, counts and checks the checkpoints it is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.parsing import collect_init_args
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from mtrl_lightning.algorithms.description import (
    cannot_rebuild,
    describe_algorithm,
    describe_spec,
    rebuild_algorithm,
    warn_of_unknown,
)
from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.state import (
    Generators,
    MeanMetrics,
    global_generators,
    restore_global_generators,
)
from mtrl_lightning.checkpoints import FORMAT, check_format, load_checkpoint
from mtrl_lightning.counters import Counters, Stopwatch
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schema import Field
from mtrl_lightning.types import EnvSpec, Mode, Transitions

if TYPE_CHECKING:
    from typing_extensions import Self


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
        frame = cast(FrameType, inspect.currentframe())
        calls = collect_init_args(frame, [], classes=(Algorithm,))  # the subclass's is the last
        self.description = describe_algorithm(type(self), calls[-1])
        self._unknown_arguments = cannot_rebuild(self.description["init_args"])
        every_argument = {name: value for call in calls for name, value in call.items()}
        described = describe_algorithm(type(self), every_argument)["init_args"]
        # lists, because loggers write them as YAML, which has no tuples
        self.save_hyperparameters(apply_to_collection(described, tuple, list))
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
        """Add what rebuilds the algorithm, and its state; keep hyper-parameters of plain values."""
        warn_of_unknown(self._unknown_arguments)
        self._unknown_arguments = {}  # once is enough
        checkpoint["mtrl_lightning"] = {
            "format": FORMAT,
            "algorithm": self.description,
            "spec": describe_spec(self.spec),
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
        if "global_generators" in state:  # left out where the process is not to be changed
            restore_global_generators(state["global_generators"])
        self.mean_metrics.load_state_dict(state["metrics"])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **overrides: Any,
    ) -> Self:
        """Build the algorithm that a checkpoint describes, with its weights and its state.

        Args:
            checkpoint_path: a file in a run's ``checkpoints/`` folder.
            map_location: device of the weights; None for the CPU.
            hparams_file: not supported: give ``overrides``.
            strict: whether all weights have to be those of the checkpoint; None for yes.
            weights_only: not used: nothing in a checkpoint is ever executed.
            trust: modules and packages, ``["mytasks"]``, whose classes the checkpoint may use
                beside those of this package and of ``torch.nn`` and ``torch.optim``.
            overrides: arguments of the constructor in place of the saved ones.

        Raises:
            ConfigurationError: if the checkpoint cannot be used; the message names the remedy.
        """
        if hparams_file is not None:
            raise ConfigurationError(
                f"hparams_file is {hparams_file}: give the arguments themselves, such as seed=3"
            )
        checkpoint = load_checkpoint(checkpoint_path)
        state = checkpoint["mtrl_lightning"]
        state.pop("global_generators", None)  # loading leaves the draws of this process as they are
        algorithm = rebuild_algorithm(state, cls, trust, overrides)
        algorithm.on_load_checkpoint(checkpoint)
        algorithm.load_state_dict(checkpoint["state_dict"], strict=strict is not False)
        return algorithm.to(map_location or "cpu")

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


def check_tasks(checkpoint: dict[str, Any], spec: EnvSpec) -> None:
    """Check that a loaded checkpoint is ours and of these tasks.

    Raises:
        ConfigurationError: if it is not.
    """
    check_format(checkpoint)
    state = checkpoint["mtrl_lightning"]
    saved_names = state["spec"]["task_names"]
    if saved_names != list(spec.task_names):
        raise ConfigurationError(
            f"the checkpoint is of other tasks: {', '.join(saved_names)} there,"
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
