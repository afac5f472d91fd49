"""Print the configuration files by group: ``mtrl-lightning list``. PyTorch is not imported."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mtrl_lightning.cli.config_names import config_names, configs_folder
from mtrl_lightning.errors import ConfigurationError

HELP = "Print the configurations that -c and sweep take by name, by group, with what each is."
GROUPS = (
    "",
    "env",
    "algorithm",
    "network",
    "encoder",
    "gradient",
    "protocol",
    "experiment",
    "logger",
    "sweep",
)
"""The order in which groups are printed; others follow by the alphabet."""
COMPLETE = "complete, or parts of every run"
"""Title of the files that belong to no group."""
INDENT = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``list``."""
    parser.add_argument(
        "group",
        nargs="?",
        help="print only this group, such as env; without it all groups are printed",
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``list``; an unknown group ends it with exit code 2.

    Args:
        args: arguments after ``list``; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="mtrl-lightning list", description=HELP)
    add_arguments(parser)
    group = parser.parse_args(sys.argv[2:] if args is None else args).group
    try:
        print(listing(group, shutil.get_terminal_size().columns))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def listing(group: str | None = None, width: int = 100) -> str:
    """Return the text that ``list`` prints.

    Args:
        group: print only this one; None for all.
        width: columns of a line.

    Raises:
        ConfigurationError: if there is no such group.
    """
    groups: dict[str, list[str]] = {}
    for name in config_names():
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    order = [one for one in GROUPS if one in groups]
    order += [one for one in groups if one not in order]
    if group is not None:
        if group not in groups:
            raise ConfigurationError(f"there is no group {group}: give one of {', '.join(order)}")
        order = [group]
    return "\n\n".join(_section(one, groups[one], width) for one in order)


def _section(group: str, names: list[str], width: int) -> str:
    blocks = [group or COMPLETE]
    for name in names:
        about = first_comment(configs_folder() / f"{name}.yaml")
        margin = " " * INDENT
        lines = textwrap.wrap(about, width, initial_indent=margin, subsequent_indent=margin)
        blocks.append("\n".join([f"  {name}", *lines]))
    return "\n".join(blocks)


def first_comment(path: Path) -> str:
    """Return the comment at the head of a configuration file, up to its command, in one line."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        words.append(line.lstrip("# "))
    return " ".join(words).removesuffix(":")
