"""PyTorch's threads on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread while environments are stepped and nothing learns.

    PyTorch's threads keep their cores busy for some milliseconds after an operation, waiting for
    the next one, and worker processes need these cores.
    """
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
