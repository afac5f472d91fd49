"""Check the pickle in a checkpoint before PyTorch follows it.

A pickle is a list of instructions. PyTorch's reader (``weights_only=True``) calls nothing that
executes code, but it makes whatever the instructions ask for: a ``bytearray`` of any size, or keys
made of tuples in tuples, whose hash takes for ever.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

ORDERED_DICT = "collections OrderedDict"
SETS = ("__builtin__ set", "builtins set")
BYTES = "_codecs encode"
CALLED = (
    ORDERED_DICT,
    *SETS,
    BYTES,
    "torch Size",
    "torch device",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
)
"""What may be called: module and name."""
NAMED = re.compile(r"torch \w+Storage|torch (bool|(uint|int|float|bfloat|complex)\d+)")
"""What may be named beside them: kinds of memory and types of numbers."""
VALUES = frozenset(
    [
        *("BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1"),
        *("BINUNICODE", "SHORT_BINSTRING"),
        *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE"),
        *("NEWFALSE", "NEWTRUE", "NONE"),
    ]
)
"""Instructions that put a value on the stack."""
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Instructions that make a tuple of so many values."""
MAX_HASHED = 16
"""How many values are hashed for each byte of the pickle, at most."""


@dataclass
class _Value:
    """What an instruction has put on the stack.

    Args:
        name: of a class or function, of what it returned, or the text.
        size: values in it, each counted as often as it is reached.
        items: of a tuple.
    """

    name: Any = None
    size: int = 1
    items: tuple[_Value, ...] = ()


class _Stack:
    """Follow a pickle's instructions without making anything."""

    def __init__(self, num_bytes: int) -> None:
        self._most_hashed = MAX_HASHED * num_bytes
        self._num_hashed = 0
        self._levels: list[list[_Value]] = [[]]
        self._memo: dict[int, _Value] = {}

    def follow(self, instruction: str, argument: Any) -> None:
        """Follow one instruction.

        Raises:
            IndexError, KeyError: if it takes what is not there.
            ValueError: if it is none that a checkpoint needs.
        """
        stack = self._levels[-1]
        if instruction in VALUES:
            stack.append(_Value(argument))
        elif instruction in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif instruction in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif instruction == "MARK":
            self._levels.append([])
        elif instruction == "TUPLE":
            self._add_tuple(self._pop_level())
        elif instruction in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[instruction])]
            self._add_tuple(items[::-1])
        elif instruction == "APPEND":
            self._extend([stack.pop()])
        elif instruction == "APPENDS":
            self._extend(self._pop_level())
        elif instruction == "SETITEM":
            stack.pop()
            self._hash(stack.pop())
        elif instruction == "SETITEMS":
            for key in self._pop_level()[::2]:
                self._hash(key)
        elif instruction == "GLOBAL":
            if argument not in CALLED and not NAMED.fullmatch(argument):
                raise ValueError(f"it names {argument.replace(' ', '.')}")
            stack.append(_Value(argument))
        elif instruction == "REDUCE":
            arguments = stack.pop()
            self._call(stack.pop().name, arguments)
        elif instruction == "BINPERSID":  # the memory of a tensor
            stack[-1] = _Value()
        elif instruction == "BUILD":
            stack.pop()
            if stack[-1].name != ORDERED_DICT:
                raise ValueError("it sets attributes")
        elif instruction not in ("PROTO", "STOP"):
            raise ValueError(f"it has the instruction {instruction}")

    def _pop_level(self) -> list[_Value]:
        items = self._levels.pop()
        if not self._levels:
            raise ValueError("its instructions do not fit together")
        return items

    def _add_tuple(self, items: list[_Value]) -> None:
        size = self._limited(1 + sum(item.size for item in items))
        self._levels[-1].append(_Value(size=size, items=tuple(items)))

    def _extend(self, items: list[_Value]) -> None:
        extended = self._levels[-1][-1]
        extended.size = self._limited(extended.size + sum(item.size for item in items))

    def _limited(self, size: int) -> int:
        return min(size, self._most_hashed + 1)

    def _call(self, name: Any, arguments: _Value) -> None:
        if name not in CALLED:
            raise ValueError("it calls what it has made")
        if name in SETS:
            self._hash(arguments)
        if name == ORDERED_DICT and arguments.size > 1:
            raise ValueError("it has an OrderedDict of other values")
        # other encodings take a time that grows with the square of the text
        if name == BYTES and [item.name for item in arguments.items[1:]] not in ([], ["latin1"]):
            raise ValueError("it has bytes of an unknown encoding")
        self._levels[-1].append(_Value(name, arguments.size))

    def _hash(self, key: _Value) -> None:
        self._num_hashed += key.size
        if self._num_hashed > self._most_hashed:
            raise ValueError("its keys are more than a file of its size can hold")


def check_pickle(program: bytes) -> None:
    """Check that a pickle's instructions make what a checkpoint holds, in a limited time.

    Args:
        program: the pickle.

    Raises:
        ValueError, IndexError, KeyError: if they do not.
    """
    stack = _Stack(len(program))
    for instruction, argument, _ in pickletools.genops(program):
        stack.follow(instruction.name, argument)
