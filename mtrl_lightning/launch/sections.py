"""The sections of a run and the class that takes the options of each.

The command line and ``train`` build a run from this table.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from mtrl_lightning.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    MetricsCallback,
    ReplayCallback,
    ResetCallback,
    RolloutCallback,
)
from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.run.data import MultiTaskData

CALLBACKS: dict[str, type[SessionCallback]] = {
    "resets": ResetCallback,
    "rollout": RolloutCallback,
    "evaluation": EvaluationCallback,
    "metrics": MetricsCallback,
    "replay": ReplayCallback,
    "checkpoint": CheckpointCallback,
}
"""The callbacks with options that every run has."""
SECTIONS: dict[str, type] = {"data": MultiTaskData, **CALLBACKS, "trainer": Trainer}
SEEDS = ("data.seed", "rollout.seed")
"""Options that the seed of the run sets."""
LEARNING_OPTIONS = (
    "seed_everything",
    "model",
    "trainer.precision",
    *(f"data.{name}" for name in MultiTaskData.learning_options),
    *(f"{section}.{name}" for section, kind in CALLBACKS.items() for name in kind.learning_options),
)
"""Options, and sections of them, that change the result."""


def options_of(section: str) -> dict[str, Any]:
    """Return the options of a section that have a default, with it."""
    parameters = inspect.signature(SECTIONS[section]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def complete(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return all options of all sections, with the defaults of those that are left out.

    Raises:
        ConfigurationError: if a section has no option of that name.
    """
    completed: dict[str, dict[str, Any]] = {}
    for section, kind in SECTIONS.items():
        options = sections.get(section, {})
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f"{section} is {options!r}: give a dictionary of its options, such as"
                f" {section}={{...}} (see help(train))"
            )
        names = [*inspect.signature(kind).parameters]
        for name in options:
            if name not in names:
                hint = name_hint(name, names)
                raise ConfigurationError(f"{section} has no option {name!r}: {hint}")
        completed[section] = options_of(section) | dict(options)
    return completed
