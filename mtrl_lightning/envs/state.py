"""An environment's whole state as plain values: what its future depends on, through any stack of wrappers.

A layer (the environment or a wrapper) that has ``get_state() -> dict`` and ``set_state(dict)`` answers for itself. Of
any other layer every attribute is taken: numbers, arrays, containers, generators, spaces, other objects, MuJoCo's
simulation and the arrays that look into its memory. What cannot be taken is an error, so nothing is forgotten silently.
"""

from __future__ import annotations

import enum
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as RegisteredSpec
from gymnasium.spaces import Box

from mtrl_lightning.envs.simulator import (
    ModelEdits,
    address_of,
    arrays_of,
    from_text,
    get_simulation,
    is_mujoco,
    set_simulation,
    to_text,
)
from mtrl_lightning.errors import ConfigurationError

PLAIN = (type(None), bool, int, float, str)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
STATIC_NAMES = {"env", "fullpath", "_ezpickle_args", "_ezpickle_kwargs", "mujoco_renderer", "_cached_spec"}
"""Attributes kept as ``make_env`` built them: the next layer, paths of this machine, windows."""
DICTS = {"dict": dict, "OrderedDict": OrderedDict}
SETS = {"set": set, "frozenset": frozenset}
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
REMEDY = "give the class that has it get_state() and set_state(dict)"


class EnvState:
    """Take and restore the state of one environment.

    Args:
        env: the environment as ``make_env`` gave it, not yet reset: edits of its MuJoCo model are told from it.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env = env
        attributes = vars(env.unwrapped).values()
        self._models = [value for value in attributes if is_mujoco(value, "MjModel")]
        self._datas = [value for value in attributes if is_mujoco(value, "MjData")]
        self._edits = [ModelEdits(model) for model in self._models]

    def get(self) -> list[Any]:
        """Return the state of every layer, outermost first, as plain values.

        Raises:
            ConfigurationError: naming an attribute that cannot be saved.
        """
        encoder = _Encoder([*self._models, *self._datas])
        states: list[Any] = [[edits.get() for edits in self._edits], [get_simulation(data) for data in self._datas]]
        for layer in _layers(self._env):
            own = getattr(type(layer), "get_state", None)
            state = own(layer) if own else encoder.attributes(layer, type(layer).__name__)
            states.append([type(layer).__name__, state])
        return states

    def set(self, states: list[Any]) -> None:
        """Restore a state that an environment made in the same way gave.

        Raises:
            ConfigurationError: if it is of an environment of other layers or attributes.
        """
        edits, simulations, *layers = states
        found, here = [name for name, _ in layers], [type(layer).__name__ for layer in _layers(self._env)]
        if found != here or len(edits) != len(self._models) or len(simulations) != len(self._datas):
            raise ConfigurationError(f"the state is of another environment: {' > '.join(found)} there, {here} here")
        for own, edit in zip(self._edits, edits, strict=True):
            own.set(edit)
        for data, simulation in zip(self._datas, simulations, strict=True):
            set_simulation(data, simulation)
        decoder = _Decoder([*self._models, *self._datas])
        for layer, (name, state) in zip(_layers(self._env), layers, strict=True):
            if hasattr(type(layer), "get_state"):
                layer.set_state(state)  # type: ignore[attr-defined]
            else:
                decoder.attributes(layer, state, name)


class _Encoder:
    """Turn attributes into plain values; what several attributes share is written once."""

    def __init__(self, simulators: list[Any]) -> None:
        self._memory = [
            (i, name, address_of(array), array.nbytes) for i, s in enumerate(simulators) for name, array in arrays_of(s)
        ]
        self._simulators = {id(simulator) for simulator in simulators}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def attributes(self, owner: Any, where: str) -> dict[str, Any]:
        return {
            name: self._encode(value, f"{where}.{name}", owner)
            for name, value in vars(owner).items()
            if name not in STATIC_NAMES
        }

    def _encode(self, value: Any, where: str, owner: Any = None) -> Any:
        if type(value) in PLAIN:
            return value
        if id(value) in self._simulators or isinstance(value, RegisteredSpec):
            return ["static", ""]
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            return ["method", value.__name__]
        if isinstance(value, (*CODE, np.dtype)):
            return ["static", _identity(value)]
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__qualname__, value.name]
        if isinstance(value, np.generic):
            return ["number", value.dtype.str, to_text(np.array(value))]
        if type(value) is bytes:
            return ["bytes", value.decode("latin-1")]
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._encode_new(value, where)

    def _encode_new(self, value: Any, where: str) -> list[Any]:
        kind = type(value).__name__
        if type(value) is np.ndarray and value.dtype.kind in "biufcSU":
            return self._encode_array(value)
        if type(value) in (list, tuple, deque):
            items = [self._encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return [kind, items, getattr(value, "maxlen", None)]
        if type(value) in DICTS.values() and all(type(key) in PLAIN for key in value):
            return ["dict", kind, [[key, self._encode(item, f"{where}[{key!r}]")] for key, item in value.items()]]
        if type(value) in SETS.values() and all(type(item) in PLAIN for item in value):
            return ["set", kind, sorted(value, key=repr)]
        if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in BIT_GENERATORS:
            return ["generator", self._encode(value.bit_generator.state, where)]
        if type(value) is np.random.RandomState:
            return ["random_state", self._encode(value.get_state(legacy=True), where)]
        if type(value) is random.Random:
            return ["random", value.getstate()]
        if type(value) is Box:
            return ["box", *(self._encode(part, where) for part in (value.low, value.high, value._np_random))]
        if _is_plain_object(value):
            return ["object", type(value).__qualname__, self.attributes(value, where)]
        raise ConfigurationError(f"the environment's attribute {where} is a {kind}, which cannot be saved: {REMEDY}")

    def _encode_array(self, array: npt.NDArray) -> list[Any]:
        start = address_of(array)
        for i, name, first, num_bytes in self._memory:
            if array.base is not None and array.size and first <= start < first + num_bytes:
                return ["view", i, name, start - first, array.dtype.str, list(array.shape), list(array.strides)]
        return ["array", array.dtype.str, list(array.shape), to_text(array)]


class _Decoder:
    """Turn plain values into attributes; objects are restored where ``make_env`` put them."""

    def __init__(self, simulators: list[Any]) -> None:
        self._simulators = simulators
        self._made: list[Any] = []
        self._taken: set[int] = set()

    def attributes(self, owner: Any, states: dict[str, Any], where: str) -> None:
        attributes = vars(owner)
        present = dict(attributes)
        kept = {name: value for name, value in present.items() if name in STATIC_NAMES}
        decoded = {
            name: self._decode(state, present.get(name), f"{where}.{name}", owner) for name, state in states.items()
        }
        attributes.clear()
        attributes.update(kept | decoded)

    def _decode(self, state: Any, present: Any, where: str, owner: Any = None) -> Any:
        if not isinstance(state, (list, tuple)):
            return state
        kind, *rest = state
        if kind == "static":
            if rest[0] and rest[0] != _identity(present):
                raise ConfigurationError(f"the environment's attribute {where} was {rest[0]}, here not: {REMEDY}")
            return present
        if kind == "method":
            return getattr(owner, rest[0])
        if kind == "enum":
            if type(present).__qualname__ != rest[0]:
                raise ConfigurationError(f"the environment's attribute {where} was a {rest[0]}, here not: {REMEDY}")
            return type(present)[rest[1]]
        if kind == "number":
            return from_text(rest[1], rest[0])[0]
        if kind == "bytes":
            return rest[0].encode("latin-1")
        if kind == "same":
            return self._made[rest[0]]
        place = len(self._made)
        self._made.append(None)
        self._made[place] = made = getattr(self, f"_make_{kind}")(present, place, where, *rest)
        return made

    def _make_view(
        self, present: Any, place: int, where: str, simulator: int, name: str, offset: int, dtype: str, shape: Any,
        strides: Any,
    ) -> Any:  # fmt: skip
        memory = getattr(self._simulators[simulator], name)
        return np.ndarray(tuple(shape), np.dtype(dtype), memory, offset, tuple(strides))

    def _make_array(self, present: Any, place: int, where: str, dtype: str, shape: list[int], text: str) -> npt.NDArray:
        return from_text(text, dtype).reshape(shape)

    def _make_list(self, present: Any, place: int, where: str, items: list[Any], maxlen: int | None) -> list[Any]:
        self._made[place] = made = []
        former = present if isinstance(present, (list, tuple, deque)) and len(present) == len(items) else None
        for i, item in enumerate(items):
            made.append(self._decode(item, former[i] if former is not None else None, f"{where}[{i}]"))
        return made

    def _make_tuple(self, *state: Any) -> tuple:
        return tuple(self._make_list(*state))

    def _make_deque(self, present: Any, place: int, where: str, items: list[Any], maxlen: int | None) -> deque:
        return deque(self._make_list(present, place, where, items, maxlen), maxlen)

    def _make_set(self, present: Any, place: int, where: str, kind: str, items: list[Any]) -> Any:
        return SETS[kind](items)

    def _make_dict(self, present: Any, place: int, where: str, kind: str, items: list[Any]) -> dict:
        former = present if isinstance(present, dict) else {}
        self._made[place] = made = DICTS[kind]()
        for key, item in items:
            made[key] = self._decode(item, former.get(key), f"{where}[{key!r}]")
        return made

    def _make_generator(self, present: Any, place: int, where: str, state: Any) -> np.random.Generator:
        content = self._decode(state, None, where)
        bits = getattr(np.random, {name: name for name in BIT_GENERATORS}[content["bit_generator"]])()
        bits.state = content
        return type(present)(bits) if isinstance(present, np.random.Generator) else np.random.Generator(bits)

    def _make_random_state(self, present: Any, place: int, where: str, state: Any) -> np.random.RandomState:
        made = np.random.RandomState()
        made.set_state(self._decode(state, None, where))
        return made

    def _make_random(self, present: Any, place: int, where: str, state: Any) -> random.Random:
        made = random.Random()
        made.setstate(state)
        return made

    def _make_box(self, present: Any, place: int, where: str, *parts: Any) -> Box:
        low, high, generator = (self._decode(part, None, where) for part in parts)
        box = Box(low, high, dtype=low.dtype.type)
        box._np_random = generator
        return box

    def _make_object(self, present: Any, place: int, where: str, kind: str, states: dict[str, Any]) -> Any:
        if type(present).__qualname__ != kind:
            raise ConfigurationError(
                f"the environment's attribute {where} was a {kind}, here it is a {type(present).__name__}: {REMEDY}"
            )
        if id(present) in self._taken:  # two objects there, one here
            present, former = type(present).__new__(type(present)), present  # type: ignore[call-overload]
            vars(present).update(vars(former))
        self._taken.add(id(present))
        self._made[place] = present
        self.attributes(present, states, where)
        return present


def _layers(env: gym.Env) -> Iterator[gym.Env]:
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def _identity(value: Any) -> str:
    """Tell one function, class or type of numbers from another."""
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", "")
    name = getattr(value, "__qualname__", getattr(value, "__name__", str(value)))
    return f"{getattr(value, '__module__', '')}.{name}{line and f':{line}'}"


def _is_plain_object(value: Any) -> bool:
    """Return whether all of an object is in its ``__dict__``."""
    kinds = type(value).__mro__
    return (
        hasattr(value, "__dict__")
        and type(value).__reduce_ex__ is object.__reduce_ex__
        and type(value).__reduce__ is object.__reduce__
        and not any(vars(kind).get("__slots__") for kind in kinds)
        and all(kind.__flags__ & (1 << 9) or kind is object for kind in kinds)  # made by a class statement
    )
