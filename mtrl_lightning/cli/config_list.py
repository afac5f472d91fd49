"""Print the configuration files by group, and the policies: ``mtrl-lightning list``.

PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl_lightning.cli.config_names import config_names, configs_folder, nearest
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import text_table, whole
from mtrl_lightning.runs import policies

HELP = "Print the configurations that -c takes by name, and the package's policies."
DESCRIPTION = (
    "Print the configurations that -c takes by name, by group, a line for each; and the"
    " trained policies that come with this package, which play, validate and fit --init_from take."
)
POLICIES = "policies"
"""The group of the trained policies."""
CARD = "policy.json"
"""How a policy of this package was trained, and its results."""
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
)
"""The order in which groups are printed; others follow by the alphabet."""
COMPLETE = "complete, or parts of every run"
"""Title of the files that belong to no group."""
INDENT = 4
MIN_DESCRIPTION = 30
"""Columns, in however narrow a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``list``."""
    parser.add_argument(
        "word",
        nargs="?",
        metavar="GROUP_OR_WORD",
        help="print the whole descriptions of this group, such as env or policies, or of the"
        " configurations whose name contains this word, such as mt10; if no name does, whose"
        " description does",
    )


def run(options: argparse.Namespace) -> None:
    """Print the configurations."""
    print(listing(options.word, shutil.get_terminal_size().columns))


def listing(word: str | None = None, width: int = 100) -> str:
    """Return the text that ``list`` prints.

    Args:
        word: a group, or a part of the names or the descriptions that are printed; None for all,
            with one line each.
        width: columns of a line.

    Raises:
        ConfigurationError: if no group, name or description has the word.
    """
    if word == POLICIES:
        return "\n\n".join(_policy_card(folder) for folder in policies().values())
    groups: dict[str, list[str]] = {}
    for name in config_names():
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    order = [one for one in GROUPS if one in groups]
    order += [one for one in groups if one not in order]
    if word is None:
        parts = [_overview(one, groups[one], width) for one in order]
        return "\n\n".join([*parts, _policies()])
    if word in groups:
        order = [word]
    else:
        names = _names_with(word)
        groups = {one: [name for name in groups[one] if name in names] for one in order}
        order = [one for one in order if groups[one]]
    return "\n\n".join(_section(one, groups[one], width) for one in order)


def _names_with(word: str) -> list[str]:
    """Return the configurations whose name, or else whose description, contains a word."""
    wanted = word.lower()
    names = config_names()
    named = [name for name in names if wanted in name.lower()]
    described = named or [name for name in names if wanted in _description(name).lower()]
    if not described:
        groups = [*(group for group in GROUPS if group), POLICIES]
        similar = nearest(word, [*groups, *names])
        hint = "" if similar is None else f" did you mean {similar}?"
        raise ConfigurationError(
            f"no configuration has {word} in its name or description:{hint} give one of the groups"
            f" {', '.join(groups)}, or a part of a name"
        )
    return described


def _overview(group: str, names: list[str], width: int) -> str:
    """Return a line for each name, with as much of its description as there is space."""
    longest = max(len(name) for name in names)
    lines = [group or COMPLETE]
    for name in names:
        start = f"  {name:<{longest}}  "
        space = max(width - len(start), MIN_DESCRIPTION)
        lines.append(start + textwrap.shorten(_description(name), space, placeholder=" ..."))
    return "\n".join(lines)


def _policies() -> str:
    """Return a table of the package's policies."""
    lines = [["policies", "tasks", "success", "score", "horizon", "trained for"]]
    for name, folder in policies().items():
        card = read_card(folder)
        protocol = card["protocol"]
        horizon = protocol.get("evaluation_horizon", protocol["horizon"])
        means = [mean(card, metric) for metric in ("success", "score")]
        results = ["" if value is None else f"{value:.2f}" for value in means]
        tasks = str(len(card["tasks"]))
        lines.append([f"  {name}", tasks, *results, str(horizon), _trained_for(card)])
    return text_table(lines, num_texts=1)


def read_card(folder: Path) -> dict[str, Any]:
    """Return how a policy of this package was trained, and its results."""
    return json.loads((folder / CARD).read_text(encoding="utf-8"))


def _trained_for(card: Mapping[str, Any]) -> str:
    return f"{whole(card['env_steps'])} {card['step_unit']}"


def mean(card: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric's mean over the tasks in the evaluation of a policy's card, if it has it."""
    return card["evaluation"]["metrics"].get(f"eval/{metric}")


def _policy_card(folder: Path) -> str:
    """Return all that the card of a policy says, with the result of each task."""
    card = read_card(folder)
    evaluation = card["evaluation"]
    metrics = evaluation["metrics"]
    columns = [metric for metric in ("success", "score", "return") if f"eval/{metric}" in metrics]
    lines = [["task", *columns]]
    for task in card["tasks"]:
        results = [metrics.get(f"eval/{metric}/{task}") for metric in columns]
        lines.append([task, *("" if result is None else f"{result:.2f}" for result in results)])
    lines.append(["average", *(f"{metrics[f'eval/{metric}']:.2f}" for metric in columns)])
    facts = {
        "algorithm": card["algorithm"],
        "trained for": _trained_for(card),
        "trained by": card["command"].replace("config.yaml", str(folder / "config.yaml")),
        "protocol": ", ".join(f"{key} {value}" for key, value in card["protocol"].items()),
        "test episodes of a task": evaluation.get("num_episodes", "as in training"),
        "sha256": card["sha256"],
    }
    described = [
        textwrap.fill(f"{key}: {value}", 100, initial_indent="  ", subsequent_indent="    ")
        for key, value in facts.items()
    ]
    table = textwrap.indent(text_table(lines, num_texts=1), "  ")
    return "\n".join([folder.name, *described, table])


def _section(group: str, names: list[str], width: int) -> str:
    blocks = [group or COMPLETE]
    for name in names:
        margin = " " * INDENT
        lines = textwrap.wrap(
            _description(name), width, initial_indent=margin, subsequent_indent=margin
        )
        blocks.append("\n".join([f"  {name}", *lines]))
    return "\n".join(blocks)


def _description(name: str) -> str:
    """Return the comment at the head of a configuration file, up to its command, in one line."""
    paragraphs = head_comment(configs_folder() / f"{name}.yaml")
    return paragraphs[0].removesuffix(":") if paragraphs else ""


def head_comment(file: Path) -> list[str]:
    """Return the paragraphs of the comment at a file's head, each in one line.

    The commands between them, which are indented, are left out.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    groups = itertools.groupby(comment, key=lambda line: line.startswith("#   "))
    return [
        " ".join(line.removeprefix("#").strip() for line in group)
        for is_command, group in groups
        if not is_command
    ]
