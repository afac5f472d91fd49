"""The command line: builds benchmark, algorithm, networks and callbacks from YAML, and runs them."""

from __future__ import annotations

import contextlib
import signal
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mtrl_lightning import clear
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.algorithm import check_tasks
from mtrl_lightning.callbacks import (
    CheckpointCallback,
    CurvesCallback,
    EnvStepProgressBar,
    EvaluationCallback,
    InterruptionCallback,
    MetricsCallback,
    MetricsCSV,
    ReplayCallback,
    ResetCallback,
    RolloutCallback,
)
from mtrl_lightning.callbacks.checkpoint_files import load_checkpoint, load_newest_whole
from mtrl_lightning.callbacks.common import check_trainer
from mtrl_lightning.callbacks.signals import Interrupted, requeue, requeue_signal, slurm_job
from mtrl_lightning.config_files import ConfigFileParser
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError, import_optional
from mtrl_lightning.replay import MultiTaskData
from mtrl_lightning.runs import (
    ensure_writable,
    find_checkpoint,
    new_run_folder,
    run_folder_of,
    run_lock,
    versions,
)


class _SaveConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder when training, and never when evaluating."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            super().setup(trainer, pl_module, stage)


class MultiTaskCLI(LightningCLI):
    """``fit`` trains and continues, ``validate`` evaluates a checkpoint; ``clear`` is a program of its own.

    Args:
        args: in place of the process' command line.
    """

    def __init__(self, args: ArgsType = None) -> None:
        job = slurm_job()
        self._origin = (
            {"job": job, "command": str(sys.argv[1:] if args is None else args)} if job else None
        )
        with contextlib.ExitStack() as self._held:
            super().__init__(
                Algorithm,
                MultiTaskData,
                subclass_mode_model=True,
                auto_configure_optimizers=False,
                save_config_callback=_SaveConfig,
                save_config_kwargs={"overwrite": True},
                trainer_defaults={"max_epochs": -1, "max_steps": -1, "num_sanity_val_steps": 0},
                parser_class=ConfigFileParser,
                parser_kwargs={"exit_on_error": False, "epilog": clear.HELP}
                | {name: {"exit_on_error": False} for name in self.subcommands()},
                args=args,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Offer what makes sense for reinforcement learning."""
        both = {"model", "datamodule"}
        return {
            "fit": {*both, "train_dataloaders", "val_dataloaders", "weights_only"},
            "validate": {*both, "dataloaders", "verbose", "weights_only"},
        }

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
        for callback, section in (
            (ResetCallback, "resets"),
            (RolloutCallback, "rollout"),
            (EvaluationCallback, "evaluation"),
            (MetricsCallback, "metrics"),
            (ReplayCallback, "replay"),
            (CheckpointCallback, "checkpoint"),
        ):
            parser.add_lightning_class_args(callback, section)
        parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")
        for target in ("model.init_args.seed", "data.seed", "rollout.seed"):
            parser.link_arguments("seed_everything", target)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as it was given: Lightning would replace the model by the checkpoint's."""

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint and the run's folder before anything is built."""
        self._given = self.config.clone()
        config = self.config[self.subcommand]
        self._loaded: dict[str, Any] = {}
        requeued = self._requeued(config)
        if requeued or config.ckpt_path:
            checkpoint = requeued or find_checkpoint(
                str(config.ckpt_path), config.root, config.name
            )
            if requeued or config.ckpt_path == "last":
                with_replay = self.subcommand == "fit" and config.replay.restore
                checkpoint, self._loaded = load_newest_whole(checkpoint, with_replay)
            else:
                self._loaded = load_checkpoint(checkpoint)
            config.ckpt_path = str(checkpoint)
            self.run_folder = run_folder_of(checkpoint)
        elif self.subcommand == "validate":
            raise ConfigurationError(
                "validate needs --ckpt_path: a checkpoint's path, last, or best"
            )
        else:
            self.run_folder = new_run_folder(config.root, config.name)
        if self.subcommand == "fit":
            ensure_writable(self.run_folder)
            self._held.enter_context(run_lock(self.run_folder))
        config.trainer.default_root_dir = str(self.run_folder)
        if self.subcommand == "validate":
            config.trainer.logger = False
        for logger in _as_list(config.trainer.logger):
            self._place_logger(logger, config.name)

    def _requeued(self, config: Namespace) -> Path | None:
        """Return the last checkpoint that this command line wrote before SLURM started its job again."""
        if self.subcommand != "fit" or self._origin is None:
            return None
        given = [Path(config.ckpt_path).resolve().parent.parent] if config.ckpt_path else []
        for folder in [*reversed(versions(config.root, config.name)), *given]:
            path = folder / "checkpoints" / "last.ckpt"
            with contextlib.suppress(ConfigurationError), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # of other runs' damaged checkpoints; this one's come when it is read
                if load_newest_whole(path, False)[1].get("origin") == self._origin:
                    rank_zero_info(
                        f"SLURM started job {self._origin['job']} again: the run goes on from"
                        f" {path}"
                    )
                    return path
        return None

    def _place_logger(self, logger: Namespace, name: str) -> None:
        """Let a logger write into the run's folder, and go on with what the checkpoint's run has logged."""
        logger.init_args.save_dir = str(self.run_folder)
        if logger.class_path.endswith("TensorBoardLogger"):
            import_optional("tensorboard", "tensorboard")
            if (
                self._loaded
            ):  # TensorBoard hides the events from this step on that were written before
                purge_step = self._loaded["mtrl_lightning"]["counters"]["env_steps"] + 1
                logger.dict_kwargs = {**(logger.get("dict_kwargs") or {}), "purge_step": purge_step}
        if logger.class_path.endswith("WandbLogger"):
            import_optional("wandb", "wandb")
            saved = (
                self._loaded.get("callbacks", {})
                .get(MetricsCallback.__qualname__, {})
                .get("wandb_id")
            )
            if "resume" in logger.init_args:
                logger.init_args.resume = (
                    "allow"  # Lightning's default, in place of which W&B's own is filled in
                )
            logger.init_args.id = saved or logger.init_args.id or uuid.uuid4().hex[:8]
            logger.init_args.name = logger.init_args.name or f"{name}/{self.run_folder.name}"

    def instantiate_classes(self) -> None:
        """Build everything; refuse a checkpoint of other tasks before environments are started."""
        try:
            super().instantiate_classes()
        except Exception:
            self._held.close()
            with contextlib.suppress(OSError):
                self.run_folder.rmdir()  # only if it is new, hence empty
            raise
        if self._loaded:
            check_tasks(self._loaded, self.model.spec)
            self._check_protocol()
        self._loaded = {}

    def _check_protocol(self) -> None:
        saved, spec = self._loaded["mtrl_lightning"], self.model.spec
        differences = [
            f"{key} {saved['protocol'].get(key)} there and {spec.protocol.get(key)} here"
            for key in dict.fromkeys([*saved["protocol"], *spec.protocol])
            if saved["protocol"].get(key) != spec.protocol.get(key)
        ]
        if saved["train_tasks"] != list(spec.train_tasks):
            differences.append(
                f"tasks trained on {saved['train_tasks']} there and {list(spec.train_tasks)} here"
            )
        if differences and self.subcommand == "fit":
            raise ConfigurationError(
                f"the checkpoint is of another protocol: {', '.join(differences)};"
                " use the config.yaml in its run's folder"
            )
        if differences:
            rank_zero_warn(
                f"the checkpoint was trained with another protocol: {', '.join(differences)}"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has: ``metrics.csv``, curves and a progress bar."""
        config = self._get(self.config_init, "trainer")
        callbacks: list[Callback] = []
        if self.subcommand == "fit":
            callbacks += [CurvesCallback(), InterruptionCallback(self._origin)]
            kwargs["logger"] = [MetricsCSV(str(self.run_folder)), *_as_list(config.get("logger"))]
        if config.get("enable_progress_bar") is not False:
            callbacks.append(EnvStepProgressBar())
        self.trainer_defaults["callbacks"] = callbacks
        # what is saved is what was given: a run repeated from it is a new run, not this one
        # continued
        self._given[self.subcommand].ckpt_path = None
        self.config = self._given
        if self._loaded:
            steps = self._loaded["mtrl_lightning"]["counters"]["env_steps"]
            self.save_config_kwargs["config_filename"] = f"config_from_{steps:012d}.yaml"
        trainer = super().instantiate_trainer(**kwargs)
        check_trainer(trainer)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train; a checkpoint is read without executing anything in it."""
        try:
            self.trainer.fit(**kwargs, weights_only=True)
        except Interrupted as interrupted:
            requeue(self.trainer, interrupted)
            raise
        rank_zero_info(f"The run's folder is {self.run_folder}")

    def validate(self, **kwargs: Any) -> None:
        """Evaluate; our callback prints the table in place of Lightning's."""
        number = requeue_signal(self.trainer)
        if number is not None:
            signal.signal(
                number, signal.SIG_IGN
            )  # Lightning's handler would leave a checkpoint in the run's folder
        self.trainer.validate(**kwargs, verbose=False, weights_only=True)


def _as_list(loggers: Any) -> list[Any]:
    if loggers is None or isinstance(loggers, bool):
        return []
    return list(loggers) if isinstance(loggers, (list, tuple)) else [loggers]


def main(args: ArgsType = None) -> None:
    """Run the command line; a user's mistake ends with its message and the exit code 2, a broken environment with 1."""
    given = sys.argv[1:] if args is None else args
    if isinstance(given, list) and given[:1] == ["clear"]:
        return clear.main(given[1:])
    warnings.filterwarnings("ignore", ".*LeafSpec")  # Lightning's own use of torch
    try:
        MultiTaskCLI(args)
    except ArgumentError as error:
        _exit(
            2, f"{error}\ntip: configs/quickstart.yaml is complete; fit --help lists every option"
        )
    except MisconfigurationException as error:
        hint = "; clipping is model.init_args.actor_max_grad_norm and critic_max_grad_norm"
        _exit(2, f"{error}{hint if 'gradient_clip_val' in str(error) else ''}")
    except (ValueError, EnvironmentFaultError) as error:
        cause = _own_error(error)
        if cause is None:
            raise
        _exit(1 if isinstance(cause, EnvironmentFaultError) else 2, str(cause))


def _own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of ours that jsonargparse may have wrapped into others."""
    while error is not None and not isinstance(error, (ConfigurationError, EnvironmentFaultError)):
        error = error.__cause__ or error.__context__
    return error


def _exit(code: int, message: str) -> NoReturn:
    print(f"\nerror: {message}", file=sys.stderr)
    sys.exit(code)
