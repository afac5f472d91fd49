"""Inputs of networks for tasks that are evaluated without being trained.

Parameters of a task that is never trained stay as they were initialized. So the mean over the
trained tasks is used, as for unseen tasks in HiP-BMDP (Zhang et al. 2021, arXiv 2007.07206): the
task's input is the mean of their inputs, and where each task has a head of its own, its outputs are
the mean of their heads' outputs. Everything computed from the task's input follows.

Shapes: ``B`` rows of any tasks ``[B]`` or in groups ``[R, n]``, ``T`` tasks, ``U`` rows of
untrained tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.checks import one_of
from mtrl_lightning.networks.network import HasTaskOutputs, is_captured
from mtrl_lightning.spec import EnvSpec

UntrainedTasks = Literal["mean", "own"]
"""``mean``: the mean over the trained tasks; ``own``: a task's own parameters, never trained."""


class _Part(NamedTuple):
    """A module whose outputs are replaced for some tasks."""

    module: nn.Module
    is_replaced_T: Tensor


class MeanOfTrained:
    """Use the trained tasks' mean for the others while a policy acts.

    Args:
        module: contains the parts that depend on the task.
        num_tasks: number of tasks, ``T``.
        train_tasks: the trained tasks.

    Raises:
        ConfigurationError: if a module has nothing to use for a task that is not trained.
    """

    def __init__(self, module: nn.Module, num_tasks: int, train_tasks: Sequence[int]) -> None:
        self._train_tasks = list(train_tasks)
        self._parts: list[_Part] = []
        for part in module.modules():
            if isinstance(part, HasTaskOutputs):
                known = part.own_tasks(train_tasks)
                is_replaced_T = torch.tensor([task not in known for task in range(num_tasks)])
                if is_replaced_T.any():
                    self._parts.append(_Part(part, is_replaced_T))

    @property
    def replaced(self) -> list[str]:
        """The classes of the modules whose outputs are replaced for some task."""
        return list(dict.fromkeys(type(part.module).__name__ for part in self._parts))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the outputs of forward passes."""
        handles = [
            part.module.register_forward_hook(
                lambda module, args, output, is_replaced_T=part.is_replaced_T: self._replace(
                    module, args, output, is_replaced_T
                )
            )
            for part in self._parts
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _replace(
        self, module: nn.Module, args: tuple[Any, ...], output: Tensor, is_replaced_T: Tensor
    ) -> Tensor:
        *features, task_B = args
        is_replaced_B = is_replaced_T.to(task_B.device)[task_B]
        # `forward` and not a call, which would recurse
        if not features:
            task_R = torch.tensor(self._train_tasks, device=task_B.device)
            mean = module.forward(task_R).mean(0)
            return torch.where(is_replaced_B[..., None], mean, output)
        if is_captured():  # the number of rows to replace is not known
            # rows in groups would be taken for those of all tasks
            rows = [feature.flatten(0, task_B.ndim - 1) for feature in features]
            mean = self._mean_output(module, rows, task_B.flatten()).to(output.dtype)
            return torch.where(is_replaced_B[..., None], mean.view_as(output), output)
        if not is_replaced_B.any():
            return output
        # rows of one task in a group, which heads of their own compute faster
        features_1UD = [feature[is_replaced_B][None] for feature in features]
        mean_1UO = self._mean_output(module, features_1UD, task_B[is_replaced_B][None])
        output = output.clone()
        output[is_replaced_B] = mean_1UO[0].to(output.dtype)
        return output

    def _mean_output(self, module: nn.Module, features: list[Tensor], task_B: Tensor) -> Tensor:
        """Return the mean over the trained tasks of the outputs for features of any tasks."""
        outputs = [
            module.forward(*features, torch.full_like(task_B, task)) for task in self._train_tasks
        ]
        return torch.stack(outputs).mean(0)


class UntrainedInput:
    """Input of a policy's networks for tasks that are evaluated without being trained.

    Args:
        spec: the tasks.
        untrained_tasks: whether the networks receive the mean of the trained tasks, or keep their
            own parameters of each task.
    """

    def __init__(self, spec: EnvSpec, untrained_tasks: UntrainedTasks) -> None:
        one_of(get_args(UntrainedTasks), untrained_tasks=untrained_tasks)
        self._spec = spec
        self.is_untrained_T = np.ones(spec.num_tasks, np.bool_)
        """True for the tasks that are not trained."""
        self.is_untrained_T[list(spec.train_tasks)] = False
        self._has_mean = untrained_tasks == "mean" and bool(self.is_untrained_T.any())
        self._mean: MeanOfTrained | None = None

    def add_networks(self, networks: Sequence[nn.Module]) -> None:
        """Receive the policy's networks.

        Raises:
            ConfigurationError: if a network has nothing to use for a task that is not trained.
        """
        if self._has_mean:
            spec = self._spec
            self._mean = MeanOfTrained(nn.ModuleList(networks), spec.num_tasks, spec.train_tasks)

    def replaced(
        self, task_E: npt.NDArray[np.int64] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward pass with these tasks; None for any tasks."""
        if self._mean is None or (task_E is not None and not self.is_untrained_T[task_E].any()):
            return contextlib.nullcontext()
        return self._mean.applied()

    @property
    def summary(self) -> str:
        """Description of the input of untrained tasks; empty if all tasks are trained."""
        if self._mean is None:
            used = "their own parameters, as initialized"
        elif self._mean.replaced:
            used = f"the mean over the trained tasks ({', '.join(self._mean.replaced)})"
        else:
            used = "no input that would have to be learned"
        return self.described(f"The policy is given {used}")

    def described(self, explanation: str) -> str:
        """Return the names of the untrained tasks and an explanation; empty if there are none."""
        if not self.is_untrained_T.any():
            return ""
        tasks = np.flatnonzero(self.is_untrained_T)
        names = ", ".join(self._spec.task_names[task] for task in tasks)
        return f"Evaluated without training: {names}. {explanation}"
