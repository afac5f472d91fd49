"""Entry point of ``mtrl-lightning``, ``python -m mtrl_lightning`` and ``python cli.py``.

PyTorch is only imported when needed: not by help, ``list``, ``clear`` or unknown commands.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from mtrl_lightning.cli.commands import RUN_COMMANDS, run_command


def main(args: Sequence[str] | None = None) -> None:
    """Run the program.

    Without a command, options are those of ``fit``, as in the default command of W&B sweeps.

    Args:
        args: command line arguments; None for ``sys.argv``.
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
    """Make ``class_path: mytasks.Pendulums`` find ``mytasks.py`` in the working directory.

    It is appended to the path, so that its files do not hide installed packages. Workers inherit
    the path.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


if __name__ == "__main__":
    main()
