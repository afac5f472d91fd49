"""Leave out what libraries print during a run and is not for its user."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

HARMLESS_WARNINGS = (
    ".*LeafSpec",  # Lightning's own use of torch
    "Be aware that when using `ckpt_path`",  # callbacks that only train are left out of validate
    "The '.*_dataloader' does not have many workers",  # batches come from memory
)
"""Beginnings of warnings, as regular expressions."""
UNWANTED_MESSAGES = ("💡 Tip", "TPU available", "Trainer was signaled to stop but")
"""Beginnings of log messages: advertisements and unused hardware."""
LOGGER = "lightning.pytorch.utilities.rank_zero"
"""Lightning's logger of messages that only the first process prints."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out advertisements and harmless warnings; all other settings stay as they are."""
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
