"""Specs of tasks that have no environments, for networks, gradient methods and algorithms."""

from collections.abc import Sequence

import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmarks.images import packed_size, parts_of
from mtrl_lightning.spec import EnvSpec


def spec_of(
    tasks: int | Sequence[str],
    observation_space: Box | None = None,
    *,
    action_dim: int = 2,
    train_tasks: Sequence[int] | None = None,
    observation_sizes: Sequence[int] = (),
) -> EnvSpec:
    """Return the spec of a number of tasks, or of tasks of these names; all are trained."""
    numbered = tuple(f"task-{i}" for i in range(tasks)) if isinstance(tasks, int) else ()
    names = numbered or tuple(tasks)
    return EnvSpec(
        task_names=names,
        observation_space=observation_space or Box(-np.inf, np.inf, (4,), np.float32),
        action_space=Box(-1.0, 1.0, (action_dim,), np.float32),
        horizon=10,
        has_success=True,
        train_tasks=tuple(range(len(names)) if train_tasks is None else train_tasks),
        protocol={"benchmark": "dummy", "horizon": 10},
        observation_sizes=tuple(observation_sizes),
    )


def packed_spec(num_tasks: int = 3, size: int = 3, side: int = 17) -> EnvSpec:
    """Return tasks whose observations are a vector and an image."""
    parts = parts_of(size, (3, side, side))
    space = Box(0, 255, (1, packed_size(parts)), np.uint8)
    return spec_of(num_tasks, space)._replace(observation_parts=parts)


def discrete_spec(
    sizes: Sequence[int] = (2, 3, 3), choices: tuple[int, ...] | None = None
) -> EnvSpec:
    """Return tasks with so many discrete actions, or with actions of several components."""
    dim = sum(choices) if choices else max(sizes)
    return spec_of(len(sizes), action_dim=dim)._replace(
        action_choices=choices or (dim,), action_sizes=() if choices else tuple(sizes)
    )
