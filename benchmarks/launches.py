"""How many kernels an update launches on a GPU, counted without one.

The update runs on PyTorch's ``meta`` device, with the operations of a GPU. Each operation that
computes is one launch, or a few for a long list of tensors; views and allocations are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.optim import Optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.types import TransitionBatch

META = torch.device("meta")
FUSED_STEP = 3
"""Launches of a fused Adam that may skip: it counts the step, makes it, and takes the count back
where it was skipped."""
VIEWS = """_reshape_alias _unsafe_view alias as_strided chunk detach diagonal expand lift_fresh
permute select slice split split_with_sizes squeeze t transpose unbind unflatten unsqueeze view"""
NO_LAUNCH = {*VIEWS.split(), "empty", "empty_like", "empty_strided", "new_empty"}
"""Operations that give a tensor another shape, or memory."""
PARTS = {
    "critic_target": "target",
    "critic_update": "critic",
    "actor_update": "actor",
    "temperature_update": "temperature",
    "distilled_update": "distilled policy",
}
"""Parts of an update, by the attribute that makes them."""


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


def launches(algorithm: Algorithm, batch: TransitionBatch) -> dict[str, int]:
    """Return the launches of an update with all parts due, by part.

    Args:
        algorithm: is moved to the ``meta`` device, and of no further use.
        batch: to learn from.
    """
    with meta_as_gpu():
        algorithm.to(META)
        on_meta: TransitionBatch = move_data_to_device(batch, META)
        count = _Launches()
        for update in algorithm.updates:
            update.optimizer = _FusedOptimizer(update.parameters, count)
        for name, part in PARTS.items():
            _label(algorithm, f"_{name}" if name == "critic_target" else name, part, count)
        _label(getattr(algorithm, "targets", None), "step", "targets", count)
        _label(algorithm.mean_metrics, "_add", "guard and metrics", count)
        _label(algorithm.guard, "end_update", "guard and metrics", count)
        algorithm.recorded_update(on_meta)  # metrics and guard take their memory
        count.numbers.clear()
        with count:
            algorithm.recorded_update(on_meta)
    return dict(count.numbers)


class _Launches(TorchDispatchMode):
    """Count operations that compute, by the part that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()
        self.parts = ["the rest"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and name not in NO_LAUNCH:
            self.numbers[self.parts[-1]] += 1
        return func(*args, **(kwargs or {}))


class _FusedOptimizer(Optimizer):
    """Replaces fused Adam, which has no kernel for ``meta``."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Sequence[torch.Tensor], count: _Launches) -> None:
        super().__init__(parameters, {})
        self._count = count

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._count.numbers["optimizers"] += FUSED_STEP


def _label(owner: Any, name: str, part: str, count: _Launches) -> None:
    """Count what an attribute of an object does as a part, if there is such an attribute."""
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if function is None:
        return

    def labelled(*args: Any) -> Any:
        count.parts.append(part)
        try:
            return function(*args)
        finally:
            count.parts.pop()

    setattr(owner, name, labelled)
