"""Progress bars, which are only shown on a terminal and disappear at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm


def shows_progress(trainer: Any) -> bool:
    """Return whether this process shows progress bars.

    Args:
        trainer: Lightning's trainer, whose own bar may be disabled.
    """
    bar = trainer.progress_bar_callback
    return bar is not None and bar.is_enabled and trainer.is_global_zero


@contextlib.contextmanager
def progress_bar(description: str, total: int, is_wanted: bool = True) -> Iterator[tqdm]:
    """Show a progress bar in this context.

    Args:
        description: text before the bar.
        total: total number of items.
        is_wanted: whether to show the bar.

    Yields:
        The bar, whose ``update()`` advances it by one.
    """
    hidden = None if is_wanted else True  # None hides it unless on a terminal
    with tqdm(
        total=total, desc=description, leave=False, disable=hidden, dynamic_ncols=True
    ) as bar:
        yield bar
