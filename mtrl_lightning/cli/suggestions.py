"""What a user may have meant by an option, a class or a command that does not exist."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from mtrl_lightning.cli.config_names import named_config
from mtrl_lightning.errors import causes, closest

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
# jsonargparse says only in its message what it does not accept
CLASS_PATH = re.compile(r"class_path=? ?'([\w.]+)'")
UNACCEPTED = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'")
UNKNOWN_CLASS = re.compile(
    r"Expected a dot import path string: (\w+)|module '[\w.]+' has no attribute '(\w+)'"
)
ALGORITHM = "mtrl_lightning.Algorithm"
"""The class of a model for which none is chosen."""
MAX_COMPLETIONS = 3
"""Full names of an abbreviated option that are suggested."""
WITHOUT_DASHES = re.compile(r"([\w.]+)=\S")
"""``key=value``, the form of options on mtrl's command line."""
FROM_MTRL = "mtrl's commands and options stand beside ours in docs/from_mtrl.md"


def suggestions(error: BaseException, args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return what a user may have meant, one line per unknown name.

    Args:
        error: of the parser that did not accept the arguments.
        args: what follows the command.
        options: names of the options that there are, without dashes.
    """
    message = str(error)
    tips = [*option_tips(args, options), *_tips_without_dashes(args, options, message)]
    for group, name in UNACCEPTED.findall(message):
        tips += _tips_of_unaccepted(f"{group}.{name}" if group else name, message, options)
    for groups in UNKNOWN_CLASS.findall(message):
        unknown = "".join(groups)
        similar = closest(unknown, _class_names())
        if similar:
            tips.append(f"did you mean {similar[0]}? No class is called {unknown}")
    tips += [
        f"there is no module {cause.name} in the working directory {Path.cwd()} and no installed"
        " package of this name"
        for cause in causes(error)
        if isinstance(cause, ModuleNotFoundError) and cause.name
    ]
    if f"class_path '{ALGORITHM}'" in message:
        tips.append("options of a model need its algorithm before them: -c algorithm/mtsac")
    has_option_of_pixels = any(argument.startswith("--data.pixels.") for argument in args)
    if has_option_of_pixels and '"data.pixels"' in message and not CLASS_PATH.search(message):
        tips.append(
            "an option of data.pixels needs the class that it belongs to: add -c pixels before it"
        )
    return list(dict.fromkeys(tips))


def option_tips(args: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Yield for each unknown option what a user may have meant.

    Args:
        args: what follows the command.
        options: names of the options that there are, without dashes. An option of a class begins
            with that of the class.
    """
    for argument in args:
        name = argument.partition("=")[0].removeprefix("--").rstrip("+")
        parts = name.split(".")
        sections = [".".join(parts[:num]) for num in range(1, len(parts) + 1)]
        if not argument.startswith("--") or any(section in options for section in sections):
            continue
        is_section = any(option.startswith(f"{name}.") for option in options)  # --data FILE
        if is_section or name.removeprefix("no_") in options:
            continue
        full = sorted(option for option in options if option.startswith(name))[:MAX_COMPLETIONS]
        similar = full or closest(name, options)
        if similar:
            yield f"did you mean {' or '.join(similar)}? There is no option {name}"


def _tips_without_dashes(
    args: Sequence[str], options: Collection[str], message: str
) -> Iterator[str]:
    """Yield what was given as ``key=value``, or as a name alone, with what to write instead."""
    for before, previous, argument in zip(["", "", *args], ["", *args], args, strict=False):
        is_value = previous.startswith("-") and "=" not in previous
        if is_value or argument.startswith("-"):
            continue
        # an option without a section, such as --name, has one value
        is_listed = before.startswith("--") and "." in before and "=" not in before
        is_second = is_listed and not previous.startswith("-") and argument in message.split()
        if named_config(argument) is not None:
            yield f"configurations are given after -c: -c {argument}"
        elif os.path.isdir(f"{argument}/checkpoints") and "resume" in options:
            yield f"a run continues with --resume {argument}"
        elif is_second:
            values = ", ".join(value.strip("[],") for value in (previous, argument))
            yield f"several values are one list: {before} '[{values}]'"
        key = WITHOUT_DASHES.match(argument)
        if key is None:
            continue
        is_option = key[1] in options
        yield f"options begin with two dashes: --{key[1]}=VALUE" if is_option else FROM_MTRL


def _tips_of_unaccepted(name: str, message: str, options: Collection[str]) -> Iterator[str]:
    """Yield what an option of a file or of a class was meant to be, or why the class lacks it."""
    class_paths = CLASS_PATH.findall(message)
    for path in class_paths:
        module, _, class_name = path.rpartition(".")
        owner = getattr(importlib.import_module(module), class_name)
        lacking = getattr(owner, "lacking_options", {})
        similar = closest(name, _arguments_of(owner))
        if name in lacking:
            yield f"{owner.__name__} has no {name}: {lacking[name]}"
        elif similar and similar[0] != name:  # a base class may have it
            yield f"did you mean {similar[0]}? {class_name} has no option {name}"
    similar = closest(name, options)
    if similar and not class_paths:
        yield f"did you mean {similar[0]}? There is no option {name}"


def _arguments_of(owner: type) -> list[str]:
    """Return the arguments of the constructors of a class and of its bases."""
    constructors = [base.__init__ for base in getattr(owner, "__mro__", ())] or [owner]
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
