"""Arithmetic on few numbers without NumPy's overhead, with bit-identical results and equal types.

Functions forward arguments of other types to the function they replace. Sums of products use
``dot`` and powers use NumPy scalars, because Python rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT64 = np.float64
DOUBLE = np.dtype(np.float64)
FLOATS = frozenset((float, np.float64))
NUMBERS = frozenset((int, float, np.float64))
LARGE = 1e100
"""Numbers below it can be squared without overflow."""
ORTHOGONAL = 1e-13
"""Tolerance within which a rotation is orthogonal; SciPy orthogonalizes from ten times that."""


def norm(x: Any, ord: Any = None) -> Any:
    """``np.linalg.norm`` of a vector or a number."""
    kind = type(x)
    if kind is np.ndarray and x.dtype == DOUBLE and x.ndim == 1 and (ord is None or ord == 2):
        flat = x if x.flags.contiguous else x.ravel("K")
        return FLOAT64(math.sqrt(flat.dot(flat)))
    if kind is FLOAT64 and ord is None:
        return FLOAT64(math.sqrt(x * x))
    return np.linalg.norm(x, ord)


def length(*parts: float) -> float:
    """Return the length of a vector."""
    vector = np.array(parts)
    return math.sqrt(vector.dot(vector))


def clip(x: Any, low: Any, high: Any) -> Any:
    """``np.clip`` of a number."""
    if (
        type(x) in (np.float32, FLOAT64)
        and type(low) in (int, float)
        and type(high) in (int, float)
        and low < x < high
    ):
        return x
    return np.clip(x, low, high)


def absolute(x: Any) -> Any:
    """``np.abs`` of a number."""
    return abs(x) if type(x) is FLOAT64 else np.abs(x)


def hstack(parts: Any) -> npt.NDArray:
    """``np.hstack`` of vectors."""
    for part in parts:
        if type(part) is not np.ndarray or part.ndim != 1:
            return np.hstack(parts)
    return np.concatenate(parts)


def tolerance(
    x: Any,
    bounds: Any = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: Any = "gaussian",
    value_at_margin: Any = 0.1,
) -> Any:
    """MetaWorld's ``reward_utils.tolerance`` of a number."""
    lower, upper = bounds
    if (
        type(x) in FLOATS
        and type(margin) in NUMBERS
        and type(lower) in NUMBERS
        and type(upper) in NUMBERS
        and value_at_margin == 0.1
    ):
        if sigmoid == "long_tail":
            return float(long_tail(float(x), lower, upper, float(margin)))
        if lower <= upper and margin > 0 and sigmoid in METAWORLDS_SIGMOIDS:
            return tolerance_of(x, lower, upper, margin, sigmoid, value_at_margin)
    return _metaworlds_rewards().tolerance(x, bounds, margin, sigmoid, value_at_margin)


def long_tail(x: float, lower: float, upper: float, margin: float) -> float:
    """``tolerance`` with the sigmoid ``long_tail``, which most rewards use.

    Args:
        x: the number; like the others, a Python float.
        lower: lower bound.
        upper: upper bound.
        margin: distance from the bounds at which the value is 0.1.
    """
    if margin > 0 and lower <= upper:
        if lower <= x <= upper:
            return 1.0
        scaled = (lower - x if x < lower else x - upper) / margin * 3.0  # 3: root of 1 / 0.1 - 1
        if scaled < LARGE:
            return 1 / (scaled**2 + 1)
    return _metaworlds_rewards().tolerance(x, (lower, upper), margin, "long_tail")


@cache
def _metaworlds_rewards() -> Any:
    from metaworld.utils import reward_utils

    return reward_utils


def tolerance_of(
    x: Any, lower: Any, upper: Any, margin: Any, sigmoid: str, value_at_margin: float
) -> float:
    """Return 1 for a number within bounds, and a value that decays by a sigmoid outside.

    Args:
        x: the number.
        lower: lower bound.
        upper: upper bound, at least ``lower``.
        margin: distance from the bounds at which the sigmoid has ``value_at_margin``, at least 0.
        sigmoid: one of ``SCALES``.
        value_at_margin: between 0 and 1.
    """
    if lower <= x <= upper:
        return 1.0
    if margin == 0:
        return 0.0
    distance = FLOAT64((lower - x if x < lower else x - upper) / margin)
    scaled = distance * scale_of(sigmoid, value_at_margin)
    return float(sigmoid_of(sigmoid, scaled, scaled**2))


def sigmoid_of(sigmoid: str, scaled: Any, square: Any) -> Any:
    """Return a sigmoid's value.

    Args:
        sigmoid: name of the sigmoid.
        scaled: the scaled distance.
        square: its square. NumPy uses a power for scalars, but a product for arrays, which may be
            rounded differently.
    """
    if sigmoid == "gaussian":
        return np.exp(-0.5 * square)
    if sigmoid == "long_tail":
        return 1 / (square + 1)
    if abs(scaled) < 1:
        return 1 - (scaled if sigmoid == "linear" else square)
    return 0.0


METAWORLDS_SIGMOIDS = ("gaussian", "long_tail")
SCALES: dict[str, Callable[[float], Any]] = {
    "gaussian": lambda value: np.sqrt(-2 * np.log(value)),
    "long_tail": lambda value: np.sqrt(1 / value - 1),
    "linear": lambda value: 1 - value,
    "quadratic": lambda value: np.sqrt(1 - value),
}
"""Scale factors with which a sigmoid has a given value at a distance of 1."""


@cache
def scale_of(sigmoid: str, value_at_margin: float) -> Any:
    """Return the scale factor with which a sigmoid has this value at a distance of 1."""
    return SCALES[sigmoid](value_at_margin)


def quaternion(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``Rotation.from_matrix(matrix).as_quat()``, which returns ``(x, y, z, w)``."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    if not (
        abs(a * d + b * e + c * f) < ORTHOGONAL
        and abs(a * a + b * b + c * c - 1) < ORTHOGONAL
        and abs(d * d + e * e + f * f - 1) < ORTHOGONAL
        and abs(b * f - c * e - g) < ORTHOGONAL
        and abs(c * d - a * f - h) < ORTHOGONAL
        and abs(a * e - b * d - i) < ORTHOGONAL
    ):
        return _scipys(matrix)
    trace = a + e + i
    if a >= e and a >= i and a >= trace:
        x, y, z, w = 1 - trace + 2 * a, d + b, g + c, h - f
    elif e >= i and e >= trace:
        x, y, z, w = b + d, 1 - trace + 2 * e, h + f, c - g
    elif i >= trace:
        x, y, z, w = c + g, f + h, 1 - trace + 2 * i, d - b
    else:
        x, y, z, w = h - f, c - g, d - b, 1 + trace
    length = math.sqrt(x * x + y * y + z * z + w * w)
    return np.array((x / length, y / length, z / length, w / length))


class Rotation:
    """Replacement for SciPy's ``Rotation.from_matrix(matrix)`` that only supports ``as_quat()``.

    Args:
        matrix: a rotation (3, 3).
    """

    __slots__ = ("_matrix",)

    def __init__(self, matrix: npt.NDArray[np.float64]) -> None:
        self._matrix = matrix

    def as_quat(self) -> npt.NDArray[np.float64]:
        """Return the quaternion."""
        return quaternion(self._matrix)


@cache
def replacements() -> dict[str, Any]:
    """Return our functions by the names that MetaWorld's task modules import."""
    from scipy.spatial.transform import Rotation as Slow

    linalg = SimpleNamespace(**{**vars(np.linalg), "norm": norm})
    numpy = SimpleNamespace(
        **{**vars(np), "linalg": linalg, "clip": clip, "abs": absolute, "hstack": hstack}
    )
    return {
        "np": numpy,
        "reward_utils": SimpleNamespace(**{**vars(_metaworlds_rewards()), "tolerance": tolerance}),
        "tolerance": tolerance,
        "Rotation": SimpleNamespace(from_matrix=Rotation) if _rounds_like_scipy() else Slow,
    }


def _rounds_like_scipy() -> bool:
    """Compare with SciPy in all cases: builds with fused multiply-add round differently."""
    generator = np.random.default_rng(0)
    for trial in range(200):
        x, y, z, w = generator.normal(size=4) * np.where(np.arange(4) == trial % 4, 3.0, 1.0)
        s = 2 / (x * x + y * y + z * z + w * w)
        matrix = np.array(
            [
                [1 - s * (y * y + z * z), s * (x * y - z * w), s * (x * z + y * w)],
                [s * (x * y + z * w), 1 - s * (x * x + z * z), s * (y * z - x * w)],
                [s * (x * z - y * w), s * (y * z + x * w), 1 - s * (x * x + y * y)],
            ]
        )
        if quaternion(matrix).tobytes() != _scipys(matrix).tobytes():
            return False
    return True


def _scipys(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    from scipy.spatial.transform import Rotation as Slow

    return Slow.from_matrix(matrix).as_quat()
