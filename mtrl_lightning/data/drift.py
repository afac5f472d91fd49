"""Check that the processes of a run have not diverged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import DriftError
from mtrl_lightning.ranks import distributed


def check_equal(algorithm: Algorithm) -> None:
    """Compare checksums of the state that must be identical on all processes.

    It comprises parameters, buffers, optimizer states, and generators that are not per rank.

    Raises:
        DriftError: on all processes, naming the difference.
    """
    if distributed.world_size() == 1:
        return
    first, *others = distributed.gather({n: _checksum(t) for n, t in _equal_tensors(algorithm)})
    wrong = {name for other in others for name, _ in first.items() ^ other.items()}
    if wrong:
        error = DriftError(
            f"the processes of the run have diverged: {min(wrong)} and {len(wrong) - 1} other"
            " tensors differ from those of rank 0. A custom module or callback may change weights"
            " or statistics on a single process: synchronize them with"
            " mtrl_lightning.ranks.distributed, and resume from a previous checkpoint"
        )
        error.is_on_all_ranks = True  # type: ignore[attr-defined]  # only rank 0 prints it
        raise error


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
        yield f"generator {name}", saved["state"]


def _checksum(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(content.numpy().data)
