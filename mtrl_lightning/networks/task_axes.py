"""Where weights and statistics have something for each task, as their modules declare it.

By this a run starts from a policy of other tasks: see ``algorithms.starting``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable


class TaskAxis(NamedTuple):
    """A tensor's axis with one block per task; tasks share the entries around the blocks."""

    axis: int = 0
    """The axis."""
    start: int = 0
    """Index at which the first task's block starts."""
    block: int = 1
    """Size of each block."""
    has_mean: bool = True
    """Whether the mean of several tasks' blocks can start a new task: false for several layers of
    its own, whose hidden units are in another order in each task."""


@runtime_checkable
class HasTaskAxes(Protocol):
    """A module that declares which of its tensors have something for each task."""

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of each tensor that has one, by its name in the module's ``state_dict``.

        Inner modules that have this method declare their own. A tensor of the extra state is named
        ``_extra_state.KEY``.
        """
