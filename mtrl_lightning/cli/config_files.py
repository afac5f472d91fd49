"""Configuration files that can be selected by name and can extend others.

A file's top-level key ``extends`` names one file or a list of files, relative to the file itself.
``-c FILE`` is then equivalent to ``-c EXTENDED_1 -c EXTENDED_2 ... -c FILE``: later files override
earlier ones by the rules of jsonargparse. The key itself is not part of the configuration. If there
is no such file, ``-c`` and ``extends`` accept the name of a configuration of the package, such as
``env/toy``.
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

from mtrl_lightning.algorithms.arguments import parameters_of
from mtrl_lightning.cli.config_names import configs_folder, find_config
from mtrl_lightning.errors import ConfigurationError

# write enum defaults of Lightning's callbacks, such as Timer's interval, as strings
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(str(value.value))
)
KEY = "extends"
BOTH_SIDES = ("network", "gradient")
"""Configuration groups of the package whose files configure both actor and critic."""
FILE_OR_NAME = re.compile(r"[\w./\\~+ -]*[\w./\\~+]")
"""Matches paths and names; ``-`` is the standard input, and the rest is YAML or a URL."""


def files_of(given: str, folder: Path = Path(), extending: tuple[Path, ...] = ()) -> list[Path]:
    """Return the files that ``-c GIVEN`` applies, in order.

    Args:
        given: a YAML file, or the name of a configuration.
        folder: base folder of relative paths.
        extending: files that extend this one.
    """
    path = find_config(given, folder).resolve()
    if path in extending:
        cycle = " -> ".join(str(file) for file in (*extending, path))
        raise ConfigurationError(f"configuration files extend each other in a cycle: {cycle}")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return [path]  # the parser reads the file next and reports the error
    names = content.get(KEY, []) if isinstance(content, dict) else []
    files: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        files += files_of(name, path.parent, (*extending, path))
    return [*files, path]


class ExtendingConfigFile(ActionConfigFile):
    """The option ``-c``, for files that can be selected by name and can extend others."""

    def __call__(  # type: ignore[override]
        self,
        parser: ArgumentParser,
        cfg: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Apply the extended files, then the file itself."""
        if not isinstance(values, str) or FILE_OR_NAME.fullmatch(values) is None:
            super().__call__(parser, cfg, values, option_string)
            return
        for file in files_of(values):
            super().__call__(parser, cfg, _of_algorithm(file, cfg), option_string)
            cfg.pop(KEY, None)


def _of_algorithm(file: Path, cfg: Namespace) -> str:
    """Return a file without critic options if the previously selected algorithm has no critic.

    Only files of the package are changed: options of a user's own file are never removed.
    """
    module, _, name = str(cfg.get("model.class_path") or "").rpartition(".")
    folders = [configs_folder().resolve() / group for group in BOTH_SIDES]
    if file.parent not in folders or not module:
        return str(file)
    known = parameters_of(getattr(importlib.import_module(module), name))
    content = yaml.safe_load(file.read_text())
    options = content.get("model", {}).get("init_args", {})
    unused = [key for key in options if key.startswith("critic") and key not in known]
    for key in unused:
        del options[key]
    return json.dumps(content) if unused else str(file)
