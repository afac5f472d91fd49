"""The configuration of a run, whose classes are imported: their code is executed.

PyTorch is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrl_lightning.runs import read_config

TRUST = (
    " The classes that the run's config.yaml names are imported, so that their code is executed:"
    " use only runs that you trust."
)
"""What the help of a command says that imports them."""
KNOWN_PACKAGES = ("mtrl_lightning", "torch", "lightning", "gymnasium")
"""Packages whose classes are imported without a note."""
IMPORT_PATH = re.compile(r"(?<![\w./\\-])[^\W\d]\w*(?:\.[^\W\d]\w*)+(?![\w/\\])")
MODULE_OF_ENVIRONMENT = re.compile(r"(?<![\w./\\-])[^\W\d][\w.]*(?=:\w)")
"""The module in an environment's id, such as ``mytasks`` in ``mytasks:Reach-v0``."""
LONGEST_PATH = 255
"""Characters of a text that may be the path of a file."""


def read_run_config(file: Path) -> dict[str, Any]:
    """Read a run's configuration, and print what it names beside ``KNOWN_PACKAGES``.

    The first process prints it, before anything is imported.

    Args:
        file: ``config.yaml`` in the run's folder.

    Raises:
        ConfigurationError: if the file is damaged.
    """
    config = read_config(file)
    named = foreign_names(config, file.parent)
    if named and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"note: {file} names {', '.join(named)}, which this package does not contain."
            " Importing them executes their code: use only runs that you trust",
            file=sys.stderr,
        )
    return config


def foreign_names(config: Any, folder: Path) -> list[str]:
    """Return what a configuration names and is imported from other packages, sorted.

    Args:
        config: the configuration, or a part of it.
        folder: of its file; further files that it names there may name classes, too.
    """
    found: set[str] = set()
    for text in _texts(config):
        paths = [*IMPORT_PATH.findall(text), *MODULE_OF_ENVIRONMENT.findall(text)]
        found.update(path for path in paths if _is_foreign(path))
        if 0 < len(text) <= LONGEST_PATH and (folder / text).is_file():
            found.add(text)
    return sorted(found)


def _is_foreign(path: str) -> bool:
    """Return whether an import path is of another package that can be imported."""
    package = path.partition(".")[0]
    if package in KNOWN_PACKAGES:
        return False
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
