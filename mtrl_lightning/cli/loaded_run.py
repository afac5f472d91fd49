"""The policy and the tasks of a run, for commands that use a trained policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError, causes
from mtrl_lightning.runs import best_checkpoint, config_file_of, read_config, run_folder_of

if TYPE_CHECKING:
    from mtrl_lightning.data import TaskData
    from mtrl_lightning.policy import LoadedPolicy

LIBRARIES = ("mtrl_lightning", "torch", "lightning")
"""Packages whose classes a checkpoint may use even if not named in the run's configuration."""


class LoadedRun(NamedTuple):
    """A checkpoint's policy, and the data module of its run."""

    checkpoint: Path
    folder: Path
    """The run folder."""
    policy: LoadedPolicy
    data: TaskData
    """Provides ``benchmark`` and ``action_transforms``; its environments are not started."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a run's checkpoint."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="run folder, ROOT/NAME/version_N, or name of a run (its best checkpoint is used), a"
        " checkpoint, or a policy of this package, such as mt10 (list policies shows all)",
    )
    add_trust_argument(parser)


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the classes that a checkpoint may use."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="MODULE",
        help="module or package whose classes the checkpoint may use in addition to those named in"
        " the run's config.yaml; may be repeated",
    )


def load_run(run: str, trust: Sequence[str]) -> LoadedRun:
    """Load the policy of a run's checkpoint, and build the data module of its configuration.

    Args:
        run: as for ``best_checkpoint``.
        trust: further modules whose classes the checkpoint may use.
    """
    checkpoint = best_checkpoint(run)  # unknown runs fail before PyTorch is imported
    folder = run_folder_of(checkpoint)
    config = read_config(config_file_of(folder))

    from mtrl_lightning.policy import load_policy
    from mtrl_lightning.utils.quiet import quiet

    with quiet():
        data = data_of(config)
        policy = load_policy(checkpoint, trust=[*named_classes(config.get("model")), *trust])
    if policy.task_names != data.spec.task_names:
        raise ConfigurationError(
            f"{checkpoint} has the tasks {', '.join(policy.task_names)}, but the run's"
            f" configuration has {', '.join(data.spec.task_names)}: use the config.yaml of its run"
        )
    return LoadedRun(checkpoint, folder, policy, data)


def data_of(config: dict[str, Any]) -> TaskData:
    """Build the data module of a configuration."""
    from jsonargparse import ArgumentError, ArgumentParser

    from mtrl_lightning.data import TaskData

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TaskData, "data", required=True)
    try:
        return parser.instantiate_classes(parser.parse_object({"data": config.get("data")})).data
    except (ArgumentError, ValueError, TypeError) as error:
        for cause in causes(error):
            if isinstance(cause, ConfigurationError):
                raise cause from None
        raise ConfigurationError(
            f"the data module of the run's configuration cannot be built ({error}): use the code"
            " version of the run, in a folder from which its modules can be imported"
        ) from error


def named_classes(config: Any) -> list[str]:
    """Return the classes and modules that a configuration names, in addition to the libraries'."""
    named = [path for path in _class_paths(config) if path.split(".")[0] not in LIBRARIES]
    return [name for path in named for name in (path, path.rpartition(".")[0])]


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if isinstance(config.get("class_path"), str):
            yield config["class_path"]
        config = list(config.values())
    for value in config if isinstance(config, list) else ():
        yield from _class_paths(value)
