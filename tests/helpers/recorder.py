"""What a CUDA graph does, on the CPU: record an update's operations, and make them again.

A graph launches the recorded kernels again on the very memory that they had, with the numbers that
the host gave them then; no line of Python runs. So does a ``Recording``: whatever an update leaves
to Python (a branch on a value, a count, a tensor that is replaced) goes missing in its replays, and
a comparison with updates made one by one shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrl_lightning.learning.acting_graphs import ActingGraphs
from mtrl_lightning.learning.compiling import AlgorithmGraphs
from mtrl_lightning.learning.graph import UpdateGraphs

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Operations for which the host waits for a number; a comparison of two tensors is one."""


class Recording(TorchDispatchMode):
    """Record all operations with their tensors; ``replay`` makes them again, in place."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._made: set[int] = set()
        """Storages that the recorded operations made, which are kept alive by them."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """All other storages that they used, and what was in them before."""
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        """Generators that they drew from, and their states before."""

    @property
    def num_operations(self) -> int:
        """Number of the recorded operations."""
        return len(self._operations)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"operation not permitted when recording: {func} reads a number")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._remember(leaf)
            elif isinstance(leaf, torch.Generator) and leaf._cdata not in self._generators:
                self._generators[leaf._cdata] = (leaf, leaf.get_state())
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._made |= {_storage(output) for output in outputs} - self._before.keys()
        self._operations.append((func, args, kwargs, outputs))
        return result

    def roll_back(self) -> None:
        """Undo what was recorded: a CUDA graph is recorded without running it."""
        for tensor, before in self._before.values():
            tensor.untyped_storage().copy_(before.untyped_storage())
        for generator, state in self._generators.values():
            generator.set_state(state)

    @torch.no_grad()
    def replay(self) -> None:
        """Make the operations again, and write their results where they were."""
        for func, args, kwargs, outputs in self._operations:
            found = [
                leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)
            ]
            for output, value in zip(outputs, found, strict=True):
                if _storage(output) != _storage(value):  # else a view, or changed in place
                    output.copy_(value.view(output.shape))  # squeeze_ came after it

    def _remember(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage in self._made or storage in self._before:
            return
        copy = torch.empty(0, dtype=torch.uint8)
        copy.set_(tensor.untyped_storage().clone())  # type: ignore[call-overload]
        self._before[storage] = (tensor, copy)


class CPURecorder:
    """Stands for ``CudaCapture`` where there is no GPU."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def run(self, function: Callable[[], None]) -> None:
        """Call the function."""
        function()

    def record(
        self, function: Callable[[], None], generators: Sequence[torch.Generator]
    ) -> Callable[[], None]:
        """Record a function without effect on any tensor, and return what replays it."""
        recording = Recording()
        try:
            with recording:
                function()
        finally:
            recording.roll_back()
        known = {generator._cdata for generator in generators}
        unknown = recording._generators.keys() - known
        assert not unknown, "a generator that was not registered"
        self.recordings.append(recording)
        return recording.replay


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def recorded_graphs(algorithm: Any, recorder: CPURecorder | None = None) -> AlgorithmGraphs:
    """Return graphs of updates and of acting, these by a recorder of their own."""
    updates = UpdateGraphs(algorithm, recorder or CPURecorder())
    return AlgorithmGraphs(updates, ActingGraphs(algorithm, CPURecorder()))
