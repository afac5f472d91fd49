"""The states of a collector's listeners and action transforms, by class.

A checkpoint identifies a part by its class, and by its index among the parts of that class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrl_lightning.ranks.share import Share


def states_of(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the states of listeners or action transforms by name."""
    return {name: part.state_dict() for name, part in _named(parts).items()}


def load_states(parts: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restore the parts that have a state; the others start from the beginning."""
    for name, part in _named(parts).items():
        if states.get(name):
            part.load_state_dict(states[name])


def reshard_states(
    parts: Sequence[Any], states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return the states of listeners or transforms on a rank; those it does not have are left out.

    Args:
        parts: the listeners or transforms.
        states: by name, of all saved ranks.
        share: the rank's part of the saved run.
    """
    return {
        name: part.reshard([state[name] for state in states], share)
        for name, part in _named(parts).items()
        if name in states[0]
    }


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts by class and by their index among the parts of the class."""
    named: dict[str, Any] = {}
    for part in parts:
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        index = sum(name.rpartition(":")[0] == kind for name in named)
        named[f"{kind}:{index}"] = part
    return named
