"""Check the pickle in a checkpoint before PyTorch's reader follows it.

A pickle is a list of instructions. PyTorch's reader (``weights_only=True``) executes no code, but
some of its instructions allocate or hash without a limit: a ``bytearray`` of any size, copies of
a text, keys made of tuples in tuples. So only the functions of plain values and dense tensors may
be called, each with the arguments that ``torch.save`` writes; keys are texts, numbers or flat
tuples of them; and copies are limited by the size of the pickle.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass, field
from typing import Any

import torch

ORDERED_DICT = "collections OrderedDict"
SETS = ("__builtin__ set", "builtins set")
BYTES = "_codecs encode"
SIZE = "torch Size"
ALLOWED_CALLS = (
    ORDERED_DICT,
    *SETS,
    BYTES,
    SIZE,
    "torch device",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
)
"""Functions and classes that may be called: module and name."""
STORAGE = re.compile(r"torch \w+Storage|torch\.storage UntypedStorage")
"""Storage classes of tensors, which may be named."""
DTYPES = {
    str(value).replace(".", " ") for value in vars(torch).values() if isinstance(value, torch.dtype)
}
KINDS = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINSTRING"), "text"),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "NEWFALSE", "NEWTRUE"), "integer"),
    **dict.fromkeys(("BINFLOAT", "NONE"), "constant"),
    "LONG1": "long",
    "EMPTY_DICT": "dict",
    "EMPTY_LIST": "list",
    "EMPTY_SET": "set",
    "EMPTY_TUPLE": "tuple",
}
"""Instructions that put a value on the stack, and the kind of the value."""
KEYS = ("text", "integer", "constant")
"""Kinds of keys: the hashes of long integers can be chosen to collide."""
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Instructions that make a tuple, and of how many values."""
MAX_COPIED = 16
"""How many values and characters calls and keys may copy or hash for each byte of the pickle."""


@dataclass
class _Value:
    """A value on the stack.

    Args:
        kind: one of ``KINDS``, ``global``, or the function that returned it.
        content: the text, the number, or the global's module and name.
        items: of a tuple or list.
    """

    kind: str
    content: Any = None
    items: list[_Value] = field(default_factory=list)


class _Checker:
    """Follow a pickle's instructions without making anything.

    Args:
        num_bytes: size of the pickle.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = MAX_COPIED * num_bytes
        self._levels: list[list[_Value]] = [[]]
        """The stack, divided by marks."""
        self._memo: dict[int, _Value] = {}

    def follow(self, instruction: str, argument: Any) -> None:
        """Follow one instruction.

        Raises:
            IndexError, KeyError: if the stack or the memo is empty.
            ValueError: if the instruction is not allowed.
        """
        stack = self._levels[-1]
        if instruction in KINDS:
            stack.append(_Value(KINDS[instruction], argument))
        elif instruction in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif instruction in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif instruction == "MARK":
            self._levels.append([])
        elif instruction == "TUPLE":
            items = self._pop_level()
            self._levels[-1].append(_Value("tuple", items=items))
        elif instruction in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[instruction])]
            stack.append(_Value("tuple", items=items[::-1]))
        elif instruction == "APPEND":
            item = stack.pop()
            stack[-1].items.append(item)
        elif instruction == "APPENDS":
            items = self._pop_level()
            self._levels[-1][-1].items.extend(items)
        elif instruction == "SETITEM":
            stack.pop()
            self._hash(stack.pop())
        elif instruction == "SETITEMS":
            for key in self._pop_level()[::2]:
                self._hash(key)
        elif instruction == "GLOBAL":
            stack.append(_Value("global", _allowed_global(argument)))
        elif instruction == "REDUCE":
            arguments = stack.pop()
            stack.append(self._call(stack.pop(), arguments))
        elif instruction == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif instruction == "BUILD":
            state = stack.pop()
            if stack[-1].kind != ORDERED_DICT or state.kind != "dict":
                raise ValueError("it sets attributes of an object")
        elif instruction not in ("PROTO", "STOP"):
            raise ValueError(f"it has the instruction {instruction}, which no checkpoint needs")

    def _pop_level(self) -> list[_Value]:
        if len(self._levels) == 1:
            raise ValueError("a MARK is missing")
        return self._levels.pop()

    def _call(self, function: _Value, arguments: _Value) -> _Value:
        """Return the value of a call.

        Raises:
            ValueError: if the function may not be called, or has other arguments than
                ``torch.save`` writes.
        """
        name = function.content
        if function.kind != "global" or name not in ALLOWED_CALLS or arguments.kind != "tuple":
            raise ValueError("it calls an object that no checkpoint needs to call")
        items = arguments.items
        kinds = [item.kind for item in items]
        if name in SETS:
            is_as_written = kinds == ["list"]
            for key in items[0].items if is_as_written else ():
                self._hash(key)
        elif name == ORDERED_DICT:
            is_as_written = not items
        elif name == BYTES:  # other encodings take a time that grows with the square of the text
            is_as_written = kinds == ["text", "text"] and items[1].content == "latin1"
            self._spend(len(items[0].content) if is_as_written else 0)
        elif name == SIZE:
            is_as_written = kinds == ["tuple"] and _are_integers(items[0].items)
            self._spend(len(items[0].items) if is_as_written else 0)
        else:
            is_as_written = True
        if not is_as_written:
            raise ValueError(f"it calls {name.replace(' ', '.')} with other arguments")
        return _Value(name)

    def _hash(self, key: _Value) -> None:
        """Count a key.

        Raises:
            ValueError: if it is not a text, a number or a flat tuple of them.
        """
        parts = key.items if key.kind == "tuple" else [key]
        if not all(part.kind in KEYS for part in parts):
            raise ValueError("it has a key that is not a text, a number or a tuple of them")
        self._spend(1 + len(parts))

    def _spend(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise ValueError("it copies or hashes more than a pickle of its size explains")


def _allowed_global(name: str) -> str:
    if name not in ALLOWED_CALLS and name not in DTYPES and not STORAGE.fullmatch(name):
        raise ValueError(
            f"it uses {name.replace(' ', '.')}, which is not a plain value or a plain tensor"
        )
    return name


def _are_integers(items: list[_Value]) -> bool:
    return all(item.kind in ("integer", "long") for item in items)


def _storage(identifier: _Value) -> _Value:
    """Return a tensor's storage.

    Args:
        identifier: ``("storage", class, key, device, number of elements)``.
    """
    kinds = [item.kind for item in identifier.items]
    is_length = _are_integers(identifier.items[-1:])
    if kinds[:-1] != ["text", "global", "text", "text"] or not is_length:
        raise ValueError("it names a storage in another way than torch.save")
    return _Value("storage")


def check_pickle(program: bytes) -> None:
    """Check that a pickle makes plain values and dense tensors, in a limited time.

    Raises:
        ValueError, IndexError, KeyError: if it does not.
    """
    checker = _Checker(len(program))
    for instruction, argument, _ in pickletools.genops(program):
        checker.follow(instruction.name, argument)
