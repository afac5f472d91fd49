"""The program of one run of a sweep: ``mtrl-lightning``, which ends when the sweep is killed.

Its standard input is a pipe of which the sweep holds the other end. The kernel closes that when the
sweep ends in any way, and the run is then interrupted as by SIGTERM: it saves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from mtrl_lightning.__main__ import main


def end_with_parent() -> None:
    """Interrupt this process when the pipe at its standard input is closed."""
    pipe = os.dup(sys.stdin.fileno())
    # what the run starts reads nothing from it
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)
    threading.Thread(target=_wait, args=(pipe,), daemon=True).start()


def _wait(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main()
