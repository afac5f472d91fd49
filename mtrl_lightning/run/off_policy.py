"""Options that only off-policy algorithms use: declared where they are, refused by one rule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mtrl_lightning.errors import ConfigurationError

_GIVEN = "_given_off_policy_options"
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


def off_policy_only(*names: str) -> Callable[[_Constructor], _Constructor]:
    """Declare arguments of a constructor that only off-policy algorithms use.

    Args:
        names: the arguments; each has a default.
    """

    def declare(constructor: _Constructor) -> _Constructor:
        signature = inspect.signature(constructor)
        defaults = {name: signature.parameters[name].default for name in names}

        @functools.wraps(constructor)
        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            constructor(self, *args, **kwargs)
            options = defaults | signature.bind(self, *args, **kwargs).arguments
            vars(self)[_GIVEN] = {n: options[n] for n in names if options[n] != defaults[n]}

        noting.off_policy_options = names  # type: ignore[attr-defined]
        return noting  # type: ignore[return-value]

    return declare


def refuse_off_policy_options(sections: Mapping[str, Any]) -> None:
    """Refuse the off-policy options of a run whose algorithm is on-policy.

    Args:
        sections: the objects that take the options of the run, by section.

    Raises:
        ConfigurationError: naming the options that differ from their defaults.
    """
    given = {
        f"{section}.{name}": value
        for section, part in sections.items()
        for name, value in vars(part).get(_GIVEN, {}).items()
    }
    if given:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        raise ConfigurationError(
            f"an on-policy algorithm has no replay, and these options are given: {listed}. Leave"
            " them out, or set them back to their defaults (null for numbers); what it learns from"
            " is set by num_steps, num_epochs and num_minibatches of model.init_args"
        )
