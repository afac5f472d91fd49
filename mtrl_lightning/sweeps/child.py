"""The program of one run of a sweep: ``mtrl-lightning``, which ends when the sweep is killed.

Its standard input is a pipe of which the sweep holds the other end. The kernel closes that when the
sweep ends in any way, and the run is then interrupted as by SIGTERM: it saves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading

from mtrl_lightning.__main__ import main


def end_with_parent() -> None:
    """Interrupt this process when the pipe at its standard input is closed."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main()
