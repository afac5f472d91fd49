"""The program: ``mtrl-lightning``, ``python -m mtrl_lightning`` and ``python cli.py`` run it.

Only what trains or acts imports PyTorch: help, ``list``, ``clear`` and a misspelled command do not.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from mtrl_lightning.cli.commands import (
    COMMANDS,
    RUN_COMMANDS,
    VERSION,
    print_help,
    run_command,
    unknown_command,
)

INTERRUPTED = "\nInterrupted"
EXIT_CODE = 128 + signal.SIGINT
"""Of a program that Ctrl-C ends, as in shells."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        args: what follows the program's name; None for the command line of the process.
    """
    try:
        _run(args)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(EXIT_CODE)


def _run(args: Sequence[str] | None) -> None:
    find_modules_in_working_directory()
    given = list(sys.argv[1:] if args is None else args)
    command = given[0] if given else "--help"
    if command in RUN_COMMANDS:
        with _ending_at_once(), _without_garbage_collection():
            from mtrl_lightning.cli.lightning_cli import main as train_or_validate
        train_or_validate(given)
        return
    try:
        if command in COMMANDS:
            run_command(command, given[1:])
        elif command in ("-h", "--help"):
            print_help()
        elif command == "--version":
            print(VERSION)
        else:
            print(f"error: {unknown_command(given)}", file=sys.stderr)
            sys.exit(2)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the program while it imports libraries, some of which ignore exceptions."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(EXIT_CODE)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import libraries without a search for garbage, which takes a sixth of that time.

    Later searches leave out the 700,000 objects of the libraries, which stay until the end.
    """
    if not gc.isenabled() or "lightning" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
