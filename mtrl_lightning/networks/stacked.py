"""Several networks of one architecture as batched products: on a GPU, half the kernels.

On a CPU two products are faster than a batched one.

Shapes: ``Q`` networks, ``R`` tasks of a batch, ``n`` rows of a task, ``B`` rows, ``D`` input
features, ``H`` hidden features, ``O`` outputs, ``T`` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import NoConditioning, OneHot
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.mlp import MLP
from mtrl_lightning.networks.multi_head import LinearHeads, MultiHead

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes with the hooks of a module, by which a call of it does more than its ``forward``."""


def can_be_stacked(members: Sequence[nn.Module], x_BD: Tensor) -> bool:
    """Return whether ``stacked_outputs`` knows the networks' architecture and the kind of batch.

    The networks are MLPs, or shared layers with linear heads, of linear layers and ReLU, and do not
    learn the task input. No hook is registered with them or their parts, whose calls are left out.
    The batch has rows of each task.
    """
    return (
        x_BD.ndim == 3
        and len(members) > 1
        and all(
            type(member) in (MLP, MultiHead)
            and type(member.conditioning) in (OneHot, NoConditioning)
            and type(member.trunk) is HiddenLayers
            and all(type(layer) in (nn.Linear, nn.ReLU) for layer in member.trunk)
            and getattr(_head(member), "num_tasks", len(x_BD)) == len(x_BD)
            and type(_head(member)) in (nn.Linear, LinearHeads)
            for member in members
        )
        and not any(
            getattr(module, hooks)
            for member in members
            for module in member.modules()
            for hooks in HOOKS
        )
    )


def stacked_outputs(members: Sequence[nn.Module], x_RnD: Tensor, task_Rn: Tensor) -> Tensor:
    """Return the outputs ``[Q, R, n, O]`` for a learning batch of all tasks.

    Args:
        members: the networks, where they ``can_be_stacked``.
        x_RnD: features.
        task_Rn: tasks.
    """
    first: Any = members[0]
    input_RnD = torch.cat([x_RnD, first.conditioning(task_Rn)], dim=-1)
    num_networks = len(members)
    parameters = [p for member in members for layer in _layers(member) for p in layer.parameters()]
    *hidden, weight_QOH, bias_QO = _Stack.apply(num_networks, *parameters)
    # weights stand first, so that their gradients have their layout and need no copy
    h_QHB = input_RnD.flatten(0, 1).t().expand(num_networks, -1, -1)
    for weight_QHD, bias_QH in list(pairwise(hidden))[::2]:
        h_QHB = torch.baddbmm(bias_QH[..., None], weight_QHD, h_QHB).relu()
    h_QBH = h_QHB.transpose(1, 2)
    head: Any = _head(first)
    if isinstance(head, LinearHeads):
        # each task's rows by its own head, [Q R, n, H]
        h_QBH = h_QBH.unflatten(1, task_Rn.shape).flatten(0, 1)
        weight_QOH = weight_QOH.unflatten(1, (head.num_tasks, head.out_dim)).flatten(0, 1)
        bias_QO = bias_QO.unflatten(1, (head.num_tasks, head.out_dim)).flatten(0, 1)
    output_QBO = torch.baddbmm(bias_QO[:, None], h_QBH, weight_QOH.transpose(1, 2))
    return output_QBO.view(num_networks, *task_Rn.shape, -1)


def _head(member: Any) -> nn.Module:
    head: nn.Module = member.heads if isinstance(member, MultiHead) else member.head
    return head


def _layers(member: Any) -> list[nn.Module]:
    return [*(layer for layer in member.trunk if isinstance(layer, nn.Linear)), _head(member)]


class _Stack(torch.autograd.Function):
    """Stack the networks' parameters, given network after network, in one operation."""

    @staticmethod
    def forward(ctx: Any, num_networks: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.num_networks = num_networks
        of_first = parameters[: len(parameters) // num_networks]
        stacked = tuple(
            parameter.new_empty(num_networks, *parameter.shape) for parameter in of_first
        )
        places = [rows[i] for i in range(num_networks) for rows in stacked]
        torch._foreach_copy_(places, list(parameters))
        return stacked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(rows[i] for i in range(ctx.num_networks) for rows in gradients)
