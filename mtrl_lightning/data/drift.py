"""Check that the processes of a run have not drifted apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import DriftError
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
    first, *others = distributed.gather({n: _checksum(t) for n, t in _equal_tensors(algorithm)})
    wrong = {name for other in others for name, _ in first.items() ^ other.items()}
    if wrong:
        error = DriftError(
            f"the processes of the run have drifted apart: {min(wrong)} and {len(wrong) - 1} other"
            " tensors are not those of rank 0. A module or callback of yours may change weights or"
            " statistics on one process only: use mtrl_lightning.ranks.distributed there. Continue"
            " from a previous checkpoint"
        )
        error.is_on_all_ranks = True  # type: ignore[attr-defined]  # only the first prints it
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
