"""A limit on the memory that networks take while they are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.resources import free_memory

MIB = 1 << 20
GIB = 1 << 30
MAX_WRITES = 64
"""How often each byte of a file may be allocated or written while its networks are built."""
FREE_BYTES = 256 * MIB
"""Memory that small networks may take besides."""
OPERATION_BYTES = 1024
"""Least size of an operation, so that many small layers count, too."""


class AllocationLimit(TorchDispatchMode):
    """End a block of code that builds networks beyond some size, before memory is filled.

    Args:
        num_bytes: the limit.
        message: text of the error beyond it.
        counts_writes: whether every result of an operation counts; else only new tensors.
    """

    def __init__(self, num_bytes: int, message: str, counts_writes: bool = False) -> None:
        super().__init__()
        self._limit = num_bytes
        self._message = message
        self._counts_writes = counts_writes
        self._num_bytes = 0

    @classmethod
    def of_machine(cls) -> AllocationLimit:
        """Return the limit of networks that are built from options: the free memory."""
        num_bytes = free_memory()
        return cls(
            num_bytes,
            f"the memory does not suffice ({num_bytes / GIB:.1f} GiB are free): choose smaller"
            " networks",
        )

    @classmethod
    def of_file(cls, file_bytes: int) -> AllocationLimit:
        """Return the limit of networks that a file of some size describes."""
        num_bytes = MAX_WRITES * file_bytes + FREE_BYTES
        return cls(
            num_bytes,
            "the checkpoint describes networks that take far more memory than the weights in it"
            f" (over {num_bytes / MIB:,.0f} MiB): it is damaged; use another one",
            counts_writes=True,
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation of PyTorch and count the memory of its results.

        Raises:
            ConfigurationError: if that is more than the limit.
        """
        options = kwargs or {}
        if _is_factory(func):  # it would fill the memory before it returns
            self._count(self._without_memory(func, args, options))
            return func(*args, **options)
        made = func(*args, **options)
        if self._counts_writes:
            self._count(made)
        return made

    def _without_memory(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of a tensor factory on the device without memory (meta)."""
        others = {name: value for name, value in options.items() if name != "generator"}
        try:
            return func.overloadpacket(*args, **others | {"device": "meta"})
        except RuntimeError as error:  # a size below 0 or above 2^63
            first_line = (str(error).splitlines() or [""])[0]
            raise ConfigurationError(
                f"networks cannot be built ({first_line}): check their sizes, or the file that they"
                " come from"
            ) from error

    def _count(self, made: Any) -> None:
        self._num_bytes += OPERATION_BYTES
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor):
                self._num_bytes += tensor.numel() * tensor.element_size()
        if self._num_bytes > self._limit:
            raise ConfigurationError(self._message)


def _is_factory(func: Any) -> bool:
    """Return whether an operation fills a tensor whose size its arguments give.

    That of ``x.new_zeros(size)`` takes a tensor as well.
    """
    arguments = func._schema.arguments
    takes_tensors = any(str(argument.type) == "Tensor" for argument in arguments)
    takes_device = any(argument.name == "device" for argument in arguments)
    return takes_device and (not takes_tensors or func._opname.startswith("new_"))
