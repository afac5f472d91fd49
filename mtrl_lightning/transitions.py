"""The policy interface, and transitions between environments and the algorithm.

Shapes: ``R`` trained tasks, ``n`` rows of a task in a batch, ``E`` environments, ``D``
observation, ``A`` action, ``S`` steps of an on-policy iteration.

To store, save and sample a further field of a step (such as ``truncated``), add its name to
``STORED``. Numbers that environments report in ``info`` are declared in ``EnvSpec.info_fields``,
and fields that a policy's ``act`` returns in addition to its actions in
``Algorithm.policy_fields``. Entries of ``info`` that are only logged are declared in
``EnvSpec.info_keys``; they are not fields of a transition.
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
    """Input of the next action: after an episode's end, the first of the next episode."""
    next_observation_ED: npt.NDArray
    """The true successor, which is stored: at an episode's end, its final observation."""
    reward_E: npt.NDArray
    terminated_E: npt.NDArray
    """Whether the task terminated: the target does not bootstrap."""
    truncated_E: npt.NDArray
    """Whether the episode was truncated: the target bootstraps from the successor."""
    success_E: npt.NDArray
    midway_E: npt.NDArray
    """Where the step's episode started midway in an earlier one (``MidwayStarts``)."""
    valid_E: npt.NDArray
    """False where there is no transition: a worker was restarted, or the environment is paused."""
    paused_E: npt.NDArray
    """Where the environment was not stepped, and its episode continues later."""
    extra: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_fields`` by name, one row per environment."""
    info: Mapping[str, npt.NDArray] = {}
    """The spec's ``info_keys``, one number per environment; NaN where the step reported none."""

    @property
    def done_E(self) -> npt.NDArray[np.bool_]:
        """Where the next observation is the first of an episode: after its end, or a restart."""
        return self.terminated_E | self.truncated_E | ~(self.valid_E | self.paused_E)


class Transitions(NamedTuple):
    """Transitions passed from collector to storage, one row per environment."""

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
        """Each group's task, as an index whose results broadcast over the group's rows."""
        return self.task_Rn[:, :1]


class Rollout(NamedTuple):
    """The transitions of an on-policy iteration, ``S`` steps of ``E`` environments."""

    columns: Mapping[str, Tensor]
    """Columns by name, ``[S, E, ...]``: the fields of the schema; ``truncated``; with
    ``PolicyReuse`` also ``foreign``, whether the policy of another task acted."""
    valid_SE: Tensor
    """False where there is no transition: the environment was rebuilt, or is paused."""
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
    """For each reported key of the spec's ``info_keys``, the mean over its steps as ``<key>``, and
    the last value as ``<key>_last``."""
    midway: bool = False
    """Whether it started midway in an earlier episode (``StartMidway``)."""
    step: int = 0
    """Index of the vector step in which it finished; 0 before it is added to a window."""


class RolloutConfig(NamedTuple):
    """Numbers of steps, epochs and minibatches of an on-policy iteration."""

    num_steps: int
    """Steps of each environment in an iteration."""
    num_epochs: int
    """Passes over these steps."""
    num_minibatches: int
    """Minibatches per epoch, each with the same number of rows of every trained task."""


Mode = Literal["explore", "exploit", "random"]
"""Selection of actions: sample from the policy's distribution, take its mode, sample uniformly."""

ActOutput: TypeAlias = (
    "npt.NDArray[np.float32] | tuple[npt.NDArray[np.float32], Mapping[str, npt.NDArray]]"
)
"""Actions ``[E, A]``, optionally with further fields of the transition by name, ``[E, ...]``."""


class Policy(Protocol):
    """Chooses actions.

    To accept exploration noise (``CorrelatedNoise``), ``act`` has a further argument, ``noise_EA``:
    standard normal noise ``[E, A]`` to sample from the distribution with, or None.
    """

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> ActOutput:
        """Choose actions ``[E, A]`` between -1 and 1."""
        ...


@runtime_checkable
class SeededPolicy(Policy, Protocol):
    """A policy whose random actions can be seeded."""

    def seed_actions(self, seed: int) -> None:
        """Seed the generator of random actions."""
        ...


@runtime_checkable
class WeightedPolicy(Policy, Protocol):
    """A policy whose weights can be sent to a copy in another process."""

    counters: Counters
    """Its ``updates`` is the number of updates of the weights so far."""

    def get_weights(self) -> dict[str, Any]:
        """Return CPU copies of the weights that ``act`` needs, suitable for ``torch.save``."""
        ...

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Load the weights returned by ``get_weights``."""
        ...


def step_fields(spec: EnvSpec) -> tuple[Field, ...]:
    """Return the fields that an environment receives and returns in one step."""
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


EPISODE_STEP = Field("episode_step", (), "int64")
"""The current or last step of an environment's episode."""
ACTIVE = Field("active", (), "bool")
"""Whether the environment is being stepped or reset, to locate where a worker died."""
PAUSED = Field("paused", (), "bool")
"""Whether the next step skips the environment."""
REPEATED = Field("repeated", (), "int64")
"""Number of steps replayed to start midway, since it was last read."""


def array_fields(spec: EnvSpec) -> tuple[Field, ...]:
    """Return the fields of a step, and the internal fields of groups."""
    return (*step_fields(spec), EPISODE_STEP, ACTIVE, PAUSED, REPEATED)


def info_column(key: str) -> str:
    """Return the column name of a logged number of ``info``, distinct from all field names."""
    return f"info/{key}"


POLICY_ACTION = "policy_action"
"""Name of the optional column of noise-free actions in collected episodes."""

STORED = ("observation", "action", "reward", "next_observation", "terminated")
"""The fields of a step that are stored, saved in checkpoints and sampled."""


def policy_action_field(spec: EnvSpec) -> Field:
    """Return the field of noise-free actions."""
    return Field(POLICY_ACTION, spec.action_space.shape)


def transition_fields(spec: EnvSpec, policy_fields: Sequence[Field] = ()) -> tuple[Field, ...]:
    """Return the fields of a transition that are stored, saved in checkpoints and sampled.

    Args:
        spec: the tasks.
        policy_fields: outputs of the policy's ``act`` in addition to its actions.
    """
    policy_names = {field.name for field in policy_fields}
    in_both = [field.name for field in spec.info_fields if field.name in policy_names]
    if in_both:
        raise ConfigurationError(
            f"info_fields have the same names as outputs of the algorithm's policy, {in_both}:"
            " rename them"
        )
    by_name = {field.name: field for field in step_fields(spec)}
    extra = (*spec.info_fields, *policy_fields)
    return tuple(field.stored() for field in (*(by_name[name] for name in STORED), *extra))
