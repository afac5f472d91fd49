"""An environment's whole state as plain values: what its future depends on, through any stack of wrappers.

A layer (the environment or a wrapper) that has ``get_state() -> dict`` and ``set_state(dict)`` answers for itself. Of
any other layer every attribute is taken: numbers, arrays, containers, generators, spaces, other objects, and of MuJoCo
the integration state, the edits of the model, and the arrays that look into its memory. What cannot be taken is an
error, so nothing is forgotten silently.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as RegisteredSpec
from gymnasium.spaces import Box

from mtrl_lightning.errors import ConfigurationError

PLAIN = (type(None), bool, int, float, str, bytes)
CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, np.dtype)
STATIC = (*CODE, RegisteredSpec)
"""Kept as ``make_env`` built it."""
STATIC_NAMES = {"env", "fullpath", "_ezpickle_args", "_ezpickle_kwargs", "mujoco_renderer", "_cached_spec"}
"""Attributes kept as ``make_env`` built them: the next layer, paths of this machine, windows."""
ASSETS = ("mesh_", "hfield_", "tex_", "skin_", "flex_", "bvh_", "oct_", "name", "text_", "mat_", "vis", "stat", "opt")
"""Prefixes of a MuJoCo model's arrays that are shapes and looks, or no arrays."""


class EnvState:
    """Take and restore the state of one environment.

    Args:
        env: the environment as ``make_env`` gave it, not yet reset: edits of its MuJoCo model are told from it.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env = env
        attributes = vars(env.unwrapped).values()
        self._models = [value for value in attributes if _is_mujoco(value, "MjModel")]
        self._datas = [value for value in attributes if _is_mujoco(value, "MjData")]
        self._pristine = [{name: array.copy() for name, array in _arrays(model)} for model in self._models]

    def get(self) -> list[Any]:
        """Return the state of every layer, outermost first, as plain values.

        Raises:
            ConfigurationError: naming an attribute that cannot be saved.
        """
        encoder = _Encoder([*self._models, *self._datas])
        states: list[Any] = [[_edits(model, pristine) for model, pristine in self._pairs()]]
        states.append([_integration_state(data) for data in self._datas])
        for layer in _layers(self._env):
            own = getattr(type(layer), "get_state", None)
            state = own(layer) if own else encoder.attributes(layer, type(layer).__name__)
            states.append([type(layer).__name__, state])
        return states

    def set(self, states: list[Any]) -> None:
        """Restore a state that an environment made in the same way gave.

        Raises:
            ConfigurationError: if it is of an environment of other layers.
        """
        edits, simulations, *layers = states
        found, here = [name for name, _ in layers], [type(layer).__name__ for layer in _layers(self._env)]
        if found != here or len(edits) != len(self._models) or len(simulations) != len(self._datas):
            raise ConfigurationError(f"the state is of another environment: {' > '.join(found)} there, {here} here")
        for (model, pristine), edit in zip(self._pairs(), edits, strict=True):
            _restore_edits(model, pristine, edit)
        for data, simulation in zip(self._datas, simulations, strict=True):
            _restore_simulation(data, np.frombuffer(simulation).copy())
        decoder = _Decoder([*self._models, *self._datas])
        for layer, (_, state) in zip(_layers(self._env), layers, strict=True):
            if hasattr(type(layer), "get_state"):
                layer.set_state(state)  # type: ignore[attr-defined]
            else:
                decoder.attributes(layer, state)

    def _pairs(self) -> Iterator[tuple[Any, dict[str, npt.NDArray]]]:
        return zip(self._models, self._pristine, strict=True)


class _Encoder:
    """Turn attributes into plain values; what several attributes share is written once."""

    def __init__(self, simulators: list[Any]) -> None:
        self._memory = [
            (i, name, _address(array), array.nbytes) for i, s in enumerate(simulators) for name, array in _arrays(s)
        ]
        self._simulators = {id(simulator) for simulator in simulators}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def attributes(self, owner: Any, where: str) -> dict[str, Any]:
        return {
            name: self._encode(value, f"{where}.{name}")
            for name, value in vars(owner).items()
            if name not in STATIC_NAMES
        }

    def _encode(self, value: Any, where: str) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, STATIC) or id(value) in self._simulators:
            return ["static"]
        if isinstance(value, np.generic):
            return ["number", value.dtype.str, value.item()]
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._encode_new(value, where)

    def _encode_new(self, value: Any, where: str) -> list[Any]:
        if type(value) is np.ndarray and value.dtype != object:
            return self._encode_array(value)
        if type(value) in (list, tuple):
            return [type(value).__name__, [self._encode(v, f"{where}[{i}]") for i, v in enumerate(value)]]
        if type(value) is deque:
            return ["deque", value.maxlen, [self._encode(v, f"{where}[{i}]") for i, v in enumerate(value)]]
        if type(value) in (dict, set, frozenset) and all(type(key) in PLAIN for key in value):
            if type(value) is not dict:
                return [type(value).__name__, sorted(value, key=repr)]
            return ["dict", [[key, self._encode(v, f"{where}[{key!r}]")] for key, v in value.items()]]
        if isinstance(value, np.random.Generator):
            return ["generator", value.bit_generator.state]
        if isinstance(value, np.random.RandomState):
            kind, keys, position, has_gauss, gauss = value.get_state(legacy=True)  # type: ignore[misc]
            return ["random_state", kind, self._encode(keys, where), position, has_gauss, gauss]
        if type(value) is Box:
            parts = {name: self._encode(getattr(value, name), where) for name in ("low", "high", "_np_random")}
            return ["box", value.dtype.str, parts]
        if hasattr(value, "__dict__"):
            return ["object", type(value).__qualname__, self.attributes(value, where)]
        raise ConfigurationError(
            f"the environment's attribute {where} is a {type(value).__name__}, which cannot be saved:"
            " give its class get_state() and set_state(dict)"
        )

    def _encode_array(self, array: npt.NDArray) -> list[Any]:
        start = _address(array)
        for i, name, first, num_bytes in self._memory:
            if array.base is not None and first <= start < first + num_bytes:
                return ["view", i, name, start - first, array.dtype.str, list(array.shape), list(array.strides)]
        return ["array", array.dtype.str, list(array.shape), array.tobytes()]


class _Decoder:
    """Turn plain values into attributes; objects are restored where ``make_env`` put them."""

    def __init__(self, simulators: list[Any]) -> None:
        self._simulators = simulators
        self._made: list[Any] = []

    def attributes(self, owner: Any, states: dict[str, Any]) -> None:
        attributes = vars(owner)
        present = dict(attributes)
        kept = {name: value for name, value in present.items() if name in STATIC_NAMES}
        restored = {name: self._decode(state, present.get(name)) for name, state in states.items()}
        attributes.clear()
        attributes.update(kept | restored)

    def _decode(self, state: Any, present: Any) -> Any:
        if not isinstance(state, (list, tuple)):
            return state
        kind, *rest = state
        if kind == "static":
            return present
        if kind == "number":
            return np.dtype(rest[0]).type(rest[1])
        if kind == "same":
            return self._made[rest[0]]
        place = len(self._made)
        self._made.append(None)
        value = getattr(self, f"_make_{kind}")(present, place, *rest)
        self._made[place] = value
        return value

    def _make_view(
        self, present: Any, place: int, simulator: int, name: str, offset: int, dtype: str, shape: Any, strides: Any
    ) -> Any:
        memory = getattr(self._simulators[simulator], name)
        return np.ndarray(tuple(shape), np.dtype(dtype), memory, offset, tuple(strides))

    def _make_array(self, present: Any, place: int, dtype: str, shape: list[int], content: bytes) -> npt.NDArray:
        return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()

    def _make_list(self, present: Any, place: int, items: list[Any]) -> list[Any]:
        former = present if isinstance(present, (list, tuple, deque)) and len(present) == len(items) else None
        return [self._decode(item, former[i] if former is not None else None) for i, item in enumerate(items)]

    def _make_tuple(self, present: Any, place: int, items: list[Any]) -> tuple:
        return tuple(self._make_list(present, place, items))

    def _make_deque(self, present: Any, place: int, maxlen: int | None, items: list[Any]) -> deque:
        return deque(self._make_list(present, place, items), maxlen)

    def _make_set(self, present: Any, place: int, items: list[Any]) -> set:
        return set(items)

    def _make_frozenset(self, present: Any, place: int, items: list[Any]) -> frozenset:
        return frozenset(items)

    def _make_dict(self, present: Any, place: int, items: list[Any]) -> dict:
        former = present if isinstance(present, dict) else {}
        return {key: self._decode(item, former.get(key)) for key, item in items}

    def _make_generator(self, present: Any, place: int, state: dict[str, Any]) -> np.random.Generator:
        known = {"PCG64": np.random.PCG64, "PCG64DXSM": np.random.PCG64DXSM, "MT19937": np.random.MT19937,
                 "Philox": np.random.Philox, "SFC64": np.random.SFC64}  # fmt: skip
        bits = known[state["bit_generator"]]()
        bits.state = state
        return type(present)(bits) if isinstance(present, np.random.Generator) else np.random.Generator(bits)

    def _make_random_state(self, present: Any, place: int, *state: Any) -> np.random.RandomState:
        made = np.random.RandomState()
        kind, keys, *rest = state
        made.set_state((kind, self._decode(keys, None), *rest))
        return made

    def _make_box(self, present: Any, place: int, dtype: str, parts: dict[str, Any]) -> Box:
        low, high, generator = (self._decode(part, None) for part in parts.values())
        box = Box(low, high, dtype=np.dtype(dtype).type)
        box._np_random = generator
        return box

    def _make_object(self, present: Any, place: int, kind: str, states: dict[str, Any]) -> Any:
        if type(present).__qualname__ != kind:
            raise ConfigurationError(f"the state is of another environment: a {kind} there, {type(present)} here")
        self._made[place] = present
        self.attributes(present, states)
        return present


def _layers(env: gym.Env) -> Iterator[gym.Env]:
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def _is_mujoco(value: Any, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__.startswith("mujoco.")


def _arrays(simulator: Any) -> Iterator[tuple[str, npt.NDArray]]:
    """Yield the arrays in the memory of a MuJoCo model or of its data."""
    for name in dir(simulator):
        if not name.startswith(("_", *ASSETS)):
            value = getattr(simulator, name, None)
            if type(value) is np.ndarray and value.size and value.dtype != object:
                yield name, value


def _address(array: npt.NDArray) -> int:
    return array.__array_interface__["data"][0]


def _edits(model: Any, pristine: dict[str, npt.NDArray]) -> dict[str, list[Any]]:
    """Return the elements of a model's arrays that differ from what was compiled: ``{array: [places, bytes]}``."""
    edits = {}
    for name, array in _arrays(model):
        places = np.flatnonzero(array.ravel() != pristine[name].ravel())
        if places.size:
            edits[name] = [places.tolist(), array.ravel()[places].tobytes()]
    return edits


def _restore_edits(model: Any, pristine: dict[str, npt.NDArray], edits: dict[str, list[Any]]) -> None:
    for name, array in _arrays(model):
        wanted = pristine[name].copy()
        if name in edits:
            wanted.ravel()[edits[name][0]] = np.frombuffer(edits[name][1], wanted.dtype)
        if (array != wanted).any():
            array[...] = wanted


def _integration_state(data: Any) -> bytes:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    return state.tobytes()


def _restore_simulation(data: Any, state: npt.NDArray[np.float64]) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_resetData(data.model, data)
    mujoco.mj_setState(data.model, data, state, kind)
    mujoco.mj_forward(data.model, data)  # what is computed from the state, such as positions that observations show
    mujoco.mj_setState(data.model, data, state, kind)
