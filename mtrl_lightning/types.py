"""Data types shared by environments, rollout, replay and algorithms.

Shapes: ``T`` tasks, ``R`` trained tasks, ``E`` environments, ``B = R * n`` batch (task-major),
``D`` observation, ``A`` action, ``S`` steps of an on-policy iteration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.schema import Field

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["explore", "exploit", "random"]
"""How a policy acts: draw from its distribution, take the mode of it, or draw uniformly."""


class EnvSpec(NamedTuple):
    """What an algorithm needs to know of a benchmark."""

    task_names: tuple[str, ...]
    """Names of all tasks; a task's integer is its place here."""
    observation_space: Box
    """Space of one environment's observation, without any task encoding."""
    action_space: Box
    """Space of one environment's action, bounded by -1 and 1."""
    horizon: int
    """Steps after which an episode is truncated."""
    has_success: bool
    """Whether ``info["success"]`` means anything."""
    train_tasks: tuple[int, ...]
    """Tasks that are trained on; the others are evaluated only."""
    protocol: Mapping[str, str | int | float]
    """What has to be said beside every number: versions, reward, horizon, goals."""

    info_fields: tuple[Field, ...] = ()
    """Numbers that environments report in ``info`` and that belong to a transition."""
    info_keys: tuple[str, ...] = ()
    """Numbers that environments may report in ``info`` and whose means are logged."""
    observation_sizes: tuple[int, ...] = ()
    """Size of each task's own observation; zeros follow it up to the size of the observation space.
    Empty if every task's observation has the size of the space."""
    action_sizes: tuple[int, ...] = ()
    """Size of each task's own action; what follows it in an action is 0 and has no effect. Empty if
    every task's action has the size of the action space."""
    max_return: float | None = None
    """Largest possible return of an episode, which a return is divided by to be a score; None if
    the benchmark has no score."""
    frame_stack: int = 0
    """Frames that an observation consists of, its first axis: the newest is the last, the others
    are those of the observation before it in its episode. 0 if observations are no such stacks.
    The replay keeps each frame once."""

    @property
    def num_tasks(self) -> int:
        """Number of all tasks, ``T``."""
        return len(self.task_names)

    @property
    def num_trained(self) -> int:
        """Number of trained tasks, ``R``."""
        return len(self.train_tasks)

    def of_task(self, task: int) -> EnvSpec:
        """Return the spec of one task alone, for a network of its own."""
        return self._replace(
            task_names=(self.task_names[task],),
            train_tasks=(0,),
            observation_sizes=self.observation_sizes[task : task + 1],
            action_sizes=self.action_sizes[task : task + 1],
        )

    @property
    def observation_mask_TD(self) -> npt.NDArray[np.bool_]:
        """Which numbers of an observation are each task's own, ``[T, D]``."""
        return _mask(self.num_tasks, self.observation_space, self.observation_sizes)

    @property
    def action_mask_TA(self) -> npt.NDArray[np.bool_]:
        """Which numbers of an action are each task's own, ``[T, A]``."""
        return _mask(self.num_tasks, self.action_space, self.action_sizes)


def _mask(num_tasks: int, space: Box, sizes: Sequence[int]) -> npt.NDArray[np.bool_]:
    if not sizes:
        return np.ones((num_tasks, *space.shape), np.bool_)
    return np.arange(space.shape[0]) < np.array(sizes)[:, None]


class RolloutConfig(NamedTuple):
    """How an on-policy algorithm collects, and how often it uses what it has collected."""

    num_steps: int
    """Steps of each environment in an iteration."""
    num_epochs: int
    """Passes over them."""
    num_minibatches: int
    """Minibatches of a pass, each with the same number of rows of every trained task."""


class StepResult(NamedTuple):
    """One step of all environments."""

    observation_ED: npt.NDArray
    """What to act on next: after an episode's end, the first observation of the next episode."""
    next_observation_ED: npt.NDArray
    """The true successor, which is stored: at an episode's end, its last observation."""
    reward_E: npt.NDArray
    terminated_E: npt.NDArray
    """The task ended: nothing is bootstrapped."""
    truncated_E: npt.NDArray
    """The time was over: the successor is bootstrapped."""
    success_E: npt.NDArray
    valid_E: npt.NDArray
    """False where a worker was restarted: the transition never happened."""
    extra: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_fields`` by name, one row per environment."""
    info: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_keys``, one number per environment; NaN where the step reported none."""


class Transitions(NamedTuple):
    """Transitions as they happened, one per row; what a collector hands to what stores them."""

    observation_ED: npt.NDArray
    action_EA: npt.NDArray
    reward_E: npt.NDArray
    next_observation_ED: npt.NDArray
    terminated_E: npt.NDArray
    truncated_E: npt.NDArray
    task_E: npt.NDArray
    env_E: npt.NDArray
    """The environment's place in the vector."""
    extra: Mapping[str, npt.NDArray] = {}
    """Further fields of the schema by name."""

    def columns(self) -> dict[str, npt.NDArray]:
        """Return every field by its name in the schema."""
        names = (name.rsplit("_", 1)[0] for name in self._fields[:-1])
        return dict(zip(names, self[:-1], strict=True)) | dict(self.extra)


class TransitionBatch(NamedTuple):
    """A batch to learn from: task-major, the same number of rows for every trained task."""

    observation_BD: Tensor
    action_BA: Tensor
    reward_B: Tensor
    next_observation_BD: Tensor
    terminated_B: Tensor
    task_B: Tensor
    extra: Mapping[str, Tensor] = {}
    """Further fields of the schema by name, ``[B, ...]``."""


class Rollout(NamedTuple):
    """The transitions of one iteration of an on-policy algorithm, ``S`` steps of ``E``."""

    columns: Mapping[str, Tensor]
    """The fields of the schema and ``truncated`` by name, ``[S, E, ...]``."""
    valid_SE: Tensor
    """False where a transition never happened, because its environment was rebuilt."""
    task_E: Tensor
    """Each environment's task."""


class Episode(NamedTuple):
    """A finished episode."""

    task: int
    return_: float
    length: int
    success: bool
    """Success in any step."""
    success_last: bool
    """Success in the last step."""
    env: int = -1
    """Place in the vector of the environment that it comes from; -1 if that is not known."""
    info: Mapping[str, float] = {}
    """For each of the spec's ``info_keys`` that it reported, the mean over its steps by the key's
    name, and the last value by ``<key>_last``."""


ActOutput: TypeAlias = (
    "npt.NDArray[np.float32] | tuple[npt.NDArray[np.float32], Mapping[str, npt.NDArray]]"
)
"""Actions ``[E, A]``, alone or with further fields of the transition by name, ``[E, ...]``."""


class Policy(Protocol):
    """Chooses actions."""

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> ActOutput:
        """Choose actions ``[E, A]`` between -1 and 1."""
        ...


@runtime_checkable
class SeededPolicy(Policy, Protocol):
    """A policy whose draws of actions can be seeded."""

    def seed_actions(self, seed: int) -> None:
        """Seed all further draws of actions."""
        ...


@runtime_checkable
class WeightedPolicy(Policy, Protocol):
    """A policy with weights, which can be sent to the same policy in another process."""

    @property
    def weights_seq_no(self) -> int:
        """Number of updates that the weights have had."""
        ...

    def get_weights(self) -> dict[str, Any]:
        """Return copies of what ``act`` needs, on the CPU; ``torch.save`` can write them."""
        ...

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Act with the weights that ``get_weights`` has returned.

        Args:
            weights: of the same networks.
            weights_seq_no: number of updates that they have had.
        """
        ...


def known_tasks(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of tasks if all are known and none appears twice.

    Args:
        names: of tasks; a version at the end, such as ``-v3``, may be left out where only one is
            known.
        known: full names.

    Raises:
        ConfigurationError: naming the nearest known tasks, or the duplicates.
    """
    names = [_with_version(name, known) for name in names]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)}"
            raise ConfigurationError(f"unknown task {name!r}: {hint}")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigurationError(f"duplicate tasks {duplicates}: name each task once")
    if not names:
        raise ConfigurationError("no task is named: give at least one")
    return tuple(names)


def _with_version(name: str, known: Sequence[str]) -> str:
    """Return the only known task of this name with a version; the name itself if there is none."""
    versions = [task for task in known if re.fullmatch(re.escape(name) + r"-v\d+", task)]
    return versions[0] if name not in known and len(versions) == 1 else name
