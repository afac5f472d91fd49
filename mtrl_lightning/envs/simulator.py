"""Arrays and stability of the MuJoCo models and simulations in environments."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

ASSETS = ("mesh_", "tex_", "skin_", "bvh_", "oct_", "name", "text_", "vis", "stat", "opt")
"""Prefixes of a model's attributes that are large and never edited, or not arrays."""
UNSTABLE = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")
"""MuJoCo's warnings of an unstable simulation, which it then resets, with consecutive codes."""


def simulations_of(env: gym.Env) -> list[Any]:
    """Return every ``MjData`` of an environment."""
    return [
        value
        for value in vars(env.unwrapped).values()
        if type(value).__name__ == "MjData" and type(value).__module__.startswith("mujoco.")
    ]


def arrays_of(simulator: Any) -> Iterator[tuple[str, npt.NDArray]]:
    """Yield the arrays in the memory of a MuJoCo model or of its data."""
    kind: Any = type(simulator)
    for name in _attributes_of(kind):
        value = getattr(simulator, name, None)
        if type(value) is np.ndarray and value.size and value.dtype != object:
            yield name, value


@cache
def _attributes_of(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith(("_", *ASSETS))]


def release(array: npt.NDArray) -> None:
    """Zero an array, and return its memory pages to the operating system (Linux only)."""
    if platform.system() != "Linux":
        return
    array[...] = 0  # also on pages shared with other arrays, so that all models are equal
    address = array.__array_interface__["data"][0]
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        size = ctypes.c_size_t(end - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


class StabilityCheck:
    """Detect that MuJoCo reset a simulation because it became unstable.

    MuJoCo counts this in the simulation's warnings. A check takes about 0.2 µs per simulation.

    Args:
        simulations: every ``MjData`` of an environment.
    """

    def __init__(self, simulations: Sequence[Any]) -> None:
        self._counts: list[npt.NDArray] = []
        if simulations:
            import mujoco

            numbers = [int(getattr(mujoco.mjtWarning, name)) for name in UNSTABLE]
            rows = slice(numbers[0], numbers[-1] + 1)
            self._counts = [data.warning.number[rows] for data in simulations]

    def warnings(self) -> str:
        """Return the names of the warnings since ``clear``, or an empty string."""
        for count in self._counts:
            numbers = count.tolist()
            if any(numbers):
                names = (name for name, number in zip(UNSTABLE, numbers, strict=True) if number)
                return ", ".join(names)
        return ""

    def clear(self) -> None:
        """Clear the warnings."""
        for count in self._counts:
            count[:] = 0
