"""What a checkpoint of several processes ("ranks") holds of each of them.

Each rank has its own environments and episodes, part of the replay, draws, and metrics since the
last row. They are in the places where a run of one process has them for rank 0, and in a list for
all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.saved import HINT

V = TypeVar("V")
Rules: TypeAlias = Mapping[str, Callable[[Sequence[Any]], Any]]
"""For each key of a state, what returns one rank's value from the values of all saved ranks."""

RANKS = "ranks"
"""Where a checkpoint of several ranks has the list of their parts."""
PART = ("collector", "data", "algorithm", "extra_states")
"""What a rank's part has."""
DATA = "MultiTaskData"
MOVED = "moved"
"""Key of the rings of other ranks that a rank reads; it is never saved."""
ROLLOUT = "rollout"
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""End of the names of what modules save beside tensors, such as episodes under way."""


class Origin(NamedTuple):
    """Where an environment of a rank was when the checkpoint was saved."""

    rank: int
    env: int


class Share(NamedTuple):
    """What one rank takes over from a checkpoint of another number of ranks.

    A class with a state says by a method ``reshard(states, share)``, beside the methods that save
    and load the state, what the state of this rank is. ``states`` are those of all saved ranks.
    """

    rank: int
    """The rank."""
    size: int
    """Number of ranks now."""
    num_envs: int
    """Environments of each saved rank."""
    origins: tuple[Origin, ...]
    """Where each environment of the rank was."""

    def own(self, states: Sequence[V]) -> V | None:
        """Return the state of the saved rank with the same number; None if there was none."""
        return states[self.rank] if self.rank < len(states) else None

    def of_envs(self, lists: Sequence[list[V]]) -> list[V]:
        """Return the rank's elements of lists that have one element per environment.

        Raises:
            ConfigurationError: if a list has another length.
        """
        for values in lists:
            if not isinstance(values, list) or len(values) != self.num_envs:
                raise ConfigurationError(
                    "the checkpoint has a list of another length than the"
                    f" {self.num_envs} environments of each process: {HINT}"
                )
        return [lists[origin.rank][origin.env] for origin in self.origins]

    def of_named_envs(self, states: Sequence[Mapping[str, V]]) -> dict[str, V]:
        """Return the rank's values of dictionaries ``{number of the environment: value}``.

        Raises:
            ConfigurationError: if a number is not one of the environments.
        """
        known = {str(env) for env in range(self.num_envs)}
        for values in states:
            if not values.keys() <= known:
                raise ConfigurationError(
                    f"the checkpoint names environments {', '.join(map(str, values))}, and each"
                    f" process had {self.num_envs}: {HINT}"
                )
        return {
            str(env): states[origin.rank][str(origin.env)]
            for env, origin in enumerate(self.origins)
            if str(origin.env) in states[origin.rank]
        }


def join(whose: str, states: Sequence[Mapping[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return one rank's state from the states of all saved ranks, each key by its own rule.

    Args:
        whose: names them in an error.
        states: of all saved ranks.
        rules: of every key that there may be.

    Raises:
        ConfigurationError: naming a key that has no rule, or that not all ranks have.
    """
    keys = dict.fromkeys(key for state in states for key in state)
    for key in keys:
        if key not in rules:
            raise ConfigurationError(
                f"the checkpoint's state of {whose} has {key!r}, which cannot be shared out among"
                " another number of processes: continue with as many as the checkpoint has"
            )
        if any(key not in state for state in states):
            raise ConfigurationError(f"not all processes' states of {whose} have {key!r}: {HINT}")
    return {key: rules[key]([state[key] for state in states]) for key in keys}


def own_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of the rank that made it."""
    algorithm = checkpoint["mtrl_lightning"]
    return {
        "collector": checkpoint["callbacks"][ROLLOUT]["collector"],
        "data": checkpoint[DATA],
        "algorithm": {name: algorithm[name] for name in OF_ALGORITHM if name in algorithm},
        "extra_states": {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name.endswith(EXTRA_STATE)
        },
    }


def with_part(checkpoint: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the rank with this part would have made it."""
    callbacks = checkpoint["callbacks"]
    rollout = {**callbacks[ROLLOUT], "collector": part["collector"]}
    state_dict = copy.copy(checkpoint["state_dict"])  # of the same class, with the versions in it
    state_dict.update(part["extra_states"])
    return {
        **checkpoint,
        "callbacks": {**callbacks, ROLLOUT: rollout},
        DATA: part["data"],
        "mtrl_lightning": {**checkpoint["mtrl_lightning"], **part["algorithm"]},
        "state_dict": state_dict,
    }


def parts_of(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a checkpoint's ranks; one if it was made by one process.

    Raises:
        ConfigurationError: if a part is not one of this checkpoint.
    """
    if RANKS not in checkpoint:
        return [own_part(checkpoint)]
    parts = checkpoint[RANKS]
    if not isinstance(parts, list) or not parts:
        raise ConfigurationError(f"the checkpoint's {RANKS} is no list of processes: {HINT}")
    names = own_part(checkpoint)["extra_states"].keys()
    for rank, part in enumerate(parts):
        wrong = _what_is_wrong(part, rank, names)
        if wrong:
            raise ConfigurationError(f"the checkpoint's part of rank {rank} {wrong}: {HINT}")
    return parts


def _what_is_wrong(part: Any, rank: int, names: Iterable[str]) -> str:
    if not isinstance(part, dict) or part.keys() != {*PART}:
        return f"does not consist of {', '.join(PART)}"
    for key in PART:
        if not isinstance(part[key], dict):
            return f"has a {key} that is no dictionary"
    if not part["algorithm"].keys() <= {*OF_ALGORITHM}:
        return f"has more of the algorithm than {', '.join(OF_ALGORITHM)}"
    if part["extra_states"].keys() != {*names}:
        return "has the states of other modules"
    manifest = part["data"].get("replay")
    if isinstance(manifest, dict) and manifest.get("folder") != f"rank_{rank}":
        return f"has a replay that is not in rank_{rank}"
    return ""


def state_for(checkpoint: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the checkpoint as one of its ranks made it."""
    return with_part(checkpoint, parts_of(checkpoint)[rank]) if RANKS in checkpoint else checkpoint


def manifests_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the replay files that a checkpoint needs, one of each rank.

    Raises:
        ConfigurationError: if one is not what a run saves.
    """
    if RANKS in checkpoint:
        found = [part["data"].get("replay") for part in parts_of(checkpoint)]
    else:
        found = [checkpoint.get(DATA, {}).get("replay")]
    for manifest in found:
        if manifest is not None and (not isinstance(manifest, dict) or MOVED in manifest):
            raise ConfigurationError(f"the checkpoint's list of replay files is none: {HINT}")
    return [manifest for manifest in found if manifest]
