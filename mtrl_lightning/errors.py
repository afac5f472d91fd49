"""Errors whose message is meant for the user; the command line prints it without a traceback."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from types import ModuleType


class ConfigurationError(ValueError):
    """An invalid configuration; the message says how to fix it."""


class EnvironmentFaultError(RuntimeError):
    """An environment or its worker process failed.

    The message names the task, the step and the cause.
    """


class RestartsExhaustedError(EnvironmentFaultError):
    """Environments failed more often than allowed; networks and transitions are intact."""


class CallError(EnvironmentFaultError):
    """An environment raised when built, called or first stepped: rebuilding would not help."""


class DivergenceError(RuntimeError):
    """A loss or its gradient is not finite; the message names the tasks and what to do."""


class PolicyFaultError(RuntimeError):
    """The actions of the policy are not finite; the environments are not the cause."""


class DriftError(RuntimeError):
    """The processes of a run no longer have the same weights or statistics."""


class Interrupted(SystemExit):
    """A signal interrupted the run; the exit code is 128 plus the signal number, as in shells."""

    is_on_all_ranks = True


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def name_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint on an unknown name: similar names, or all known ones if none is similar."""
    known = list(known)
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(similar)}?" if similar else f"known: {', '.join(known)}"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    found: dict[str, str] = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def import_optional(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: the module to import.
        extra: this package's extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigurationError(
            f'{module} is not installed: pip install "mtrl_lightning[{extra}]"'
        ) from error
