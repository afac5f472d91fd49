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

from mtrl_lightning.cli.config_names import configs_folder, find_config
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.utils.signatures import parameters_of

# defaults of Lightning's callbacks, such as Timer's interval, are written as texts
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(str(value.value))
)
KEY = "extends"
BOTH_SIDES = ("network", "gradient")
"""Groups of the package whose files name parts of actor and critic."""
FILE_OR_NAME = re.compile(r"[\w./\\~+ -]*[\w./\\~+]")
"""What can be a path or a name; ``-`` is the standard input, the rest YAML or a URL."""


def files_of(given: str, folder: Path = Path(), extending: tuple[Path, ...] = ()) -> list[Path]:
    """Return the files that ``-c GIVEN`` applies, in their order.

    Args:
        given: a YAML file, or the name of a configuration.
        folder: that a relative path starts from.
        extending: files that extend this one.
    """
    path = find_config(given, folder).resolve()
    if path in extending:
        cycle = " -> ".join(str(file) for file in (*extending, path))
        raise ConfigurationError(f"configuration files extend each other in a cycle: {cycle}")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return [path]  # the parser reads the file next, and explains the error
    names = content.get(KEY, []) if isinstance(content, dict) else []
    files: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        files += files_of(name, path.parent, (*extending, path))
    return [*files, path]


class ExtendingConfigFile(ActionConfigFile):
    """The option ``-c``, for files that are given by name and that extend others."""

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
    """Return a file without the critic's side, if the algorithm chosen before it has no critic.

    Only files of the package are changed: what a user's own file gives is never left out.
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
