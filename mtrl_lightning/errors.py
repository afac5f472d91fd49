"""The failures that a user meets; the command line prints their message without a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType


class ConfigurationError(ValueError):
    """What the user asked for cannot work; the message names the remedy."""


class EnvironmentFaultError(RuntimeError):
    """An environment or its worker process broke; the message names the task, the step and the cause."""


class RestartsExhaustedError(EnvironmentFaultError):
    """Environments broke more often than they may be rebuilt; what was learned and seen is whole."""


class CallError(EnvironmentFaultError):
    """An environment could not answer a question; asking a rebuilt one would not help."""


class DivergenceError(RuntimeError):
    """A loss or its gradient is not finite; the message names the tasks and the remedy."""


class PolicyFaultError(EnvironmentFaultError):
    """The policy's actions are not numbers: no environment is to blame."""


def import_optional(module: str, package: str) -> ModuleType:
    """Import an optional package when it is first needed.

    Raises:
        ConfigurationError: naming the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigurationError(f"{module} is not installed: pip install {package}") from error
