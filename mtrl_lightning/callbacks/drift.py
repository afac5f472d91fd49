"""Check that the processes of a run have not drifted apart, and that they were started alike."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import ConfigurationError, DriftError
from mtrl_lightning.ranks import distributed


def check_equal(algorithm: Algorithm) -> None:
    """Compare by checksums the state that has to be bit-exact on all processes.

    These are the parameters, buffers, the optimizers' states, and the generators that are
    shared by all of them.

    Raises:
        DriftError: on all processes, naming the difference.
    """
    if distributed.world_size() == 1:
        return
    checksums = {name: _checksum(tensor) for name, tensor in _equal_tensors(algorithm)}
    names = list(checksums)
    # compared first, because numbers of lists of different lengths could not be exchanged
    lists = distributed.gather_numbers([len(names), zlib.crc32(repr(names).encode())])
    if any(other != lists[0] for other in lists):
        raise _shared(
            DriftError(
                "the processes of the run have drifted apart: they do not have the same parameters,"
                f" buffers and optimizer states, but {[number for number, _ in lists]} of them"
            )
        )
    found_NP = torch.tensor(distributed.gather_numbers(list(checksums.values())))
    differs_P = (found_NP != found_NP[0]).any(0)
    wrong = [name for name, differs in zip(names, differs_P.tolist(), strict=True) if differs]
    if wrong:
        ranks = (found_NP != found_NP[0]).any(1).nonzero().flatten().tolist()
        raise _shared(
            DriftError(
                f"the processes of the run have drifted apart: {wrong[0]} of rank"
                f" {', '.join(map(str, ranks))} is not that of rank 0 ({len(wrong)} such tensors)."
                " A module or callback of yours may change weights or statistics on one process"
                " only: use mtrl_lightning.ranks.distributed there. Continue from a checkpoint"
                " before"
            )
        )


def _equal_tensors(algorithm: Algorithm) -> Iterator[tuple[str, Tensor]]:
    yield from algorithm.named_parameters()
    differing = {
        f"{path}.{name}".removeprefix(".")
        for path, module in algorithm.named_modules()
        for name in getattr(module, "buffers_of_each_rank", ())
    }
    yield from (named for named in algorithm.named_buffers() if named[0] not in differing)
    for update in algorithm.updates:
        if update.optimizer is None:
            continue
        for index, state in update.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{update.name} optimizer: {name} of parameter {index}", value
    for name, saved in algorithm.generators.state_dict()["used"].items():
        if name not in algorithm.generators.per_rank:
            yield f"generator {name}", saved["state"]


def _checksum(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(content.numpy().data)


def check_started_alike(options: Mapping[str, Any]) -> None:
    """Check that all processes have the same options and versions.

    Raises:
        ConfigurationError: on all processes, naming the difference.
    """
    if distributed.world_size() == 1:
        return
    first, *others = distributed.gather({name: str(value) for name, value in options.items()})
    differences = [
        f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name)
    ]
    if differences:
        raise _shared(
            ConfigurationError(
                f"the processes of the run were started differently: {', '.join(differences[:5])}."
                " Give all of them the same command, files and versions"
            )
        )


def _shared(error: Exception) -> Exception:
    """Mark an exception that all processes raise, so that only the first prints it."""
    error.is_on_all_ranks = True  # type: ignore[attr-defined]
    return error
