"""Copies from and to the device that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

CPU = torch.device("cpu")


def to_device(array: Any, device: torch.device) -> Tensor:
    """Return an array or a tensor on the device; a copy to a GPU may still be running."""
    # without pinning, which takes longer than it saves; CUDA has read pageable memory on return
    return torch.as_tensor(array).to(device, non_blocking=device.type == "cuda")


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray]:
    """Return tensors ``[N, ...]`` as arrays, by one copy from a GPU for all of them.

    Args:
        tensors: of the same number of rows; those of another type than the first take a copy each.
    """
    first = tensors[0]
    if first.device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    joined = [tensor for tensor in tensors if tensor.dtype == first.dtype]
    flat = [tensor.reshape(len(tensor), -1) for tensor in joined]
    parts = iter(torch.cat(flat, 1).cpu().split([rows.shape[1] for rows in flat], 1))
    arrays = []
    for tensor in tensors:
        is_joined = tensor.dtype == first.dtype
        array = next(parts).reshape(tensor.shape) if is_joined else tensor.cpu()
        arrays.append(array.numpy())
    return arrays
