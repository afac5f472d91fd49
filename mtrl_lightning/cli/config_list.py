"""Print the configuration files by group, and the policies: ``mtrl-lightning list``.

PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

from mtrl_lightning.cli.config_names import config_names, configs_folder
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import policies
from mtrl_lightning.utils.text import text_table, whole

HELP = "List the configurations that -c accepts by name, and the package's policies."
DESCRIPTION = (
    "List the configurations that -c accepts by name, grouped, one per line; and the trained"
    " policies of this package, which play, validate and fit --init_from accept."
)
POLICIES = "policies"
"""The group of the trained policies."""
CARD = "policy.json"
"""File that records how a policy of this package was trained, and its results."""
COMPLETE = "complete, or parts of every run"
"""Title of files without a group."""
MIN_DESCRIPTION = 30
"""Minimum width of a description in columns, even in a narrow terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``list``."""
    parser.add_argument(
        "word",
        nargs="?",
        metavar="GROUP_OR_WORD",
        help="show full descriptions of this group, such as env or policies, or of all"
        " configurations whose name or description contains this word, such as mt10",
    )


def run(options: argparse.Namespace) -> None:
    """Print the configurations."""
    word = options.word
    width = shutil.get_terminal_size().columns
    if word == POLICIES:
        print("\n\n".join(_policy_card(folder) for folder in policies().values()))
        return
    names = config_names()
    if word is not None:
        of_group = [name for name in names if name.startswith(f"{word}/")]
        text = word.lower()
        names = of_group or [n for n in names if text in f"{n} {_description(n)}".lower()]
        if not names:
            raise ConfigurationError(
                f"no configuration has {word} in its name or description: run list without"
                " arguments to show all"
            )
    parts = []
    for group, members in itertools.groupby(names, key=lambda name: name.rpartition("/")[0]):
        listed = list(members)
        start = max(map(len, listed)) + 4
        lines = [group or COMPLETE]
        for name in listed:
            if word is None:
                space = max(width - start, MIN_DESCRIPTION)
                shown = textwrap.shorten(_description(name), space, placeholder=" ...")
                lines.append(f"  {name}".ljust(start) + shown)
            else:
                text = textwrap.fill(_description(name), width - 4)
                lines += [f"  {name}", textwrap.indent(text, "    ")]
        parts.append("\n".join(lines))
    print("\n\n".join([*parts, _policies()] if word is None else parts))


def _policies() -> str:
    """Return a table of the package's policies."""
    lines = [["policies", "tasks", "success", "score", "horizon", "trained for"]]
    for name, folder in policies().items():
        card = read_card(folder)
        protocol, metrics = card["protocol"], card["evaluation"]["metrics"]
        horizon = protocol.get("evaluation_horizon", protocol["horizon"])
        means = [metrics.get(f"eval/{metric}") for metric in ("success", "score")]
        results = ["" if value is None else f"{value:.2f}" for value in means]
        trained_for = f"{whole(card['env_steps'])} {card['step_unit']}"
        lines.append([f"  {name}", str(len(card["tasks"])), *results, str(horizon), trained_for])
    return text_table(lines, num_texts=1)


def read_card(folder: Path) -> dict[str, Any]:
    """Return how a policy of this package was trained, and its results."""
    return json.loads((folder / CARD).read_text(encoding="utf-8"))


def _policy_card(folder: Path) -> str:
    """Return the full card of a policy, including the results per task."""
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
        "trained for": f"{whole(card['env_steps'])} {card['step_unit']}",
        "trained by": card["command"].replace("config.yaml", str(folder / "config.yaml")),
        "protocol": ", ".join(f"{key} {value}" for key, value in card["protocol"].items()),
        "test episodes of a task": evaluation.get("num_episodes", "as in training"),
        "sha256": card["sha256"],
    }
    described = [
        textwrap.fill(
            f"{key}: {value}",
            100,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for key, value in facts.items()
    ]
    table = textwrap.indent(text_table(lines, num_texts=1), "  ")
    return "\n".join([folder.name, *described, table])


def _description(name: str) -> str:
    """Return the head comment of a configuration file, up to its command, in one line."""
    paragraphs = head_comment(configs_folder() / f"{name}.yaml")
    return paragraphs[0].removesuffix(":") if paragraphs else ""


def head_comment(file: Path) -> list[str]:
    """Return the paragraphs of a file's head comment, each in one line.

    The indented commands between them are omitted.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    groups = itertools.groupby(comment, key=lambda line: line.startswith("#   "))
    return [
        " ".join(line.removeprefix("#").strip() for line in group)
        for is_command, group in groups
        if not is_command
    ]
