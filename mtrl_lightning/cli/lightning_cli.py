"""The command line: build benchmark, algorithm, networks and callbacks from YAML, and run them."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import sys
import uuid
from collections.abc import Sequence
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

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks import MetricsCallback
from mtrl_lightning.callbacks.options import plain
from mtrl_lightning.callbacks.signals import requeue_signal
from mtrl_lightning.checkpoints import restoring
from mtrl_lightning.cli.parser import RunParser, parser_options
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks, only_split
from mtrl_lightning.errors import (
    ConfigurationError,
    DivergenceError,
    DriftError,
    EnvironmentFaultError,
    PolicyFaultError,
    RankLostError,
    causes,
    import_optional,
)
from mtrl_lightning.launch.folder import find_restart_id
from mtrl_lightning.launch.quiet import quiet
from mtrl_lightning.launch.sections import CALLBACKS, SECTIONS, SEEDS
from mtrl_lightning.launch.start import FIXED_TRAINER_OPTIONS, as_list, prepare
from mtrl_lightning.ranks import distributed
from mtrl_lightning.resources import is_out_of_memory, keep_freed_memory
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.runs import VALIDATIONS, ensure_writable, is_of_package, replacing

WITHOUT_LOGGER = "log to metrics.csv alone by -c logger/csv"
"""What a user does without the package of a logger."""
SINGLE_LOGGERS = ("TensorBoardLogger", "WandbLogger")
"""Of which a run has one at most: both write into its folder."""
FAULTS = (DivergenceError, DriftError, EnvironmentFaultError, PolicyFaultError, RankLostError)
"""What ends a run with its message and the exit code 1."""
MAX_SEED = 2**32 - 1
"""The largest seed that NumPy takes."""
HINTS = {
    "fit": "-c quickstart is complete; fit --help lists every option",
    "validate": "give the run to evaluate first: validate runs/NAME/version_0;"
    " validate --help lists every option",
}
"""What helps with any argument that is not accepted."""


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
        args: the command and its arguments, in place of the process' command line.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        given = list(sys.argv[1:] if args is None else args)
        self.command = given[0]
        self._restart_id = find_restart_id(str(given))
        with contextlib.ExitStack() as self._held:
            super().__init__(
                Algorithm,
                MultiTaskData,
                run=False,
                subclass_mode_model=True,
                auto_configure_optimizers=False,
                # an algorithm describes itself in its checkpoints
                load_from_checkpoint_support=False,
                save_config_callback=None,  # ``instantiate_trainer`` adds ours
                trainer_defaults=dict(FIXED_TRAINER_OPTIONS),
                parser_class=RunParser,
                parser_kwargs=parser_options(self.command),
                args=given[1:],
            )
            if self.command == "fit":
                self.fit(self.model)
            else:
                self.validate()

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse what follows the command.

        Raises:
            ArgumentError: if an argument is unknown or its value does not fit.
            ConfigurationError: if the seed is out of range, or a run cannot be used.
        """
        assert isinstance(parser, RunParser) and isinstance(args, list)
        self.config = parser.parse_with_tips(args)
        if not 0 <= self.config.seed_everything <= MAX_SEED:
            raise ConfigurationError(
                f"seed_everything is {self.config.seed_everything}: give a whole number from 0 to"
                f" {MAX_SEED:,}"
            )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, which Lightning would also take as true or false."""
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=1,
            help="seed of weights, environments, all random numbers",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, the essential callbacks, and what follows from what."""
        assert isinstance(parser, RunParser)
        parser.add_own_arguments(self.command)
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

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint and the run's folder before anything is built."""
        config = self.config
        config.trainer.logger = _one_of_each(config.trainer.logger)
        self._given = self.config.clone()
        is_fitting = self.command == "fit"
        if not is_fitting and not config.ckpt_path:
            raise ConfigurationError(
                "validate needs a run, validate runs/NAME/version_0, or --ckpt_path"
            )
        if not is_fitting and config.json is not None:
            ensure_writable(Path(config.json).parent)
        self._start = prepare(
            {section: vars(config[section]) for section in SECTIONS},
            root=config.root,
            name=config.name,
            ckpt_path=None if config.ckpt_path is None else str(config.ckpt_path),
            init_from=config.init_from,
            init_new_tasks=config.init_new_tasks,
            restart_id=self._restart_id,
            overwrite_metrics=config.overwrite_metrics,
            is_fitting=is_fitting,
        )
        self._location = self._start.location
        if is_fitting:
            self._held.enter_context(self._start.hold())
        else:
            config.trainer.logger = False
        for logger in as_list(config.trainer.logger):
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
            saved = states.get(MetricsCallback.key, {}).get("wandb_id")
            if "resume" in logger.init_args:
                # Lightning's default, in place of which W&B's own is filled in
                logger.init_args.resume = "allow"
            logger.init_args.id = logger.init_args.id or saved or uuid.uuid4().hex[:8]
            folder = self._location.folder.name
            logger.init_args.name = logger.init_args.name or f"{name}/{folder}"

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has, and the file that the run can be repeated from."""
        # what is saved is what was given: a run repeated from it is a new run, not a continued one
        self._given.ckpt_path = None
        self._given.overwrite_metrics = False
        self.config = self._given
        name = "config.yaml"
        if self._location.checkpoint is not None:
            name = f"config_from_{self._location.env_steps:012d}.yaml"
        described = plain(self.config)
        described.pop("config", None)  # the files that it was read from
        described["model"].get("init_args", {}).pop("spec", None)  # follows from the benchmark
        options = vars(self.config_init["trainer"])
        return self._start.make_trainer(
            options,
            [*as_list(options["callbacks"]), *(self.config_init[section] for section in CALLBACKS)],
            described,
            [_SaveConfig(self.parser, self.config, name, overwrite=True)],
        )

    def fit(self, model: Algorithm) -> None:
        """Train."""
        keep_freed_memory()
        self._start.fit(self.trainer, model, self.datamodule)

    def validate(self) -> None:
        """Evaluate; our callback prints the table in place of Lightning's."""
        data = self.datamodule
        if self.config.split is not None:
            data.benchmark = only_split(data.benchmark, self.config.split)
        if self.config.tasks is not None:
            data.benchmark = OnlyTasks(data.benchmark, self.config.tasks)
        self._location.check(self.model.spec, must_match=False)
        number = requeue_signal(self.trainer)
        if number is not None:
            # Lightning's handler would leave a checkpoint in the run's folder
            signal.signal(number, signal.SIG_IGN)
        checkpoint = str(self._location.checkpoint)
        evaluation = self.config_init["evaluation"]
        with restoring(checkpoint, lambda: evaluation.is_restoring):
            self.trainer.validate(self.model, data, checkpoint, verbose=False, weights_only=True)
        if distributed.rank() == 0:
            self._store_results(self.config.json)

    def _store_results(self, json_file: str | None) -> None:
        """Add the results to the run's folder, and write them into a file if one is given."""
        content = {
            "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "checkpoint": str(self._location.checkpoint),
            "env_steps": self.model.counters.env_steps,
            "num_episodes": self.config.evaluation.num_episodes,
            "protocol": dict(self.model.spec.protocol),
            # of Lightning's trainer they would be in single precision
            "metrics": self.config_init["evaluation"].session.results,
        }
        if not is_of_package(self._location.folder):
            self._add_to_run(content)
        if json_file is None:
            return
        with replacing(Path(json_file)) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")
        rank_zero_info(f"The results are in {json_file}")

    def _add_to_run(self, content: dict[str, Any]) -> None:
        """Add results to those in the run's folder."""
        stored = self._location.folder / VALIDATIONS
        try:
            with stored.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
            rank_zero_info(f"The results are added to {stored}")
        except OSError as error:  # the folder of somebody else
            rank_zero_warn(f"the results could not be added to {stored} ({error.strerror})")


class _ParserBuiltError(Exception):
    """The parser is built, which is the only argument."""


class _ParserOnlyCLI(MultiTaskCLI):
    """Stop when the parser is built."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        raise _ParserBuiltError(parser)


def build_parser(command: str = "fit") -> RunParser:
    """Return the parser of ``fit`` or ``validate``, without reading any argument."""
    try:
        _ParserOnlyCLI([command])
    except _ParserBuiltError as built:
        return built.args[0]
    raise AssertionError("the parser is built before anything else")


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


def main(args: Sequence[str] | None = None) -> None:
    """Run ``fit`` or ``validate``.

    A user's mistake ends it with exit code 2, a fault while it runs with exit code 1.

    Args:
        args: the command and its arguments; None for those of the process.
    """
    try:
        with quiet():
            MultiTaskCLI(args)
    except ArgumentError as error:
        given = sys.argv[1:] if args is None else args
        _exit(2, f"{error}\ntip: {HINTS[given[0]]}")
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


def _own_error(error: BaseException) -> BaseException | None:
    """Return the error of ours that jsonargparse may have wrapped into others.

    A lack of memory counts as one, and a missing package of a callback or a logger.
    """
    for cause in causes(error):
        if isinstance(cause, (ConfigurationError, *FAULTS)):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return ConfigurationError(f"a package is not installed: {cause}")
        if is_out_of_memory(cause):
            return ConfigurationError(
                f"the memory does not suffice ({str(cause).splitlines()[0]}): choose smaller"
                " networks, or a smaller data.batch_size"
            )
    return None


def _exit(code: int, message: str) -> NoReturn:
    whose = f" of rank {distributed.rank()}" if distributed.rank() > 0 else ""
    print(f"\nerror{whose}: {message}", file=sys.stderr)
    sys.exit(code)
