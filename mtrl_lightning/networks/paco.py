"""Composed parameters (Sun et al. 2022, "PaCo: Parameter-Compositional Multi-Task Reinforcement Learning").

Shapes: ``B`` batch, ``T`` tasks, ``U`` trained tasks, ``n`` rows of a task, ``K`` parameter sets,
``D`` input features, ``H`` hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import NeedsTaskNames, OneHot, TaskConditioning, must_tell
from mtrl_lightning.networks.experts import he_uniform_, require_at_least_one, tasks_in_order
from mtrl_lightning.networks.network import Network, uniform_


class PaCo(Network):
    """A perceptron of which every weight and bias is ``sum_k w_tau,k Phi_k``; the task is not part of the input.

    ``w`` is linear in what tells the task, without bias, softmax or bound: with the one-hot, a
    learned table. The tasks' ``w`` begin with a norm of 1 (root mean square), so that the composed
    weights begin with the variance of one set; only for frozen embeddings, which have unit length
    themselves, not exactly.

    A task whose loss explodes is left out of the step, and its ``w`` begins again within the convex
    hull of the other tasks' (section 3.4), while the loss is still finite: one that is not has no
    finite gradient to leave out. The optimizer's moments of ``w`` stay as they are.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in the paper.
        depth: number of hidden layers; 3 in the paper.
        num_sets: parameter sets, ``K``; 5 for MT10, 20 for MT50.
        max_loss: a task's largest loss that is learned from, ``epsilon``; 3e3 in the authors'
            program. None: any.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: what ``w`` is linear in; None for the algorithm's
            ``conditioning``, or else the one-hot.

    Raises:
        ConfigurationError: if there would be no layer, set or feature, or if exploding tasks should
            begin again although ``w`` is no table, or nothing tells the task.
    """

    tasks_T1: Tensor

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 400,
        depth: int = 3,
        num_sets: int = 5,
        max_loss: float | None = 3e3,
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        require_at_least_one(width=width, depth=depth, num_sets=num_sets)
        self.conditioning = must_tell((conditioning or OneHot)(num_tasks), "PaCo")
        self._is_table = isinstance(self.conditioning, OneHot)
        if max_loss is not None and not (self._is_table and max_loss > 0):
            raise ConfigurationError(
                "max_loss must be positive, and an exploding task can only begin again with the"
                " one-hot: "
                "set max_loss to null, or conditioning to OneHot"
            )
        self._max_loss = max_loss
        self.register_buffer("tasks_T1", torch.arange(num_tasks)[:, None], persistent=False)
        self.composition = nn.Linear(self.conditioning.out_dim, num_sets, bias=False)
        with torch.no_grad():
            self.composition.weight.normal_()
            self.composition.weight /= self.composition.weight.norm(dim=0)
            if not any(isinstance(part, NeedsTaskNames) for part in self.conditioning.modules()):
                w_TK = self.composition(self.conditioning(self.tasks_T1[:, 0]))
                self.composition.weight /= w_TK.square().sum(1).mean().sqrt()
        sizes = list(pairwise([in_dim, *[width] * depth, out_dim]))
        self.weights = nn.ParameterList(torch.empty(num_sets, fan_in, out) for fan_in, out in sizes)
        self.biases = nn.ParameterList(torch.zeros(num_sets, out) for _, out in sizes)
        for weight_KDH in self.weights[:-1]:
            he_uniform_(weight_KDH)
        uniform_(self.weights[-1], output_bound, width)
        uniform_(self.biases[-1], output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        tasks_G = (
            tasks_in_order(task_B, self.tasks_T1) if task_B.device.type == "cpu" else None
        )  # a GPU is not stopped
        if tasks_G is not None:
            x_GnD = x_BD.view(len(tasks_G), -1, x_BD.shape[1])
            return self._by_task(x_GnD, self.composition(self.conditioning(tasks_G))).flatten(0, 1)
        w_BK = self.composition(self.conditioning(task_B))
        last = len(self.weights) - 1
        for i, (weight_KDH, bias_KH) in enumerate(zip(self.weights, self.biases, strict=True)):
            # sum_k w_k (x Phi_k + phi_k) as one product over k and the features: no weight matrix
            # for each row
            x_BKD = w_BK[:, :, None] * x_BD[:, None, :]
            x_BD = torch.addmm(w_BK @ bias_KH, x_BKD.flatten(1), weight_KDH.flatten(0, 1))
            x_BD = x_BD if i == last else x_BD.relu()
        return x_BD

    def _by_task(self, x_TnD: Tensor, w_TK: Tensor) -> Tensor:
        """Map each task's rows by the task's composed parameters."""
        last = len(self.weights) - 1
        for i, (weight_KDH, bias_KH) in enumerate(zip(self.weights, self.biases, strict=True)):
            weight_TDH = (w_TK @ weight_KDH.flatten(1)).unflatten(1, weight_KDH.shape[1:])
            x_TnD = torch.baddbmm((w_TK @ bias_KH)[:, None], x_TnD, weight_TDH)
            x_TnD = x_TnD if i == last else x_TnD.relu()
        return x_TnD

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameter sets, and what ``w`` is computed by unless it is a table: a task's row is its own."""
        if not self._is_table:
            yield from self.conditioning.parameters()
            yield from self.composition.parameters()
        yield from self.weights
        yield from self.biases

    def last_shared_weight(self) -> Parameter:
        """Return the output layer's weights of all sets ``[K, width, out_dim]``."""
        return self.weights[-1]

    def mask_losses(self, loss_T: Tensor) -> Tensor:
        """Return the tasks' losses ``[T]``, with 0 for a task whose loss explodes."""
        return (
            loss_T
            if self._max_loss is None
            else torch.where(_is_healthy(loss_T, self._max_loss), loss_T, 0)
        )

    @torch.no_grad()
    def after_step(self, loss_T: Tensor, task_T: Tensor, generator: torch.Generator) -> None:
        """Let exploding tasks begin again from a random convex combination of the others' ``w``, if there are others.

        Args:
            loss_T: the losses that the step was made for, before they were masked.
            task_T: which task each of them is of.
            generator: draws the combinations; as many numbers whether a task explodes or not.
        """
        if self._max_loss is None:
            return
        is_healthy_U, w_KT = _is_healthy(loss_T, self._max_loss), self.composition.weight
        # in (0, 1], so that the weights of a combination never vanish together
        share_UU = 1 - torch.rand(
            len(task_T), len(task_T), generator=generator, device=w_KT.device, dtype=w_KT.dtype
        )
        share_UU = share_UU * is_healthy_U
        share_UU = share_UU / share_UU.sum(1, keepdim=True)
        w_KU = w_KT[:, task_T]
        # an exploded w may be no number, which a share of 0 would not remove
        combined_KU = torch.where(is_healthy_U, w_KU, 0) @ share_UU.t()
        w_KT[:, task_T] = torch.where(is_healthy_U | ~is_healthy_U.any(), w_KU, combined_KU)


def _is_healthy(loss_T: Tensor, max_loss: float) -> Tensor:
    return loss_T.isfinite() & (loss_T <= max_loss)
