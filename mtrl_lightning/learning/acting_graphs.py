"""Actions as graphs: a policy's choice is recorded once, and then replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrl_lightning.learning.graph import WARM_UPS, Capture, Graphs, HasModules, Replay

Chosen = tuple[Tensor, dict[str, Tensor]]
"""Actions ``[E, A]``, and the further fields of the transitions by name."""


class _Graph(NamedTuple):
    """The graph of a choice of actions."""

    given: list[Tensor]
    """Tensors on the device that the graph reads, and that are given anew."""
    function: Callable[..., Chosen]
    """What was recorded: it holds further tensors that the graph reads, such as the tasks."""
    replay: Replay
    chosen: Chosen
    """Tensors that the graph writes."""


class ActingGraphs(Graphs):
    """Choose actions by graphs, and without where the choice cannot be recorded.

    There is a graph for each kind of choice: a mode, and environments with their tasks. It is
    recorded after ``WARM_UPS`` choices of its kind, up to ``MOST_GRAPHS`` graphs.

    Args:
        modules: the policy's.
        capture: records the choices.
        device: that the policy is on while there are graphs; elsewhere they are not used.
    """

    instead = "actions are chosen without a graph"
    too_many = "for further groups of environments actions are chosen without a graph"

    def __init__(self, modules: HasModules, capture: Capture, device: torch.device) -> None:
        super().__init__(modules, capture)
        self.device = device

    def choose(
        self,
        kind: Hashable,
        function: Callable[..., Chosen],
        given: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> Chosen:
        """Return what a function chooses.

        Args:
            kind: choices of the same kind make the same operations, on tensors of the same shapes.
            function: chooses, from ``given`` on the device.
            given: the observations, and the noise if it is not drawn: on the host.
            generators: from which the function may draw.

        Returns:
            The function's tensors; those of a graph are written again by its next choice.
        """
        self._check_buffers()
        is_warm = self._warm[kind] >= WARM_UPS
        if is_warm and kind not in self._graphs and not self.reason and self._has_room():
            self._record_choice(kind, function, given, generators)
        if kind in self._graphs:
            graph: _Graph = self._graphs[kind]
            for tensor, values in zip(graph.given, given, strict=True):
                tensor.copy_(values, non_blocking=True)
            graph.replay()
            return graph.chosen
        if not is_warm:
            self._warm[kind] += 1
        on_device = [tensor.to(self.device) for tensor in given]
        chosen: list[Chosen] = []
        self._capture.run(lambda: chosen.append(function(*on_device)))
        return chosen[0]

    def _record_choice(
        self,
        kind: Hashable,
        function: Callable[..., Chosen],
        given: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        on_device = [tensor.to(self.device, copy=True) for tensor in given]
        chosen: list[Chosen] = []
        replay = self._record(lambda: chosen.append(function(*on_device)), generators)
        if replay is not None:
            self._graphs[kind] = _Graph(on_device, function, replay, chosen[0])
