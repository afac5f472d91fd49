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
    "test": "The same in Lightning's test loop.",
}
"""The commands of ``mtrl_lightning.cli.lightning_cli``, with what they do."""
TRUST = (
    " The classes that the run's config.yaml names are imported, so that their code is executed:"
    " use only runs that you trust."
)
"""What the help of a command says that imports them."""
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
    hint = name_hint(args[0], [*RUN_COMMANDS, *COMMANDS])
    return f"there is no command {args[0]}: {hint} ({PROGRAM} --help explains the commands)"


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which takes options by their full names only.

    Args:
        command: its name.
        args: what follows it.
        options: of ``argparse.ArgumentParser``.
    """

    def __init__(self, command: str, args: Sequence[str], **options: Any) -> None:
        self._args = args
        super().__init__(prog=f"{PROGRAM} {command}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print a mistake, with the nearest name of each unknown option, and exit with code 2."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for given in self._args:
            name = given.partition("=")[0]
            if name.startswith("--") and name not in known:
                message += "".join(f"\ntip: did you mean {one}?" for one in closest(name, known))
        super().error(message)


def run_command(name: str, args: Sequence[str]) -> None:
    """Run a command; a user's mistake ends it with exit code 2, a fault while it runs with 1.

    Args:
        name: one of ``COMMANDS``.
        args: what follows it.
    """
    command = importlib.import_module(COMMANDS[name])
    parser = CommandParser(name, args, description=command.DESCRIPTION)
    command.add_arguments(parser)
    try:
        command.run(parser.parse_args(args))
    except BrokenPipeError:  # nobody reads on
        raise
    except (ConfigurationError, OSError, EnvironmentFaultError, PolicyFaultError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ConfigurationError, OSError)) else 1)
