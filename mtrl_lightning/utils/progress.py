"""Bars of work that a user waits for. They are shown on a terminal alone, and vanish at the end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

POLL_SECONDS = 0.2
"""Between two looks at work that others count."""


def shows_progress(trainer: Any) -> bool:
    """Return whether bars are wanted in this process of a run.

    Args:
        trainer: Lightning's, whose own bar may be hidden.
    """
    bar = trainer.progress_bar_callback
    return bar is not None and bar.is_enabled and trainer.is_global_zero


@contextlib.contextmanager
def progress_bar(description: str, total: int, is_wanted: bool = True) -> Iterator[tqdm]:
    """Show a bar while a block of code works.

    Args:
        description: stands before the bar.
        total: how much is to be done.
        is_wanted: whether there is a bar at all.

    Yields:
        The bar, whose ``update()`` counts one more.
    """
    hidden = None if is_wanted else True  # None: only where it is no terminal
    with tqdm(
        total=total, desc=description, leave=False, disable=hidden, dynamic_ncols=True
    ) as bar:
        yield bar


@contextlib.contextmanager
def polled_progress_bar(
    description: str, total: int, done: Callable[[], int], is_wanted: bool = True
) -> Iterator[None]:
    """Show a bar while a block of code waits for work that others do.

    Args:
        description: stands before the bar.
        total: how much is to be done.
        done: returns how much has been done since the start.
        is_wanted: whether there is a bar at all.
    """
    if not is_wanted:
        yield
        return
    has_ended = threading.Event()
    with progress_bar(description, total) as bar:

        def poll() -> None:
            while not has_ended.wait(POLL_SECONDS):
                bar.update(done() - bar.n)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
