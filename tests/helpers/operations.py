"""The operations that a piece of code makes, as the dispatcher of PyTorch sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def described(value: Any) -> Any:
    """Return an argument; of a tensor its shape, strides, type and device."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device.type)
    return None if isinstance(value, torch.Generator) else value


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "profiler":  # an optimizer's mark around its step
            self._operations.append((str(func), *map(repr, tree_map(described, (args, kwargs)))))
        return func(*args, **kwargs)


@contextmanager
def recorded() -> Iterator[list[tuple[Any, ...]]]:
    """Record the name of each operation of a block, and its arguments: tensors by their shapes."""
    operations: list[tuple[Any, ...]] = []
    with _Recorder(operations):
        yield operations
