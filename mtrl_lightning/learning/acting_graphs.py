"""Acting by graphs: a policy's operations are recorded once, and then replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from mtrl_lightning.devices import to_device
from mtrl_lightning.learning.graph import (
    WARM_UPS,
    CannotRecordError,
    Capture,
    Graphs,
    HasModules,
    Replay,
)
from mtrl_lightning.networks.untrained import UntrainedInput
from mtrl_lightning.types import Mode

Actions = tuple[Tensor, dict[str, Tensor]]
"""Actions ``[E, A]``, and the further fields of the transitions by name."""


class ActingKind(NamedTuple):
    """Calls of the same kind make the same operations, on tensors of the same shapes."""

    mode: Mode
    tasks: bytes
    """The environments' tasks, as the memory of their array."""
    num_inputs: int
    """1 if the noise is sampled, 2 if it is an input."""
    is_training: bool
    """The mode of PyTorch's modules, on which dropout depends."""


class Acting(HasModules, Protocol):
    """An algorithm, as far as its acting is recorded."""

    training: bool
    untrained: UntrainedInput

    @property
    def device(self) -> torch.device:
        """The device of its networks."""


class _Graph(NamedTuple):
    """A recorded computation of actions."""

    inputs: list[Tensor]
    """Tensors on the device, overwritten before each replay."""
    function: Callable[..., Actions]
    """The recorded function, which keeps further tensors that the graph reads, as the tasks."""
    replay: Replay
    actions: Actions
    """The tensors that each replay writes."""


class ActingGraphs(Graphs[Acting, _Graph]):
    """Compute actions by graphs, and without where the computation cannot be recorded.

    There is a graph for each ``ActingKind``. It is recorded after ``WARM_UPS`` calls of the kind,
    up to ``MOST_GRAPHS`` graphs.

    Args:
        algorithm: that acts.
        capture: records its operations.
    """

    instead = "actions are computed without graphs"
    too_many = (
        "actions of further kinds are computed without: policies act in many groups of environments"
    )

    def __init__(self, algorithm: Acting, capture: Capture) -> None:
        super().__init__(algorithm, capture)
        self._refused: set[ActingKind] = set()
        """Kinds that cannot be recorded."""

    def compute(
        self,
        mode: Mode,
        task_E: npt.NDArray[np.int64],
        function: Callable[..., Actions],
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> Actions:
        """Return the actions that a function computes.

        Args:
            mode: of acting.
            task_E: the environments' tasks.
            function: computes actions from ``inputs`` on the device.
            inputs: the observations, and the noise if it is one: on the host.
            generators: from which the function may sample.

        Returns:
            The function's tensors; those of a graph are overwritten by its next replay.
        """
        if self._is_refused(task_E):
            return function(*[to_device(tensor, self._algorithm.device) for tensor in inputs])
        kind = ActingKind(mode, task_E.tobytes(), len(inputs), self._algorithm.training)
        self._check_buffers()
        if self._may_record(kind):
            self._record_kind(kind, function, inputs, generators)
        graph = self._graphs.get(kind)
        if graph is not None:
            for static, values in zip(graph.inputs, inputs, strict=True):
                static.copy_(values, non_blocking=True)
            graph.replay()
            return graph.actions
        if self._warm[kind] < WARM_UPS:
            self._warm[kind] += 1
        on_device = [tensor.to(self._algorithm.device) for tensor in inputs]
        actions: list[Actions] = []
        self._capture.run(lambda: actions.append(function(*on_device)))
        return actions[0]

    def _is_refused(self, task_E: npt.NDArray[np.int64]) -> bool:
        """Return whether the actions for these tasks have to be computed without graphs now."""
        # the mean input replaces rows whose number the host has to know; tensors of inference mode
        # and autocast's rounded weights are not there in a later replay
        return (
            self._algorithm.untrained.replaces(task_E)
            or torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled(self._algorithm.device.type)
        )

    def _may_record(self, kind: ActingKind) -> bool:
        is_wanted = kind not in self._graphs and kind not in self._refused and not self.reason
        return is_wanted and self._warm[kind] >= WARM_UPS and self._has_room()

    def _record_kind(
        self,
        kind: ActingKind,
        function: Callable[..., Actions],
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        static = [tensor.to(self._algorithm.device, copy=True) for tensor in inputs]
        actions: list[Actions] = []
        try:
            replay = self._record(lambda: actions.append(function(*static)), generators)
        except CannotRecordError as error:
            if not self._refused:
                rank_zero_warn(f"compile graph: actions are computed without graphs where {error}")
            self._refused.add(kind)
            self.forget()  # after a failure the generators have other states than those of graphs
        else:
            self._graphs[kind] = _Graph(static, function, replay, actions[0])
