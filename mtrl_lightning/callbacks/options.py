"""All options of a run: in every logger's configuration, and in its checkpoints."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.drift import check_started_alike
from mtrl_lightning.callbacks.metrics import PACKAGES
from mtrl_lightning.rollout.evaluator import metric_names

WITHOUT_EFFECT = (
    "checkpoint",
    "ckpt_path",
    "config",
    "data.seed",
    "evaluation",
    "metrics",
    "model.init_args.seed",
    "name",
    "overwrite_metrics",
    "replay",
    "rollout.check_every",
    "rollout.learner_threads",
    "rollout.listeners",
    "rollout.max_restarts",
    "rollout.num_workers",
    "rollout.rank_timeout",
    "rollout.seed",
    "rollout.timeout",
    "rollout.total_steps",
    "rollout.warmup_steps",
    "rollout.window",
    "root",
    "verbose",
    "weights_only",
)
"""Options, and sections of them, that do not change what is learned, or follow from others."""
WITH_EFFECT = ("trainer.precision",)
"""Options of Lightning's trainer that do."""


class OptionsCallback(SessionCallback):
    """Give a run's options to every logger, and warn of those that change when it continues.

    Args:
        options: sections and their options by name, as ``config.yaml`` holds them.
    """

    key = "options"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = plain(options)
        self._former: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all processes of the run have the same options and versions.

        Raises:
            ConfigurationError: if they do not.
        """
        super().setup(trainer, pl_module, stage)
        versions = {f"version of {name}": importlib.metadata.version(name) for name in PACKAGES}
        check_started_alike(versions | dict(_flat(self._options)))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the options, and say which differ from the checkpoint's."""
        self._warn_of_changes()
        if not self._options:
            return
        for logger in trainer.loggers:
            logger.log_hyperparams(self._options)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                self._show_in_tensorboard(logger)

    def _warn_of_changes(self) -> None:
        here = dict(_flat(self._options))
        there = self._former
        changed = [
            f"{name} {there[name]} there and {here[name]} here"
            for name in sorted(here.keys() & there.keys())
            if here[name] != there[name] and _has_effect(name)
        ]
        if changed and there:
            rank_zero_warn(
                f"the run continues with other options than its checkpoint's: {', '.join(changed)};"
                " it is not the uninterrupted run"
            )

    def _show_in_tensorboard(self, logger: TensorBoardLogger) -> None:
        """Fill TensorBoard's table of hyper-parameters, and show the configuration as a text.

        The table's columns are metrics that are logged.

        The logger itself would also log a value of each metric, in the middle of its curve.
        """
        from torch.utils.tensorboard.summary import hparams  # TensorBoard is optional

        columns = {name: 0.0 for name in metric_names(self.session.benchmark) if _is_mean(name)}
        values = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in _flat(self._options)
        }
        writer = logger.experiment._get_file_writer()
        for summary in hparams(values, columns):
            writer.add_summary(summary)
        # Markdown shows lines that are indented by four columns as they are
        text = textwrap.indent(yaml.safe_dump(self._options, sort_keys=False), "    ")
        logger.experiment.add_text("config", text, self.session.counters.env_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the options that change what is learned, by their full names."""
        return {name: value for name, value in _flat(self._options) if _has_effect(name)}

    def restore(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's options, to compare."""
        self._former = plain(state_dict)


def plain(value: Any) -> Any:
    """Return a value as what a YAML file holds; of other objects their class."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "as_dict"):  # jsonargparse's Namespace
        return plain(value.as_dict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option by its full name, such as ``rollout.total_steps``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _has_effect(name: str) -> bool:
    if name.startswith("trainer."):
        return name in WITH_EFFECT
    return not any(name == other or name.startswith(f"{other}.") for other in WITHOUT_EFFECT)


def _is_mean(metric: str) -> bool:
    return metric.count("/") == 1
