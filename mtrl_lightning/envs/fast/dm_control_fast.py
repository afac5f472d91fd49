"""dm_control's tasks with less Python overhead and bit-identical results.

A domain's physics looks elements up by name, ``named.data.xpos["torso", "z"]``, and its rewards use
``rewards.tolerance``; both often take longer than a simulation step. Here, a name is converted only
once, and single numbers are computed without arrays.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.fast.arithmetic import (
    FLOAT64,
    FLOATS,
    SCALES,
    norm,
    scale_of,
    sigmoid_of,
    tolerance_of,
)

Upstream: Any = object
"""A domain's physics class, which becomes the base class of ours."""

CHECKED = {"dm_control": ("1.0.28",), "mujoco": ("3.3.0",)}
"""Versions against which this file's environments were verified, observation by observation."""


class NamedField:
    """Replacement for dm_control's ``FieldIndexer``: a simulation array indexed by names.

    Args:
        array: view of the simulation's memory.
        indexer: dm_control's indexer, which converts names to indices.
    """

    __slots__ = ("_array", "_convert", "_indices")

    def __init__(self, array: npt.NDArray, indexer: Any) -> None:
        self._array = array
        self._convert = indexer._convert_key
        self._indices: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self._array[self._index(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array[self._index(key)] = value

    def _index(self, key: Any) -> Any:
        known = key if type(key) is str else _hashable(key)
        try:
            return self._indices[known]
        except KeyError:
            index = self._convert(key)
            if type(index) is list:
                index = np.array(index)  # avoids conversion by NumPy
            self._indices[known] = index
            return index
        except TypeError:  # arrays are not hashable
            return self._convert(key)


def _hashable(key: Any) -> Any:
    """Convert an index without arrays to a hashable key."""
    kind = type(key)
    if kind is tuple:
        return tuple([part if type(part) is str else _hashable(part) for part in key])
    if kind is list:
        return ("list", *key)
    if kind is slice:
        return ("slice", key.start, key.stop, key.step)
    return key


class FastPhysics(Upstream):
    """Physics of all domains, preceding the domain's class in the method resolution order."""

    named: Any = None  # attributes instead of dm_control's properties
    model: Any = None
    data: Any = None

    def _reload_from_data(self, data: Any) -> None:
        self.model = data.model
        self.data = data
        super()._reload_from_data(data)
        import mujoco

        self._mujoco = mujoco
        self._simulation = (data.model.ptr, data.ptr)
        self._is_runge_kutta = data.model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
        self._ctrl = data.ctrl
        self.named = SimpleNamespace(
            model=_named_fields(data.model.ptr, self._named.model),
            data=_named_fields(data.ptr, self._named.data),
        )

    def set_control(self, control: npt.NDArray) -> None:
        """Set the actuators' controls."""
        self._ctrl[:] = control

    def step(self, nstep: int = 1) -> None:
        """Simulate; raise dm_control's error if MuJoCo warns of an unstable simulation."""
        if not self.legacy_step:
            return super().step(nstep)
        mujoco = self._mujoco
        model, data = self._simulation
        before = self._warnings.tolist()
        if self._is_runge_kutta:
            mujoco.mj_step(model, data, nstep)
        else:
            mujoco.mj_step2(model, data)
            if nstep > 1:
                mujoco.mj_step(model, data, nstep - 1)
        mujoco.mj_step1(model, data)
        after = self._warnings.tolist()
        if after != before:
            # dm_control raises an error for warnings added in this context
            now = self._warnings.copy()
            self._warnings[:] = before
            with self.check_invalid_state():
                self._warnings[:] = now


def _named_fields(struct: Any, indexers: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            name: NamedField(getattr(struct, name), indexer)
            for name, indexer in indexers._asdict().items()
        }
    )


def hstack(parts: Any) -> npt.NDArray:
    """``np.hstack`` of vectors and numbers."""
    rows = []
    for part in parts:
        if type(part) is FLOAT64:
            rows.append(np.array((part,)))
        elif type(part) is np.ndarray and part.ndim == 1:
            rows.append(part)
        else:
            return np.hstack(parts)
    return np.concatenate(rows)


def tolerance(
    x: Any,
    bounds: Any = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: str = "gaussian",
    value_at_margin: float = 0.1,
) -> Any:
    """``rewards.tolerance`` of a number, or of a vector around 0."""
    lower, upper = bounds
    if sigmoid in SCALES and lower <= upper and margin >= 0:
        if type(x) in FLOATS:
            return tolerance_of(x, lower, upper, margin, sigmoid, value_at_margin)
        if type(x) is np.ndarray and x.dtype == FLOAT64:
            if x.ndim == 0:
                value = tolerance_of(x[()], lower, upper, margin, sigmoid, value_at_margin)
                return np.array(value)
            if lower == upper == 0 and margin > 0 and x.ndim == 1:
                return _of_vector(x, margin, sigmoid, value_at_margin)
    from dm_control.utils import rewards

    return rewards.tolerance(x, bounds, margin, sigmoid, value_at_margin)


def _of_vector(x: Any, margin: Any, sigmoid: str, value_at_margin: float) -> npt.NDArray:
    """Return the tolerances around 0."""
    scale = scale_of(sigmoid, value_at_margin)
    if len(x) == 1:
        scaled = FLOAT64(abs(x[0]) / margin * scale)
        return np.array((sigmoid_of(sigmoid, scaled, scaled * scaled),))
    scaled = np.abs(x) / margin * scale
    if sigmoid == "gaussian":
        return np.exp(-0.5 * (scaled * scaled))
    if sigmoid == "long_tail":
        return 1 / (scaled * scaled + 1)
    value = 1 - (scaled if sigmoid == "linear" else scaled * scaled)
    return np.where(scaled < 1, value, 0.0)


@cache
def replacements() -> dict[str, Any]:
    """Return our functions by the names that dm_control's domain modules import."""
    from dm_control.utils import rewards

    linalg = SimpleNamespace(**{**vars(np.linalg), "norm": norm})
    return {
        "np": SimpleNamespace(**{**vars(np), "linalg": linalg, "hstack": hstack}),
        "rewards": SimpleNamespace(**{**vars(rewards), "tolerance": tolerance}),
    }
