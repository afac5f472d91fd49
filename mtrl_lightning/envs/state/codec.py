"""Attributes as plain values and back, which a checkpoint loads without executing anything."""

from __future__ import annotations

import enum
import random
import types
from collections import OrderedDict, deque
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as RegisteredSpec
from gymnasium.spaces import Box
from numpy.random.bit_generator import SeedSequence

from mtrl_lightning.envs.state.simulator import (
    PLAIN_KINDS,
    address_of,
    arrays_of,
    from_text,
    to_text,
)
from mtrl_lightning.errors import ConfigurationError

PLAIN = (type(None), bool, int, float, str, bytes)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
STATIC_NAMES = {"fullpath", "_ezpickle_args", "_ezpickle_kwargs", "mujoco_renderer", "_cached_spec"}
"""Attributes that stay as ``make_env`` built them; a class may name more in ``static_names``."""
DICTS = {"dict": dict, "OrderedDict": OrderedDict}
SETS = {"set": set, "frozenset": frozenset}
BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
IS_HEAP_TYPE = 1 << 9
"""The flag of classes that a class statement makes."""
SEEDS = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
HINT = "give the class that has it get_state() and set_state(dict)"


class StateEncoder:
    """Turn attributes into plain values; an object that several attributes share is written once.

    Args:
        simulators: MuJoCo's models and data; arrays may be views of their memory.
    """

    def __init__(self, simulators: list[Any]) -> None:
        self.objects: dict[str, tuple[type, str]] = {}
        """Classes of the objects met, by name, and where."""
        self._memory = [
            (i, name, address_of(array), array.nbytes)
            for i, s in enumerate(simulators)
            for name, array in arrays_of(s)
        ]
        self._simulators = {id(simulator) for simulator in simulators}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    @property
    def classes(self) -> dict[str, type]:
        """Classes of the objects met."""
        return {name: kind for name, (kind, _) in self.objects.items()}

    def attributes(self, owner: Any, where: str) -> dict[str, Any]:
        """Return all attributes of an object; ``where`` names it in errors."""
        return {
            name: self.encode(value, f"{where}.{name}", owner)
            for name, value in vars(owner).items()
            if not _is_static(owner, name)
        }

    def encode(self, value: Any, where: str, owner: Any = None) -> Any:
        """Return a value as plain ones.

        Raises:
            ConfigurationError: if it cannot be saved.
        """
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
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._encode_new(value, where)

    def _encode_new(self, value: Any, where: str) -> list[Any]:
        kind = type(value).__name__
        if type(value) is np.ndarray and value.dtype.kind in PLAIN_KINDS:
            return self._encode_array(value, where)
        if type(value) in (list, tuple, deque):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return [kind, items, getattr(value, "maxlen", None)]
        if type(value) in DICTS.values() and all(type(key) in PLAIN for key in value):
            return [
                "dict",
                kind,
                [[key, self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()],
            ]
        if type(value) in SETS.values() and all(type(item) in PLAIN for item in value):
            return ["set", kind, sorted(value, key=repr)]
        if (
            isinstance(value, np.random.Generator)
            and type(value.bit_generator).__name__ in BIT_GENERATORS
        ):
            bits = value.bit_generator
            seeds = bits.seed_seq if type(bits.seed_seq) is SeedSequence else None
            arguments = [getattr(seeds, name) for name in SEEDS] if seeds else None
            return ["generator", self.encode(bits.state, where), self.encode(arguments, where)]
        if type(value) is np.random.RandomState:
            return ["random_state", self.encode(value.get_state(legacy=True), where)]
        if type(value) is random.Random:
            return ["random", value.getstate()]
        if type(value) is Box:
            return [
                "box",
                *(self.encode(part, where) for part in (value.low, value.high, value._np_random)),
            ]
        if _is_plain_object(value):
            self.objects.setdefault(type(value).__qualname__, (type(value), where))
            return ["object", type(value).__qualname__, self.attributes(value, where)]
        raise ConfigurationError(
            f"the environment's attribute {where} is a {kind}, which cannot be saved: {HINT}"
        )

    def _encode_array(self, array: npt.NDArray, where: str) -> list[Any]:
        start = address_of(array)
        layout = [array.dtype.str, list(array.shape), list(array.strides)]
        for i, name, first, num_bytes in self._memory:
            if array.base is not None and array.size and first <= start < first + num_bytes:
                return ["view", i, name, start - first, *layout]
        if type(array.base) is np.ndarray and array.size and array.base.flags.c_contiguous:
            base = self.encode(array.base, where)
            return ["window", base, start - address_of(array.base), *layout]
        return ["array", array.dtype.str, list(array.shape), to_text(array)]


class StateDecoder:
    """Turn plain values into attributes; objects are restored where ``make_env`` put them.

    Args:
        simulators: as the encoder's.
        classes: allowed classes of new objects, by name.
    """

    def __init__(self, simulators: list[Any], classes: dict[str, type]) -> None:
        self._simulators = simulators
        self._classes = classes
        self._made: list[Any] = []
        self._taken: set[int] = set()

    def attributes(self, owner: Any, states: dict[str, Any], where: str) -> None:
        """Restore all attributes of an object."""
        attributes = vars(owner)
        present = dict(attributes)
        kept = {name: value for name, value in present.items() if _is_static(owner, name)}
        decoded = {
            name: self.decode(state, present.get(name), f"{where}.{name}", owner)
            for name, state in states.items()
        }
        attributes.clear()
        attributes.update(kept | decoded)

    def decode(self, state: Any, present: Any, where: str, owner: Any = None) -> Any:
        """Return the value that was encoded.

        Args:
            state: the plain values.
            present: the value that ``make_env`` put there.
            where: names it in errors.
            owner: the object whose attribute it is.

        Raises:
            ConfigurationError: if it is of another environment.
        """
        if not isinstance(state, (list, tuple)):
            return state
        kind, *rest = state
        if kind == "static":
            if rest[0] and rest[0] != _identity(present):
                raise _differs(where, rest[0], present)
            return present
        if kind == "method":
            return getattr(owner, rest[0])
        if kind == "enum":
            if type(present).__qualname__ != rest[0]:
                raise _differs(where, f"a {rest[0]}", present)
            return type(present)[rest[1]]
        if kind == "number":
            return from_text(rest[1], rest[0])[0]
        if kind == "same":
            return self._made[rest[0]]
        index = len(self._made)
        self._made.append(None)
        self._made[index] = made = getattr(self, f"_make_{kind}")(present, index, where, *rest)
        return made

    def _make_view(
        self, present: Any, index: int, where: str, simulator: int, name: str, *layout: Any
    ) -> npt.NDArray:
        return _view(dict(arrays_of(self._simulators[simulator]))[name], *layout)

    def _make_window(
        self, present: Any, index: int, where: str, base: Any, *layout: Any
    ) -> npt.NDArray:
        return _view(self.decode(base, None, where), *layout)

    def _make_array(
        self, present: Any, index: int, where: str, dtype: str, shape: list[int], text: str
    ) -> npt.NDArray:
        return from_text(text, dtype).reshape(shape).copy()

    def _make_list(
        self, present: Any, index: int, where: str, items: list[Any], maxlen: int | None
    ) -> list[Any]:
        self._made[index] = made = []
        known = isinstance(present, (list, tuple, deque)) and len(present) == len(items)
        previous = present if known else [None] * len(items)
        for i, (item, before) in enumerate(zip(items, previous, strict=True)):
            made.append(self.decode(item, before, f"{where}[{i}]"))
        return made

    def _make_tuple(self, *state: Any) -> tuple:
        return tuple(self._make_list(*state))

    def _make_deque(
        self, present: Any, index: int, where: str, items: list[Any], maxlen: int | None
    ) -> deque:
        return deque(self._make_list(present, index, where, items, maxlen), maxlen)

    def _make_set(self, present: Any, index: int, where: str, kind: str, items: list[Any]) -> Any:
        return SETS[kind](items)

    def _make_dict(self, present: Any, index: int, where: str, kind: str, items: list[Any]) -> dict:
        previous = present if isinstance(present, dict) else {}
        self._made[index] = made = DICTS[kind]()
        for key, item in items:
            made[key] = self.decode(item, previous.get(key), f"{where}[{key!r}]")
        return made

    def _make_generator(
        self, present: Any, index: int, where: str, state: Any, seeds: Any
    ) -> np.random.Generator:
        content = self.decode(state, None, where)
        arguments = self.decode(seeds, None, where)
        seeding = SeedSequence(**dict(zip(SEEDS, arguments, strict=True))) if arguments else None
        bits = BIT_GENERATORS[content["bit_generator"]](seeding)
        bits.state = content
        kind = type(present) if isinstance(present, np.random.Generator) else np.random.Generator
        return kind(bits)

    def _make_random_state(
        self, present: Any, index: int, where: str, state: Any
    ) -> np.random.RandomState:
        made = np.random.RandomState()
        made.set_state(self.decode(state, None, where))
        return made

    def _make_random(self, present: Any, index: int, where: str, state: Any) -> random.Random:
        made = random.Random()
        made.setstate(state)
        return made

    def _make_box(self, present: Any, index: int, where: str, *parts: Any) -> Box:
        low, high, generator = (self.decode(part, None, where) for part in parts)
        box = Box(low, high, dtype=low.dtype.type)
        box._np_random = generator
        return box

    def _make_object(
        self, present: Any, index: int, where: str, kind: str, states: dict[str, Any]
    ) -> Any:
        made = present
        # of another class if it was made later; taken if it is one of several
        if type(present).__qualname__ != kind or id(present) in self._taken:
            if kind not in self._classes:
                raise _differs(where, f"a {kind}", present)
            made = object.__new__(self._classes[kind])
        self._taken.add(id(made))
        self._made[index] = made
        self.attributes(made, states, where)
        return made


def _is_static(owner: Any, name: str) -> bool:
    names = {*STATIC_NAMES, *getattr(type(owner), "static_names", ())}
    return name in names or (name == "env" and isinstance(owner, gym.Wrapper))


def _identity(value: Any) -> str:
    """Return a text that identifies a function, class or type of numbers."""
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", "")
    name = getattr(value, "__qualname__", getattr(value, "__name__", str(value)))
    return f"{getattr(value, '__module__', '')}.{name}{line and f':{line}'}"


def _view(
    memory: npt.NDArray, offset: int, dtype: str, shape: list[int], strides: list[int]
) -> npt.NDArray:
    """Return an array over a part of another's memory."""
    return np.ndarray(tuple(shape), dtype, memory, offset, tuple(strides))


def _differs(where: str, was: str, present: Any) -> ConfigurationError:
    here = _identity(present) if isinstance(present, CODE) else f"a {type(present).__name__}"
    return ConfigurationError(
        f"the environment's attribute {where} was {was}, here it is {here}: {HINT}"
    )


def _is_plain_object(value: Any) -> bool:
    """Return whether all of an object is in its ``__dict__``."""
    kinds = type(value).__mro__
    are_python_classes = all(kind.__flags__ & IS_HEAP_TYPE or kind is object for kind in kinds)
    return (
        hasattr(value, "__dict__")
        and type(value).__reduce_ex__ is object.__reduce_ex__
        and type(value).__reduce__ is object.__reduce__
        and not has_slots(type(value))
        and are_python_classes
    )


def has_slots(kind: type) -> bool:
    """Return whether objects of a class have attributes outside their ``__dict__``."""
    return any(vars(base).get("__slots__") for base in kind.__mro__)
