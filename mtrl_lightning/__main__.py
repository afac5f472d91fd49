"""The program: ``mtrl-lightning``, ``python -m mtrl_lightning`` and ``python cli.py`` run it.

Only what trains or acts imports PyTorch: help, ``list``, ``clear`` and a misspelled command do not.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from mtrl_lightning.cli.commands import RUN_COMMANDS, run_command


def main(args: Sequence[str] | None = None) -> None:
    """Run the program.

    Options without a command are those of ``fit``, as in W&B's default command of a sweep.

    Args:
        args: what follows the program's name; None for the command line of the process.
    """
    find_modules_in_working_directory()
    given = list(sys.argv[1:] if args is None else args) or ["--help"]
    if given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        given = ["fit", *given]
    try:
        if given[0] in RUN_COMMANDS:
            from mtrl_lightning.cli.lightning_cli import main as run_lightning

            run_lightning(given)
        else:
            run_command(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nInterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader has closed the pipe, as in `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find_modules_in_working_directory() -> None:
    """Let ``class_path: mytasks.Pendulums`` find ``mytasks.py`` in the working directory.

    It comes last, so that no file there hides an installed package. Workers find modules where
    this process does.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


if __name__ == "__main__":
    main()
