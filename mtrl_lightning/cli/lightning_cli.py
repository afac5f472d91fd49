"""The commands ``fit``, ``validate`` and ``test``, based on ``LightningCLI``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentError, Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mtrl_lightning import errors
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.arguments import parameters_of
from mtrl_lightning.algorithms.starting import NewTasks
from mtrl_lightning.callbacks import MetricsFile
from mtrl_lightning.cli import PROGRAM, TRUST
from mtrl_lightning.cli.config_files import ExtendingConfigFile
from mtrl_lightning.data import TaskData
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks, only_split
from mtrl_lightning.errors import ConfigurationError, causes
from mtrl_lightning.runs import (
    VALIDATIONS,
    best_checkpoint,
    checkpoint_at,
    config_file_of,
    is_first_process,
    is_of_package,
    open_run,
    replacing,
    run_folder_of,
)
from mtrl_lightning.training import (
    CALLBACKS,
    TRAINER,
    checkpoint_to_continue,
    copy_policy,
    listed,
    restart_version,
    with_progress_bar,
)
from mtrl_lightning.transitions import step_unit
from mtrl_lightning.utils.devices import is_out_of_memory, keep_freed_memory
from mtrl_lightning.utils.quiet import quiet

DESCRIPTIONS = {
    "fit": "Train: fit -c NAME_OR_FILE [-c ...] [--OPTION VALUE ...]. Resume a run with its own"
    " configuration: fit --resume RUN [--OPTION VALUE ...]; RUN is a run folder, one of its"
    " checkpoints, or its name. Later files and options override earlier ones. --model.help SAC and"
    f" --data.help ReplayData print the options of a class.{TRUST}",
    "validate": "Run test episodes of every task with a checkpoint: validate RUN [--OPTION VALUE"
    " ...]. RUN must come first; it is a run folder or the name of a run (its best checkpoint is"
    " used), a checkpoint, or a policy of this package, such as mt10. The results are appended to"
    f" RUN/{VALIDATIONS}.{TRUST}",
}
DESCRIPTIONS["test"] = DESCRIPTIONS["validate"].replace("validate RUN", "test RUN")
FLAG = re.compile(r"--\w+(\.\w+)+(?<!\.help)")
"""An option of a section, without its value."""
EXPONENT = re.compile(r"(--[\w.]+=)?(\d+(?:\.\d*)?[eE]\+?\d+)")
"""A number such as 1e5, with or without its option."""


class RunParser(LightningArgumentParser):
    """Lightning's parser, with support for configuration names and ``extends``."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument; ``ExtendingConfigFile`` replaces the action of configuration files."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs |= {
                "action": ExtendingConfigFile,
                "metavar": "NAME_OR_FILE",
                "help": "name of a configuration, such as quickstart or env/toy (mtrl-lightning"
                " list shows all), or a YAML file, which takes precedence over a name",
            }
        return super().add_argument(*args, **kwargs)


class _SaveConfig(SaveConfigCallback):
    """Write ``config.yaml`` to the run folder, only once training starts."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pass  # the other callbacks or the checkpoint may still reject the configuration

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class MultiTaskCLI(LightningCLI):
    """Train with ``fit``, evaluate a checkpoint with ``validate`` and ``test``.

    Args:
        args: the command and its arguments.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self._args = list(args)
        self._parsers: dict[str, LightningArgumentParser] = {}
        options = {"exit_on_error": False, "allow_abbrev": False}
        of_commands = {
            name: {**options, "description": DESCRIPTIONS[name]} for name in DESCRIPTIONS
        }
        with contextlib.ExitStack() as self._open:
            super().__init__(
                Algorithm,
                TaskData,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                # algorithms save their hyperparameters in checkpoints themselves
                load_from_checkpoint_support=False,
                save_config_callback=_SaveConfig,
                save_config_kwargs={"overwrite": True},
                trainer_defaults=TRAINER,
                parser_class=RunParser,
                parser_kwargs={**options, "prog": PROGRAM, **of_commands},
                args=self._args,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands, each with the arguments that are not options."""
        return {name: LightningCLI.subcommands()[name] for name in DESCRIPTIONS}

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line."""
        assert isinstance(args, list)
        self.config = parser.parse_args(plain_arguments(args))
        seed = self.config[args[0]].seed_everything
        if not 0 <= seed < 2**32:
            raise ConfigurationError(f"seed_everything is {seed}: give 0 to {2**32 - 1:,}")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would replace the options with those of the checkpoint."""

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, which Lightning would also accept as a boolean."""
        text = "seed of weights, environments and all random numbers"
        parser.add_argument("--seed_everything", type=int, default=1, help=text)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, the required callbacks, and the linked arguments."""
        parser.set_defaults({"data": {"class_path": "mtrl_lightning.data.ReplayData"}})
        parser.add_argument("--name", default="run", help="the run folder is ROOT/NAME/version_N")
        parser.add_argument(
            "--root", default="runs", help="folder of all runs, as trainer.default_root_dir"
        )
        parser.add_argument(
            "--init_from",
            type=str | None,
            help="checkpoint, run, or policy of this package whose weights initialize the new run,"
            " even on other tasks. Weights of single tasks are copied for tasks with the same name",
        )
        parser.add_argument(
            "--init_new_tasks",
            type=NewTasks,
            default="fresh",
            help="initial weights of all other tasks: fresh weights, or the mean of the policy's"
            " tasks",
        )
        for section, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, section)
        parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")
        for target in ("model.init_args.seed", "data.init_args.seed"):
            parser.link_arguments("seed_everything", target)

        command = next(name for name, text in DESCRIPTIONS.items() if text == parser.description)
        self._parsers[command] = parser
        if command != "fit":
            self._add_arguments_of_evaluation(parser)

    def _add_arguments_of_evaluation(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--split", type=str | None, help="split to evaluate (default: all except train)"
        )
        parser.add_argument(
            "--tasks", type=str, nargs="+", metavar="TASK", help="tasks to evaluate, in this order"
        )
        parser.add_argument(
            "--json",
            type=str | None,
            metavar="FILE",
            help="also write the results to this file: metrics, checkpoint, env_steps, protocol"
            " and time",
        )

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint and the run folder before anything is instantiated."""
        config = self.config[self.subcommand]
        _leave_out_nulls(config.model)
        config.weights_only = True  # never execute code of a checkpoint
        config.root = config.trainer.default_root_dir or config.root
        if self.subcommand != "fit":
            if not config.ckpt_path:
                raise ConfigurationError(f"give the run first: {PROGRAM} {self.subcommand} RUN")
            checkpoint = checkpoint_to_continue(config.root, config.name, None, config.ckpt_path)
            assert checkpoint is not None
            config.ckpt_path, config.verbose = str(checkpoint), False
            self._folder = run_folder_of(checkpoint)
            config.trainer.logger = False
            return
        version = restart_version(self._args)
        start = checkpoint_to_continue(config.root, config.name, version, config.ckpt_path)
        run = open_run(config.root, config.name, version, start)
        self._folder = self._open.enter_context(run)
        # repeating a run from its config.yaml starts a new run, also in W&B
        config.ckpt_path = None
        saved = config.clone()
        self.save_config_callback = lambda parser, config, **options: (  # type: ignore[assignment]
            _SaveConfig(parser, saved, **options)
        )
        config.ckpt_path = None if start is None else str(start)
        for logger in listed(config.trainer.logger):
            self._place_logger(logger.class_path, logger.init_args, config.name)

    def _place_logger(self, class_path: str, options: Namespace, name: str) -> None:
        """Make a logger write to the run folder, and resume the W&B run of a resumed run."""
        if "save_dir" in options:  # joining keeps an absolute path
            options.save_dir = str(self._folder / (options.save_dir or "."))
        if class_path.endswith("WandbLogger") and is_first_process():
            file = self._folder / "wandb_id"
            saved = file.read_text() if file.exists() else uuid.uuid4().hex[:8]
            options.id = os.environ.get("WANDB_RUN_ID") or options.id or saved
            options.name = options.name or f"{name}/{self._folder.name}"
            options.resume = "allow"
            file.write_text(options.id)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the trainer, with the run folder, the metrics file and the progress bar."""
        own: dict[str, Any] = {"default_root_dir": str(self._folder), "logger": False}
        if self.subcommand == "fit":
            given = self.config_init[self.subcommand].trainer
            own["logger"] = [MetricsFile(self._folder), *listed(given.logger)]
            given.callbacks = with_progress_bar(listed(given.callbacks), given.enable_progress_bar)
        try:
            return super().instantiate_trainer(**own, **kwargs)
        except ValueError as error:  # mutually exclusive options
            raise ConfigurationError(str(error)) from error

    def before_fit(self) -> None:
        """Copy the weights of ``init_from``."""
        keep_freed_memory()
        config = self.config[self.subcommand]
        if config.init_from and config.ckpt_path is None:
            copy_policy(self.model, config.init_from, config.init_new_tasks)
        rank_zero_info(f"The run's folder is {os.path.relpath(self._folder)}")

    def after_fit(self) -> None:
        """Print commands for the finished run."""
        steps = f"{self.model.counters.env_steps:,} {step_unit(self.model.kind)}"
        folder = os.path.relpath(self._folder)
        rank_zero_info(
            f"The run ended after {steps}. Its folder is {folder}\n"
            f"  its curves and tables: {PROGRAM} compare {folder}\n"
            f"  watch the policy:      {PROGRAM} play {folder}\n"
            f"  evaluate it:           {PROGRAM} validate {folder}"
        )

    def before_validate(self) -> None:
        """Select the requested tasks and split."""
        config = self.config[self.subcommand]
        if config.split is not None:
            self.datamodule.benchmark = only_split(self.datamodule.benchmark, config.split)
        if config.tasks is not None:
            self.datamodule.benchmark = OnlyTasks(self.datamodule.benchmark, config.tasks)

    def after_validate(self) -> None:
        """Append the results to the file in the run folder, and write ``--json``."""
        if not self.trainer.is_global_zero:
            return
        config = self.config[self.subcommand]
        evaluation = self.config_init[self.subcommand].evaluation
        content = {
            "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "checkpoint": config.ckpt_path,
            "env_steps": self.model.counters.env_steps,
            "num_episodes": config.evaluation.num_episodes,
            "protocol": dict(self.model.spec.protocol),
            # the metrics of Lightning's trainer are in single precision
            "metrics": evaluation.results,
            "success_intervals": evaluation.success_intervals,
        }
        if not is_of_package(self._folder):
            stored = self._folder / VALIDATIONS
            try:
                with stored.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(content) + "\n")
                rank_zero_info(f"The results are added to {stored}")
            except OSError as error:  # the folder may not be writable
                rank_zero_warn(f"the results could not be added to {stored} ({error.strerror})")
        if config.json is not None:
            path = Path(config.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                unfinished.write_text(json.dumps(content, indent=2) + "\n")

    before_test, after_test = before_validate, after_validate


def _leave_out_nulls(model: Namespace) -> None:
    """Replace null with the default of a factory, because jsonargparse accepts null for all."""
    for name, parameter in parameters_of(locate(model.class_path)).items():
        is_optional = "None" in str(parameter.annotation)
        is_factory = parameter.default is not parameter.empty and callable(parameter.default)
        if is_factory and not is_optional and model.init_args.get(name, "") is None:
            del model.init_args[name]


class _ParsingCLI(MultiTaskCLI):
    """Parse a command line without instantiating anything."""

    def before_instantiate_classes(self) -> None:
        assert self.subcommand is not None
        parser, config = self._parsers[self.subcommand], self.config[self.subcommand]
        text = parser.dump(config, format="json", skip_unset=False, skip_validation=True)
        self.described: dict[str, Any] = json.loads(text)
        self.subcommand = None  # so that LightningCLI runs no command

    def instantiate_classes(self) -> None:
        pass


def parsed(args: Sequence[str]) -> dict[str, Any]:
    """Return the complete configuration of a command line, as plain values."""
    return _ParsingCLI(args).described


def plain_arguments(args: Sequence[str]) -> list[str]:
    """Convert the arguments to the form that LightningCLI accepts.

    ``--resume RUN`` of ``fit`` and the first argument of ``validate`` and ``test`` become the run's
    ``--config`` and ``--ckpt_path``, before all other arguments. ``--a.b`` without a value, as
    written by W&B's ``${args_no_boolean_flags}``, becomes ``--a.b=true``, and 1e5 becomes 100000.
    """
    command, *rest = args
    run = None
    if command == "fit":
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--resume")
        known, rest = parser.parse_known_args(rest)
        run = known.resume
        if run is not None and any(option.startswith("--init_from") for option in rest):
            raise ConfigurationError("--init_from and --resume are mutually exclusive: give one")
    elif not rest:
        raise ConfigurationError(f"give the run first: {PROGRAM} {command} RUN")
    elif not rest[0].startswith("-"):
        run, *rest = rest
    first: list[str] = []
    if run is not None:
        checkpoint = checkpoint_at(run) if command == "fit" else best_checkpoint(run)
        config_file = config_file_of(run_folder_of(checkpoint))
        first = [f"--config={config_file}", f"--ckpt_path={checkpoint}"]
    plain = []
    for argument, following in itertools.pairwise([*rest, "--"]):
        if FLAG.fullmatch(argument) and following.startswith("--"):
            argument += "=true"
        number = EXPONENT.fullmatch(argument)
        if number is not None and float(number[2]).is_integer():
            argument = f"{number[1] or ''}{int(float(number[2]))}"
        plain.append(argument)
    return [command, *first, *plain]


def main(args: Sequence[str]) -> None:
    """Run ``fit``, ``validate`` or ``test``.

    The exit code is 2 for usage errors and 1 for failures during the run.

    Args:
        args: the command and its arguments.
    """
    try:
        with quiet():
            MultiTaskCLI(args)
    except (ArgumentError, MisconfigurationException) as error:
        _exit(2, str(error))
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        for cause in causes(error):
            if getattr(cause, "is_on_all_ranks", False) and not is_first_process():
                sys.exit(1)  # the first process reports the error
            if type(cause).__module__ == errors.__name__:
                _exit(2 if isinstance(cause, ConfigurationError) else 1, str(cause))
            if isinstance(cause, ModuleNotFoundError):
                _exit(2, f"a package is not installed: {cause}")
            if is_out_of_memory(cause):
                reason = str(cause).splitlines()[0]
                _exit(2, f"out of memory ({reason}): use a smaller data.batch_size or network")
            if "in loading state_dict" in str(cause):
                reason = " ".join(str(cause).split())
                _exit(2, f"{reason} Resume with the run's own networks")
        raise


def _exit(code: int, message: str) -> NoReturn:
    print(f"\nerror: {message}", file=sys.stderr)
    sys.exit(code)
