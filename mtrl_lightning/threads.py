"""PyTorch's threads on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let the calling thread compute with a number of PyTorch's threads.

    One is right while environments are stepped and nothing learns: PyTorch's threads keep their
    cores busy for some milliseconds after an operation, waiting for the next one, and worker
    processes need these cores.
    """
    former = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def in_turn(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Call two functions, one after the other; return what both return."""
    return first(), second()


def side_by_side(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Call two functions at once, each with half of PyTorch's threads; return what both return.

    Threads that share one operation wait for each other at its end, which costs small networks as
    much as they gain. The functions must not change anything that the other one uses. What the
    first raises is raised after the second has ended.
    """
    number = max(1, torch.get_num_threads() // 2)
    autocast = (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))

    def in_other_thread() -> Second:
        with torch_threads(number), torch.autocast("cpu", *autocast):
            return second()

    with torch_threads(number):
        other = _other_thread().submit(in_other_thread)
        try:
            result = first()
        finally:
            wait([other])
    return result, other.result()


@cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="side_by_side")
