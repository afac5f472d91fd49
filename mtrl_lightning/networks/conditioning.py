"""Task conditioning: the input that tells a network the task.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``C`` features of the
task input, ``T`` tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.network import TaskAxis, task_values
from mtrl_lightning.spec import EnvSpec


class TaskConditioning(nn.Module):
    """Map a task to its input features; built by a factory ``(spec) -> TaskConditioning``.

    Args:
        spec: the tasks.
    """

    is_task_input = True
    """Its parameters are inputs of a network and count as shared."""
    out_dim: int
    """Size of the task input, ``C``."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.num_tasks = spec.num_tasks

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` (integers) to ``[B, out_dim]``."""
        raise NotImplementedError

    def columns(self, weight: str, start: int = 0) -> dict[str, TaskAxis]:
        """Return which columns of a linear layer's weight belong to single tasks; by default none.

        Args:
            weight: name of the weight ``[H, start + C]`` that multiplies the task input.
            start: number of preceding inputs.
        """
        return {}


class OneHot(TaskConditioning):
    """Use the one-hot task ID.

    Args:
        spec: the tasks.
    """

    table_TT: Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.out_dim = spec.num_tasks
        self.register_buffer("table_TT", torch.eye(spec.num_tasks), persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to ``[B, T]``."""
        return task_values(self.table_TT, task_B)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the vectors: an untrained task's is the mean of the trained ones."""
        return {"table_TT": TaskAxis()}

    def columns(self, weight: str, start: int = 0) -> dict[str, TaskAxis]:
        """Return the columns from ``start`` on: each feature belongs to one task."""
        return {weight: TaskAxis(1, start)}


class NoConditioning(TaskConditioning):
    """Use no task input, for a network whose features already contain the task.

    Args:
        spec: the tasks.
    """

    table_T0: Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.out_dim = 0
        self.register_buffer("table_T0", torch.zeros(spec.num_tasks, 0), persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to ``[B, 0]``."""
        return task_values(self.table_T0, task_B)


class Embedding(TaskConditioning):
    """Learn a vector for each task, as in BRC (Nauman et al. 2025) with ``unit_norm``.

    Args:
        spec: the tasks.
        dim: size of a vector, ``C``; 32 in BRC, 50 in mtrl.
        unit_norm: whether vectors are normalized to unit length in the forward pass.
    """

    def __init__(self, spec: EnvSpec, *, dim: int = 32, unit_norm: bool = False) -> None:
        super().__init__(spec)
        at_least(1, dim=dim, prefix="a task embedding's ")
        self.out_dim = dim
        self._unit_norm = unit_norm
        self.weight_TC = nn.Parameter(torch.randn(spec.num_tasks, dim))

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to ``[B, C]``."""
        embedding_BC = task_values(self.weight_TC, task_B)
        return F.normalize(embedding_BC, dim=-1) if self._unit_norm else embedding_BC

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the vectors."""
        return {"weight_TC": TaskAxis()}


class TaskEncoder(TaskConditioning):
    """Encode a task embedding with an MLP, as in CARE (Sodhani et al. 2021) and mtrl.

    Args:
        spec: the tasks.
        width: size of a hidden layer; 50 in CARE.
        depth: number of hidden layers; 2 in CARE.
        out_dim: output size, ``C``; 50 in CARE.
        embedding: task conditioning, the input of the MLP: learned vectors of size 50 by
            default, or for example a frozen ``Language``.
    """

    tasks_T: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        width: int = 50,
        depth: int = 2,
        out_dim: int = 50,
        embedding: Callable[[EnvSpec], TaskConditioning] = lambda spec: Embedding(spec, dim=50),
    ) -> None:
        super().__init__(spec)
        at_least(1, out_dim=out_dim, prefix="a task encoder's ")
        self.out_dim = out_dim
        self.register_buffer("tasks_T", torch.arange(spec.num_tasks), persistent=False)
        self.embedding = embedding(spec)
        self.hidden = HiddenLayers(self.embedding.out_dim, width, depth, layer_norm=False)
        self.output = nn.Linear(width, out_dim)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to ``[B, C]``."""
        # once per task instead of per row, because there are far fewer tasks
        return self.output(self.hidden(self.embedding(self.tasks_T)))[task_B]

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of the first layer that multiply a one-hot task ID."""
        return self.embedding.columns("hidden.0.weight")


def require_task_input(conditioning: TaskConditioning, network: str) -> TaskConditioning:
    """Return the conditioning, or raise an error if it has no features.

    Without features, quantities computed only from the task input would be constant.

    Args:
        conditioning: the network's task conditioning.
        network: the network's name, for the error message.
    """
    if conditioning.out_dim < 1:
        raise ConfigurationError(
            f"{network} depends on the task only through the task input,"
            f" but {type(conditioning).__name__} has none:"
            " set the network's conditioning to OneHot, or choose an encoder whose features do"
            " not contain the task (-c configs/encoder/identity.yaml)"
        )
    return conditioning
