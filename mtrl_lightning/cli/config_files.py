"""Configuration files that are given by name and that extend others.

A file's top-level key ``extends`` names one file or a list of files, relative to the file itself.
``-c FILE`` is then exactly ``-c EXTENDED_1 -c EXTENDED_2 ... -c FILE``: what comes later overrides
what comes earlier, by the rules of jsonargparse. The key itself is not part of the configuration.
Where no such file exists, the name of a configuration of the package, such as ``env/toy``, is
accepted, both after ``-c`` and in ``extends``.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning_utilities.core.enums import StrEnum

from mtrl_lightning.cli.config_names import (
    configs_folder,
    find_config,
    hint_of,
    named_config,
)
from mtrl_lightning.errors import ConfigurationError

# defaults of Lightning's callbacks, such as Timer's interval, are written as texts
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(str(value.value))
)
KEY = "extends"
BOTH_SIDES = ("network", "gradient")
"""Groups of the package whose files name parts of actor and critic."""
FILE_OR_NAME = re.compile(r"[\w./\\~+ -]*[\w./\\~+]")
"""What can be a path or a name; ``-`` is the standard input, the rest YAML or a URL."""


def files_of(given: str) -> list[Path]:
    """Return the files that ``-c GIVEN`` applies, in their order.

    Args:
        given: a YAML file, or the name of a configuration.

    Raises:
        ConfigurationError: if it or an extended file is missing, if files extend each other in a
            cycle, or if ``extends`` is neither a file nor a list of files.
    """
    return _with_extended(find_config(given), ())


def config_of(key: str, value: Any) -> str:
    """Return a configuration of one option as text: ``{"a": {"b": value}}`` for the key ``a.b``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return json.dumps(value)


def _with_extended(path: Path, extending: tuple[Path, ...]) -> list[Path]:
    """Return the file after all files that it extends."""
    if path.resolve() in [file.resolve() for file in extending]:
        cycle = " -> ".join(str(file) for file in (*extending, path))
        raise ConfigurationError(
            f"configuration files extend each other in a cycle: {cycle}; remove one {KEY}"
        )
    files: list[Path] = []
    for name in _names_of(path):
        file = path.parent / name
        found = file if file.is_file() else named_config(name)
        if found is None:
            raise ConfigurationError(
                f"{path} extends {name}, and there is no file {file}{hint_of(name)}."
                f" {KEY} takes names and paths relative to the file that it stands in"
            )
        files += _with_extended(found, (*extending, path))
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
        for file in files_of(values):
            super().__call__(parser, cfg, _of_algorithm(file, cfg), option_string)
            cfg.pop(KEY, None)


def _of_algorithm(file: Path, cfg: Namespace) -> str:
    """Return a file without the critic's side, if the algorithm chosen before it has no critic.

    Only files of the package are changed: what a user's own file gives is never left out.
    """
    module, _, name = str(cfg.get("model.class_path") or "").rpartition(".")
    folders = [configs_folder().resolve() / group for group in BOTH_SIDES]
    if file.resolve().parent not in folders or not module:
        return str(file)
    kind = getattr(importlib.import_module(module), name)
    lacking = getattr(kind, "lacking_options", {})
    content = yaml.safe_load(file.read_text())
    given = content.get("model", {}).get("init_args", {})
    unused = [key for key in given if key.startswith("critic") and key in lacking]
    if not unused:
        return str(file)
    for key in unused:
        del given[key]
    return json.dumps(content)
