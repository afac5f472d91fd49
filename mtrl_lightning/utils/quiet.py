"""Suppress library output that is irrelevant to the user of a run."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

HARMLESS_WARNINGS = (
    ".*LeafSpec",  # Lightning's own use of torch
    "Be aware that when using `ckpt_path`",  # validate omits callbacks that only train
    "The '.*_dataloader' does not have many workers",  # batches come from memory
)
"""Beginnings of warnings to suppress, as regular expressions."""
UNWANTED_MESSAGES = ("💡 Tip", "TPU available", "Trainer was signaled to stop but")
"""Beginnings of log messages to suppress: advertisements and unused hardware."""
LOGGER = "lightning.pytorch.utilities.rank_zero"
"""Lightning's logger of rank-zero messages."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress advertisements and harmless warnings in this context."""
    logger = logging.getLogger(LOGGER)
    is_outermost = _is_wanted not in logger.filters
    with warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message)
        logger.addFilter(_is_wanted)
        try:
            yield
        finally:
            if is_outermost:
                logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(UNWANTED_MESSAGES)
