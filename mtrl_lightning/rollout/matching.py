"""A policy for the tasks of a benchmark, matched by their names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec, pad_to
from mtrl_lightning.transitions import ActOutput, Mode, Policy


class _MatchedPolicy:
    """A policy for environments with other task indices or another padding.

    Args:
        policy: the policy.
        policy_spec: the policy's tasks.
        spec: the environments' tasks.
    """

    def __init__(self, policy: Policy, policy_spec: EnvSpec, spec: EnvSpec) -> None:
        self.spec = spec
        self._policy = policy
        self._policy_spec = policy_spec
        indices = {name: task for task, name in enumerate(policy_spec.task_names)}
        # environments of tasks unknown to the policy are not stepped
        self._policy_task_T = np.array([indices.get(name, -1) for name in spec.task_names])

    def act(
        self,
        observation_ED: npt.NDArray,
        task_E: npt.NDArray[np.int64],
        mode: Mode,
        noise_EA: npt.NDArray[np.float32] | None = None,
    ) -> ActOutput:
        """Choose actions ``[E, A]`` with the environments' task indices and action size."""
        noise = {}
        if noise_EA is not None:
            noise["noise_EA"] = pad_to(noise_EA, self._policy_spec.action_space.shape)
        padded_ED = pad_to(observation_ED, self._policy_spec.observation_space.shape)
        output = self._policy.act(padded_ED, self._policy_task_T[task_E], mode, **noise)
        action_EA, fields = output if isinstance(output, tuple) else (output, None)
        action_EA = pad_to(np.asarray(action_EA), self.spec.action_space.shape)
        return action_EA if fields is None else (action_EA, fields)


def matched_policy(policy: Policy, spec: EnvSpec, tasks: Iterable[int]) -> Policy:
    """Return the policy for the tasks of a benchmark, matched by name.

    The benchmark may have any of the policy's tasks, in any order and with a different padding. A
    policy without a ``spec`` is returned unchanged, and receives the benchmark's task indices.

    Args:
        policy: the policy.
        spec: spec of the benchmark.
        tasks: indices of the tasks in ``spec.task_names`` that are stepped.

    Returns:
        The adapted policy; the policy itself if indices and sizes are equal.
    """
    policy_spec = getattr(policy, "spec", None)
    if not isinstance(policy_spec, EnvSpec):
        return policy
    names = [spec.task_names[task] for task in dict.fromkeys(tasks)]
    unknown = [name for name in names if name not in policy_spec.task_names]
    if unknown:
        raise ConfigurationError(
            f"the policy does not have the tasks {', '.join(unknown)}, only"
            f" {', '.join(policy_spec.task_names)}: use a benchmark of any of these"
        )
    for name in names:
        for kind in ("observation", "action"):
            shape, shape_here = (
                one.shape_of(kind, one.task_names.index(name)) for one in (policy_spec, spec)
            )
            if shape != shape_here:
                raise ConfigurationError(
                    f"the {kind} of {name} has shape {shape} in the policy and {shape_here} in the"
                    " benchmark: use a benchmark with the wrappers and pixels with which the policy"
                    " was trained"
                )
    is_same = policy_spec.task_names == spec.task_names and all(
        getattr(policy_spec, space).shape == getattr(spec, space).shape
        for space in ("observation_space", "action_space")
    )
    return policy if is_same else _MatchedPolicy(policy, policy_spec, spec)
