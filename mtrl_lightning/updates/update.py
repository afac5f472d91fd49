"""One optimizer step from the tasks' losses, for actors, critics, temperatures, auxiliaries.

The functions below the class query the capabilities of an optimizer and its device.

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
from mtrl_lightning.networks.network import last_shared_weight, shared_parameters
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics

Extra = TypeVar("Extra")
"""Additional result of a loss function, returned to the caller."""


class Update:
    """Train modules on the tasks' losses; ``update(lambda: (loss_R, extra))`` makes one step.

    A step with a non-finite gradient changes neither the weights nor the state of the optimizer and
    the gradient method; it is reported to the guard.

    With several processes, each has a share of every task's rows. Losses and gradients are averaged
    over processes, so that all make the same step on the global batch. All decisions (masks,
    weights, gradient method, repairs, whether the step is finite) depend on the averages only.

    Args:
        name: prefix of its metrics, such as ``critic``.
        modules: the trained modules, in the optimizer's order. A ``TaskModule`` declares the
            parameters of single tasks (``task_axes``); those of other modules, such as an encoder,
            are all shared.
        make_optimizer: builds the optimizer from the parameters.
        generators: the algorithm's random generators.
        metrics: receives the losses and, with a ``method``, statistics of the gradient.
        guard: handles steps that are not finite.
        spec: the tasks; there is one loss for each trained task.
        method: how the tasks' losses are combined into one gradient; None for the mean loss.
        max_grad_norm: global norm to which the gradient is clipped, above 0; None for no clipping.
        clip_groups: groups of parameters clipped separately, each by the norm of its own
            gradient; they must contain all trained parameters. None for one group.
        weights: returns the weight of each task's loss, ``[R]``; None for equal weights.
        frozen: parameters that the losses depend on but do not train.
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
        self.has_new_options = False
        """Whether a loaded optimizer state gets this optimizer's own options."""
        self.grad_norm = torch.tensor(0.0)
        """Norm of the last gradient before clipping; not finite if the step was skipped."""
        self.step: Callable[[], object] | None = None
        """Steps the optimizer through Lightning, which counts it; None to step it directly."""
        self.call_hook: Callable[..., None] = lambda name, *args: None
        """Calls a hook of Lightning's callbacks, ``(name, *arguments)``."""
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        """All parameters of the optimizer, including frozen ones."""
        self._networks = [module for module in modules if isinstance(module, TaskModule)]
        self._trained = self.task_parameters.shared + self.task_parameters.own
        # masks depend on the values of the losses, and all ranks must mask the same tasks
        masks = any(
            type(network).mask_losses is not TaskModule.mask_losses for network in self._networks
        )
        self._needs_values = masks or self.method.depends_on_values
        """Whether the losses of the global batch are needed before the backward pass."""
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
        """Build and return the optimizer."""
        self.optimizer = self.make_optimizer(self.parameters)
        self.optimizer.register_load_state_dict_pre_hook(self._prepare_state)
        if decides_on_device(self.parameters[0].device) and not skips_on_device(self.optimizer):
            distributed.warn(
                f"the optimizer of {self.name}, {type(self.optimizer).__name__}, cannot skip a step"
                " on the GPU, so every update synchronizes with the GPU: choose Adam, AdamW or SGD"
                " with fused: true"
            )
        return self.optimizer

    def _prepare_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        check_fused_state(state, optimizer)
        if self.has_new_options:
            replace_options(state, optimizer)

    def clear_state(self, parameters: set[Parameter]) -> None:
        """Clear the optimizer state of reinitialized parameters."""
        for parameter in self.parameters:
            if self.optimizer and parameter in parameters:
                self.optimizer.state.pop(parameter, None)

    def __call__(self, losses: Callable[[], tuple[Tensor, Extra]]) -> Extra:
        """Make one optimizer step.

        Args:
            losses: returns the tasks' losses ``[R]`` and an additional result. A gradient method
                may call it again without gradients, so it must not sample. The losses are logged
                at the end of the update and must not be modified in place before.

        Returns:
            The additional result of ``losses``.

        Raises:
            DivergenceError: if the gradient is not finite and the guard does not skip the step.
            ValueError: if the number of losses is not the number of trained tasks.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "call configure_optimizer before the first step"
        with without_gradients(self._frozen):
            # 1. losses of this rank's rows
            own_loss_R, extra = losses()
        if own_loss_R.shape != self._task_R.shape:
            raise ValueError(
                f"the losses of {self.name} have shape {list(own_loss_R.shape)}: return one number"
                f" per trained task, {list(self._task_R.shape)}"
            )
        # a method that depends on the losses' values needs those of the global batch
        loss_R = distributed.global_losses(own_loss_R) if self._needs_values else own_loss_R
        device = loss_R.device.type
        precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        with torch.no_grad():
            weight_R = self._weights() if self._weights is not None else None
        # restored below if the step is skipped
        method_state = [buffer.clone() for buffer in self.method.buffers()]
        generator = self._generators.get("gradient", loss_R.device)

        # gradients of the last step, or of another update that shares the encoder
        self.call_hook("on_before_zero_grad", optimizer)
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autocast(device, enabled=False):  # autocast would round products of gradients
            # 2. gradients: combined over tasks by the method, then averaged over ranks
            weighted_R = self._weighted(loss_R, weight_R)
            self.method.backward(weighted_R, self.task_parameters, generator)
            if not self._needs_values:
                loss_R = own_loss_R.detach()
                if distributed.world_size() > 1:
                    loss_R = loss_R.clone()  # it is averaged in place
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

            # 4. step if the norm is finite: a bad batch must not corrupt the weights
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
        """Synchronize to read the norm, and make the step if it is finite."""
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
        """Let the device skip the step if the norm is not finite, without synchronization.

        Requires an optimizer with ``found_inf``, which fused optimizers have for gradient scaling.
        """
        # 0 for a finite norm, 1 for infinity and NaN, since either times 0 is NaN
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
        """Clip the gradient by its norm, or each group's gradient by the group's norm."""
        if self._clip_groups is None:
            clip_(gradients, max_norm, norm)
            return
        for group in self._clip_groups:
            of_group = [p.grad for p in group if p.grad is not None]
            clip_(of_group, max_norm, get_total_norm(of_group))

    def _weighted(self, loss_R: Tensor, weight_R: Tensor | None) -> Tensor:
        # PaCo masks tasks whose loss explodes
        for network in self._networks:
            loss_R = network.mask_losses(loss_R)
        return loss_R if weight_R is None else loss_R * weight_R

    def _end_step(self, loss_R: Tensor) -> None:
        """Repair the networks and clear the autocast cache, even if the step was skipped."""
        if self._networks:
            if self._task_R.device != loss_R.device:
                self._task_R = self._task_R.to(loss_R.device)
            generator = self._generators.get("repair", loss_R.device)
            # projections of weights, such as bounds and orthonormal bases
            for network in self._networks:
                network.after_step(loss_R, self._task_R, generator)
        # it holds bfloat16 copies of the weights from before the step
        torch.clear_autocast_cache()

    def _log(self, loss_R: Tensor, norm: Tensor) -> None:
        statistics = {"loss": loss_R}
        if self._logs_gradient:
            statistics |= {"grad_norm": norm, **self.method.metrics()}
        self._metrics.add({f"{self.name}_{key}": value for key, value in statistics.items()})


def decides_on_device(device: torch.device) -> bool:
    """Return whether reading a number from the device would synchronize, as on a GPU."""
    return device.type != "cpu"


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can skip a step depending on the tensor ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def check_fused_state(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Check that a saved state has the shapes of the parameters.

    PyTorch's fused kernels do not check them, and could write out of bounds.

    Args:
        saved: the saved ``state_dict``.
        optimizer: the optimizer that will load it.
    """
    for found, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        parameters = zip(found["params"], own["params"], strict=True)
        for index, parameter in parameters if found.get("fused") or own.get("fused") else ():
            for name, value in saved["state"].get(index, {}).items():
                if name != "step" and value.shape != parameter.shape:
                    raise ConfigurationError(
                        f"{name} of parameter {index} in the checkpoint's optimizer has shape"
                        f" {list(value.shape)} instead of {list(parameter.shape)}:"
                        " use the config.yaml in its run's folder"
                    )


def replace_options(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Replace the options of a saved state, such as the learning rate, with an optimizer's own.

    The factor by which a schedule has scaled the learning rate is kept.
    """
    for found, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        initial = found.get("initial_lr")
        factor = found["lr"] / initial if initial else 1.0
        found |= {**own, "params": found["params"], "lr": factor * own["lr"]}
        if initial is not None:
            found["initial_lr"] = own["lr"]


def clip_(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Clip gradients of this norm to ``max_norm``, with fewer kernels than PyTorch's function."""
    # g <- g / max(1, |g| / max_norm)
    if gradients:
        torch._foreach_div_(gradients, (norm / max_norm).clamp(min=1))


def task_parameters(modules: Sequence[nn.Module]) -> TaskParameters:
    """Return the trained parameters without frozen ones, those of task modules last.

    Args:
        modules: task modules, and modules that all tasks share.
    """
    networks = [module for module in modules if isinstance(module, TaskModule)]
    shared: list[Parameter] = []
    own: list[Parameter] = []
    for module in modules:
        if not isinstance(module, TaskModule):
            shared += _trained(module.parameters())
    # GradNorm compares the tasks' gradients at the last shared layer: the networks', or the
    # encoder's if the networks share none
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
    """Freeze parameters in this context, so that only a module's input gets a gradient."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
