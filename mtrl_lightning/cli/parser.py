"""The parser of ``fit`` and ``validate``: runs and files by name, and help of a page or two."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentError, DefaultHelpFormatter, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from mtrl_lightning.algorithms.starting import NewTasks
from mtrl_lightning.cli.commands import PROGRAM, option_tips
from mtrl_lightning.cli.config_files import ExtendingConfigFile, config_of
from mtrl_lightning.cli.run_config import TRUST, read_run_config
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.launch.start import check_start
from mtrl_lightning.runs import (
    VALIDATIONS,
    best_checkpoint,
    checkpoint_at,
    config_file_of,
    policy_folder,
    run_folder_of,
)

DESCRIPTIONS = {
    "fit": "Train, or continue a run. Options are taken in the order in which they are given: a"
    " later one overrides an earlier one and the files before it. Classes have options of their"
    " own: --model.help SAC prints them.",
    "validate": "Run test episodes of every task with a checkpoint, and print a table of success"
    " and return for each evaluated split. RUN is the folder of a run, whose best checkpoint is"
    " taken, a checkpoint, or a policy that comes with this package, such as mt10. The results are"
    f" added to RUN/{VALIDATIONS}. Options change how it is"
    " evaluated: --evaluation.num_episodes 50 runs more test episodes, and"
    " --data.benchmark.init_args.goal_seed 1 samples other goals of MetaWorld's tasks than those of"
    f" training (goal_seed 0).{TRUST}",
}
USAGE = {
    "fit": "mtrl-lightning fit -c NAME_OR_FILE [-c ...] [--OPTION VALUE ...]\n"
    "       mtrl-lightning fit --resume RUN [--OPTION VALUE ...]",
    "validate": "mtrl-lightning validate RUN [--tasks TASK ...] [--OPTION VALUE ...]\n"
    "       mtrl-lightning validate -c NAME_OR_FILE [-c ...] --ckpt_path CKPT_PATH",
}
CONFIG = (
    "a configuration by name, such as quickstart or env/toy (mtrl-lightning list prints all), or a"
    " YAML file. A file of this path takes precedence over a name."
)
RESUME = (
    "continue this run, runs/NAME/version_N, from its newest complete checkpoint with its own"
    " configuration; or one of its checkpoints. Options beside it override the configuration."
    f"{TRUST}"
)
CKPT_PATH = {
    "fit": "continue from this checkpoint: a file in a run's checkpoints folder; the run's folder,"
    " for its newest complete checkpoint; last or best, for that of the newest run of --name."
    " --resume also takes the run's configuration.",
    "validate": "the checkpoint to evaluate: a file in a run's checkpoints folder; the run's"
    " folder, for its newest complete checkpoint; last or best, for that of the newest run of"
    " --name.",
}
INIT_FROM = (
    "start a new run with the weights of a trained policy, also on other tasks: a checkpoint; a"
    " run's folder, for its best checkpoint; or the name of a policy of this package. What belongs"
    " to a task is copied for tasks of the same name"
)
INIT_NEW_TASKS = (
    "what the other tasks of a run with --init_from start with: fresh weights, or the mean of those"
    " of the policy's tasks"
)
TRAINER_HELP = (
    "Show the options of Lightning's Trainer, such as --trainer.accelerator, --trainer.precision"
    " and --trainer.callbacks, and exit."
)
CHECKPOINTS = "checkpoints"
"""The folder in that of a run by which a run is known."""
NAMED_FILE = "--config."
"""The start of the options that give a configuration file, each with a name of its own."""
FILE_OPTIONS = ("-c", "--config")
"""Options that give a configuration file."""
START_OPTIONS = ("init_from", "init_new_tasks")
"""Options that start a new run with a policy's weights."""


class _Run(argparse.Action):
    """The argument ``RUN`` of ``validate`` and the option ``--resume`` of ``fit``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Check that the parser begins with this run's configuration.

        Raises:
            ConfigurationError: if it does not.
        """
        parser.check_run(values)


class _NamedFile(argparse.Action):
    """An option ``--config.NAME``, whose files are collected in the order of the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Add a file.

        Raises:
            ConfigurationError: if none is given.
        """
        if not values:
            raise ConfigurationError(f"{option} needs a configuration, such as env/toy")
        namespace.named_files = [*getattr(namespace, "named_files", ()), values]


class _TrainerHelp(argparse.Action):
    """Print the options of Lightning's trainer."""

    def __call__(self, parser: Any, *_: Any) -> None:
        """Print them and end the program."""
        trainer = LightningArgumentParser(
            description="", usage=argparse.SUPPRESS, add_help=False, print_config=None
        )
        trainer.add_lightning_class_args(Trainer, "trainer")
        trainer.print_help()
        parser.exit()


class _ShortHelp(DefaultHelpFormatter):
    """The help without the trainer's options, and without what other options set."""

    def add_arguments(self, actions: Any) -> None:
        """Add a group of options."""
        super().add_arguments([action for action in actions if not _is_hidden(action)])


def _is_hidden(action: argparse.Action) -> bool:
    if action.dest == "trainer" or action.dest.startswith("trainer."):
        return True
    return any(" --> " in name for name in action.option_strings)


def parser_options(command: str) -> dict[str, Any]:
    """Return the constructor's arguments of a command's parser, ``fit`` or ``validate``."""
    return {
        "prog": f"{PROGRAM} {command}",
        "description": DESCRIPTIONS[command],
        "usage": USAGE[command],
        "formatter_class": _ShortHelp,
        "exit_on_error": False,
        "allow_abbrev": False,
    }


class RunParser(LightningArgumentParser):
    """Lightning's parser for one command, with our configuration files and short help.

    jsonargparse makes such parsers also for the classes in a configuration.
    """

    _command = ""
    _run: str | None = None
    """The run whose configuration comes first."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument; that of configuration files is replaced by ours."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs |= {"action": ExtendingConfigFile, "help": CONFIG, "metavar": "NAME_OR_FILE"}
        return super().add_argument(*args, **kwargs)

    def option_names(self) -> list[str]:
        """Return the names of the options without dashes, but those of chosen classes."""
        names = [*self.get_defaults().keys(), "help", "print_config", "trainer.help"]
        return [*names, "resume"] if self._command == "fit" else names

    def add_own_arguments(self, command: str) -> None:
        """Add what a command has beside the sections of a configuration.

        Args:
            command: ``fit`` or ``validate``.
        """
        self._command = command
        assert self.groups is not None, "LightningCLI adds the sections first"
        self.groups["trainer"].title = argparse.SUPPRESS  # shown by --trainer.help
        if self._command == "fit":
            hidden = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self.add_argument("--resume", action=_Run, metavar="RUN", help=RESUME, **hidden)
        else:
            self._add_arguments_of_validate()
        self.add_argument(
            "--ckpt_path", type=str | None, default=None, help=CKPT_PATH[self._command]
        )
        # a run's config.yaml has these, which validate reads
        is_fitting = self._command == "fit"
        helps = (INIT_FROM, INIT_NEW_TASKS) if is_fitting else (argparse.SUPPRESS,) * 2
        self.add_argument("--init_from", type=str | None, default=None, help=helps[0])
        self.add_argument("--init_new_tasks", type=NewTasks, default="fresh", help=helps[1])
        self.add_argument(
            "--trainer.help",
            action=_TrainerHelp,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=TRAINER_HELP,
        )

    def _add_arguments_of_validate(self) -> None:
        self.add_argument(
            "run",
            nargs="?",
            action=_Run,
            default=argparse.SUPPRESS,
            metavar="RUN",
            help="the run's folder, ROOT/NAME/version_N, or one of its checkpoints; or, as the"
            " first argument, the name of a policy of this package",
        )
        self.add_argument(
            "--split",
            type=str | None,
            default=None,
            help="the only split to evaluate, such as eval_interpolation (default: all but the"
            " first, which is trained on)",
        )
        self.add_argument(
            "--tasks",
            type=str,
            nargs="+",
            metavar="TASK",
            help="the only tasks to evaluate, in this order, such as reach door-open (default: all"
            " of the run)",
        )
        self.add_argument(
            "--json",
            type=str | None,
            default=None,
            metavar="FILE",
            help="also write the results into this file, as JSON: the metrics by name, the"
            " checkpoint, its env_steps, the protocol and the time",
        )

    def check_run(self, run: str) -> None:
        """Check that an argument is the run whose configuration comes first.

        Raises:
            ConfigurationError: if it is another one, or none.
        """
        if self._run is None:
            if policy_folder(run) is not None:
                raise ConfigurationError(
                    f"give the policy {run} first: {PROGRAM} {self._command} {run} ..."
                )
            _files_of(Path(run), self._command)  # names what is missing
        if run != self._run:
            is_any = os.path.exists(run) or policy_folder(run) is not None
            if self._command == "validate" and not is_any:
                # the value of an option that does not exist
                raise ArgumentError(None, f"unrecognized arguments: {run}")
            raise ConfigurationError(f"two runs are given, {self._run} and {run}: give one")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any
    ) -> Namespace:
        """Parse what follows the command on the command line.

        Raises:
            ConfigurationError: if a run is given that cannot be used.
        """
        given = _with_nulls(_with_named_files(sys.argv[1:] if args is None else args))
        given_options = _given_options(given, self._command)
        self._run = given_options.get("resume", [None])[0]
        if self._command == "validate":
            self._run, given = _without_run(given)
        if self._run is None:
            config = super().parse_args(given, *rest, **kwargs)
        else:
            config_file, checkpoint = _files_of(Path(self._run), self._command)
            stored = read_run_config(config_file)  # names the classes that the parser imports
            # the run's own options come first, so that all other arguments override them
            first = ["-c", str(config_file), f"--ckpt_path={checkpoint}"]
            config = super().parse_args([*first, *given], *rest, **kwargs)
            self._keep_identity(config, stored, str(checkpoint), given_options)
        if self._command == "fit":
            continued = self._run or config.ckpt_path or None
            # A continued run has these options in its file from when it started: they take no
            # effect now. Given on the command line, they are a mistake.
            is_chosen = {name: name in given_options or not continued for name in START_OPTIONS}
            check_start(
                config.init_from if is_chosen["init_from"] else None,
                config.init_new_tasks if is_chosen["init_new_tasks"] else "fresh",
                continued,
            )
        return config

    def parse_with_tips(self, args: Sequence[str]) -> Namespace:
        """Parse what follows the command; errors name similar options.

        Raises:
            ArgumentError: if an argument is unknown or its value does not fit.
            ConfigurationError: if a run is given that cannot be used, or a path.
        """
        try:
            return self.parse_args(args)
        except ArgumentError as error:
            error.message = "\n".join([error.message, *option_tips(args, self.option_names())])
            raise
        except OSError as error:  # a value that is too long for a path
            raise ConfigurationError(str(error)) from error

    def _keep_identity(
        self,
        config: Namespace,
        stored: dict[str, Any],
        checkpoint: str,
        given_options: Mapping[str, Any],
    ) -> None:
        """Keep the run's checkpoint, name and root, which a file after ``-c`` may set too."""
        if "ckpt_path" in given_options:
            raise ConfigurationError(
                f"a run, {self._run}, and --ckpt_path are both given: give one of them."
                " In place of the run's folder, one of its checkpoints can be given"
            )
        config.ckpt_path = checkpoint
        if self._command != "fit":
            return
        for name in ("name", "root"):
            kept = stored.get(name, config[name])
            if name in given_options and config[name] != kept:
                raise ConfigurationError(
                    f"--{name} cannot be given with --resume: the run continues in {self._run}."
                    " Leave it out, or copy the folder and resume the copy"
                )
            config[name] = kept


def _files_of(run: Path, command: str) -> tuple[Path, Path]:
    """Return the configuration file of a run, and its checkpoint or the folder for the newest."""
    of_package = policy_folder(str(run))
    folder = of_package or (run_folder_of(run) if run.is_file() else run)
    if run.is_file():
        return config_file_of(folder), run
    # both name what is missing
    found = best_checkpoint(folder) if command == "validate" else checkpoint_at(run)
    return config_file_of(folder), found if found.name == "best.ckpt" else folder


def _given_options(args: Sequence[str], command: str) -> dict[str, Any]:
    """Return the options that choose the run, as far as they are given as arguments.

    The configuration of the run has them, too, and is read before all other arguments.
    """
    parser = _partial_parser()
    if command == "fit":
        parser.add_argument("--resume", action="append")
    for name in ("ckpt_path", "name", "root", *START_OPTIONS):
        parser.add_argument(f"--{name}")
    return vars(parser.parse_known_args(args)[0])


def _partial_parser() -> argparse.ArgumentParser:
    """Return a parser for some of the arguments, which come before or between the others."""
    return argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )


def _without_run(args: list[str]) -> tuple[str | None, list[str]]:
    """Return the run that ``validate`` is given, wherever it stands, and the other arguments.

    The run is recognized by its path: the folder of a run, or a checkpoint. Its position among the
    arguments does not tell, because an option before it may take several values or none, and the
    options of the classes in its configuration are unknown until that is read.
    """
    for index, (previous, argument) in enumerate(itertools.pairwise(["", *args])):
        if argument.startswith("-") or previous in (*FILE_OPTIONS, "--ckpt_path"):
            continue
        is_run = os.path.isdir(f"{argument}/{CHECKPOINTS}") or argument.endswith(".ckpt")
        if is_run or (index == 0 and policy_folder(argument) is not None):
            return argument, [*args[:index], *args[index + 1 :]]
    return None, args


def _with_named_files(args: Sequence[str]) -> list[str]:
    """Replace ``--config.NAME FILE`` by ``-c FILE`` behind the last other file.

    The parameters of a sweep have a name each and come in alphabetical order: one that chooses a
    file must not replace the options beside it.
    """
    options = [argument.partition("=")[0] for argument in args if argument.startswith(NAMED_FILE)]
    parser = _partial_parser()
    for option in dict.fromkeys(options):
        parser.add_argument(option, action=_NamedFile, nargs="?")
    named, others = parser.parse_known_args(args)
    files = [f"--config={file}" for file in getattr(named, "named_files", ())]
    ends = [
        index + (1 if "=" in argument else 2)
        for index, argument in enumerate(others)
        if argument.partition("=")[0] in FILE_OPTIONS
    ]
    end = max(ends, default=0)
    return [*others[:end], *files, *others[end:]]


def _with_nulls(args: Sequence[str]) -> list[str]:
    """Replace the value ``None`` by YAML's ``null``, also for an option of a nested class.

    jsonargparse 4.53 passes ``null`` on as the text ``None`` when a class is nested in another
    one, and no type but a string accepts that. ``--config`` with a string takes effect in its
    place.
    """
    replaced: list[str] = []
    for argument in args:
        option, _, value = argument.partition("=")
        is_option = argument.startswith("--")
        if (value if is_option else argument) not in ("None", "null"):
            replaced.append(argument)
            continue
        if not is_option:
            if not replaced or not _is_nested(replaced[-1]):
                replaced.append("null")
                continue
            option = replaced.pop()
        if _is_nested(option):
            replaced.append(f"--config={config_of(option.removeprefix('--'), None)}")
        else:
            replaced.append(f"{option}=null")
    return replaced


def _is_nested(option: str) -> bool:
    is_name = option.startswith("--") and "=" not in option
    return is_name and option.count(".init_args.") > 1
