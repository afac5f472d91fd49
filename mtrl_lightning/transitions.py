"""How a policy is called, and transitions on their way from environments to the algorithm.

Shapes: ``R`` trained tasks, ``n`` rows of a task in a batch, ``E`` environments, ``D``
observation, ``A`` action, ``S`` steps of an on-policy iteration.

A further field of a step that is stored, saved and sampled (such as ``truncated``) is one more name
in ``STORED``. A number that environments report in ``info`` is one entry of
``EnvSpec.info_fields``, and a field that a policy's ``act`` returns in addition to its actions one
of ``Algorithm.policy_fields``. What is only logged of ``info`` is named in ``EnvSpec.info_keys``
and is no field of a transition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.utils.counters import Counters

if TYPE_CHECKING:
    from torch import Tensor

Kind: TypeAlias = Literal["off-policy", "on-policy", "offline"]
"""Source of an algorithm's training data: a replay of its own steps, the steps of one iteration, or
demonstrations."""


def step_unit(kind: Kind) -> str:
    """Return the unit of the schedules and of ``counters.env_steps``."""
    return "updates" if kind == "offline" else "env steps"


class StepResult(NamedTuple):
    """One step of all environments."""

    observation_ED: npt.NDArray
    """The next action is for this one: after an episode's end, the first of the next episode."""
    next_observation_ED: npt.NDArray
    """The true successor, which is stored: at an episode's end, its last observation."""
    reward_E: npt.NDArray
    terminated_E: npt.NDArray
    """The task ended: nothing is bootstrapped."""
    truncated_E: npt.NDArray
    """The time was over: the successor is bootstrapped."""
    success_E: npt.NDArray
    midway_E: npt.NDArray
    """Where the step's episode began in the middle of an earlier one (``MidwayStarts``)."""
    valid_E: npt.NDArray
    """False where the transition never happened: a worker was restarted, or it is paused."""
    paused_E: npt.NDArray
    """Where the environment was not stepped: its episode continues later."""
    extra: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_fields`` by name, one row per environment."""
    info: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_keys``, one number per environment; NaN where the step reported none."""

    @property
    def done_E(self) -> npt.NDArray[np.bool_]:
        """Where the next observation is the first of an episode: after its end, or a restart."""
        return self.terminated_E | self.truncated_E | ~(self.valid_E | self.paused_E)


class Transitions(NamedTuple):
    """Transitions in the order of the environments, one per row, from collector to storage."""

    observation_ED: npt.NDArray
    action_EA: npt.NDArray
    reward_E: npt.NDArray
    next_observation_ED: npt.NDArray
    terminated_E: npt.NDArray
    truncated_E: npt.NDArray
    task_E: npt.NDArray
    env_E: npt.NDArray
    """Index of the environment."""
    extra: Mapping[str, npt.NDArray] = {}
    """Further fields of the schema by name."""

    def columns(self) -> dict[str, npt.NDArray]:
        """Return every field by its name in the schema."""
        names = (name.rsplit("_", 1)[0] for name in self._fields[:-1])
        return dict(zip(names, self[:-1], strict=True)) | dict(self.extra)


class TransitionBatch(NamedTuple):
    """A batch to learn from: ``n`` rows of each trained task, in the order of the tasks."""

    observation_RnD: Tensor
    action_RnA: Tensor
    reward_Rn: Tensor
    next_observation_RnD: Tensor
    terminated_Rn: Tensor
    task_Rn: Tensor
    extra: Mapping[str, Tensor] = {}
    """Further fields of the schema by name, ``[R, n, ...]``."""

    @property
    def task_R1(self) -> Tensor:
        """Each group's task, as an index of quantities that broadcast over its rows."""
        return self.task_Rn[:, :1]


class Rollout(NamedTuple):
    """The transitions of one iteration of an on-policy algorithm, ``S`` steps of ``E``."""

    columns: Mapping[str, Tensor]
    """By name, ``[S, E, ...]``: the fields of the schema; ``truncated``; with ``PolicyReuse``
    also ``foreign``, whether the policy of another task acted."""
    valid_SE: Tensor
    """False where a transition never happened: its environment was rebuilt, or is paused."""
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
    """Index of its environment; -1 if unknown."""
    info: Mapping[str, float] = {}
    """For each of the spec's ``info_keys`` that it reported, the mean over its steps by the key's
    name, and the last value by ``<key>_last``."""
    midway: bool = False
    """Whether it began in the middle of an earlier one (``StartMidway``)."""
    step: int = 0
    """Number of the vector step in which it finished; 0 before it is in a window."""


class RolloutConfig(NamedTuple):
    """How an on-policy algorithm collects, and how often it uses each transition."""

    num_steps: int
    """Steps of each environment in an iteration."""
    num_epochs: int
    """Passes over these steps."""
    num_minibatches: int
    """Minibatches per pass, each with the same number of rows of every trained task."""


Mode = Literal["explore", "exploit", "random"]
"""How a policy acts: sample from its distribution, take its mode, or sample uniformly."""

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


class NoisyPolicy(Policy, Protocol):
    """A policy that makes its actions from given noise."""

    def act(
        self,
        observation_ED: npt.NDArray,
        task_E: npt.NDArray[np.int64],
        mode: Mode,
        noise_EA: npt.NDArray[np.float32] | None = None,
    ) -> ActOutput:
        """Choose actions; to explore, from standard normal noise ``[E, A]`` instead of its own."""
        ...


@runtime_checkable
class SeededPolicy(Policy, Protocol):
    """A policy whose random actions can be seeded."""

    def seed_actions(self, seed: int) -> None:
        """Seed the generator of random actions."""
        ...


@runtime_checkable
class WeightedPolicy(Policy, Protocol):
    """A policy with weights, which can be sent to the same policy in another process."""

    counters: Counters
    """With the number of updates of the weights so far."""

    def get_weights(self) -> dict[str, Any]:
        """Return copies of the weights that ``act`` needs, on the CPU, for ``torch.save``."""
        ...

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Act with the weights returned by ``get_weights``."""
        ...


def step_fields(spec: EnvSpec) -> tuple[Field, ...]:
    """Return the fields that an environment receives and reports in one step."""
    observation_type = np.dtype(spec.observation_space.dtype).name
    return (
        Field("action", spec.action_space.shape, "float32"),
        Field("observation", spec.observation_space.shape, observation_type),
        Field("next_observation", spec.observation_space.shape, observation_type),
        Field("reward", (), "float64"),
        Field("terminated", (), "bool"),
        Field("truncated", (), "bool"),
        Field("success", (), "bool"),
        Field("midway", (), "bool"),
        *spec.info_fields,
        *(Field(info_column(key), (), "float64") for key in spec.info_keys),
    )


def info_column(key: str) -> str:
    """Return the column of a logged number of ``info``, which no field of a transition is named."""
    return f"info/{key}"


POLICY_ACTION = "policy_action"
"""The column of the actions before noise was added, which collected episodes may have."""

STORED = ("observation", "action", "reward", "next_observation", "terminated")
"""The fields of a step that are stored, saved with checkpoints and sampled."""


def policy_action_field(spec: EnvSpec) -> Field:
    """Return the field of the actions before noise was added."""
    return Field(POLICY_ACTION, spec.action_space.shape)


def transition_fields(spec: EnvSpec, policy_fields: Sequence[Field] = ()) -> tuple[Field, ...]:
    """Return the fields of a transition that are stored, saved with checkpoints, and sampled.

    Args:
        spec: the tasks.
        policy_fields: outputs of the policy's ``act`` in addition to its actions.
    """
    policy_names = {field.name for field in policy_fields}
    in_both = [field.name for field in spec.info_fields if field.name in policy_names]
    if in_both:
        raise ConfigurationError(
            f"info_fields name {in_both}, as outputs of the algorithm's policy are named: rename"
            " them"
        )
    by_name = {field.name: field for field in step_fields(spec)}
    extra = (*spec.info_fields, *policy_fields)
    return tuple(field.stored() for field in (*(by_name[name] for name in STORED), *extra))
