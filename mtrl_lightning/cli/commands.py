"""The commands of the program, whose help does not import PyTorch.

Each is a module with ``HELP``, ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(options)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mtrl_lightning import __version__
from mtrl_lightning.cli import PROGRAM
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError, PolicyFaultError

DESCRIPTION = "Multi-task reinforcement learning: train one agent on many tasks, and evaluate it."
RUN_COMMANDS = {
    "fit": "Train, or resume a run.",
    "validate": "Evaluate the best checkpoint of a run, or any other, on every task.",
    "test": "Like validate, but in Lightning's test loop.",
}
"""The commands of ``mtrl_lightning.cli.lightning_cli``."""
COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "collect": "mtrl_lightning.cli.collect",
    "compare": "mtrl_lightning.cli.compare",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
}


def run_command(args: Sequence[str]) -> None:
    """Run one of ``COMMANDS``, or print the program's help or version.

    The exit code is 2 for usage errors and 1 for failures during the run.
    """
    parser = argparse.ArgumentParser(PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    version = f"{PROGRAM} {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in RUN_COMMANDS.items():
        commands.add_parser(name, help=summary)
    # doctor must also start if packages that other commands import are missing
    for name in [args[0]] if args[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(COMMANDS[name])
        command = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        command.set_defaults(run_command=module.run)
        module.add_arguments(command)
    options = parser.parse_args(args)
    try:
        options.run_command(options)
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except (ConfigurationError, OSError, EnvironmentFaultError, PolicyFaultError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ConfigurationError, OSError)) else 1)
