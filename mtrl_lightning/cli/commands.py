"""The commands of the program; their help starts no PyTorch.

Each is a module with ``HELP``, ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(options)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mtrl_lightning import __version__
from mtrl_lightning.cli.suggestions import FROM_MTRL, WITHOUT_DASHES, option_tips
from mtrl_lightning.errors import (
    ConfigurationError,
    EnvironmentFaultError,
    PolicyFaultError,
    name_hint,
)

PROGRAM = "mtrl-lightning"
VERSION = f"{PROGRAM} {__version__}"
DESCRIPTION = "Multi-task reinforcement learning: train one agent on many tasks, and evaluate it."
RUN_COMMANDS = {
    "fit": "Train, or continue a run.",
    "validate": "Evaluate the best checkpoint of a run, or any other, on every task.",
}
"""The commands of ``mtrl_lightning.cli.lightning_cli``, with what they do."""
COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "collect": "mtrl_lightning.cli.collect",
    "compare": "mtrl_lightning.cli.compare",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
    "completion": "mtrl_lightning.cli.completion",
}


def print_help() -> None:
    """Print what the program's commands are."""
    parser = argparse.ArgumentParser(
        PROGRAM, usage=f"{PROGRAM} COMMAND ...", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in RUN_COMMANDS.items():
        commands.add_parser(name, help=summary)
    for name, module in COMMANDS.items():
        commands.add_parser(name, help=importlib.import_module(module).HELP)
    parser.print_help()


def unknown_command(args: Sequence[str]) -> str:
    """Return an error about a command that does not exist."""
    known = [*RUN_COMMANDS, *COMMANDS]
    if WITHOUT_DASHES.match(args[0]):
        hint = f"give a command first, such as fit. {FROM_MTRL}"
    elif args[0].startswith("-"):
        hint = f"give the command first, such as {PROGRAM} fit {args[0]}"
    else:
        hint = f"{name_hint(args[0], known)} ({PROGRAM} --help explains the commands)"
    return f"there is no command {args[0]}: {hint}"


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which takes options by their full names alone.

    Args:
        command: its name.
        options: of ``argparse.ArgumentParser``.
    """

    takes_fit_options = False
    """Whether what follows ``--`` is kept as ``fit_options``."""

    def __init__(self, command: str, **options: Any) -> None:
        self._names: list[str] = []
        self._given: Sequence[str] = ()
        super().__init__(prog=f"{PROGRAM} {command}", allow_abbrev=False, **options)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument, whose name is suggested for a misspelled one."""
        action = super().add_argument(*args, **kwargs)
        self._names += [name.removeprefix("--") for name in action.option_strings]
        return action

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse what follows the command."""
        place = len(args)
        if self.takes_fit_options and "--" in args:
            place = args.index("--")
        self._given = args[:place]
        options = self.parse_args(self._given)
        options.fit_options = tuple(args[place + 1 :])
        return options

    def error(self, message: str) -> NoReturn:
        """Print a mistake, with the nearest name of each unknown option, and exit with code 2."""
        tips = [f"\ntip: {tip}" for tip in option_tips(self._given, self._names)]
        if self.takes_fit_options and not tips and message.startswith("unrecognized"):
            tips = ["\ntip: options of fit come last, after --: ... -- --OPTION VALUE"]
        super().error("".join([message, *tips]))


def run_command(name: str, args: Sequence[str]) -> None:
    """Run a command; a user's mistake ends it with exit code 2, a fault while it runs with 1.

    Args:
        name: one of ``COMMANDS``.
        args: what follows it.
    """
    command = importlib.import_module(COMMANDS[name])
    formatter = argparse.HelpFormatter
    if "\n" in command.DESCRIPTION:
        formatter = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(name, description=command.DESCRIPTION, formatter_class=formatter)
    command.add_arguments(parser)
    options = parser.parse(args)
    try:
        command.run(options)
    except BrokenPipeError:  # nobody reads on
        raise
    except (ConfigurationError, OSError, EnvironmentFaultError, PolicyFaultError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ConfigurationError, OSError)) else 1)
