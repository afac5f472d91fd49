"""The share of one process ("rank") of a checkpoint that another number of processes wrote.

The list of all environments is the same for any number of ranks. Each environment moves, with its
current episode and its ring of the replay, to the rank that now steps it. A class with a state, but
``Algorithm`` (``data.run_io``), has a method ``reshard(states, share)``
beside those that save and load the state: it returns the state of one rank from the states of all
saved ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from mtrl_lightning.errors import ConfigurationError

V = TypeVar("V")
Rules: TypeAlias = Mapping[str, Callable[[Sequence[Any]], Any]]
"""For each key of a state, the function from the values of all saved ranks to one rank's value."""


class SavedEnv(NamedTuple):
    """An environment of the checkpoint."""

    rank: int
    """The rank that saved it."""
    env: int
    """Its index among the environments of that rank."""


class Share(NamedTuple):
    """The part of a checkpoint that one of another number of ranks takes over."""

    rank: int
    """The rank."""
    size: int
    """Number of ranks of this run."""
    num_envs: int
    """Environments of each saved rank."""
    saved_envs: tuple[SavedEnv, ...]
    """The environments that the rank takes over, in its order."""

    def own(self, states: Sequence[V]) -> V | None:
        """Return the state of the saved rank with the same number; None if there was none."""
        return states[self.rank] if self.rank < len(states) else None

    def of_envs(self, lists: Sequence[list[V]]) -> list[V]:
        """Return the rank's elements of lists that have one element per environment."""
        return [lists[saved.rank][saved.env] for saved in self.saved_envs]

    def of_named_envs(self, states: Sequence[Mapping[str, V]]) -> dict[str, V]:
        """Return the rank's values of dictionaries ``{index of the environment: value}``."""
        return {
            str(env): states[saved.rank][str(saved.env)]
            for env, saved in enumerate(self.saved_envs)
            if str(saved.env) in states[saved.rank]
        }

    def join(self, name: str, states: Sequence[Mapping[str, Any]], rules: Rules) -> dict[str, Any]:
        """Return the rank's state from the states of all saved ranks, each key by its own rule.

        Args:
            name: of the object that has the state, for errors.
            states: of all saved ranks.
            rules: for every key that there may be.

        Raises:
            ConfigurationError: naming a key that has no rule.
        """
        keys = dict.fromkeys(key for state in states for key in state)
        for key in keys:
            if key not in rules:
                raise ConfigurationError(
                    f"the checkpoint's state of {name} has {key!r}, which cannot be shared out"
                    " among another number of processes: continue with as many as the checkpoint"
                    " has"
                )
        return {key: rules[key]([state[key] for state in states]) for key in keys}


def share_of(tasks: Sequence[list[int]], rank: int, size: int) -> Share:
    """Return the share of a rank: each rank has the same number of environments per task.

    Args:
        tasks: the task of each environment, for each rank of the checkpoint.
        rank: the rank.
        size: number of ranks of this run.

    Raises:
        ConfigurationError: if the environments per task cannot be shared equally.
    """
    saved_per_task = tasks[0].count(tasks[0][0])
    distinct = list(dict.fromkeys(tasks[0]))
    all_per_task = saved_per_task * len(tasks)
    envs_per_task, rest = divmod(all_per_task, size)
    if rest:
        raise ConfigurationError(
            f"the checkpoint has {all_per_task} environments per task, which {size} processes"
            " cannot share equally: continue with a number of processes that divides it"
        )
    saved_envs = []
    for task_index in range(len(distinct)):
        # all environments of a task are numbered across ranks, and each rank has a contiguous range
        for env_of_all in range(rank * envs_per_task, (rank + 1) * envs_per_task):
            saved_rank, env_of_task = divmod(env_of_all, saved_per_task)
            saved_envs.append(SavedEnv(saved_rank, task_index * saved_per_task + env_of_task))
    return Share(rank, size, len(tasks[0]), tuple(saved_envs))
