"""The command line: build benchmark, algorithm, networks and callbacks from YAML, and run them."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ActionYesNo, ArgumentError, Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mtrl_lightning import __version__
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.allocation import AllocationLimit
from mtrl_lightning.callbacks import MetricsCallback, MetricsCSV
from mtrl_lightning.callbacks.metrics import saved_wandb_id
from mtrl_lightning.callbacks.options import plain
from mtrl_lightning.callbacks.signals import requeue_signal
from mtrl_lightning.callbacks.trainer_options import check_trainer
from mtrl_lightning.cli.config_files import ConfigFileParser
from mtrl_lightning.cli.help_texts import DESCRIPTION, PROGRAM, add_other_commands, arrange_help
from mtrl_lightning.cli.suggestions import suggestions
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks, only_split
from mtrl_lightning.errors import (
    ConfigurationError,
    DivergenceError,
    DriftError,
    EnvironmentFaultError,
    PolicyFaultError,
    RankLostError,
    import_optional,
)
from mtrl_lightning.launch.folder import find_restart_id
from mtrl_lightning.launch.quiet import quiet
from mtrl_lightning.launch.sections import CALLBACKS, SECTIONS, SEEDS
from mtrl_lightning.launch.start import FIXED_TRAINER_OPTIONS, fit, prepare, standard_callbacks
from mtrl_lightning.ranks import distributed
from mtrl_lightning.resources import is_out_of_memory, keep_freed_memory
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.runs import VALIDATIONS, ensure_writable, replacing
from mtrl_lightning.saved import restoring

WITHOUT_LOGGER = "log to metrics.csv alone by -c logger/csv"
"""What a user does without the package of a logger."""
SINGLE_LOGGERS = ("TensorBoardLogger", "WandbLogger")
"""Of which a run has one at most: both write into its folder."""
PARSER = {"exit_on_error": False, "allow_abbrev": False}
"""Options of the parsers: errors are raised, and options have their full names."""
FAULTS = (DivergenceError, DriftError, EnvironmentFaultError, PolicyFaultError, RankLostError)
"""What ends a run with its message and the exit code 1."""
MISSING_PACKAGE = re.compile(
    r"given class_path '([^']+)':\s+(.*(?:No module named|Requirement .* not met).*)"
)
"""What jsonargparse says of a class whose package is not installed."""


class _SaveConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder when training, and never when evaluating."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pass  # the other callbacks or the checkpoint may still refuse the configuration

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = trainer.datamodule.session  # type: ignore[attr-defined]
        if trainer.ckpt_path and session.loop.is_complete():
            return  # nothing is trained with it
        super().setup(trainer, pl_module, TrainerFn.FITTING)


class MultiTaskCLI(LightningCLI):
    """Train and continue with ``fit``, evaluate a checkpoint with ``validate``.

    Args:
        args: in place of the process' command line.
    """

    def __init__(self, args: ArgsType = None) -> None:
        self._restart_id = find_restart_id(str(sys.argv[1:] if args is None else args))
        with contextlib.ExitStack() as self._held:
            super().__init__(
                Algorithm,
                MultiTaskData,
                subclass_mode_model=True,
                auto_configure_optimizers=False,
                # an algorithm describes itself in its checkpoints
                load_from_checkpoint_support=False,
                save_config_callback=_SaveConfig,
                save_config_kwargs={"overwrite": True},
                trainer_defaults=dict(FIXED_TRAINER_OPTIONS),
                parser_class=ConfigFileParser,
                parser_kwargs={
                    "prog": PROGRAM,
                    "version": __version__,
                    "description": DESCRIPTION,
                    **PARSER,
                }
                | {name: dict(PARSER) for name in self.subcommands()},
                args=args,
            )

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise ConfigurationError(
                f"seed_everything is {self._get(self.config, 'seed_everything')}: give a whole"
                " number from 0 to 4,294,967,295"
            ) from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Offer what makes sense for reinforcement learning."""
        both = {"model", "datamodule"}
        return {
            "fit": {*both, "train_dataloaders", "val_dataloaders", "weights_only"},
            "validate": {*both, "dataloaders", "verbose", "weights_only"},
        }

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        validate = self._subcommand_parsers["validate"]
        validate.add_argument(
            "--split",
            type=str | None,
            default=None,
            help="the only split to evaluate, such as eval_interpolation (default: all but the"
            " first, which is trained on)",
        )
        validate.add_argument(
            "--tasks",
            type=str,
            nargs="+",
            metavar="TASK",
            help="the only tasks to evaluate, in this order, such as reach door-open (default: all"
            " of the run)",
        )
        validate.add_argument(
            "--json",
            type=str | None,
            default=None,
            metavar="FILE",
            help="also write the results into this file, as JSON: the metrics by name, the"
            " checkpoint, its env_steps, the protocol and the time",
        )
        for name, subparser in self._subcommand_parsers.items():
            arrange_help(subparser, name)
        add_other_commands(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; an error names the options and classes with similar names.

        Raises:
            ArgumentError: if an argument is unknown or its value does not fit.
        """
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            lines = suggestions(str(error), self._subcommand_parsers.values())
            error.message = "\n".join([error.message, *(f"tip: {line}" for line in lines)])
            raise

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, which Lightning would also take as true or false."""
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=1,
            help="seed of weights, environments, all draws",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, the essential callbacks, and what follows from what."""
        parser.add_argument(
            "--name",
            type=str,
            default="run",
            help="name of the run: its folder is ROOT/NAME/version_N",
        )
        parser.add_argument("--root", type=str, default="runs", help="folder of all runs")
        parser.add_argument(
            "--overwrite_metrics",
            action=ActionYesNo,
            default=False,
            help="continue from an older checkpoint than the last, which deletes the later rows of"
            " metrics.csv",
        )
        for section, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, section)
        parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")
        for target in ("model.init_args.seed", *SEEDS):
            parser.link_arguments("seed_everything", target)

    def _parse_ckpt_path(self) -> None:
        """Keep the given configuration.

        Lightning's own method would replace the model's options by the checkpoint's.
        """

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint and the run's folder before anything is built."""
        config = self.config[self.subcommand]
        config.trainer.logger = _one_of_each(config.trainer.logger)
        self._given = self.config.clone()
        is_fitting = self.subcommand == "fit"
        if not is_fitting and not config.ckpt_path:
            raise ConfigurationError(
                "validate needs a run, validate runs/NAME/version_0, or --ckpt_path"
            )
        if not is_fitting and config.json is not None:
            ensure_writable(Path(config.json).parent)
        self._location, self._processes = prepare(
            {section: vars(config[section]) for section in SECTIONS},
            config.root,
            config.name,
            None if config.ckpt_path is None else str(config.ckpt_path),
            self._restart_id,
            config.overwrite_metrics,
            is_fitting,
        )
        if self._location.checkpoint is not None:
            config.ckpt_path = str(self._location.checkpoint)
        config.trainer.default_root_dir = str(self._location.folder)
        if is_fitting:
            self._held.enter_context(self._location.hold())
        else:
            config.trainer.logger = False
        for logger in _as_list(config.trainer.logger):
            self._place_logger(logger, config.name)

    def _place_logger(self, logger: Namespace, name: str) -> None:
        """Let a logger write into the run's folder, and continue what the run has logged."""
        if "save_dir" in logger.init_args:
            logger.init_args.save_dir = str(self._location.folder)
        if logger.class_path.endswith("TensorBoardLogger"):
            import_optional("tensorboard", '"mtrl_lightning[tensorboard]"', WITHOUT_LOGGER)
            if self._location.checkpoint is not None:
                # TensorBoard hides the events from this step on that were written before
                given = logger.get("dict_kwargs") or {}
                logger.dict_kwargs = {**given, "purge_step": self._location.env_steps + 1}
        if logger.class_path.endswith("WandbLogger"):
            import_optional("wandb", '"mtrl_lightning[wandb]"', WITHOUT_LOGGER)
            states = self._location.content.get("callbacks", {})
            with restoring("id of a W&B run"):
                saved = saved_wandb_id(states.get(MetricsCallback.key, {}))
            if "resume" in logger.init_args:
                # Lightning's default, in place of which W&B's own is filled in
                logger.init_args.resume = "allow"
            logger.init_args.id = logger.init_args.id or saved or uuid.uuid4().hex[:8]
            folder = self._location.folder.name
            logger.init_args.name = logger.init_args.name or f"{name}/{folder}"

    def instantiate_classes(self) -> None:
        """Build everything; refuse a checkpoint of other tasks before environments are started."""
        with AllocationLimit.of_machine():
            super().instantiate_classes()
        if self.subcommand == "validate":
            data = self.datamodule
            options = self.config.validate
            if options.split is not None:
                data.benchmark = only_split(data.benchmark, options.split)
            if options.tasks is not None:
                data.benchmark = OnlyTasks(data.benchmark, options.tasks)
        self._location.check(self.model.spec, must_match=self.subcommand == "fit")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has: ``metrics.csv``, curves, a report and a progress bar."""
        config = self._get(self.config_init, "trainer")
        is_fitting = self.subcommand == "fit"
        if is_fitting:
            own = MetricsCSV(str(self._location.folder))
            kwargs["logger"] = [own, *_as_list(config.get("logger"))]
        has_bar = config.get("enable_progress_bar") is not False
        # what is saved is what was given: a run repeated from it is a new run, not a continued one
        self._given[self.subcommand].ckpt_path = None
        self._given[self.subcommand].overwrite_metrics = False
        self.config = self._given
        self.trainer_defaults["callbacks"] = standard_callbacks(
            is_fitting,
            has_bar,
            self._restart_id,
            self._options(),
            _as_list(config.get("callbacks")),
        )
        if self._location.checkpoint is not None:
            name = f"config_from_{self._location.env_steps:012d}.yaml"
            self.save_config_kwargs["config_filename"] = name
        if self._processes.number > 1:
            kwargs["strategy"] = self._processes.strategy
        trainer = super().instantiate_trainer(**kwargs)
        check_trainer(trainer)
        return trainer

    def _options(self) -> dict[str, Any]:
        """Return what ``config.yaml`` holds."""
        options = plain(self.config[self.subcommand])
        options.pop("config", None)  # the files that it was read from
        options["model"].get("init_args", {}).pop("spec", None)  # follows from the benchmark
        return options

    def fit(self, model: Algorithm, **kwargs: Any) -> None:
        """Train."""
        keep_freed_memory()
        fit(self.trainer, model, self.datamodule, self._location.checkpoint)

    def validate(self, **kwargs: Any) -> None:
        """Evaluate; our callback prints the table in place of Lightning's."""
        number = requeue_signal(self.trainer)
        if number is not None:
            # Lightning's handler would leave a checkpoint in the run's folder
            signal.signal(number, signal.SIG_IGN)
        self.trainer.validate(**kwargs, verbose=False, weights_only=True)
        if distributed.rank() == 0:
            self._store_results(self.config.validate.json)

    def _store_results(self, json_file: str | None) -> None:
        """Add the results to the run's folder, and write them into a file if one is given."""
        content = {
            "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "checkpoint": str(self._location.checkpoint),
            "env_steps": self.model.counters.env_steps,
            "num_episodes": self.config.validate.evaluation.num_episodes,
            "protocol": dict(self.model.spec.protocol),
            # of Lightning's trainer they would be in single precision
            "metrics": self._get(self.config_init, "evaluation").session.results,
        }
        stored = self._location.folder / VALIDATIONS
        try:
            with stored.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
            rank_zero_info(f"The results are added to {stored}")
        except OSError as error:  # the folder of somebody else
            rank_zero_warn(f"the results could not be added to {stored} ({error.strerror})")
        if json_file is None:
            return
        with replacing(Path(json_file)) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")
        rank_zero_info(f"The results are in {json_file}")


class _ParserOnlyCLI(MultiTaskCLI):
    """Stop when the parser is built."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        raise _ParserBuiltError


class _ParserBuiltError(Exception):
    pass


def build_parser() -> LightningArgumentParser:
    """Return the parser of ``fit`` and ``validate``, without reading any argument."""
    command_line = _ParserOnlyCLI.__new__(_ParserOnlyCLI)
    with contextlib.suppress(_ParserBuiltError):
        command_line.__init__([])  # type: ignore[misc]
    return command_line.parser


def _as_list(given: Any) -> list[Any]:
    """Return loggers or callbacks as a list, however they are given."""
    if given is None or isinstance(given, bool):
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _one_of_each(loggers: Any) -> Any:
    """Return the loggers without those that a later one of their kind replaces.

    Each file of the group ``logger`` adds one. Two of TensorBoard or of W&B would write into the
    same folder, as when a run with one is resumed with ``-c logger/wandb``.
    """
    if not isinstance(loggers, list):
        return loggers
    kept: dict[Any, Namespace] = {}
    for index, logger in enumerate(loggers):
        kind = next((name for name in SINGLE_LOGGERS if logger.class_path.endswith(name)), index)
        kept.pop(kind, None)
        kept[kind] = logger
    return list(kept.values())


def _subclasses(kind: type[Algorithm]) -> Iterator[type[Algorithm]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def main(args: ArgsType = None) -> None:
    """Run ``fit`` or ``validate``.

    A user's mistake ends it with exit code 2, a fault while it runs with exit code 1.
    """
    try:
        with quiet():
            MultiTaskCLI(args)
    except ArgumentError as error:
        tips = ["-c quickstart is complete; fit --help lists every option"]
        tips += [
            f"{kind.__name__} has no {name}: {hint}"
            for kind in _subclasses(Algorithm)
            for name, hint in kind.lacking_options.items()
            if f".{kind.__name__}':" in str(error)
            and f"Option '{name}' is not accepted" in str(error)
        ]
        _exit(2, "\n".join([str(error), *(f"tip: {tip}" for tip in tips)]))
    except MisconfigurationException as error:
        _exit(2, str(error))
    except (ValueError, RuntimeError, *FAULTS) as error:
        cause = _own_error(error)
        if cause is None:
            raise
        code = 1 if isinstance(cause, FAULTS) else 2
        if getattr(cause, "is_on_all_ranks", False) and distributed.rank() > 0:
            sys.exit(code)  # the first process says it
        _exit(code, str(cause))


def _own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of ours that jsonargparse may have wrapped into others.

    A lack of memory counts as one, and a missing package of a callback or a logger.
    """
    missing = MISSING_PACKAGE.search(str(error)) if isinstance(error, ValueError) else None
    if missing is not None:
        return ConfigurationError(f"{missing[1]} needs a package: {missing[2]}")
    while error is not None and not isinstance(error, (ConfigurationError, *FAULTS)):
        if is_out_of_memory(error):
            return ConfigurationError(
                f"the memory does not suffice ({str(error).splitlines()[0]}): choose smaller"
                " networks, or a smaller data.batch_size"
            )
        error = error.__cause__ or error.__context__
    return error


def _exit(code: int, message: str) -> NoReturn:
    whose = f" of rank {distributed.rank()}" if distributed.rank() > 0 else ""
    print(f"\nerror{whose}: {message}", file=sys.stderr)
    sys.exit(code)
