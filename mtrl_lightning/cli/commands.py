"""The commands beside ``fit`` and ``validate``, each a module with ``main`` and ``HELP``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from mtrl_lightning.cli.suggestions import option_tips
from mtrl_lightning.errors import ConfigurationError

COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "compare": "mtrl_lightning.cli.compare",
    "sweep": "mtrl_lightning.cli.sweep",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
    "completion": "mtrl_lightning.cli.completion",
}


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which takes options by their full names alone.

    Args:
        command: its name.
        options: of ``argparse.ArgumentParser``.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"mtrl-lightning {command}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print a mistake, with the nearest name of each unknown option, and exit with code 2."""
        names = [name.removeprefix("--") for name in self._option_string_actions]
        tips = [f"\ntip: {tip}" for _, tip in option_tips(message, names)]
        super().error("".join([message, *tips]))


@contextlib.contextmanager
def mistakes_end_the_program() -> Iterator[None]:
    """Print a user's mistake, or a file that cannot be read or written, and exit with code 2."""
    try:
        yield
    except (ConfigurationError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2)
