"""Communication between the processes ("ranks") of one run.

With a single process, nothing is sent, and functions return their argument. All ranks must call
these functions in the same order; never call them under conditions that may differ between ranks.

Shapes: ``N`` ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

V = TypeVar("V")

_processes_of_machine = 1


def world_size() -> int:
    """Return the number of ranks, ``N``."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, starting at 0."""
    return dist.get_rank() if world_size() > 1 else 0


def local_size() -> int:
    """Return the number of ranks on this machine, which share its cores and memory."""
    return _processes_of_machine if world_size() > 1 else 1


def set_local_size(number: int) -> None:
    """Set the number of ranks on this machine."""
    global _processes_of_machine
    _processes_of_machine = number


def seed_of_rank(seed: int) -> int:
    """Return a seed that differs between ranks; rank 0 gets the original seed."""
    if rank() == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(rank(),)).generate_state(1)[0])


def per_rank_prefix() -> str:
    """Return the prefix ``Each of N processes: ``; empty for one process."""
    return "" if world_size() == 1 else f"Each of {world_size()} processes: "


def warn(message: str) -> None:
    """Emit a warning that names this rank."""
    whose = "" if world_size() == 1 else f"rank {rank()}: "
    warnings.warn(f"{whose}{message}", stacklevel=3)


def average(tensors: Sequence[Tensor]) -> None:
    """Replace tensors in place with their means over ranks, using one message per dtype."""
    if world_size() == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        dist.all_reduce(flat)
        flat /= world_size()
        parts = flat.split([tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def average_gradients(parameters: Sequence[Parameter], more: Sequence[Tensor] = ()) -> None:
    """Replace the parameters' ``.grad`` with its mean over ranks; a missing one counts as 0.

    It stays None if no rank has a gradient.

    Args:
        parameters: parameters whose ``.grad`` is averaged.
        more: further tensors to average in the same message.
    """
    if world_size() == 1:
        return
    if not parameters:
        average(more)
        return
    is_missing = [parameter.grad is None for parameter in parameters]
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    # also exchange which gradients exist, because all ranks must treat a parameter identically
    present = torch.tensor(is_missing, device=gradients[0].device).logical_not()
    is_present = present.to(gradients[0].dtype)
    average([*gradients, is_present, *more])
    if not any(is_missing):
        return
    anywhere = (is_present > 0).tolist()
    for parameter, gradient, is_anywhere in zip(parameters, gradients, anywhere, strict=True):
        parameter.grad = gradient if is_anywhere else None


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    if world_size() == 1:
        return tensor
    result = tensor.detach().clone()
    average([result])
    return result


class _OwnGradient(torch.autograd.Function):
    """The mean over ranks; its gradient is passed to this rank's own value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return mean(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def global_losses(loss_R: Tensor) -> Tensor:
    """Return the losses of the global batch, with the gradient of this rank's own losses.

    The mean of the ranks' gradients is then the gradient of the global batch, even for nonlinear
    functions of the losses.
    """
    if world_size() == 1:
        return loss_R
    result: Tensor = _OwnGradient.apply(loss_R)
    return result


def largest(tensor: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks."""
    if world_size() == 1:
        return tensor
    result = tensor.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, ``[N, ...]``."""
    if world_size() == 1:
        return tensor[None]
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def gather_rows(rows: Tensor) -> Tensor:
    """Return the rows of all ranks, in rank order; their numbers may differ."""
    numbers = [number for (number,) in gather_numbers([len(rows)])]
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = zip(gather_tensor(padded), numbers, strict=True)
    return torch.cat([part[:number] for part, number in parts])


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Return the integers of every rank."""
    return gather_tensor(torch.tensor(numbers, dtype=torch.int64)).tolist()


def total(number: int) -> int:
    """Return the sum over the ranks."""
    return sum(numbers[0] for numbers in gather_numbers([number]))


def is_any(value: bool) -> bool:
    """Return whether the value is true on any rank."""
    return total(int(value)) > 0


def gather(value: V) -> list[V]:
    """Return the values of all ranks, which must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_zero(value: V) -> list[V] | None:
    """Return the values of all ranks on rank 0, and None on the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values)
    return values


def broadcast(value: V) -> V:
    """Return the value of rank 0."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def on_rank_zero(compute: Callable[[], Tensor], like: Tensor) -> Tensor:
    """Return the result of rank 0, because other machines may round differently.

    Args:
        compute: function called on rank 0 only.
        like: a tensor with the shape, dtype and device of the result.
    """
    if world_size() == 1:
        return compute()
    result = compute().contiguous() if rank() == 0 else torch.empty_like(like)
    dist.broadcast(result, 0)
    return result


def merged_moments(mean_: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and number of the union of the ranks' rows.

    The variance of a union is the weighted mean of the variances plus the variance of the means.

    Args:
        mean_: mean of this rank's rows; ignored where the count is 0.
        variance: variance of this rank's rows, without Bessel's correction.
        count: number of this rank's rows; its dimensions are the leading ones of the mean.
    """
    if world_size() == 1:
        return mean_, variance, count
    has_rows = (count > 0).view(*count.shape, *[1] * (mean_.ndim - count.ndim))
    moments = torch.stack([mean_, variance]).where(has_rows, 0.0)
    moments_N2 = gather_tensor(moments)
    count_N = gather_tensor(count)
    weight_N = count_N / count_N.sum(0).clamp(min=1)
    weight_N = weight_N.view(*weight_N.shape, *[1] * (mean_.ndim - count.ndim)).to(mean_)
    union_mean = (weight_N * moments_N2[:, 0]).sum(0)
    within = (weight_N * moments_N2[:, 1]).sum(0)
    between = (weight_N * (moments_N2[:, 0] - union_mean).square()).sum(0)
    return union_mean, within + between, count_N.sum(0)


@contextmanager
def raise_on_all_ranks(*kinds: type[Exception]) -> Iterator[None]:
    """Raise an exception in this context on all ranks if any of them raises it.

    Exceptions of other kinds become ``RuntimeError`` on the other ranks. Do not communicate between
    ranks after code that may raise in this context.

    Args:
        kinds: exception classes that are raised identically on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        if world_size() == 1:
            raise
        error = raised
    if world_size() > 1:
        raise_together(error, kinds)


def raise_together(error: Exception | None, kinds: Sequence[type[Exception]]) -> None:
    """Raise the exception of the lowest rank that has one on all ranks.

    Args:
        error: this rank's exception; None if there is none.
        kinds: exception classes that are raised identically on all ranks, constructed from a
            message. Exceptions of other classes are raised on their own rank only, and
            ``RuntimeError`` on the others.
    """
    description = None
    if error is not None:
        alike = (index for index, kind in enumerate(kinds) if isinstance(error, kind))
        description = (next(alike, None), str(error), type(error).__name__)
    descriptions = [
        (other_rank, other)
        for other_rank, other in enumerate(gather(description))
        if other is not None
    ]
    if not descriptions:
        return
    # unexpected exceptions take precedence
    first, (kind, message, name) = min(descriptions, key=lambda one: one[1][0] is not None)
    if kind is None:
        if error is not None and description is not None and description[0] is None:
            raise error
        raise RuntimeError(f"rank {first} failed with {name}: {message}. See its own output")
    if error is None or first != rank():
        origin = error
        error = kinds[kind](message if first == 0 else f"rank {first}: {message}")
        error.__cause__ = origin
    error.is_on_all_ranks = True  # type: ignore[attr-defined]
    raise error
