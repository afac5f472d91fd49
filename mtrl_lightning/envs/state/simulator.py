"""The state of a MuJoCo simulation and the edits of its model, as plain values."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

ASSETS = ("mesh_", "tex_", "skin_", "bvh_", "oct_", "name", "text_", "vis", "stat", "opt")
"""Prefixes of a model's attributes that are large and never edited, or no arrays."""
SOLVER = ("efc_", "iefc_", "contact", "solver_", "timer", "warning")
"""Prefixes of a simulation's attributes that each step recomputes, in a size of its own."""
UNSTABLE = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")
"""MuJoCo's warnings of an unstable simulation, which it then resets; they are numbered in a row."""
PLAIN_KINDS = "biufcSU"
"""Kinds of NumPy's types that hold numbers and texts, and no pointers."""


def is_mujoco(value: Any, name: str) -> bool:
    """Return whether a value is MuJoCo's class of this name."""
    return type(value).__name__ == name and type(value).__module__.startswith("mujoco.")


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


def address_of(array: npt.NDArray) -> int:
    """Return where an array's memory begins."""
    return array.__array_interface__["data"][0]


def release(array: npt.NDArray) -> None:
    """Set an array to zeros, and return its pages to the system, where it is Linux."""
    if platform.system() != "Linux":
        return
    array[...] = 0  # also on pages that other arrays share, so that all models are equal
    start = -(-address_of(array) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address_of(array) + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        size = ctypes.c_size_t(end - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def to_text(array: npt.NDArray) -> str:
    """Return an array's bytes as text, which ``torch.load(weights_only=True)`` accepts."""
    return array.tobytes().decode("latin-1")


def from_text(text: str, dtype: str | np.dtype) -> npt.NDArray:
    """Return the elements of ``to_text``."""
    return np.frombuffer(text.encode("latin-1"), dtype).copy()


def is_computed(name: str, array: npt.NDArray) -> bool:
    """Return whether an array of a simulation holds numbers that a step has computed."""
    return array.dtype.kind == "f" and not name.startswith(SOLVER)


class ModelEdits:
    """Find the changes of a model since it was compiled.

    Args:
        model: MuJoCo's model, as compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._compiled = {name: array.copy() for name, array in arrays_of(model)}
        self._options = _options(model)

    def get(self) -> dict[str, Any]:
        """Return the changed elements of arrays, and changed options such as gravity."""
        arrays = {}
        for name, array in arrays_of(self._model):
            indices = np.flatnonzero(_differs(array, self._compiled[name]))
            if indices.size:
                arrays[name] = [indices.tolist(), to_text(array.ravel()[indices])]
        now = _options(self._model)
        options = {
            name: [value.dtype.str, list(value.shape), to_text(value)]
            for name, value in now.items()
            if _differs(value, self._options[name]).any()
        }
        return {"arrays": arrays, "options": options}

    def set(self, edits: dict[str, Any]) -> None:
        """Restore them, and undo others."""
        arrays = dict(arrays_of(self._model))
        options = _options(self._model)
        restored = {name: self._compiled[name].copy() for name in arrays}
        for name, (indices, elements) in edits["arrays"].items():
            restored[name].ravel()[indices] = from_text(elements, arrays[name].dtype)
        restored_options = dict(self._options)
        for name, (_, _, elements) in edits["options"].items():
            compiled = self._options[name]
            restored_options[name] = from_text(elements, compiled.dtype).reshape(compiled.shape)
        for name, array in arrays.items():
            if _differs(array, restored[name]).any():
                array[...] = restored[name]
        for name, value in restored_options.items():
            if _differs(options[name], value).any():
                setattr(self._model.opt, name, value if value.ndim else value.item())


class MujocoState:
    """Take and restore the state of a MuJoCo simulation, bit-exact.

    An environment with a simulation can use it for its own state::

        def __init__(self):
            self.model = mujoco.MjModel.from_xml_path("arm.xml")
            self.data = mujoco.MjData(self.model)
            self.simulation = MujocoState(self.model, self.data)
            self.goal = 0.0

        def get_state(self):
            return {"simulation": self.simulation.get(), "goal": self.goal}

        def set_state(self, state):
            self.simulation.set(state["simulation"])
            self.goal = state["goal"]

    ``mjSTATE_INTEGRATION`` is all that the physics depends on. An environment also reads what a
    step has computed, such as positions of bodies, before the next step recomputes it. So the
    arrays that ``mj_forward`` would not reproduce are saved, too.

    Args:
        model: the ``MjModel`` as compiled; later edits of it, such as another mass or gravity, are
            found by comparison.
        data: the ``MjData`` of this model.
    """

    def __init__(self, model: Any, data: Any) -> None:
        self._data = data
        self._edits = ModelEdits(model)

    def get(self) -> dict[str, Any]:
        """Return the state as plain values, which do not change with the simulation."""
        import mujoco

        model, data = self._data.model, self._data
        integration = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, integration, mujoco.mjtState.mjSTATE_INTEGRATION)
        recomputed = mujoco.MjData(model)
        _integrate(recomputed, integration)
        fresh = dict(arrays_of(recomputed))
        computed = {
            name: [array.dtype.str, to_text(array)]
            for name, array in arrays_of(data)
            if is_computed(name, array) and _differs(array, fresh[name]).any()
        }
        return {
            "edits": self._edits.get(),
            "integration": to_text(integration),
            "computed": computed,
        }

    def set(self, state: dict[str, Any]) -> None:
        """Restore a state from ``get`` for a simulation of the same compiled model."""
        import mujoco

        self._edits.set(state["edits"])
        mujoco.mj_resetData(self._data.model, self._data)
        _integrate(self._data, from_text(state["integration"], "f8"))
        arrays = dict(arrays_of(self._data))
        for name, (dtype, text) in state["computed"].items():
            arrays[name][...] = from_text(text, dtype).reshape(arrays[name].shape)


class StabilityCheck:
    """Find out that MuJoCo reset a simulation because it became unstable.

    MuJoCo counts that in the simulation's warnings. A check costs about 0.2 µs per simulation.

    Args:
        simulations: the ``MjData`` of an environment.
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
        """Forget the warnings so far."""
        for count in self._counts:
            count[:] = 0


def _integrate(data: Any, state: npt.NDArray[np.float64]) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(data.model, data, state, kind)
    mujoco.mj_forward(data.model, data)
    mujoco.mj_setState(data.model, data, state, kind)


def _options(model: Any) -> dict[str, npt.NDArray]:
    values = {name: getattr(model.opt, name) for name in dir(model.opt) if not name.startswith("_")}
    return {
        name: np.array(value)
        for name, value in values.items()
        if isinstance(value, (int, float, np.ndarray))
    }


def _differs(one: npt.NDArray, other: npt.NDArray) -> npt.NDArray[np.bool_]:
    """Compare element by element; a NaN does not differ from a NaN."""
    return ((one != other) & ~((one != one) & (other != other))).ravel()
