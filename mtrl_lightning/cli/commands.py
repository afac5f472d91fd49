"""The commands of the program; their help starts no PyTorch.

Each is a module with ``HELP``, ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(options)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from mtrl_lightning import __version__
from mtrl_lightning.errors import (
    ConfigurationError,
    EnvironmentFaultError,
    PolicyFaultError,
    closest,
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
MAX_COMPLETIONS = 3
"""Full names of an abbreviated option that are suggested."""
COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "collect": "mtrl_lightning.cli.collect",
    "compare": "mtrl_lightning.cli.compare",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
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
    if args[0].startswith("-"):
        hint = f"give the command first, such as {PROGRAM} fit {args[0]}"
    else:
        hint = f"{name_hint(args[0], known)} ({PROGRAM} --help explains the commands)"
    return f"there is no command {args[0]}: {hint}"


def option_tips(args: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Yield for each unknown option the nearest one, or those that it abbreviates.

    Args:
        args: what follows the command.
        options: names of the options that there are, without dashes. An option of a class begins
            with that of the class.
    """
    for argument in args:
        name = argument.partition("=")[0].removeprefix("--").rstrip("+")
        parts = name.split(".")
        sections = [".".join(parts[:num]) for num in range(1, len(parts) + 1)]
        if not argument.startswith("--") or any(section in options for section in sections):
            continue
        is_section = any(option.startswith(f"{name}.") for option in options)  # --data FILE
        if is_section or name.removeprefix("no_") in options:
            continue
        complete = sorted(option for option in options if option.startswith(name))
        similar = complete[:MAX_COMPLETIONS] or closest(name, options)
        if similar:
            yield f"tip: did you mean {' or '.join(similar)}? There is no option {name}"


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which takes options by their full names alone.

    Args:
        command: its name.
        options: of ``argparse.ArgumentParser``.
    """

    takes_fit_options = False
    """Whether what follows ``--`` is kept as ``fit_options``."""

    def __init__(self, command: str, **options: Any) -> None:
        self._given: Sequence[str] = ()
        super().__init__(prog=f"{PROGRAM} {command}", allow_abbrev=False, **options)

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
        names = [name.removeprefix("--") for name in self._option_string_actions]
        tips = list(option_tips(self._given, names))
        if self.takes_fit_options and not tips and message.startswith("unrecognized"):
            tips = ["tip: options of fit come last, after --: ... -- --OPTION VALUE"]
        super().error("\n".join([message, *tips]))


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
