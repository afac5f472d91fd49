"""Arguments of the command line that are rewritten before they are parsed.

``fit --resume RUN`` and ``validate RUN`` stand for the run's configuration and a checkpoint of it,
``--config.NAME FILE`` for ``-c FILE``, ``None`` for ``null``, and ``null`` for an option of a
nested class for a configuration.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mtrl_lightning.cli.run_config import read_run_config
from mtrl_lightning.cli.suggestions import FROM_MTRL, WITHOUT_DASHES
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import checkpoint_at, config_file_of, run_folder_of

RESUME = "--resume"
NAMED_FILE = "--config."
"""What the options begin with that give a configuration file, each with a name of its own."""
PRINT_CONFIG = "--print_config"
"""jsonargparse's option whose value stands behind an equals sign, if anywhere."""
CHECKPOINT = "--ckpt_path"
OF_A_NEW_RUN = ("--name", "--root")
"""Options that choose the folder of a new run."""
TASKS = "--tasks"
"""The option of ``validate`` that takes several values."""
CHECKPOINTS = "checkpoints"
"""The folder in that of a run by which a run is known."""


def rewritten(args: Sequence[str], flags: Collection[str] = ()) -> list[str]:
    """Return the arguments as the parser understands them.

    Args:
        args: what follows the program's name on the command line.
        flags: options of the command that take no value.

    Raises:
        ConfigurationError: if a run is given that cannot be used.
    """
    return _with_nested_nulls(_with_nulls(_with_named_files(_with_run(args, flags))))


def _with_run(args: Sequence[str], flags: Collection[str]) -> list[str]:
    """Replace ``fit --resume RUN`` and ``validate RUN`` by ``-c CONFIG --ckpt_path CHECKPOINT``.

    They come first, so that all other arguments override the run's configuration.
    """
    command, *rest = args or [""]
    if command == "fit":
        run, others = _without_resume(rest)
    elif command == "validate":
        run, others = _without_run(rest, flags)
    else:
        return list(args)
    if run is None:
        return list(args)
    given = _option_names(others)
    if CHECKPOINT in given:
        raise ConfigurationError(
            f"a run, {run}, and --ckpt_path are both given: give one of them."
            " In place of the run's folder, one of its checkpoints can be given"
        )
    placing = [name for name in OF_A_NEW_RUN if name in given]
    if placing and command == "fit":
        raise ConfigurationError(
            f"{placing[0]} cannot be given with {RESUME}: the run continues in {run}. Leave it out,"
            " or copy the folder and resume the copy"
        )
    if WITHOUT_DASHES.match(run) and not Path(run).exists():
        raise ConfigurationError(f"there is no run {run}. {FROM_MTRL}")
    folder, checkpoint = _folder_and_checkpoint(Path(run), prefers_best=command == "validate")
    config = config_file_of(folder)
    read_run_config(config)  # names the classes that the parser imports
    return [command, "-c", str(config), f"--ckpt_path={checkpoint}", *others]


def _without_resume(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of ``--resume``, None without it, and the other arguments."""
    run: str | None = None
    others: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        option, has_value, value = argument.partition("=")
        if option != RESUME:
            others.append(argument)
            continue
        if not has_value:
            if not remaining or remaining[0].startswith("-"):
                raise ConfigurationError(
                    f"{RESUME} needs the folder of a run, such as runs/NAME/version_0"
                )
            value = remaining.pop(0)
        run = value
    return run, others


def _without_run(args: Sequence[str], flags: Collection[str]) -> tuple[str | None, list[str]]:
    """Return the first argument that is no option and no option's value, and all others.

    Raises:
        ConfigurationError: if a run is the value of an option, and no checkpoint is given.
    """
    waiting = ""  # an option whose value comes next
    swallowed: list[str] = []
    for index, argument in enumerate(args):
        if _is_option(argument):
            is_complete = "=" in argument or argument in (*flags, PRINT_CONFIG)
            waiting = "" if is_complete else argument
        elif not waiting or (waiting == TASKS and _is_run(Path(argument))):
            return argument, [*args[:index], *args[index + 1 :]]
        elif waiting != TASKS:
            if (Path(argument) / CHECKPOINTS).is_dir():
                swallowed = [waiting, argument]
            waiting = ""
    if swallowed and CHECKPOINT not in _option_names(args):
        raise ConfigurationError(
            f"{swallowed[0]} needs a value, and takes the run {swallowed[1]} for it: give the value"
            f" behind an equals sign, {swallowed[0]}=VALUE {swallowed[1]}"
        )
    return None, list(args)


def _is_run(path: Path) -> bool:
    """Return whether a path is a run's folder or a checkpoint."""
    return (path / CHECKPOINTS).is_dir() or path.suffix == ".ckpt"


def _is_option(argument: str) -> bool:
    """Return whether an argument is an option: ``-`` and negative numbers are values."""
    try:
        float(argument)
    except ValueError:
        return argument.startswith("-") and argument != "-"
    return False


def _option_names(args: Sequence[str]) -> set[str]:
    return {argument.split("=")[0] for argument in args}


def _folder_and_checkpoint(run: Path, prefers_best: bool) -> tuple[Path, Path]:
    """Return the folder of a run and what ``--ckpt_path`` is to be: a checkpoint or the folder.

    A folder stands for its newest complete checkpoint.
    """
    if run.is_file():
        return run_folder_of(run), run
    best = run / CHECKPOINTS / "best.ckpt"
    if prefers_best and best.is_file():
        return run, best
    checkpoint_at(run)  # names what is missing
    return run, run


def _with_named_files(args: Sequence[str]) -> list[str]:
    """Replace ``--config.NAME FILE`` by ``-c FILE`` behind the other files, before all options.

    The parameters of a sweep have a name each and come in the order of the alphabet: one that
    chooses a file must not replace the options beside it.
    """
    files: list[str] = []
    others: list[str] = []
    place = 1  # behind the command
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        option, has_value, value = argument.partition("=")
        if option.startswith(NAMED_FILE):
            if not has_value:
                if not remaining:
                    raise ConfigurationError(f"{option} needs a configuration, such as env/toy")
                value = remaining.pop(0)
            files += ["-c", value]
            continue
        others.append(argument)
        if option in ("-c", "--config"):
            if not has_value and remaining:
                others.append(remaining.pop(0))
            place = len(others)
    return [*others[:place], *files, *others[place:]]


def _with_nulls(args: Sequence[str]) -> list[str]:
    """Replace the value ``None`` by ``null``: Python's word for YAML's."""
    return [
        "null"
        if argument == "None"
        else f"{argument.removesuffix('None')}null"
        if argument.startswith("--") and argument.endswith("=None")
        else argument
        for argument in args
    ]


def _with_nested_nulls(args: Sequence[str]) -> list[str]:
    """Replace ``--a.init_args.b.init_args.c null`` by a configuration with the same effect.

    jsonargparse 4.53 passes the value on as the text ``None`` when a class is nested in another
    one, and no type but a string accepts that. ``--config`` with a string takes effect in its
    place.
    """
    replaced: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        option, has_value, value = argument.partition("=")
        if not option.startswith("--") or option.count(".init_args.") < 2:
            replaced.append(argument)
        elif has_value and value == "null":
            replaced.append(f"--config={_config_with_null(option)}")
        elif not has_value and remaining[:1] == ["null"]:
            remaining.pop(0)
            replaced.append(f"--config={_config_with_null(option)}")
        else:
            replaced.append(argument)
    return replaced


def _config_with_null(option: str) -> str:
    config: Any = None
    for key in reversed(option.removeprefix("--").split(".")):
        config = {key: config}
    return json.dumps(config)
