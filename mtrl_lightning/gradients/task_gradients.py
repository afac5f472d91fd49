"""The gradient of every task, and how the gradients are combined.

Shapes: ``R`` trained tasks, or groups of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mtrl_lightning.gradients.method import TaskParameters
from mtrl_lightning.ranks import distributed
from mtrl_lightning.utils.devices import CPU


class TaskGradients(NamedTuple):
    """The gradient of every task's loss, averaged over the processes."""

    parameters: TaskParameters
    shared: list[Tensor]
    """For each shared parameter, the tasks' gradients ``[R, *shape]``."""
    own: list[Tensor]
    """For each parameter that is not shared, the gradient of the mean loss."""

    @classmethod
    def from_losses(
        cls,
        loss_R: Tensor,
        parameters: TaskParameters,
        mean_weight_R: Tensor | None = None,
        retain_graph: bool = False,
    ) -> TaskGradients:
        """Differentiate the tasks' losses: on a GPU in one batched pass, on a CPU task by task.

        On a CPU, each task's pass computes only the rows of this task (``per_task_forward``); a
        batched pass computes all rows for every task.

        Args:
            loss_R: one loss per task, or the mean loss of each group.
            parameters: the parameters that the losses train.
            mean_weight_R: weight of each loss in the mean loss; the weights sum to 1. None for
                ``1 / R``.
            retain_graph: whether the losses will be differentiated again.
        """
        shared = parameters.shared
        own = parameters.own
        trained = [*shared, *own]
        num_tasks = len(loss_R)
        if mean_weight_R is None:
            mean_weight_R = loss_R.new_full((num_tasks,), 1 / num_tasks)
        else:
            mean_weight_R = mean_weight_R.to(loss_R)
        if loss_R.device.type != "cpu":
            gradients = batched_gradients(loss_R, trained, retain_graph)
            means = [
                torch.tensordot(mean_weight_R, gradient, 1) for gradient in gradients[len(shared) :]
            ]
            distributed.average([*gradients[: len(shared)], *means])
            return cls(parameters, gradients[: len(shared)], means)
        stacked = [parameter.new_zeros(num_tasks, *parameter.shape) for parameter in shared]
        means = [torch.zeros_like(parameter) for parameter in own]
        for i, mean_weight in enumerate(mean_weight_R.tolist()):
            retain = retain_graph or i + 1 < num_tasks
            one = torch.autograd.grad(loss_R[i], trained, retain_graph=retain, allow_unused=True)
            for rows, gradient in zip(stacked, one[: len(shared)], strict=True):
                if gradient is not None:
                    rows[i] = gradient
            for total, gradient in zip(means, one[len(shared) :], strict=True):
                if gradient is not None:
                    total.add_(gradient, alpha=mean_weight)
        distributed.average([*stacked, *means])
        return cls(parameters, stacked, means)

    def gram(self) -> Tensor:
        """Return ``g_i . g_j`` over the shared parameters, ``[R, R]``, in float64."""
        total = sum(g.flatten(1) @ g.flatten(1).t() for g in self.shared)
        assert isinstance(total, Tensor), "the network has no shared parameters"
        return total.double()

    def combine(self, weight_R: Tensor) -> None:
        """Set ``.grad``: ``sum_i w_i g_i`` for shared parameters, the mean gradient for others."""
        weight_R = weight_R.to(self.shared[0])
        for parameter, gradient in zip(self.parameters.shared, self.shared, strict=True):
            parameter.grad = torch.tensordot(weight_R, gradient, 1)
        for parameter, gradient in zip(self.parameters.own, self.own, strict=True):
            parameter.grad = gradient

    def combine_with(
        self,
        solve: Callable[[Tensor], Tensor],
        mean_weight_R: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Set ``.grad`` using the weights that a method computes from the Gram matrix.

        Args:
            solve: returns the weights ``[R]`` for the Gram matrix divided by its mean diagonal.
            mean_weight_R: weight of each task in the mean loss, on the device on which ``solve``
                runs; the CPU synchronizes with a GPU.

        Returns:
            The weights, and their ``statistics``.
        """
        gram_RR = self.gram().to(mean_weight_R.device)
        # solved on one rank: rounding may differ between machines, but parameters must not
        weight_R = distributed.on_rank_zero(
            lambda: weights_from(gram_RR, mean_weight_R, solve).double(), like=gram_RR[0]
        )
        self.combine(weight_R)
        return weight_R, statistics(gram_RR, weight_R, mean_weight_R)


def equal_weights(num_tasks: int, device: torch.device = CPU) -> Tensor:
    """Return the weights of the plain mean, ``1 / R`` for each task, in the Gram matrix's dtype."""
    return torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64, device=device)


def batched_gradients(
    loss_R: Tensor, parameters: list[Parameter], retain_graph: bool
) -> list[Tensor]:
    """Return the gradients of all losses for every parameter, ``[R, *shape]``, in one pass."""
    one_hot_RR = torch.eye(len(loss_R), device=loss_R.device, dtype=loss_R.dtype)
    gradients = torch.autograd.grad(
        loss_R, parameters, one_hot_RR, retain_graph, is_grads_batched=True, allow_unused=True
    )
    # for unused parameters, materialize_grads would return one gradient instead of one per loss
    return [
        parameter.new_zeros(len(loss_R), *parameter.shape) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def weighted_backward(loss_R: Tensor, weight_R: Tensor, parameters: TaskParameters) -> None:
    """Combine gradients with known weights in two passes instead of ``R``."""
    shared = parameters.shared
    own = parameters.own
    weighted_loss = (weight_R.to(loss_R) * loss_R).sum()
    for loss, trained, is_last_pass in (
        (weighted_loss, shared, not own),
        (loss_R.mean(), own, True),
    ):
        if trained:
            gradients = torch.autograd.grad(
                loss,
                trained,
                retain_graph=not is_last_pass,
                allow_unused=True,
                materialize_grads=True,
            )
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
    distributed.average_gradients([*shared, *own])


def weights_from(
    gram_RR: Tensor, mean_weight_R: Tensor, solve: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``solve`` of the Gram matrix divided by its mean diagonal.

    If all gradients are zero or one of them is not finite, there is no solution. Then
    ``mean_weight_R`` is returned, so that non-finite values propagate to the parameters' gradients
    and the logged norm.
    """
    scale = gram_RR.diagonal().mean()
    is_solvable = torch.isfinite(gram_RR).all() & (scale != 0)
    identity_RR = torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
    # selected on the device, to avoid GPU synchronization
    weight_R = solve(torch.where(is_solvable, gram_RR / scale, identity_RR))
    return torch.where(is_solvable, weight_R, mean_weight_R)


def average_directions(gram_RR: Tensor, solve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the weights of a weighted average of the unit gradients times the mean norm.

    The update therefore equals the mean gradient when the gradients are parallel. A zero gradient
    is left out of the average, but counts in the mean norm.

    Args:
        gram_RR: the Gram matrix of the gradients, which is not zero.
        solve: returns positive weights of the unit gradients, up to a common factor, for the
            cosines ``[R, R]`` and the norms ``[R]``. It receives a zero gradient as a unit gradient
            orthogonal to all others.

    Returns:
        The weights ``[R]`` of the unnormalized gradients.
    """
    own_norm_R = gram_RR.diagonal().sqrt()
    is_present_R = own_norm_R > 0
    norm_R = torch.where(is_present_R, own_norm_R, 1.0)
    # cosines of the gradients: the Gram matrix of unit gradients
    cosine_RR = gram_RR / torch.outer(norm_R, norm_R)
    cosine_RR = cosine_RR + (~is_present_R).to(cosine_RR).diag()
    unit_weight_R = torch.where(is_present_R, solve(cosine_RR, norm_R), 0.0)
    return unit_weight_R / unit_weight_R.sum() * own_norm_R.mean() / norm_R


def statistics(gram_RR: Tensor, weight_R: Tensor, mean_weight_R: Tensor) -> dict[str, Tensor]:
    """Describe the gradients and their weights.

    Returns:
        ``conflicts``, the fraction of pairs with ``g_i . g_j < 0``; ``cosine``, the mean cosine of
        the pairs, 0 if a gradient is zero; ``weight_min`` and ``weight_max``, relative to the
        weights of the mean.
    """
    norm_R = gram_RR.diagonal().sqrt()
    norms_RR = torch.outer(norm_R, norm_R)
    cosine_RR = torch.where(norms_RR == 0, 0.0, gram_RR / norms_RR)
    i, j = torch.triu_indices(len(gram_RR), len(gram_RR), 1, device=gram_RR.device)
    num_pairs = max(len(i), 1)
    pairs = {
        "conflicts": (gram_RR[i, j] < 0).sum() / num_pairs,
        "cosine": cosine_RR[i, j].sum() / num_pairs,
    }
    return pairs | weight_statistics(weight_R / mean_weight_R)


def weight_statistics(relative_R: Tensor) -> dict[str, Tensor]:
    """Return the smallest and the largest weight, relative to the weights of the mean."""
    return {"weight_min": relative_R.min(), "weight_max": relative_R.max()}
