"""Configuration files that extend others.

A file's top-level key ``extends`` names one file or a list of files, relative to the file itself.
``-c FILE`` is then exactly ``-c EXTENDED_1 -c EXTENDED_2 ... -c FILE``: what comes later overrides
what comes earlier, by the rules of jsonargparse. The key itself is not part of the configuration.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Action
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from mtrl_lightning.errors import ConfigurationError

KEY = "extends"


def extended_files(path: str | Path) -> list[Path]:
    """Return the file and all files that it extends, in the order in which they are applied.

    Args:
        path: a YAML file.

    Raises:
        ConfigurationError: if an extended file is missing, if files extend each other in a cycle,
            or if ``extends`` is neither a file nor a list of files.
    """
    return _extended_files(Path(path), ())


def _extended_files(path: Path, extending: tuple[Path, ...]) -> list[Path]:
    if path.resolve() in [file.resolve() for file in extending]:
        cycle = " -> ".join(str(file) for file in (*extending, path))
        raise ConfigurationError(
            f"configuration files extend each other in a cycle: {cycle}; remove one {KEY}"
        )
    files: list[Path] = []
    for name in _names_of(path):
        file = path.parent / name
        if not file.is_file():
            raise ConfigurationError(
                f"{path} extends {name}, and there is no file {file}:"
                f" {KEY} takes paths relative to the file that it stands in"
            )
        files += _extended_files(file, (*extending, path))
    return [*files, path]


def _names_of(path: Path) -> list[str]:
    """Return what a file's ``extends`` names."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # the parser reads the file next, and explains the error
    if not isinstance(content, dict) or KEY not in content:
        return []
    names = content[KEY]
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"{KEY} in {path} is {content[KEY]!r}: give a file, or a list of files"
        )
    return names


class ExtendingConfigFile(ActionConfigFile):
    """The option ``-c``, for files that extend others."""

    def __call__(  # type: ignore[override]
        self,
        parser: ArgumentParser,
        cfg: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Apply the extended files, then the file itself."""
        if not os.path.isfile(values):  # a configuration as a string, or a missing file
            super().__call__(parser, cfg, values, option_string)
            return
        for file in extended_files(values):
            super().__call__(parser, cfg, str(file), option_string)
            cfg.pop(KEY, None)


class ConfigFileParser(LightningArgumentParser):
    """Lightning's parser, with files that extend others and with ``null`` in nested options."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Action:
        """Add an argument; that of configuration files is replaced by ours."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = ExtendingConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any
    ) -> Namespace:
        """Parse the arguments of the command line."""
        given = sys.argv[1:] if args is None else args
        return super().parse_args(_with_nested_nulls(given), *rest, **kwargs)


def _with_nested_nulls(args: Sequence[str]) -> list[str]:
    """Replace ``--a.init_args.b.init_args.c null`` by a configuration with the same effect.

    jsonargparse 4.53 passes the value on as the text ``None`` when a class is nested in another
    one, and no type but a string accepts that. ``--config`` with a string takes effect in its
    place.
    """
    replaced: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        option, has_value, value = argument.partition("=")
        if not option.startswith("--") or option.count(".init_args.") < 2:
            replaced.append(argument)
        elif has_value and value == "null":
            replaced.append(f"--config={_config_with_null(option)}")
        elif not has_value and remaining[:1] == ["null"]:
            remaining.pop(0)
            replaced.append(f"--config={_config_with_null(option)}")
        else:
            replaced.append(argument)
    return replaced


def _config_with_null(option: str) -> str:
    config: Any = None
    for key in reversed(option.removeprefix("--").split(".")):
        config = {key: config}
    return json.dumps(config)
