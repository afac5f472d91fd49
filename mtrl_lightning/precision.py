"""Find out whether this processor is faster in bfloat16: ``python -m mtrl_lightning.precision``.

A processor without instructions for bfloat16 (AVX-512 BF16 or AMX on x86, BF16 on ARM) computes in
it all the same, up to thirty times slower than in float32. Which processors have them, and whether
this build of PyTorch uses them, can only be found out by trying: flags have other names on every
system. So the matrix products are timed in both.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from mtrl_lightning.networks.hidden import input_gradient, linear_product, weight_gradient

SMALL = (64, 400)
"""Rows of a batch and width of a layer: milliseconds even where bfloat16 is slow."""
LARGE = (1280, 400)
"""The same, of an update of MT10."""
HOPELESS = 3.0
"""Times as slow with small matrices, from which large ones are not timed: that would take long."""
SECONDS = 0.04
"""Spent on repeating the products in both types; the fastest count: other processes disturb."""
NOTICEABLE = 1.1
"""Times as slow from which bfloat16 is advised against: less may be chance."""


class ProductTimes(NamedTuple):
    """Seconds of a layer's three matrix products: its output, and the gradients of both factors."""

    rows: int
    width: int
    float32: float
    bfloat16: float

    @property
    def slowdown(self) -> float:
        """How many times as long bfloat16 takes as float32; below 1 it is faster."""
        return self.bfloat16 / self.float32

    @property
    def is_bfloat16_slower(self) -> bool:
        """Whether bfloat16 is slower by more than chance."""
        return self.slowdown > NOTICEABLE


@functools.cache
def time_products() -> ProductTimes:
    """Time a layer's matrix products on the CPU in float32 and in bfloat16, in about 0.1 s.

    It uses no random generator and changes no setting of PyTorch. A process measures once.
    """
    times = _time_products(*SMALL)
    if times.slowdown > HOPELESS:
        return times
    return _time_products(*LARGE)


def check_precision(precision: str, device: torch.device) -> None:
    """Warn if ``bf16-mixed`` is slower than ``32-true`` on this CPU; other choices are not timed.

    Args:
        precision: Lightning's ``trainer.precision``.
        device: that the model is trained on.
    """
    if precision != "bf16-mixed" or device.type != "cpu":
        return
    times = time_products()
    if times.is_bfloat16_slower:
        warnings.warn(
            "trainer.precision is bf16-mixed,"
            " but this processor multiplies matrices"
            f" {times.slowdown:.1f} times as slowly in bfloat16 as in float32:"
            " train with --trainer.precision 32-true",
            stacklevel=2,
        )


def _time_products(rows: int, width: int) -> ProductTimes:
    in_float32 = _products(rows, width, torch.float32)
    in_bfloat16 = _products(rows, width, torch.bfloat16)
    in_float32()  # the first call loads and compiles code
    in_bfloat16()
    float32: list[float] = []
    bfloat16: list[float] = []
    end = time.perf_counter() + SECONDS
    while not float32 or time.perf_counter() < end:  # in turn, so that a disturbance hits both
        float32.append(_seconds(in_float32))
        bfloat16.append(_seconds(in_bfloat16))
    return ProductTimes(rows, width, min(float32), min(bfloat16))


def _products(rows: int, width: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return the products of a layer: forward, and backward to its input and weight."""
    input_BH = torch.ones(rows, width, dtype=dtype, device="cpu")
    weight_HH = torch.ones(width, width, dtype=dtype, device="cpu")
    gradient_BH = torch.ones(rows, width, dtype=dtype, device="cpu")

    def multiply() -> None:
        linear_product(input_BH, weight_HH)
        input_gradient(gradient_BH, weight_HH)
        weight_gradient(gradient_BH, input_BH)

    return multiply


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    """Print both times and which precision to train with on this CPU."""
    times = time_products()
    print(
        f"three products of a layer, {times.rows} x {times.width} by {times.width} x {times.width},"
        f" on the CPU with {torch.get_num_threads()} threads:"
    )
    print(f"float32   {times.float32 * 1e3:8.2f} ms")
    print(f"bfloat16  {times.bfloat16 * 1e3:8.2f} ms, {times.slowdown:.2f} of float32's time")
    if times.is_bfloat16_slower:
        print("bfloat16 is slower here: train with --trainer.precision 32-true")
    elif times.slowdown < 1 / NOTICEABLE:
        print("bfloat16 is faster here: train with --trainer.precision bf16-mixed")
    else:
        print("bfloat16 gains nothing here: train with --trainer.precision 32-true")
    return 0


if __name__ == "__main__":
    sys.exit(main())
