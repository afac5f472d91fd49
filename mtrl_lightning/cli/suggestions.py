"""What a user may have meant by a class, an option or a command that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.errors import closest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

CLASS_MODULES = (
    "mtrl_lightning.algorithms",
    "mtrl_lightning.envs",
    "mtrl_lightning.networks",
    "mtrl_lightning.gradients",
    "mtrl_lightning.auxiliaries",
    "mtrl_lightning.callbacks",
    "torch.optim",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
"""Where the classes are whose names can be misspelled."""
UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)")
UNKNOWN_KEY = re.compile(r"does not accept option '([\w.]+)'")
UNACCEPTED = re.compile(r"Option '([\w.]+)' is not accepted")
UNKNOWN_CLASS = re.compile(
    r"Expected a dot import path string: (\w+)"
    r"|module '[\w.]+' has no attribute '(\w+)'"
)
MAX_COMPLETIONS = 3
"""Full names of an abbreviated option that are suggested."""
WITHOUT_DASHES = re.compile(r"(?<!\S)([\w.]+)=\S")
"""``key=value``, the form of options on mtrl's command line."""
FROM_MTRL = "mtrl's commands and options stand beside ours in docs/from_mtrl.md"
UNKNOWN_COMMAND = re.compile(r"invalid choice: '([^']+)' \(choose from ([^)]*)\)")
UNKNOWN_MODULE = re.compile(r"No module named '([\w.]+)'")
OPTION_WITHOUT_PIXELS = re.compile(
    r'Parser key "data\.pixels":.*Dict must include a class_path.* but got NestedArg\(', re.DOTALL
)
CLASS_PATH = re.compile(r"class_path=? ?'([\w.]+)'")


def suggestions(message: str, parsers: Iterable[ArgumentParser]) -> list[str]:
    """Return what a user may have meant, one line per unknown name.

    Args:
        message: of the parser that did not accept it.
        parsers: of the subcommands, whose options are known.
    """
    options = sorted({name for parser in parsers for name in _options_of(parser)})
    found = {unknown: tip for unknown, tip in option_tips(message, options)}
    for unknown in UNKNOWN_KEY.findall(message):
        similar = closest(unknown, options)
        if similar:
            found[unknown] = f"did you mean {similar[0]}? There is no option {unknown}"
    for unknown in UNACCEPTED.findall(message):
        for path in CLASS_PATH.findall(message):
            similar = closest(unknown, _arguments_of(path))
            if similar and similar[0] != unknown:  # a base class may have it
                class_name = path.rpartition(".")[2]
                found[unknown] = f"did you mean {similar[0]}? {class_name} has no option {unknown}"
    for groups in UNKNOWN_CLASS.findall(message):
        unknown = "".join(groups)
        similar = closest(unknown, _class_names())
        if similar:
            found[unknown] = f"did you mean {similar[0]}? No class is called {unknown}"
    found |= dict(_tips_without_dashes(message, options))
    for unknown, choices in UNKNOWN_COMMAND.findall(message):
        similar = closest(unknown, re.findall(r"\w+", choices))
        if similar:
            found[unknown] = f"did you mean {similar[0]}? There is no command {unknown}"
    for unknown in UNKNOWN_MODULE.findall(message):
        found[unknown] = (
            f"there is no module {unknown} in the working directory {Path.cwd()}"
            " and no installed package of this name"
        )
    if OPTION_WITHOUT_PIXELS.search(message):
        found["data.pixels"] = (
            "an option of data.pixels needs the class that it belongs to: add -c pixels before it"
        )
    if "required: validate." in message:
        found["validate"] = "give the run to evaluate: validate runs/NAME/version_0"
    return list(found.values())


def option_tips(message: str, options: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each unknown option of a message with what a user may have meant.

    Args:
        message: of a parser that did not recognize some arguments.
        options: names of those that there are, without dashes.
    """
    for unknown in re.findall(r"(?<!\S)--([\w.]+)", "".join(UNRECOGNIZED.findall(message))):
        full = sorted(name for name in options if name.startswith(unknown))[:MAX_COMPLETIONS]
        similar = full or closest(unknown, options)
        if similar:
            yield unknown, f"did you mean {' or '.join(similar)}? There is no option {unknown}"


def _tips_without_dashes(message: str, options: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what was given as ``key=value`` with what to write instead."""
    commands = [command for command, _ in UNKNOWN_COMMAND.findall(message)]
    text = " ".join([*UNRECOGNIZED.findall(message), *commands])
    for key in WITHOUT_DASHES.findall(text):
        if key in options:
            yield key, f"options begin with two dashes: --{key}=VALUE"
        else:
            yield FROM_MTRL, FROM_MTRL  # once for all such options


def _options_of(parser: ArgumentParser) -> Iterator[str]:
    for option in parser._option_string_actions:
        if option.startswith("--") and not option.endswith((".help", "+")):
            yield option.removeprefix("--")


def _arguments_of(class_path: str) -> list[str]:
    """Return the arguments of the constructors of a class and of its bases."""
    module, _, name = class_path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    constructors = [base.__init__ for base in getattr(found, "__mro__", ())] or [found]
    return [
        argument for function in constructors for argument in inspect.signature(function).parameters
    ]


def _class_names() -> list[str]:
    return [
        name
        for module in CLASS_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if inspect.isclass(value) and not name.startswith("_")
    ]
