"""The fields of a transition: workers' shared memory, storage, chunk files and batches use them.

A further field of a step that is stored, saved and sampled (such as ``truncated``) is one more name
in ``STORED``. A number that environments report in ``info`` is one entry of
``EnvSpec.info_fields``, and a field that a policy's ``act`` returns beside its actions one of
``Algorithm.policy_fields``. What is only logged of ``info`` is named in ``EnvSpec.info_keys`` and
is no field of a transition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec, Field


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
        policy_fields: outputs of the policy's ``act`` beside its actions.

    Raises:
        ConfigurationError: if one of the ``info_fields`` has the name of one of these outputs.
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
