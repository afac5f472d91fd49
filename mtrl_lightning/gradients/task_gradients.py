"""Every task's own gradient, and how they are put together.

Shapes: ``T`` trained tasks, or groups of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mtrl_lightning.gradients.method import TaskParameters


class TaskGradients(NamedTuple):
    """The gradient of every task's loss."""

    parameters: TaskParameters
    shared: list[Tensor]
    """For every shared parameter, ``[T, *shape]``."""
    own: list[Tensor]
    """For every other parameter, the gradient of the mean loss."""

    @classmethod
    def of(
        cls,
        loss_T: Tensor,
        parameters: TaskParameters,
        share_T: Tensor | None = None,
        retain_graph: bool = False,
    ) -> TaskGradients:
        """Compute them from the tasks' losses: on a GPU in one batched pass, on a CPU task by task.

        A task's pass on a CPU touches this task's rows alone (``algorithms/task_rows.py``), a
        batched one all rows for every task.

        Args:
            loss_T: one loss a task, or a group's mean loss.
            parameters: what the losses train.
            share_T: share of each loss in the mean loss, adding up to 1; None for ``1 / T``.
            retain_graph: whether the losses are differentiated again.
        """
        shared = parameters.shared
        own = parameters.own
        both = [*shared, *own]
        num_tasks = len(loss_T)
        share_T = (
            loss_T.new_full((num_tasks,), 1 / num_tasks) if share_T is None else share_T.to(loss_T)
        )
        if loss_T.is_cuda:
            found = batched_gradients(loss_T, both, retain_graph)
            means = [torch.tensordot(share_T, gradient, 1) for gradient in found[len(shared) :]]
            parameters.reduce([*found[: len(shared)], *means])
            return cls(parameters, found[: len(shared)], means)
        stacked = [parameter.new_zeros(num_tasks, *parameter.shape) for parameter in shared]
        means = [torch.zeros_like(parameter) for parameter in own]
        for i, share in enumerate(share_T.tolist()):
            retain = retain_graph or i + 1 < num_tasks
            alone = torch.autograd.grad(loss_T[i], both, retain_graph=retain, allow_unused=True)
            for rows, gradient in zip(stacked, alone[: len(shared)], strict=True):
                if gradient is not None:
                    rows[i] = gradient
            for total, gradient in zip(means, alone[len(shared) :], strict=True):
                if gradient is not None:
                    total.add_(gradient, alpha=share)
        parameters.reduce([*stacked, *means])
        return cls(parameters, stacked, means)

    def gram(self) -> Tensor:
        """Return the products ``g_i . g_j`` over the shared parameters, ``[T, T]``, on the CPU in float64."""
        total = sum(g.flatten(1) @ g.flatten(1).t() for g in self.shared)
        assert isinstance(total, Tensor), "a network without shared parameters"
        return total.cpu().double()

    def combine(self, weight_T: Tensor) -> None:
        """Set the gradient of the shared parameters to ``sum_i w_i g_i``, that of the others to the mean's."""
        weight_T = weight_T.to(self.shared[0])  # once: a GPU is waited for
        for parameter, gradient in zip(self.parameters.shared, self.shared, strict=True):
            parameter.grad = torch.tensordot(weight_T, gradient, 1)
        for parameter, gradient in zip(self.parameters.own, self.own, strict=True):
            parameter.grad = gradient

    def follow(
        self, solve: Callable[[Tensor], Tensor], share_T: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Combine the gradients with the weights that a method finds for their Gram matrix.

        Args:
            solve: returns the weights ``[T]`` for the Gram matrix divided by its mean diagonal.
            share_T: the mean's weights.

        Returns:
            The weights, and ``statistics`` of them.
        """
        gram_TT = self.gram()
        weight_T = weights_from(gram_TT, share_T, solve)
        self.combine(weight_T)
        return weight_T, statistics(gram_TT, weight_T, share_T)


def equal_shares(num_tasks: int) -> Tensor:
    """Return the mean's weights, ``[T]`` times ``1 / T``, as the Gram matrix's type."""
    return torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64)


def batched_gradients(
    loss_T: Tensor, parameters: list[Parameter], retain_graph: bool
) -> list[Tensor]:
    """Return for every parameter the gradients of all losses, ``[T, *shape]``, in one pass."""
    each_TT = torch.eye(len(loss_T), device=loss_T.device, dtype=loss_T.dtype)
    found = torch.autograd.grad(
        loss_T, parameters, each_TT, retain_graph, is_grads_batched=True, allow_unused=True
    )
    # materialize_grads would give a parameter that no loss uses one gradient, not one for each loss
    return [
        parameter.new_zeros(len(loss_T), *parameter.shape) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]


def weighted_backward(loss_T: Tensor, weight_T: Tensor, parameters: TaskParameters) -> None:
    """Set what ``TaskGradients.combine`` sets, for weights that are known: two passes in place of ``T``."""
    shared = parameters.shared
    own = parameters.own
    for loss, trained, last in (
        ((weight_T.to(loss_T) * loss_T).sum(), shared, not own),
        (loss_T.mean(), own, True),
    ):
        if trained:
            found = torch.autograd.grad(
                loss, trained, retain_graph=not last, allow_unused=True, materialize_grads=True
            )
            for parameter, gradient in zip(trained, found, strict=True):
                parameter.grad = gradient


def weights_from(gram_TT: Tensor, share_T: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``solve`` of the Gram matrix divided by its mean diagonal.

    Where all gradients are zero, or one is not finite, no method has an answer: the mean's weights
    ``share_T`` are returned, which let what is not finite reach the parameters' gradients and the
    logged norm.
    """
    scale = gram_TT.diagonal().mean()
    if not torch.isfinite(gram_TT).all() or scale == 0:
        return share_T
    return solve(gram_TT / scale)


def statistics(gram_TT: Tensor, weight_T: Tensor, share_T: Tensor) -> dict[str, Tensor]:
    """Describe the gradients and their weights.

    Returns:
        ``conflicts``, the share of pairs with ``g_i . g_j < 0``; ``cosine``, their mean cosine,
        with 0 where a gradient is zero; ``weight_min`` and ``weight_max``, relative to the mean's
        weights.
    """
    norm_T = gram_TT.diagonal().sqrt()
    norms_TT = torch.outer(norm_T, norm_T)
    cosine_TT = torch.where(norms_TT == 0, 0.0, gram_TT / norms_TT)
    i, j = torch.triu_indices(len(gram_TT), len(gram_TT), 1)
    num_pairs = max(len(i), 1)
    pairs = {
        "conflicts": (gram_TT[i, j] < 0).sum() / num_pairs,
        "cosine": cosine_TT[i, j].sum() / num_pairs,
    }
    return pairs | weight_statistics(weight_T / share_T)


def weight_statistics(relative_T: Tensor) -> dict[str, Tensor]:
    """Return the smallest and the largest weight, relative to the mean's."""
    return {"weight_min": relative_T.min(), "weight_max": relative_T.max()}
