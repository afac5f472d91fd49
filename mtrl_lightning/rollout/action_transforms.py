"""Changes of actions on their way from the policy to the environments.

The action that the policy chose is stored and learned from; the one that is sent may differ.

Shapes: ``E`` environments, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import above
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import ActOutput, Mode, Policy

LOW, HIGH = -1.0, 1.0
"""Bounds of the actions that environments take."""


class ActionTransform:
    """Change actions before they are sent to environments; override ``transform``.

    A transform with a random generator or a memory has both in ``state_dict``. Each process has its
    own state. In a run that continues with another number of processes, lists with one entry per
    environment under the key ``per_env`` move with the environments, and a new process has no
    other state: its generator is as ``seed`` left it.
    """

    def seed(self, seed: int) -> None:
        """Seed its random generator; called once before training."""

    def transform(
        self, action_EA: npt.NDArray[np.float32], task_E: npt.NDArray[np.int64], is_training: bool
    ) -> npt.NDArray:
        """Return the actions that are sent, ``[E, A]``; they are clipped to [-1, 1].

        Args:
            action_EA: the policy's actions, or those of the transform before.
            task_E: the environments' tasks.
            is_training: False in an evaluation, where its state may not change.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore its state; called only if the checkpoint has one."""


class ActionNoise(ActionTransform):
    """Add normal noise to the actions that are sent in training, and none in an evaluation.

    Args:
        std: standard deviation of each number's noise, above 0.
    """

    def __init__(self, std: float) -> None:
        above(0, finite=True, std=std)
        self._std = std
        self._generator = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        """Seed the noise."""
        self._generator = np.random.default_rng(seed)

    def transform(
        self, action_EA: npt.NDArray[np.float32], task_E: npt.NDArray[np.int64], is_training: bool
    ) -> npt.NDArray:
        """Return the actions with noise, if it is training."""
        if not is_training:
            return action_EA
        return action_EA + self._std * self._generator.standard_normal(action_EA.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generator."""
        self._generator.bit_generator.state = state["generator"]


def sent_actions(
    transforms: Sequence[ActionTransform],
    action_EA: npt.NDArray[np.float32],
    task_E: npt.NDArray[np.int64],
    is_training: bool,
) -> npt.NDArray[np.float32]:
    """Return the actions after all transforms, clipped to [-1, 1]; without any, the actions."""
    if not transforms:
        return action_EA
    sent_EA: npt.NDArray = action_EA
    for transform in transforms:
        previous_EA = sent_EA
        # a copy: the transform may write into its argument, and the chosen action is stored
        sent_EA = np.asarray(transform.transform(previous_EA.copy(), task_E, is_training))
        if sent_EA.shape != action_EA.shape:
            raise ConfigurationError(
                f"data.action_transforms: {type(transform).__name__} returns the shape"
                f" {sent_EA.shape} for actions of the shape {action_EA.shape}: return as many"
            )
        if not np.isfinite(sent_EA).all() and np.isfinite(previous_EA).all():
            raise ConfigurationError(
                f"data.action_transforms: {type(transform).__name__} returns actions that are"
                f" not finite: {sent_EA[~np.isfinite(sent_EA)][:5].tolist()}"
            )
    return sent_EA.clip(LOW, HIGH).astype(np.float32)


class TransformedPolicy:
    """A policy with the transforms of an evaluation.

    Args:
        policy: chooses the actions.
        transforms: of the actions; without noise, as in an evaluation.
    """

    def __init__(self, policy: Policy, transforms: Sequence[ActionTransform]) -> None:
        self._policy = policy
        self._transforms = list(transforms)

    @property
    def spec(self) -> EnvSpec:
        """The policy's tasks, if it knows them: ``act`` receives their indices."""
        return self._policy.spec  # type: ignore[attr-defined]

    def act(
        self,
        observation_ED: npt.NDArray,
        task_E: npt.NDArray[np.int64],
        mode: Mode = "exploit",
    ) -> ActOutput:
        """Choose actions ``[E, A]`` between -1 and 1 for a batch, and transform them."""
        chosen = self._policy.act(observation_ED, task_E, mode)
        action_EA = chosen[0] if isinstance(chosen, tuple) else chosen
        sent_EA = sent_actions(self._transforms, np.asarray(action_EA), task_E, is_training=False)
        return (sent_EA, chosen[1]) if isinstance(chosen, tuple) else sent_EA


def with_action_transforms(policy: Policy, transforms: Sequence[ActionTransform]) -> Policy:
    """Return the policy itself, or one with transformed actions if there are transforms."""
    return TransformedPolicy(policy, transforms) if transforms else policy
