"""PaCo: parameters composed of shared parameter sets.

Sun et al. 2022, "PaCo: Parameter-Compositional Multi-Task Reinforcement Learning".

Shapes: ``B`` rows of any tasks, ``T`` tasks, ``R`` trained tasks or tasks of a batch, ``n`` rows of
a task, ``K`` parameter sets, ``D`` input features, ``H`` hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, require_task_input
from mtrl_lightning.networks.experts import he_uniform_
from mtrl_lightning.networks.language import TaskTable
from mtrl_lightning.networks.network import Network, TaskAxis, uniform_
from mtrl_lightning.spec import EnvSpec


class PaCo(Network):
    """Compose every weight and bias of an MLP from shared parameter sets: ``sum_k w_tau,k Phi_k``.

    The task is not part of the input. ``w`` is linear in the task conditioning, without bias,
    softmax or bound; for one-hot task IDs it is a learned table. The initial ``w`` of the tasks
    have a root mean square norm of 1, so that the composed weights start with the variance of one
    set. For frozen embeddings, which have unit length, this holds only approximately.

    A task whose loss exceeds ``max_loss`` is masked in the update, and its ``w`` is reinitialized
    with a random convex combination of the other tasks' ``w`` (section 3.4). Non-finite losses
    cannot be masked, because their gradients are not finite either. The optimizer's moments of
    ``w`` are not reset.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of a hidden layer; 400 in the paper.
        depth: number of hidden layers; 3 in the paper.
        num_sets: number of parameter sets, ``K``; 5 for MT10, 20 for MT50.
        max_loss: loss above which a task is masked, above 0 (``epsilon`` in the paper; 3e3 in the
            authors' code). None for no limit.
        output_bound: bound of the uniform initial values of the output layers (0: 1 / sqrt(width)).
        conditioning: task conditioning, from which ``w`` is computed; None for the algorithm's
            ``conditioning``, by default the one-hot task ID.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 400,
        depth: int = 3,
        num_sets: int = 5,
        max_loss: float | None = 3e3,
        output_bound: float = 3e-3,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        at_least(1, width=width, depth=depth, num_sets=num_sets)
        self.conditioning = require_task_input((conditioning or OneHot)(spec), "PaCo")
        is_table = isinstance(self.conditioning, OneHot)
        if max_loss is not None and not (is_table and max_loss > 0):
            raise ConfigurationError(
                f"PaCo's max_loss is {max_loss}"
                f" and its conditioning is {type(self.conditioning).__name__}:"
                " use a max_loss above 0 with OneHot only"
                " (the w of an exploding task can only be reinitialized in a table),"
                " or set max_loss to null"
            )
        self._max_loss = max_loss
        self.composition = nn.Linear(self.conditioning.out_dim, num_sets, bias=False)
        with torch.no_grad():
            # a random unit vector for each feature of the task input; for one-hot task IDs, for
            # each task
            self.composition.weight.normal_()
            self.composition.weight /= self.composition.weight.norm(dim=0)
            if not any(isinstance(part, TaskTable) for part in self.conditioning.modules()):
                # mean_tau ||w_tau||^2 = 1; frozen embeddings already have unit length
                w_TK = self.composition(self.conditioning(torch.arange(spec.num_tasks)))
                self.composition.weight /= w_TK.square().sum(1).mean().sqrt()
        sizes = list(pairwise([in_dim, *[width] * depth, out_dim]))
        self.weights = nn.ParameterList(torch.empty(num_sets, fan_in, out) for fan_in, out in sizes)
        self.biases = nn.ParameterList(torch.zeros(num_sets, out) for _, out in sizes)
        for weight_KDH in self.weights[:-1]:
            he_uniform_(weight_KDH)
        uniform_(self.weights[-1], output_bound, width)
        uniform_(self.biases[-1], output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs: ``[B, out_dim]``, or ``[R, n, out_dim]``."""
        if x_BD.ndim == 3:
            w_RK = self.composition(self.conditioning(task_B[:, 0]))
            return self._forward_by_task(x_BD, w_RK)
        w_BK = self.composition(self.conditioning(task_B))
        last = len(self.weights) - 1
        for i, (weight_KDH, bias_KH) in enumerate(zip(self.weights, self.biases, strict=True)):
            # sum_k w_k (x Phi_k + phi_k) as one product over k and features, instead of one weight
            # matrix per row
            x_BKD = w_BK[:, :, None] * x_BD[:, None, :]
            x_BD = torch.addmm(w_BK @ bias_KH, x_BKD.flatten(1), weight_KDH.flatten(0, 1))
            x_BD = x_BD if i == last else x_BD.relu()
        return x_BD

    def _forward_by_task(self, x_RnD: Tensor, w_RK: Tensor) -> Tensor:
        """Map each task's rows ``[R, n, in_dim]`` with the composed parameters of the task."""
        last = len(self.weights) - 1
        for i, (weight_KDH, bias_KH) in enumerate(zip(self.weights, self.biases, strict=True)):
            # sum_k w_tau,k Phi_k and sum_k w_tau,k phi_k, once per task
            weight_RDH = (w_RK @ weight_KDH.flatten(1)).unflatten(1, weight_KDH.shape[1:])
            x_RnD = torch.baddbmm((w_RK @ bias_KH)[:, None], x_RnD, weight_RDH)
            x_RnD = x_RnD if i == last else x_RnD.relu()
        return x_RnD

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of ``w`` that multiply a one-hot task ID."""
        return self.conditioning.columns("composition.weight")

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the tasks' losses ``[R]``, with 0 for each task whose loss explodes."""
        if self._max_loss is None:
            return loss_R
        return torch.where(_is_healthy(loss_R, self._max_loss), loss_R, 0)

    @torch.no_grad()
    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Reinitialize ``w`` of exploding tasks with convex combinations of the others' ``w``.

        If all tasks explode, nothing changes.

        Args:
            loss_R: losses of the update, before masking.
            task_R: task of each loss.
            generator: samples the combinations; the number of samples does not depend on losses.
        """
        if self._max_loss is None:
            return
        is_healthy_R = _is_healthy(loss_R, self._max_loss)
        w_KT = self.composition.weight
        # in (0, 1], so that the weights of a combination cannot all be 0
        share_RR = 1 - torch.rand(
            len(task_R), len(task_R), generator=generator, device=w_KT.device, dtype=w_KT.dtype
        )
        # each row is a convex combination of the healthy tasks: its shares sum to 1
        share_RR = share_RR * is_healthy_R
        share_RR = share_RR / share_RR.sum(1, keepdim=True)
        w_KR = w_KT[:, task_R]
        # an exploded w may be NaN, which multiplying by 0 would not remove
        combined_KR = torch.where(is_healthy_R, w_KR, 0) @ share_RR.t()
        # w_tau of an exploding task, unless no task is healthy
        w_KT[:, task_R] = torch.where(is_healthy_R | ~is_healthy_R.any(), w_KR, combined_KR)


def _is_healthy(loss_R: Tensor, max_loss: float) -> Tensor:
    return loss_R.isfinite() & (loss_R <= max_loss)
