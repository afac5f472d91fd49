"""Options that not every kind of algorithm uses: declared where they are, refused by one rule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.types import Kind

REASONS: dict[Kind, str] = {
    "off-policy": "an off-policy algorithm learns from its own steps",
    "on-policy": "an on-policy algorithm has no replay",
    "offline": "an offline algorithm learns from demonstrations and steps no environments",
}
"""Why an algorithm of a kind refuses an option."""
REPLACEMENTS: dict[Kind, str] = {
    "off-policy": "demonstrations are for algorithms such as BehaviourCloning (-c algorithm/bc)",
    "on-policy": "its updates are set by num_steps, num_epochs and num_minibatches of"
    " model.init_args",
    "offline": "its updates are set by data.demonstrations, data.batch_size and"
    " rollout.total_steps, which is its number of updates",
}
"""Replacements of the refused options."""
_GIVEN = "_given_options_of_kinds"
"""Attribute of an object: its given options, each with the kinds that refuse it."""
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


def refused_by(kinds: tuple[Kind, ...], *names: str) -> Callable[[_Constructor], _Constructor]:
    """Declare arguments of a constructor that algorithms of some kinds do not use.

    Args:
        kinds: that refuse the arguments where these are given.
        names: the arguments; each has a default.
    """

    def declare(constructor: _Constructor) -> _Constructor:
        signature = inspect.signature(constructor)
        defaults = {name: signature.parameters[name].default for name in names}

        @functools.wraps(constructor)
        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            constructor(self, *args, **kwargs)
            options = defaults | signature.bind(self, *args, **kwargs).arguments
            # an empty list is none
            given = {
                name: (options[name], kinds)
                for name in names
                if options[name] not in (defaults[name], [])
            }
            given |= vars(self).get(_GIVEN, {})
            # in the order of the arguments
            order = (*signature.parameters, *given)
            vars(self)[_GIVEN] = {name: given[name] for name in order if name in given}

        others = getattr(constructor, "refusing_kinds", {})
        noting.refusing_kinds = {**others, **dict.fromkeys(names, kinds)}  # type: ignore[attr-defined]
        return noting  # type: ignore[return-value]

    return declare


def refuse_options(kind: Kind, sections: Mapping[str, Any]) -> None:
    """Refuse the given options that a run's algorithm does not use.

    Args:
        kind: of the algorithm.
        sections: the objects that take the options of the run, by section.

    Raises:
        ConfigurationError: naming the options that differ from their defaults.
    """
    given = {
        f"{section}.{name}": value
        for section, part in sections.items()
        for name, (value, kinds) in vars(part).get(_GIVEN, {}).items()
        if kind in kinds
    }
    if given:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        raise ConfigurationError(
            f"{REASONS[kind]}, and these options are given: {listed}. Leave them out, or set them"
            f" back to their defaults (null for numbers); {REPLACEMENTS[kind]}"
        )
