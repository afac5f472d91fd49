"""One optimizer step from the tasks' losses, for actors, critics, temperatures, auxiliaries.

The functions below the class say what an optimizer and its device can do.

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from mtrl_lightning.checks import above
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod, Mean, TaskParameters
from mtrl_lightning.networks import TaskModule
from mtrl_lightning.networks.task_axes import last_shared_weight, shared_parameters
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics

Extra = TypeVar("Extra")
"""Result of a loss function beside the losses, for the caller."""


class Update:
    """Train modules on the tasks' losses; ``update(lambda: (loss_R, extra))`` makes one step.

    A step whose gradient is not finite changes neither weights nor the optimizer's and the gradient
    method's state; the guard is informed of it.

    With several processes, each has a share of every task's rows. Losses and gradients are averaged
    over them, so that all make the step of the joined batch. All that decides (masks, weights, the
    gradient method, repairs, whether the step is finite) goes by the averages.

    Args:
        name: prefix of its metrics, such as ``critic``.
        modules: the trained modules, in the optimizer's order. A ``TaskModule`` declares the
            parameters of single tasks (``task_axes``); those of other modules, such as an encoder,
            are all shared.
        make_optimizer: builds the optimizer from the parameters.
        generators: the algorithm's random generators.
        metrics: receives the losses, and statistics of the gradient if there is a ``method``.
        guard: decides about steps that are not finite.
        spec: the tasks; the losses are those of the trained ones.
        method: how the tasks' losses become one gradient; None for the mean of losses.
        max_grad_norm: global norm to which the gradient is clipped, above 0; None for no clipping.
        clip_groups: groups of parameters clipped separately, each by the norm of its own
            gradient; all trained parameters must be among them. None for one group.
        weights: returns how much each task's loss counts, ``[R]``; None for equal weights.
        frozen: parameters that the losses depend on and do not train.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        make_optimizer: OptimizerCallable,
        *,
        generators: Generators,
        metrics: MeanMetrics,
        guard: DivergenceGuard,
        spec: EnvSpec,
        method: GradientMethod | None = None,
        max_grad_norm: float | None = None,
        clip_groups: Sequence[Sequence[Parameter]] | None = None,
        weights: Callable[[], Tensor] | None = None,
        frozen: Sequence[Parameter] = (),
    ) -> None:
        above(0, prefix=f"{name}_", hint=", or null for no clipping", max_grad_norm=max_grad_norm)
        self.name = name
        self.method = Mean(spec) if method is None else method
        self.task_parameters = task_parameters(modules)
        self.method.check(self.task_parameters)
        self.optimizer: Optimizer | None = None
        self.grad_norm = torch.tensor(0.0)
        """Of the last gradient, before it is clipped; not finite if the step was left out."""
        self.step: Callable[[], object] | None = None
        """Steps the optimizer as Lightning counts it; None steps the optimizer itself."""
        self.call_hook: Callable[..., None] = lambda name, *args: None
        """Calls a hook of Lightning's callbacks, ``(name, *arguments)``."""
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        """All parameters of the optimizer, also frozen ones."""
        self._networks = [module for module in modules if isinstance(module, TaskModule)]
        self._trained = self.task_parameters.shared + self.task_parameters.own
        # a mask goes by the values of the losses, and all ranks must mask the same tasks
        masks = any(
            type(network).mask_losses is not TaskModule.mask_losses for network in self._networks
        )
        self._needs_values = masks or self.method.depends_on_values
        """Whether the losses of the joined batch are needed before the backward pass."""
        self.make_optimizer = make_optimizer
        self._generators = generators
        self._metrics = metrics
        self._guard = guard
        self._task_R = torch.tensor(spec.train_tasks)
        self._logs_gradient = method is not None
        self._max_grad_norm = max_grad_norm
        self._clip_groups = clip_groups
        self._weights = weights
        self._frozen = [parameter for parameter in frozen if parameter.requires_grad]

    def configure_optimizer(self) -> Optimizer:
        """Build the optimizer, which the following steps use, and return it."""
        try:
            self.optimizer = self.make_optimizer(self.parameters)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the optimizer of {self.name} cannot be built: {error}"
            ) from error
        if decides_on_device(self.parameters[0].device) and not skips_on_device(self.optimizer):
            distributed.warn(
                f"the optimizer of {self.name}, {type(self.optimizer).__name__}, cannot skip a step"
                " on the GPU, so every update waits for the GPU: choose Adam, AdamW or SGD with"
                " fused: true"
            )
        return self.optimizer

    def clear_state(self, parameters: set[Parameter]) -> None:
        """Clear the optimizer's state of parameters that were reinitialized."""
        for parameter in self.parameters:
            if self.optimizer and parameter in parameters:
                self.optimizer.state.pop(parameter, None)

    def __call__(self, losses: Callable[[], tuple[Tensor, Extra]]) -> Extra:
        """Make one step.

        Args:
            losses: returns the tasks' losses ``[R]`` and anything else. A gradient method may call
                it a second time, without a graph, so it must sample nothing. The losses are logged
                when the update ends, and must not change in place until then.

        Returns:
            The extra result of the losses.

        Raises:
            DivergenceError: if the gradient is not finite and the guard refuses to skip the step.
            ValueError: if there is not one loss per trained task.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "configure_optimizer comes before the first step"
        with without_gradients(self._frozen):
            # 1. losses of this rank's rows
            own_loss_R, extra = losses()
        if own_loss_R.shape != self._task_R.shape:
            raise ValueError(
                f"the losses of {self.name} have the shape {list(own_loss_R.shape)}: return one"
                f" number per trained task, {list(self._task_R.shape)}"
            )
        # a method that weighs by losses has to see those of the joined batch
        loss_R = distributed.global_losses(own_loss_R) if self._needs_values else own_loss_R
        device = loss_R.device.type
        precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        with torch.no_grad():
            weight_R = self._weights() if self._weights is not None else None
        # restored below if the step is left out
        method_state = [buffer.clone() for buffer in self.method.buffers()]
        generator = self._generators.get("gradient", loss_R.device)

        # of the last step, or of another update that shares the encoder
        self.call_hook("on_before_zero_grad", optimizer)
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autocast(device, enabled=False):  # it would round the products of gradients
            # 2. gradients: the method combines the tasks', then they are averaged over the ranks
            weighted_R = self._weighted(loss_R, weight_R)
            self.method.backward(weighted_R, self.task_parameters, generator)
            if not self._needs_values:
                loss_R = own_loss_R.detach()
                if distributed.world_size() > 1:
                    loss_R = loss_R.clone()  # which is averaged in place
                distributed.average_gradients(self._trained, [loss_R])
            elif not self.method.averages_gradients:
                distributed.average_gradients(self._trained)
            loss_R = loss_R.detach()
            self.call_hook("on_after_backward")
            # 3. clip
            gradients = [p.grad for p in self._trained if p.grad is not None]
            norm = self.grad_norm = get_total_norm(gradients)
            if self._max_grad_norm is not None:
                self._clip(gradients, self._max_grad_norm, norm)

            def losses_after() -> Tensor:
                with torch.autocast(*precision):
                    new_loss_R, _ = losses()
                return self._weighted(distributed.global_losses(new_loss_R), weight_R)

            # 4. step if the norm is finite: one bad batch must not end in the weights
            on_device = decides_on_device(norm.device) and skips_on_device(optimizer)
            step = self._step_on_device if on_device else self._step_on_host
            step(optimizer, norm, loss_R, losses_after, method_state)
        self._log(loss_R, norm)
        return extra

    def _step_on_host(
        self,
        optimizer: Optimizer,
        norm: Tensor,
        loss_R: Tensor,
        losses_after: Callable[[], Tensor],
        method_state: Sequence[Tensor],
    ) -> None:
        """Wait for the norm, and make the step if it is finite."""
        is_finite = math.isfinite(norm)
        if is_finite:
            self._make_step(optimizer)
        self._end_step(loss_R)
        if is_finite:
            # methods such as FAMO compare the losses before and after the step
            with torch.no_grad():
                self.method.after_step(losses_after)
        else:
            for buffer, before in zip(self.method.buffers(), method_state, strict=True):
                buffer.copy_(before)
        self._guard.check(self.name, is_finite, loss_R)

    def _step_on_device(
        self,
        optimizer: Optimizer,
        norm: Tensor,
        loss_R: Tensor,
        losses_after: Callable[[], Tensor],
        method_state: Sequence[Tensor],
    ) -> None:
        """Let the device leave the step out if the norm is not finite, without waiting for it.

        That takes an optimizer with ``found_inf``, as fused ones have for gradient scaling.
        """
        # 0 for a finite norm, 1 for infinity and NaN, which are NaN times 0
        found_inf = (norm * 0).nan_to_num(1.0)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self._make_step(optimizer)
        self._end_step(loss_R)
        with torch.no_grad():
            self.method.after_step(losses_after)
        if method_state:
            is_skipped = found_inf > 0
            for buffer, before in zip(self.method.buffers(), method_state, strict=True):
                buffer.copy_(torch.where(is_skipped, before, buffer))
        self._guard.keep(self.name, found_inf, loss_R)

    def _make_step(self, optimizer: Optimizer) -> None:
        if self.step is not None:
            self.step()  # Lightning calls the hook itself
            return
        self.call_hook("on_before_optimizer_step", optimizer)
        optimizer.step()

    def _clip(self, gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
        """Clip the gradient, whose norm is given, or each group's by its own norm."""
        if self._clip_groups is None:
            clip_(gradients, max_norm, norm)
            return
        for group in self._clip_groups:
            of_group = [p.grad for p in group if p.grad is not None]
            clip_(of_group, max_norm, get_total_norm(of_group))

    def _weighted(self, loss_R: Tensor, weight_R: Tensor | None) -> Tensor:
        # PaCo leaves out tasks whose loss explodes
        for network in self._networks:
            loss_R = network.mask_losses(loss_R)
        return loss_R if weight_R is None else loss_R * weight_R

    def _end_step(self, loss_R: Tensor) -> None:
        """Repair the networks and drop rounded weights, also where the step was left out."""
        if self._networks:
            if self._task_R.device != loss_R.device:
                self._task_R = self._task_R.to(loss_R.device)
            generator = self._generators.get("repair", loss_R.device)
            # projections of weights, such as bounds and orthonormal bases
            for network in self._networks:
                network.after_step(loss_R, self._task_R, generator)
        # it holds the weights of before the step in bf16
        torch.clear_autocast_cache()

    def _log(self, loss_R: Tensor, norm: Tensor) -> None:
        statistics = {"loss": loss_R}
        if self._logs_gradient:
            statistics |= {"grad_norm": norm, **self.method.metrics()}
        self._metrics.add({f"{self.name}_{key}": value for key, value in statistics.items()})


def decides_on_device(device: torch.device) -> bool:
    """Return whether the device has to be waited for to see a number, as a GPU."""
    return device.type != "cpu"


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer takes a tensor by which it skips a step."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clip_(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this norm to at most ``max_norm``: PyTorch's function has more kernels."""
    # g <- g / max(1, |g| / max_norm)
    if gradients:
        torch._foreach_div_(gradients, (norm / max_norm).clamp(min=1))


def task_parameters(modules: Sequence[nn.Module]) -> TaskParameters:
    """Return the trained parameters, other modules before networks, without frozen ones.

    Args:
        modules: networks, and modules that all tasks share.
    """
    networks = [module for module in modules if isinstance(module, TaskModule)]
    shared: list[Parameter] = []
    own: list[Parameter] = []
    for module in modules:
        if not isinstance(module, TaskModule):
            shared += _trained(module.parameters())
    # GradNorm compares the tasks' gradients at the last layer that they share: the networks', or
    # the encoder's where the networks share none
    last_shared = [parameter for parameter in shared if parameter.ndim > 1][-1:]
    weights = [last_shared_weight(network) for network in networks]
    last_shared = [weight for weight in weights if weight is not None] or last_shared
    for network in networks:
        network_shared = _trained(shared_parameters(network))
        known = {id(parameter) for parameter in network_shared}
        shared += network_shared
        own += [
            parameter for parameter in _trained(network.parameters()) if id(parameter) not in known
        ]
    return TaskParameters(shared, own, last_shared)


def _trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


@contextmanager
def without_gradients(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Leave parameters out of the graph, so that only a module's input gets a gradient."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
