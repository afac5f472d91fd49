"""Windows of training that another process asks for, so that several runs take turns."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


class Pacer:
    """Run a window of steps for each line of the standard input; write its seconds as JSON.

    Args:
        steps: of a window: vector steps, or updates.
        settle: steps before the first window.
        descriptor: of the open file that the lines are written to.
        drain: returns the seconds that were spent on named things since the last call.
        about: what is written when it is ready for the first window.
        examine: returns what else is written after a window, whose seconds do not include it.
    """

    def __init__(
        self,
        steps: int,
        settle: int,
        descriptor: int,
        drain: Callable[[], dict[str, float]] = dict,
        about: Mapping[str, float] | None = None,
        examine: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._steps = steps
        self._left = settle
        self._drain = drain
        self._about = dict(about or {})
        self._examine = examine
        self._out = os.fdopen(descriptor, "w", buffering=1)
        self._start_time: float | None = None

    def tick(self) -> bool:
        """Count a step that is about to begin; wait at a window's end; False after the last."""
        if self._left == 0:
            synchronize()
            self._out.write(json.dumps(self._measured()) + "\n")
            if not sys.stdin.readline():
                return False
            self._drain()
            self._left = self._steps
            self._start_time = time.perf_counter()
        self._left -= 1
        return True

    def _measured(self) -> dict[str, Any]:
        if self._start_time is None:
            return self._about
        seconds = time.perf_counter() - self._start_time
        return {
            "seconds": seconds,
            "fractions": {name: spent / seconds for name, spent in self._drain().items()},
            **self._examine(),
        }


def synchronize() -> None:
    """Wait for what a GPU was asked for."""
    torch = sys.modules.get("torch")  # its import takes seconds, and some processes need none of it
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
