"""Configuration files that are given by name and that extend others.

A file's top-level key ``extends`` names one file or a list of files, relative to the file itself.
``-c FILE`` is then exactly ``-c EXTENDED_1 -c EXTENDED_2 ... -c FILE``: what comes later overrides
what comes earlier, by the rules of jsonargparse. The key itself is not part of the configuration.
Where no such file exists, the name of a configuration of the package, such as ``env/toy``, is
accepted, both after ``-c`` and in ``extends``.
"""

from __future__ import annotations

import re
import sys
from argparse import Action
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.enums import StrEnum

from mtrl_lightning.cli.arguments import rewritten
from mtrl_lightning.cli.config_names import find_config, hint_of, named_config
from mtrl_lightning.cli.help_texts import only_groups, own_groups
from mtrl_lightning.errors import ConfigurationError

# defaults of Lightning's callbacks, such as Timer's interval, are written as texts
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(str(value.value))
)
KEY = "extends"
FILE_OR_NAME = re.compile(r"[\w./\\~+ -]*[\w./\\~+]")
"""What can be a path or a name; ``-`` is the standard input, the rest YAML or a URL."""


def is_sweep_file(path: Path) -> bool:
    """Return whether a YAML file describes a sweep instead of a run."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # the parser reads the file next, and explains the error
    return isinstance(content, dict) and {"method", "parameters"} <= set(content)


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
            named = named_config(name)
            if named is None:
                raise ConfigurationError(
                    f"{path} extends {name}, and there is no file {file}{hint_of(name)}."
                    f" {KEY} takes names and paths relative to the file that it stands in"
                )
            file = named
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
    """The option ``-c``, for files that are given by name and that extend others."""

    def __call__(  # type: ignore[override]
        self,
        parser: ArgumentParser,
        cfg: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Apply the extended files, then the file itself.

        Raises:
            ConfigurationError: if there is neither a file nor a configuration of this name.
        """
        if not isinstance(values, str) or FILE_OR_NAME.fullmatch(values) is None:
            super().__call__(parser, cfg, values, option_string)
            return
        path = find_config(values)
        if is_sweep_file(path):
            raise ConfigurationError(
                f"{values} is a sweep file, no configuration of one run:"
                f" mtrl-lightning sweep {values}"
            )
        for file in extended_files(path):
            super().__call__(parser, cfg, str(file), option_string)
            cfg.pop(KEY, None)


class ConfigFileParser(LightningArgumentParser):
    """Lightning's parser, with our configuration files and rewritten arguments."""

    _commands: Any = None
    """The subcommands; None in the parser of one of them."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the subcommands, whose parsers know which of their options take a value."""
        self._commands = super().add_subcommands(*args, **kwargs)
        return self._commands

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
        flags = self.flags_of(given[0]) if given else set()
        return super().parse_args(rewritten(given, flags), *rest, **kwargs)

    def flags_of(self, command: str) -> set[str]:
        """Return the options of a subcommand that take no value; none of what is no subcommand."""
        parsers = {} if self._commands is None else self._commands.choices
        actions = parsers[command]._actions if command in parsers else []
        return {name for action in actions if action.nargs == 0 for name in action.option_strings}

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help, with our own options first and without the trainer's."""
        with only_groups(self, own_groups(self)):
            return super().format_help(*args, **kwargs)
