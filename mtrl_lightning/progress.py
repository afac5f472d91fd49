"""Bars of work that a user waits for. They are shown on a terminal alone, and vanish at the end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tqdm import tqdm

SECONDS_BETWEEN_LOOKS = 0.2
"""At work that is counted elsewhere."""


@contextlib.contextmanager
def shown(description: str, total: int, is_wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar while a block of code works.

    Args:
        description: stands before the bar.
        total: how much is to be done.
        is_wanted: whether there is a bar at all.

    Yields:
        A function that is called with how much has been done since the start.
    """
    hidden = None if is_wanted else True  # None: only where it is no terminal
    with tqdm(
        total=total, desc=description, leave=False, disable=hidden, dynamic_ncols=True
    ) as bar:
        yield lambda done: bar.update(done - bar.n)


@contextlib.contextmanager
def watched(
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

    def look() -> None:
        while not has_ended.wait(SECONDS_BETWEEN_LOOKS):
            show(done())

    with shown(description, total) as show:
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            has_ended.set()
            looking.join()
