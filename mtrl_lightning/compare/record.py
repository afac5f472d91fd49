"""What a run's folder records: its options, its protocol and its curves. PyTorch is not imported.

Files are read as plain values: nothing in them is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrl_lightning.compare.metrics_file import (
    ENV_STEPS_RATE,
    METRICS,
    OFFLINE_RATE,
    Curve,
    read_metrics,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import config_file_of, read_config

SEED_AT_END = re.compile(r"(^|[_\-. ])seed[_\-. ]*\d+$")
"""The seed at the end of the name of a file of metrics, such as ``sac_seed_1.jsonl``."""
QUANTITIES = ("success", "score", "return", "length")
"""Metrics are shown in this order, others after them."""
BOUNDED = ("success", "success_last", "score")
"""Quantities between 0 and 1."""


ENV_STEPS = "env steps"
UPDATES = "updates"


class RunRecord(NamedTuple):
    """One run, as its folder records it."""

    folder: Path
    """The path of the file for a copy of a run's metrics."""
    options: dict[str, Any]
    """Sections and their options, as ``config.yaml`` holds them; ``model`` of a run from Python."""
    protocol: dict[str, Any]
    """What a result is measured by, such as the horizon; empty if it is not recorded."""
    versions: dict[str, str]
    """Of the packages that trained it."""
    curves: dict[str, Curve]
    """Every metric as ``(env_steps, values)``."""

    @property
    def name(self) -> str:
        """The run's name; that of a copy of its metrics is the part before the seed."""
        parent = self.folder.resolve().parent.name
        if self.folder.suffix == ".jsonl":
            name = SEED_AT_END.sub("", self.folder.stem)
            return parent if name in ("", "metrics") else name
        return str(self.options.get("name") or parent)

    @property
    def seed(self) -> int | None:
        """The seed; None if it is not recorded."""
        arguments = self.section("model").get("init_args")
        of_model = arguments.get("seed") if isinstance(arguments, Mapping) else None
        seed = self.options.get("seed_everything", of_model)
        return seed if isinstance(seed, int) else None

    @property
    def env_steps(self) -> int:
        """Environment steps of the last row of metrics."""
        return max((steps[-1] for steps, _ in self.curves.values()), default=0)

    @property
    def step_unit(self) -> str:
        """What its steps are: those of a run that learns from demonstrations only are updates."""
        is_offline = OFFLINE_RATE in self.curves and ENV_STEPS_RATE not in self.curves
        return UPDATES if is_offline else ENV_STEPS

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the options of a section; empty if they are not recorded."""
        options = self.options.get(name)
        return options if isinstance(options, Mapping) else {}

    def tasks_of(self, metric: str) -> tuple[str, ...]:
        """Return the tasks of which a metric was measured, sorted."""
        prefix = f"{metric}/"
        return tuple(sorted(n.removeprefix(prefix) for n in self.curves if n.startswith(prefix)))

    def evaluated(self) -> list[str]:
        """Return the metrics of evaluations that have values for each task, by quantity."""
        names = [name for name in self.curves if is_evaluation(name) and name.count("/") == 1]
        return sorted((name for name in names if self.tasks_of(name)), key=metric_order)


def is_evaluation(metric: str) -> bool:
    """Return whether a metric is one of an evaluation, of any split."""
    split = metric.partition("/")[0]
    return split == "eval" or split.startswith("eval_")


def is_bounded(metric: str) -> bool:
    """Return whether a metric lies between 0 and 1."""
    return any(part in BOUNDED for part in metric.split("/"))


def metric_order(metric: str) -> tuple[int, str]:
    """Return the key by which metrics are sorted: the quantity, and then the split."""
    quantity = metric.partition("/")[2]
    index = QUANTITIES.index(quantity) if quantity in QUANTITIES else len(QUANTITIES)
    return index, metric


def read_run(path: Path) -> RunRecord:
    """Read the folder of a run, or a copy of its ``metrics.jsonl``, whose options are unknown.

    Raises:
        ConfigurationError: if it is neither, or the metrics are damaged.
    """
    is_copy = path.is_file()
    if not is_copy and not is_run(path):
        raise ConfigurationError(
            f"{path} is not the folder of a run, which has {METRICS}: give one such as"
            " runs/NAME/version_0, or a folder of runs"
        )
    try:
        curves = read_metrics(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path if is_copy else path / METRICS} cannot be read ({error}): it is damaged. Leave"
            " the run out"
        ) from error
    if is_copy and not curves:
        raise ConfigurationError(
            f"{path} holds no values: give the folder of a run, or a copy of its {METRICS}"
        )
    if is_copy:
        return RunRecord(path, {}, {}, {}, curves)
    hparams = _plain(lambda: path / "hparams.yaml")
    options = _plain(lambda: config_file_of(path))
    if not options:  # a run from Python: Lightning logs the algorithm's arguments
        arguments = {name: value for name, value in hparams.items() if "/" not in str(name)}
        options = {"model": {"init_args": arguments}} if arguments else {}
    versions = {name: str(version) for name, version in _with(hparams, "version/").items()}
    return RunRecord(path, options, _with(hparams, "protocol/"), versions, curves)


def _plain(find: Callable[[], Path]) -> dict[str, Any]:
    """Return the content of a YAML file; nothing if there is none or it cannot be read."""
    try:
        return read_config(find())
    except ConfigurationError:
        return {}


def _with(hparams: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in hparams.items()
        if isinstance(name, str) and name.startswith(prefix)
    }


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / METRICS).is_file()


def find_runs(path: Path) -> list[Path]:
    """Return the path itself if it is one of ``read_run``, or else the runs in the folder.

    Runs are found in ``PATH/version_N`` and ``PATH/NAME/version_N``, oldest first.

    Raises:
        ConfigurationError: if there are none.
    """
    if is_run(path) or path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigurationError(
            f"there is no folder {path}: give the folder of a run, such as runs/NAME/version_0, or"
            " one that contains runs, such as runs/NAME"
        )
    patterns = ("version_*", "*/version_*")
    folders = [
        folder
        for pattern in patterns
        for folder in sorted(path.glob(pattern), key=_natural)
        if is_run(folder)
    ]
    if not folders:
        raise ConfigurationError(
            f"{path} is not the folder of a run, which has {METRICS}, and contains none: give one"
            " such as runs/NAME/version_0 that has trained until its first metrics"
        )
    return folders


def _natural(path: Path) -> tuple[str, int]:
    version = path.name.removeprefix("version_")
    return str(path.parent), int(version) if version.isdigit() else -1
