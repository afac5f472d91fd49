"""Ctrl-C and SIGTERM, heard at once and acted on where the run's state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """The run was asked to end; its code is 128 plus the signal's number, as shells have it."""


class SignalWatch:
    """Remember a signal until ``check``; a second Ctrl-C acts at once."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._former: dict[int, Any] = {}

    def install(self) -> None:
        """Begin to listen; only the main thread can."""
        if threading.current_thread() is threading.main_thread() and not self._former:
            self._former = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def restore(self) -> None:
        """Give the signals back to those who had them."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came."""
        if self._received is not None:
            raise Interrupted(128 + self._received)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
        former = self._former.get(number)
        if number == signal.SIGTERM and callable(former):
            former(number, frame)  # Lightning passes it on to the other ranks
