"""Check that a network declares its task-specific parameters.

A forgotten declaration would not show: a task that is evaluated without being trained would use
parameters as they were initialized, and gradient methods would take the tasks' own for shared ones.

Shapes: ``n`` rows of a task, ``D`` input features, ``O`` outputs, ``T`` tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.untrained import MeanOfTrained

NUM_ROWS = 8
"""Rows whose gradient is taken: a hidden unit is hardly ever 0 for all of them."""


def check_declared(
    network: nn.Module, shared: Sequence[Parameter], in_dim: int, num_tasks: int
) -> None:
    """Check by gradients which parameters the first and the last task have for themselves.

    Args:
        network: maps features ``[R, n, D]`` and tasks ``[R, n]`` to outputs.
        shared: the parameters that it declares as shared.
        in_dim: number of input features, ``D``.
        num_tasks: number of tasks, ``T``.

    Raises:
        ConfigurationError: if it takes no learning batch, or ``own_tasks`` or ``shared_parameters``
            is missing or incomplete.
    """
    if torch.is_inference_mode_enabled():
        return
    _check_groups(network, in_dim, num_tasks)
    if num_tasks < 2:
        return
    kind = type(network).__name__
    try:
        forgotten = _own_parameters(network, in_dim, num_tasks, replaces=True)
    except ConfigurationError:  # nothing replaces a task's outputs, and own_tasks says so
        forgotten = {}
    for name in forgotten:
        raise ConfigurationError(
            f"{kind} has parameters for each task ({name}), and nothing replaces those of a task"
            " that is not trained: define the method own_tasks(train_tasks), which returns the"
            " tasks that have parameters of their own"
        )
    declared = {id(parameter) for parameter in shared}
    if not declared:
        return
    for name, parameter in _own_parameters(network, in_dim, num_tasks, replaces=False).items():
        if id(parameter) in declared:
            raise ConfigurationError(
                f"{kind} has parameters for each task ({name}) and declares them as shared: define"
                " the method shared_parameters(), which yields all others"
            )


def _own_parameters(
    network: nn.Module, in_dim: int, num_tasks: int, replaces: bool
) -> dict[str, Parameter]:
    """Return the parameters with a separate part for each task.

    Args:
        network: maps features and tasks to outputs.
        in_dim: number of input features.
        num_tasks: number of tasks.
        replaces: whether the task counts as untrained, so that its declared parameters are
            replaced. If not, only tables with a row for each task count, and no task conditioning:
            its parameters are a network's input.
    """
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    first, last = (
        _gradients(network, list(parameters.values()), in_dim, task, num_tasks, replaces)
        for task in (0, num_tasks - 1)
    )
    pairs = {name: pair for name, *pair in zip(parameters, first, last, strict=True)}
    of_first = [name for name, (one, other) in pairs.items() if one.any() and not other.any()]
    of_last = [name for name, (one, other) in pairs.items() if other.any() and not one.any()]
    names = [*of_first, *of_last] if of_first and of_last else []
    for name, (one, other) in pairs.items():
        dims = range(one.ndim) if replaces else range(min(one.ndim, 1))
        if any(_has_blocks(one, other, dim, num_tasks) for dim in dims):
            names.append(name)
    inputs: set[int] = set()
    if not replaces:  # the parameters of task conditionings are inputs, and count as shared
        parts = [module for module in network.modules() if getattr(module, "is_task_input", False)]
        inputs = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name: parameters[name] for name in names if id(parameters[name]) not in inputs}


def _has_blocks(first: Tensor, last: Tensor, dim: int, num_tasks: int) -> bool:
    """Return whether a dimension consists of one block for each task, each with its gradient."""
    if first.shape[dim] == 0 or first.shape[dim] % num_tasks:
        return False
    places = []
    for gradient in (first, last):
        blocks = gradient.unflatten(dim, (num_tasks, -1)).movedim(dim, 0).flatten(1)
        places.append(blocks.any(1).nonzero()[:, 0].tolist())
    return places == [[0], [num_tasks - 1]]


def _gradients(
    network: nn.Module,
    parameters: Sequence[Parameter],
    in_dim: int,
    task: int,
    num_tasks: int,
    replaces: bool,
) -> list[Tensor]:
    """Return the parameters' gradients of a sum of a task's outputs."""
    generator = torch.Generator().manual_seed(0)
    like = parameters[0] if parameters else torch.zeros(())
    x_1nD = torch.randn(1, NUM_ROWS, in_dim, generator=generator).to(like)
    task_1n = torch.full((1, NUM_ROWS), task, device=like.device)
    others = [other for other in range(num_tasks) if other != task]
    replaced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if replaces:
        replaced = MeanOfTrained(network, num_tasks, others).applied()
    with torch.enable_grad(), _evaluating(network), replaced:
        output_1nO = network(x_1nD, task_1n)
    if not output_1nO.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    weight_1nO = torch.randn(output_1nO.shape, generator=generator).to(output_1nO)
    total = (weight_1nO * output_1nO).sum()
    return list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True))


def _check_groups(network: nn.Module, in_dim: int, num_tasks: int) -> None:
    """Check that a network takes rows in groups, as in a learning batch."""
    like = next(network.parameters(), torch.zeros(()))
    tasks = sorted({0, num_tasks - 1})
    x_RnD = torch.zeros(len(tasks), NUM_ROWS, in_dim).to(like)
    task_Rn = torch.tensor(tasks, device=like.device)[:, None].expand(-1, NUM_ROWS)
    try:
        with torch.no_grad(), _evaluating(network):
            network(x_RnD.flatten(0, 1), task_Rn.flatten())
    except RuntimeError:  # behind a projection it receives other features than in_dim
        return
    try:
        with torch.no_grad(), _evaluating(network):
            shape = network(x_RnD, task_Rn).shape
        cause = "" if shape[:2] == task_Rn.shape else f"outputs {list(shape)}"
    except (RuntimeError, IndexError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
    if cause:
        raise ConfigurationError(
            f"{type(network).__name__} does not map features {list(x_RnD.shape)} and tasks"
            f" {list(task_Rn.shape)} to outputs with the same leading dimensions ({cause}): let it"
            " compute on the last dimension, as by torch.cat(..., dim=-1); in learning it receives"
            " features [R, n, in_dim], and in acting also [B, in_dim]"
        )


@contextlib.contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Keep statistics of the inputs as they are."""
    training = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, was_training in training:
            module.training = was_training
