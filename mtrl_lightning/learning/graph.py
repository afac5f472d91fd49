"""Updates as graphs: recorded once, and then replayed without Python.

On a GPU an update takes as long as the host needs to launch its kernels. A CUDA graph launches all
of them at once, on the same memory, with the numbers that the host gave them when it was recorded.
``acting_graphs.py`` has those of acting.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrl_lightning.counters import Counters
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.types import BatchSource, TransitionBatch

UPDATES_PER_GRAPH = 4
"""Updates that one graph makes where as many are owed; the rest are made by graphs of one."""
WARM_UPS = 2
"""Updates of a kind that are made one by one before such an update is recorded: they build the
optimizer's state, and choose algorithms of matrix products."""
MOST_GRAPHS = 32
"""Graphs that are kept at once."""

Replay = Callable[[], None]
"""Replays the recorded operations."""
A = TypeVar("A", bound="HasModules")
"""The algorithm whose operations are recorded."""
G = TypeVar("G")
"""A recorded graph."""


class CannotRecordError(Exception):
    """Operations cannot be recorded; the message completes the sentence "because ..."."""


class Capture(Protocol):
    """Records the operations that a function launches on a device."""

    def run(self, function: Callable[[], None]) -> None:
        """Call the function as it is, where the same operations may be recorded later."""

    def record(self, function: Callable[[], None], generators: Sequence[torch.Generator]) -> Replay:
        """Record the function's operations without effect on any tensor.

        Args:
            function: makes the same operations on the same tensors each time.
            generators: from which it may sample; each replay samples further numbers.

        Raises:
            RuntimeError: if it cannot be recorded, such as where it reads a number.
        """


class HasModules(Protocol):
    """An algorithm, as far as graphs check its buffers."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return all modules by name."""


class Learner(HasModules, Protocol):
    """An algorithm, as far as its updates are recorded."""

    counters: Counters
    generators: Generators
    is_static: bool
    """Whether the next update makes the operations of the last, but for parts that are due."""

    def before_updates(self, first: Callable[[], TransitionBatch], num_updates: int) -> None:
        """Do the host's part of the next updates, once for all of them."""

    def recorded_update(self, batch: TransitionBatch) -> None:
        """Make one update on the device."""

    def after_updates(self, num_updates: int) -> None:
        """Count updates that were made."""

    def due_parts(self, update: int) -> Hashable:
        """Return which of the parts that are not in every update are in this one."""


class Graphs(Generic[A, G]):
    """Graphs of one purpose by kind, and the reason if there are none.

    Args:
        algorithm: whose buffers the graphs use.
        capture: records them.
    """

    instead: ClassVar[str]
    """Start of the warning that there are no graphs; the reason follows."""
    too_many: ClassVar[str]
    """End of the warning that there are ``MOST_GRAPHS``."""

    def __init__(self, algorithm: A, capture: Capture) -> None:
        self._algorithm = algorithm
        self._capture = capture
        self._graphs: dict[Hashable, G] = {}
        self._warm: Counter[Hashable] = Counter()
        """Calls of each kind that were made without a graph."""
        self._buffers: list[_Buffer] = []
        """The buffers that the graphs use."""
        self._has_warned_of_most = False
        """Whether the warning about ``MOST_GRAPHS`` was printed."""
        self.reason = ""
        """Why there are no graphs; empty if there may be."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs that were recorded and are kept."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, because tensors were replaced: they are recorded again."""
        self._graphs = {}
        self._warm = Counter()
        self._buffers = []

    def give_up(self, reason: str) -> None:
        """Use no graphs from here on, and warn once, with the first reason.

        Args:
            reason: completes the sentence "because ...".
        """
        if self.reason:
            return
        self.forget()
        self.reason = reason
        rank_zero_warn(f"compile graph: {self.instead}, because {reason}")

    def _record(
        self, function: Callable[[], None], generators: Sequence[torch.Generator]
    ) -> Replay:
        """Record a function's operations.

        Raises:
            CannotRecordError: if they cannot be.
        """
        self._buffers = _buffers_of(self._algorithm)
        try:
            return self._capture.record(function, generators)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise CannotRecordError(f"{_part_of(error)} cannot be recorded: {reason}") from error

    def _has_room(self) -> bool:
        """Return whether there may be another graph; say once that there may not."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        if not self._has_warned_of_most:
            self._has_warned_of_most = True
            rank_zero_warn(f"compile graph: {MOST_GRAPHS} graphs are kept, and {self.too_many}")
        return False

    def _check_buffers(self) -> None:
        """Give up graphs if a buffer is another tensor than the one that they use."""
        for buffer in self._buffers:
            if buffer.owner.get(buffer.key) is not buffer.tensor:
                self.give_up(
                    f"the buffer {buffer.name} was replaced: change it in place, as by copy_"
                )
                return


class UpdateGraphs(Graphs[Learner, Replay]):
    """Make updates by graphs, and one by one where they cannot be recorded.

    Updates are of one kind if their batches have the same shapes and the same parts are due in
    them, such as an actor that is updated at every second update. There is a graph for each kind,
    and for each sequence of kinds that one graph makes. It is recorded when updates of each of its
    kinds were made one by one ``WARM_UPS`` times, up to ``MOST_GRAPHS`` graphs.

    Args:
        algorithm: whose updates are made.
        capture: records them.
    """

    instead = "updates are made one by one"
    too_many = (
        "updates of further kinds are made one by one: batches have many shapes, or parts are due"
        " at many periods"
    )

    def make(self, source: BatchSource, num_updates: int) -> None:
        """Make updates, several by one graph where there are enough.

        Args:
            source: of their batches.
            num_updates: to make.
        """
        learner = self._algorithm
        while num_updates > 0:
            is_whole = num_updates >= UPDATES_PER_GRAPH and learner.is_static
            num = UPDATES_PER_GRAPH if is_whole else 1
            shapes = source.prepare(num)
            learner.before_updates(partial(source.take, 0), num)
            self._make(source, shapes)
            num_updates -= num

    def _make(self, source: BatchSource, shapes: Sequence[Hashable]) -> None:
        """Make the updates whose batches are ready."""
        learner = self._algorithm
        first = learner.counters.updates
        key = tuple((shape, learner.due_parts(first + i)) for i, shape in enumerate(shapes))
        self._check_buffers()
        is_warm = all(self._warm[kind] >= WARM_UPS for kind in key)
        can_record = is_warm and learner.is_static and not self.reason
        if can_record and key not in self._graphs and self._has_room():
            self._record_updates(source, key)
        if key in self._graphs:
            self._graphs[key]()
            learner.after_updates(len(key))
            return
        for index, shape in enumerate(shapes):
            self._capture.run(partial(self._update, source, index))
            # after the update, as the first ones show which parts there are
            self._warm[shape, learner.due_parts(learner.counters.updates)] += 1
            learner.after_updates(1)

    def _record_updates(self, source: BatchSource, key: tuple[Hashable, ...]) -> None:
        counters = self._algorithm.counters
        first = counters.updates

        def updates() -> None:
            for index in range(len(key)):
                self._update(source, index)
                counters.updates += 1  # parts that are due go by it

        # a recording that fails replaces their states, which would part acting from its graphs
        of_updates = self._algorithm.generators.all_but("act")
        generators = [*of_updates, *source.random_generators()]
        try:
            self._graphs[key] = self._record(updates, generators)
        except CannotRecordError as error:
            self.give_up(str(error))
        finally:
            counters.updates = first

    def _update(self, source: BatchSource, index: int) -> None:
        # autocast keeps the rounded weights until it ends, and these updates are within one
        torch.clear_autocast_cache()
        self._algorithm.recorded_update(source.take(index))


class _Buffer(NamedTuple):
    """A buffer of a module when graphs were recorded."""

    name: str
    owner: dict[str, Tensor | None]
    key: str
    tensor: Tensor | None


def _buffers_of(algorithm: HasModules) -> list[_Buffer]:
    return [
        _Buffer(f"{name}.{key}" if name else key, module._buffers, key, tensor)
        for name, module in algorithm.named_modules()
        for key, tensor in module._buffers.items()
    ]


def _part_of(error: BaseException) -> str:
    """Name the part in which an error was raised: the last function that is not PyTorch's."""
    pytorch = Path(torch.__file__).parent
    name = "a part"
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(pytorch) or path == Path(__file__) or "self" not in frame.f_locals:
            continue
        owner = type(frame.f_locals["self"])
        if not issubclass(owner, TorchDispatchMode):
            name = f"{owner.__name__}.{frame.f_code.co_name} ({path.name}, line {line})"
    return name


class CudaCapture:
    """Records CUDA graphs, which share their memory: only one runs at a time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the same stream for what comes before, as PyTorch asks for: nodes of the backward pass
        # that were made on another stream would wait for it, which no graph can record
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """The graphs that are left, whose memory is the pool."""

    def run(self, function: Callable[[], None]) -> None:
        """Call the function on the stream on which it may be recorded later."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None], generators: Sequence[torch.Generator]) -> Replay:
        """Record the function's kernels, and return a function that launches them.

        Raises:
            RuntimeError: if it waits for the device, or uses tensors of the host.
        """
        on_device = [g for g in generators if g.device.type == "cuda"]
        # PyTorch registers this one itself
        on_device.append(torch.cuda.default_generators[self._index])
        states = [generator.get_state() for generator in on_device]
        if not self._graphs:  # with its last graph a pool ends
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in on_device[:-1]:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a graph has memory of its own
        try:
            with torch.cuda.stream(self._stream):
                self._capture_into(graph, function)
        except BaseException:
            # they still count as being recorded, and would refuse to sample further
            for generator, state in zip(on_device, states, strict=True):
                fresh = torch.Generator(self._device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise
        self._graphs.add(graph)
        return graph.replay

    @property
    def _index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    def _capture_into(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        # thread_local: other threads, such as a logger's, may use the GPU meanwhile
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            with OnlyOn(self._device.type):
                function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it repeats the error
                graph.capture_end()
            with contextlib.suppress(RuntimeError):  # where the line above has not come to it
                torch._C._cuda_endAllocateToPool(self._index, self._pool)
            raise
        graph.capture_end()


class OnlyOn(TorchDispatchMode):
    """Refuse operations on other devices: a graph would keep the numbers that they give now.

    A single number that an operation makes of a constant, as ``torch.where(x > 0, x, 1.0)`` does,
    may be on the CPU.

    Args:
        device: the only kind of device, such as ``cuda``.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._constants: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make an operation, and look at its tensors.

        Raises:
            RuntimeError: if one is on another device.
        """
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.scalar_tensor.default:
            self._constants.append(result)
        for tensor in tree_leaves((args, kwargs, result)):
            is_elsewhere = isinstance(tensor, Tensor) and tensor.device.type != self._device
            if is_elsewhere and not any(tensor is constant for constant in self._constants):
                raise RuntimeError(f"{func} uses a tensor on the {tensor.device.type}")
        return result
