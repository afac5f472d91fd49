"""Shared hidden layers with one head per task.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``T`` tasks, ``D`` input
features, ``H`` hidden features, ``O`` outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.experts import TaskExperts
from mtrl_lightning.networks.mlp import MLP
from mtrl_lightning.networks.network import TaskAxis, group_values, uniform_
from mtrl_lightning.spec import EnvSpec


class MultiHead(MLP):
    """Share the hidden layers between all tasks, with one head per task.

    The task is also part of the input (MetaWorld+, McLean et al. 2025). With one task, the network
    is equivalent to an ``MLP``.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        head_width: size of the hidden layer of each head, as in mtrl (Sodhani et al. 2021); 0 for
            linear heads.
        options: arguments of ``MLP``.
    """

    def __init__(
        self, in_dim: int, out_dim: int, spec: EnvSpec, *, head_width: int = 0, **options: Any
    ) -> None:
        at_least(0, head_width=head_width, hint=", 0 for linear heads")
        # the constructor of MLP calls add_output, which reads it
        self._head_width = head_width
        super().__init__(in_dim, out_dim, spec, **options)

    def add_output(self, width: int, out_dim: int, spec: EnvSpec, output_bound: float) -> None:
        """Build the heads after the hidden layers."""
        self.heads: nn.Module
        if self._head_width:
            self.heads = TaskExperts(
                spec.num_tasks,
                width,
                out_dim,
                width=self._head_width,
                depth=1,
                output_bound=output_bound,
            )
        else:
            self.heads = LinearHeads(width, out_dim, spec.num_tasks, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        input_BD = torch.cat([x_BD, self.conditioning(task_B)], dim=-1)
        return self.heads(self.trunk(input_BD), task_B)  # type: ignore[no-any-return]

    @property
    def scale_outputs(self) -> Callable[[Tensor, Tensor], None] | None:
        """Scales linear heads; None for heads with a hidden layer."""
        return self.heads.scale_outputs if isinstance(self.heads, LinearHeads) else None


class LinearHeads(nn.Linear):
    """Apply one linear layer per task to the rows of this task.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        num_tasks: number of tasks, ``T``.
        output_bound: bound of the uniform initial values (0: 1 / sqrt(in_dim)).
    """

    tasks_T: Tensor

    def __init__(self, in_dim: int, out_dim: int, num_tasks: int, output_bound: float) -> None:
        super().__init__(in_dim, num_tasks * out_dim)
        self.num_tasks = num_tasks
        self.out_dim = out_dim
        self.register_buffer("tasks_T", torch.arange(num_tasks), persistent=False)
        uniform_(self.weight, output_bound, in_dim)
        uniform_(self.bias, output_bound, in_dim)

    def forward(self, h_BH: Tensor, task_B: Tensor) -> Tensor:  # type: ignore[override]
        """Map features ``[B, H]`` to ``[B, out_dim]``, or ``[R, n, H]`` to ``[R, n, out_dim]``."""
        if h_BH.ndim == 3:
            # apply each task's head to its rows
            weight_ROH = group_values(self.weight.view(self.num_tasks, self.out_dim, -1), task_B)
            bias_R1O = group_values(self.bias.view(self.num_tasks, 1, self.out_dim), task_B)
            if self.out_dim == 1 and h_BH.device.type == "cpu":  # faster there, with more launches
                return ((h_BH * weight_ROH).sum(-1, keepdim=True) + bias_R1O).to(h_BH.dtype)
            return torch.baddbmm(bias_R1O, h_BH, weight_ROH.transpose(1, 2))
        # compute all heads in one product, then select the task's head. This is cheaper than
        # gathering one weight matrix per row, or than indexing, whose backward sorts on a GPU
        y_BTO = super().forward(h_BH).unflatten(-1, (self.num_tasks, self.out_dim))
        is_own_BT1 = (task_B[:, None] == self.tasks_T)[..., None]
        return torch.where(is_own_BT1, y_BTO, 0).sum(1, dtype=y_BTO.dtype)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the heads."""
        return {"weight": TaskAxis(), "bias": TaskAxis()}

    @torch.no_grad()
    def scale_outputs(self, scale_T: Tensor, shift_T: Tensor) -> None:
        """Multiply each task's outputs by its scale and add its shift, ``[T]`` each."""
        scale_TO = scale_T.repeat_interleave(self.out_dim)
        self.weight.mul_(scale_TO[:, None])
        self.bias.mul_(scale_TO).add_(shift_T.repeat_interleave(self.out_dim))
