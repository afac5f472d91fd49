"""All options of a run: in every logger's configuration, and in its checkpoints."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.drift import check_started_alike
from mtrl_lightning.callbacks.metrics import PACKAGES
from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.runs import read_config

RUN_SELECTION = (
    "ckpt_path",
    "config",
    "init_from",
    "init_new_tasks",
    "name",
    "overwrite_metrics",
    "root",
)
"""Options that choose a run and the use of its files."""
MODEL_SEED = "model.init_args.seed"
"""The algorithm's seed, which follows from ``seed_everything``."""
HPARAMS = "hparams.yaml"
"""The file of a run's folder that holds the options with which it was started or continued."""
START_ONLY = ("seed_everything",)
"""Options that count when a run starts: a continued run restores its random generators."""
INITIAL_VALUE_SUFFIXES = (".initial", ".output_bound")
"""Ends of further names of this kind: a continued run restores the weights."""


class OptionsCallback(SessionCallback):
    """Give a run's options to every logger, and warn of options that change when it is resumed.

    Args:
        options: sections and their options by name, as ``config.yaml`` holds them.
        learning_options: names of options, and of sections of them, that affect training.
    """

    key = "options"

    def __init__(self, options: Mapping[str, Any], learning_options: Sequence[str]) -> None:
        self._options = plain(options)
        self._learning_options = learning_options
        self._previous: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all processes of the run have the same options and versions.

        Raises:
            ConfigurationError: if they do not.
        """
        super().setup(trainer, pl_module, stage)
        installed = installed_versions(PACKAGES).items()
        versions = {f"version of {name}": version for name, version in installed}
        check_started_alike(versions | dict(_flat(self._options)))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the options of a new run; in a continued one, compare them with the checkpoint's.

        Raises:
            ConfigurationError: if one that differs would change nothing from here on.
        """
        changed = self._changes() if trainer.ckpt_path else {}
        with distributed.raise_on_all_ranks(ConfigurationError):
            self._refuse_unused(changed)
        effective = [text for name, text in changed.items() if self._has_effect(name)]
        if effective:
            rank_zero_warn(
                "the run continues with other options than its checkpoint's:"
                f" {', '.join(effective)}; it is not the uninterrupted run"
            )

        if not trainer.ckpt_path:
            self._log(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the options of a continued run, once everything is restored."""
        if trainer.ckpt_path:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if not self._options:
            return
        for logger in trainer.loggers:
            logger.log_hyperparams(self._options)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                self._show_in_tensorboard(logger)

    def _changes(self) -> dict[str, str]:
        """Return the options that differ from the checkpoint's, with both values.

        ``hparams.yaml`` has all; the checkpoint those that affect training, and goes first.
        """
        here = dict(_flat(self._options))
        previous = self._previous
        there = {
            name: value
            for name, value in self._recorded().items()
            if not _common_names({name: None}, previous)
        }
        there |= previous
        changes = {}
        for name in sorted(_common_names(here, there)):
            value = _value_of(name, here)
            other = _value_of(name, there)
            if not (_is_same(value, other) or _is_among(name, RUN_SELECTION)):
                changes[name] = f"{name} {other} there and {value} here"
        return changes

    def _recorded(self) -> dict[str, Any]:
        """Return the options in the run's folder; none if they are not there or damaged."""
        try:
            return dict(_flat(read_config(self.session.folder / HPARAMS)))
        except ConfigurationError:
            return {}

    def _refuse_unused(self, changed: Mapping[str, str]) -> None:
        if changed and self.session.loop.is_complete():
            raise ConfigurationError(
                f"the run has made all of its {self.session.algorithm.step_unit}, and other options"
                f" would change nothing: {', '.join(changed.values())}. Give a rollout.total_steps"
                f" above {self.session.loop.counted_steps:,} to continue, or give the previous"
                " values"
            )
        unused = set(self.session.loop.unused_options())
        texts = [
            text
            for name, text in changed.items()
            if name in unused or name in START_ONLY or name.endswith(INITIAL_VALUE_SUFFIXES)
        ]
        if texts:
            raise ConfigurationError(
                "these options count only when a run starts; a continued one has the checkpoint's"
                f" state in their place: {', '.join(texts)}. Give the previous values, continue"
                " with fit --resume RUN, or start a new run"
            )

    def _show_in_tensorboard(self, logger: TensorBoardLogger) -> None:
        """Fill TensorBoard's table of hyper-parameters, and show the configuration as a text.

        The table's columns are metrics that are logged.

        The logger itself would also log a value of each metric, in the middle of its curve.
        """
        from torch.utils.tensorboard.summary import hparams  # TensorBoard is optional

        names = metric_names(self.session.benchmark)
        columns = {name: 0.0 for name in names if name.count("/") == 1}  # means, of no single task
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
        """Return the options that affect training, by their full names."""
        return {name: value for name, value in _flat(self._options) if self._has_effect(name)}

    def _has_effect(self, name: str) -> bool:
        return name != MODEL_SEED and _is_among(name, self._learning_options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's options, to compare."""
        self._previous = plain(state_dict)


def plain(value: Any) -> Any:
    """Return a value in plain types, as in a YAML file; of other objects their class."""
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


def _common_names(options: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    """Return names that both have, also where one has a section and the other a plain value.

    A part that is left out, such as ``rollout.exploration: null``, is a plain value.
    """
    of_options = {name for whole in options for name in _upwards(whole) if name in others}
    of_others = {name for whole in others for name in _upwards(whole) if name in options}
    return of_options | of_others


def _upwards(name: str) -> Iterator[str]:
    """Yield a full name, and those of the sections that it stands in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _value_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return an option's value; of a section its class, or else its options."""
    if name in options:
        return options[name]
    section = {
        whole.removeprefix(f"{name}."): value
        for whole, value in options.items()
        if whole.startswith(f"{name}.")
    }
    return section.get("class_path", section)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether values are equal, or name the same class by two of its import paths."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_is_same(value[k], other[k]) for k in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if value == other:
        return True
    named = _class_named(value)
    return named is not None and named is _class_named(other)


def _class_named(path: Any) -> type | None:
    """Return the class that an import path names; None if it is not imported already."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    # a checkpoint may name any module: importing one would execute it, and so would getattr of a
    # module that imports its names when they are asked for
    named = getattr(sys.modules.get(module), "__dict__", {}).get(name)
    return named if isinstance(named, type) else None


def _is_among(name: str, sections: Sequence[str]) -> bool:
    """Return whether an option, or a section that it stands in, is in a list."""
    return any(name == section or name.startswith(f"{section}.") for section in sections)
