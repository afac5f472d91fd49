"""PyTorch's ``meta`` device instead of a GPU: its tensors have shapes and no numbers.

Whoever asks for a number, or mixes such tensors with tensors on the CPU, gets an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.optim import Adam
from torch.utils import _foreach_utils

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.generators import Generators
from tests.helpers.algorithms import attach, learning_batch, make_spec

META = torch.device("meta")


@contextmanager
def meta_as_gpu() -> Iterator[None]:
    """Let ``meta`` stand for a GPU: it has neither generators nor autocast of its own."""

    def get(self: Generators, name: str, device: torch.device) -> torch.Generator | None:
        return torch.Generator() if device != META else None

    with (
        mock.patch.object(Generators, "get", get),
        mock.patch.object(torch, "get_autocast_dtype", lambda kind: torch.bfloat16),
        mock.patch.object(torch, "is_autocast_enabled", lambda kind: False),
        mock.patch.object(torch, "autocast", lambda *args, **options: nullcontext()),
        # the way to the device would replace the parameters, which optimizers and others know
        mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True),
        # lists of gradients are one operation, as on a GPU
        mock.patch.object(
            _foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]
        ),
    ):
        yield


class SkippingAdam(Adam):
    """An Adam that has the flag ``fused``, as no fused kernel exists here."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.device == META and self.found_inf.shape == ()
        del self.found_inf
        return super().step(closure)


def on_meta(make, num_tasks: int = 4, optimizer=SkippingAdam, **options: Any) -> Algorithm:
    """Return an algorithm on the device, with its optimizers."""
    algorithm = make(make_spec(num_tasks), **options)
    for update in algorithm.updates:
        update.make_optimizer = partial(optimizer, lr=1e-3)
    algorithm.to(META)
    attach(algorithm)
    return algorithm


def meta_batch(algorithm: Algorithm) -> TransitionBatch:
    batch = learning_batch(algorithm)
    extra = {name: column.to(META) for name, column in batch.extra.items()}
    return type(batch)(*(field.to(META) for field in batch[:-1]), extra)
