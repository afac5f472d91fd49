"""PyTorch's ``meta`` device in place of a GPU: its tensors have shapes and no numbers.

Whoever asks for a number, or mixes such tensors with tensors on the CPU, gets an error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Adam

from benchmarks.updates import META
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.types import TransitionBatch
from tests.helpers.algorithms import attach, make_batch, make_spec


class _Skipping:
    """Stands for a fused optimizer, of which no kernel exists here: it is given the flag."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.device == META and self.found_inf.shape == ()
        del self.found_inf
        return super().step(closure)


class SkippingAdam(_Skipping, Adam):
    pass


class SkippingSGD(_Skipping, SGD):
    """Its step has no number that changes from step to step, as a capturable Adam's has none."""


def on_meta(make, num_tasks: int = 4, optimizer=SkippingAdam, **options: Any) -> Algorithm:
    """Return an algorithm on the device, with its optimizers."""
    algorithm = make(make_spec(num_tasks), **options)
    for update in algorithm.updates:
        update.make_optimizer = partial(optimizer, lr=1e-3)
    algorithm.to(META)
    attach(algorithm)
    return algorithm


def meta_batch(algorithm: Algorithm, rows: int = 5) -> TransitionBatch:
    batch = make_batch(algorithm.spec, rows)
    extra = {}
    if algorithm.collection is not None:
        names = ("log_prob", "advantage", "value", "target")
        extra = {name: torch.empty_like(batch.reward_Rn, device=META) for name in names}
        extra["unclipped_action"] = torch.empty_like(batch.action_RnA, device=META)
    return type(batch)(*(field.to(META) for field in batch[:-1]), extra)
