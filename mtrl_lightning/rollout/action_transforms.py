"""Transforms of actions between the policy and the environments.

The policy's original action is stored and learned from; the action sent to the environment may
differ.

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
"""Bounds of the environments' actions."""


class ActionTransform:
    """Transform actions before they are sent to environments; override ``transform``.

    Return generators and other state from ``state_dict``. Each process has its own state. If a run
    is resumed with a different number of processes, lists with one entry per environment under the
    key ``per_env`` move with the environments, and new processes have no other state: their
    generators are as initialized by ``seed``.
    """

    def seed(self, seed: int) -> None:
        """Seed the random generator; called once before training."""

    def transform(
        self, action_EA: npt.NDArray[np.float32], task_E: npt.NDArray[np.int64], is_training: bool
    ) -> npt.NDArray:
        """Return the actions to send, ``[E, A]``, which are then clipped to [-1, 1].

        Args:
            action_EA: actions of the policy or of the previous transform.
            task_E: tasks of the environments.
            is_training: False in evaluations, which must not change the transform's state.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; only called if the checkpoint has one."""


class ActionNoise(ActionTransform):
    """Add normal noise to actions in training, but not in evaluations.

    Args:
        std: standard deviation of the noise, above 0.
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
        """Add noise to the actions if ``is_training``."""
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
    """Apply all transforms and clip to [-1, 1]; without any, return the actions unchanged."""
    if not transforms:
        return action_EA
    sent_EA: npt.NDArray = action_EA
    for transform in transforms:
        previous_EA = sent_EA
        # a copy: the transform may write into its argument, and the chosen action is stored
        sent_EA = np.asarray(transform.transform(previous_EA.copy(), task_E, is_training))
        if sent_EA.shape != action_EA.shape:
            raise ConfigurationError(
                f"data.action_transforms: {type(transform).__name__} returns shape {sent_EA.shape}"
                f" for actions of shape {action_EA.shape}: return the same shape"
            )
        if not np.isfinite(sent_EA).all() and np.isfinite(previous_EA).all():
            raise ConfigurationError(
                f"data.action_transforms: {type(transform).__name__} returns actions that are"
                f" not finite: {sent_EA[~np.isfinite(sent_EA)][:5].tolist()}"
            )
    return sent_EA.clip(LOW, HIGH).astype(np.float32)


class TransformedPolicy:
    """A policy followed by action transforms, as in an evaluation.

    Args:
        policy: the policy.
        transforms: transforms of its actions.
    """

    def __init__(self, policy: Policy, transforms: Sequence[ActionTransform]) -> None:
        self._policy = policy
        self._transforms = list(transforms)

    @property
    def spec(self) -> EnvSpec:
        """The policy's spec, if it has one: ``act`` receives indices of its tasks."""
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
    """Return the policy with transformed actions, or the policy itself without transforms."""
    return TransformedPolicy(policy, transforms) if transforms else policy
