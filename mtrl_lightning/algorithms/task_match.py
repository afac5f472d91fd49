"""Tasks of a checkpoint and of a run, matched by name, and the conversion of their tensors.

Shapes: ``T`` tasks of the run, ``S`` tasks of the checkpoint, ``N`` new tasks of the run.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.spec import EnvSpec


class TaskMatch(NamedTuple):
    """The tasks of a checkpoint and those of this run."""

    there: EnvSpec
    """The checkpoint's tasks."""
    here: EnvSpec
    """This run's tasks."""
    common: dict[int, int]
    """Index in the checkpoint of each task of this run that the checkpoint has trained, by its
    index in this run."""
    new: list[int]
    """Indices in this run of all other tasks, ``[N]``."""

    @classmethod
    def by_name(cls, there: EnvSpec, here: EnvSpec) -> TaskMatch:
        """Match tasks of the same name."""
        trained = {there.task_names[task]: task for task in there.train_tasks}
        tasks = list(enumerate(here.task_names))
        common = {task: trained[name] for task, name in tasks if name in trained}
        return cls(there, here, common, [task for task, name in tasks if name not in trained])

    @property
    def common_names(self) -> list[str]:
        """Names of the common tasks."""
        return [self.here.task_names[task] for task in self.common]

    @property
    def has_same_order(self) -> bool:
        """Whether both have the same tasks in the same order."""
        return self.there.task_names == self.here.task_names

    def check_sizes(self) -> None:
        """Check that the common tasks' observations and actions have the checkpoint's shapes."""
        for here, there in self.common.items():
            saved, own = self.there.shapes_of(there), self.here.shapes_of(here)
            if saved != own:
                raise ConfigurationError(
                    "a run cannot start from a policy with other observations or actions: those of"
                    f" {self.here.task_names[here]} have shapes {saved} in the checkpoint and {own}"
                    " in this run. Choose tasks and wrappers with the same shapes, or remove"
                    " init_from"
                )

    def shape_there(self, own: Tensor, axis: TaskAxis) -> tuple[int, ...]:
        """Return the shape that a tensor of this run has with the checkpoint's number of tasks."""
        shape = list(own.shape)
        block = (shape[axis.axis] - axis.start) // self.here.num_tasks
        shape[axis.axis] = axis.start + block * self.there.num_tasks
        return tuple(shape)

    def adopt(
        self, own: Tensor, saved: Tensor, axis: TaskAxis, use_mean: bool
    ) -> tuple[Tensor, int]:
        """Return a tensor with the checkpoint's values of common tasks and of shared entries.

        Args:
            own: this run's tensor, whose values new tasks keep.
            saved: the checkpoint's tensor, of shape ``shape_there``.
            axis: position of the tasks' blocks.
            use_mean: whether new tasks get the mean of the checkpoint's trained tasks.

        Returns:
            The tensor, and the number of copied elements.
        """
        adopted = own.clone()
        shared = adopted.narrow(axis.axis, 0, axis.start)
        shared.copy_(saved.narrow(axis.axis, 0, axis.start))
        blocks_T = axis.blocks(adopted, self.here.num_tasks)
        saved_S = axis.blocks(saved, self.there.num_tasks)
        for here, there in self.common.items():
            blocks_T[here] = saved_S[there]
        if use_mean and self.new:
            blocks_T[self.new] = saved_S[list(self.there.train_tasks)].mean(0)
        return adopted, own.numel() - len(self.new) * blocks_T[0].numel()
