"""The program: ``mtrl-lightning``, ``python -m mtrl_lightning`` and ``python cli.py`` run it.

``list``, ``doctor`` and ``clear`` start without PyTorch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from mtrl_lightning.cli.commands import COMMANDS


def main(args: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        args: what follows the program's name; None for the command line of the process.
    """
    find_modules_in_working_directory()
    given = list(sys.argv[1:] if args is None else args)
    if given and given[0] in COMMANDS:
        try:
            importlib.import_module(COMMANDS[given[0]]).main(given[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads on, as in `list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    from mtrl_lightning.cli.lightning_cli import main as train_or_validate

    if not given:
        train_or_validate(["--help"])
    train_or_validate(None if args is None else given)


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
