"""What a run's folder records: its options, its protocol and its curves. PyTorch is not imported.

Files are read as plain values: nothing in them is executed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.metrics_file import METRICS, Curve, MetricsReader, read_metrics
from mtrl_lightning.runs import config_file_of, read_config

SECTIONS = (
    "name",
    "root",
    "seed_everything",
    "model",
    "data",
    "rollout",
    "evaluation",
    "metrics",
    "replay",
    "checkpoint",
    "resets",
    "trainer",
)
"""Parts of a run's options in ``hparams.yaml``, which holds other values beside them."""
METRICS_SUFFIX = ".csv"
SEED_AT_END = re.compile(r"(^|[_\-. ])seed[_\-. ]*\d+$")
"""The seed at the end of the name of a file of metrics, such as ``sac_seed_1.csv``."""
PREFERRED_METRICS = ("eval/success", "eval/score", "eval/return")
"""What is compared unless a metric is chosen; the first that all runs have."""
BOUNDED = ("success", "success_last", "score")
"""Quantities between 0 and 1."""


class RunRecord(NamedTuple):
    """One run, as its folder records it."""

    folder: Path
    options: dict[str, Any]
    """Sections and their options, as ``config.yaml`` holds them; empty if they are not recorded."""
    protocol: dict[str, Any]
    """What a result is measured by, such as the horizon; empty if it is not recorded."""
    versions: dict[str, str]
    """Of the packages that trained it."""
    curves: dict[str, Curve]
    """Every metric as ``(env_steps, values)``."""

    @property
    def name(self) -> str:
        """The run's name; that of a file of metrics is what stands before the seed."""
        if self.folder.suffix == METRICS_SUFFIX:
            name = SEED_AT_END.sub("", self.folder.stem)
            has_own_name = name not in ("", "metrics")
            return name if has_own_name else self.folder.resolve().parent.name
        return str(self.options.get("name") or self.folder.resolve().parent.name)

    @property
    def seed(self) -> int | None:
        """The seed; None if it is not recorded."""
        seed = self.options.get("seed_everything")
        return seed if isinstance(seed, int) else None

    @property
    def env_steps(self) -> int:
        """Environment steps of the last row of metrics."""
        return max((steps[-1] for steps, _ in self.curves.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """Environment steps after which the run ends; None if they are not recorded."""
        steps = self.section("rollout").get("total_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the options of a section; empty if they are not recorded."""
        options = self.options.get(name)
        return options if isinstance(options, Mapping) else {}

    def tasks_of(self, metric: str) -> tuple[str, ...]:
        """Return the tasks of which a metric was measured, sorted."""
        prefix = f"{metric}/"
        return tuple(sorted(n.removeprefix(prefix) for n in self.curves if n.startswith(prefix)))

    def evaluated(self) -> list[str]:
        """Return the metrics of evaluations that have values for each task."""
        names = [name for name in self.curves if is_evaluation(name) and name.count("/") == 1]
        return sorted(name for name in names if self.tasks_of(name))


def is_evaluation(metric: str) -> bool:
    """Return whether a metric is one of an evaluation, of any split."""
    split = metric.partition("/")[0]
    return split == "eval" or split.startswith("eval_")


def is_bounded(metric: str) -> bool:
    """Return whether a metric lies between 0 and 1."""
    return any(part in BOUNDED for part in metric.split("/"))


def read_run(folder: Path) -> RunRecord:
    """Read the folder of one run.

    Raises:
        ConfigurationError: if it is not the folder of a run, or ``metrics.csv`` is damaged.
    """
    if not is_run(folder):
        raise ConfigurationError(
            f"{folder} is not the folder of a run, which has {METRICS}: give one such as"
            " runs/NAME/version_0, or a folder of runs"
        )
    try:
        curves = read_metrics(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{folder / METRICS} cannot be read ({error}): it is damaged. Leave the run out, or"
            " continue it with fit --resume, which repairs the file"
        ) from error
    hparams = _yaml_at(folder / "hparams.yaml")
    try:
        options = _yaml_at(config_file_of(folder))
    except ConfigurationError:  # a run from Python
        options = {name: hparams[name] for name in SECTIONS if name in hparams}
    versions = {name: str(version) for name, version in _with(hparams, "version/").items()}
    return RunRecord(folder, options, _with(hparams, "protocol/"), versions, curves)


def read_metrics_file(path: Path) -> RunRecord:
    """Read the metrics of a run whose folder was not kept; its options are not known.

    Args:
        path: of a copy of ``metrics.csv``, such as ``pcgrad_seed_1.csv``.

    Raises:
        ConfigurationError: if it cannot be read.
    """
    try:
        curves = MetricsReader(path).read()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as a metrics.csv ({error})") from error
    return RunRecord(path, {}, {}, {}, curves)


def is_metrics_file(path: Path) -> bool:
    """Return whether a path is that of a file of metrics, not of a folder."""
    return path.suffix == METRICS_SUFFIX and path.is_file()


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / METRICS).is_file()


def find_runs(path: Path) -> list[Path]:
    """Return the folder itself if it is of a run, or else those of the runs in it.

    Runs are found in ``PATH/version_N``, ``PATH/NAME/version_N`` and, those of sweeps, two folders
    deeper, oldest first.

    Raises:
        ConfigurationError: if there are none.
    """
    if is_run(path):
        return [path]
    if not path.is_dir():
        raise ConfigurationError(
            f"there is no folder {path}: give the folder of a run, such as runs/NAME/version_0, or"
            " one that contains runs, such as runs/NAME"
        )
    found = [
        folder
        for pattern in ("version_*", "*/version_*", "*/*/version_*", "*/*/*/version_*")
        for folder in sorted(path.glob(pattern), key=_natural)
        if is_run(folder)
    ]
    if not found:
        raise ConfigurationError(
            f"{path} is not the folder of a run, which has {METRICS}, and contains none: give one"
            " such as runs/NAME/version_0 that has trained until its first metrics"
        )
    return found


def _natural(path: Path) -> tuple[str, int]:
    number = path.name.removeprefix("version_")
    return str(path.parent), int(number) if number.isdigit() else -1


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option by its full name, such as ``rollout.total_steps``."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _with(hparams: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in hparams.items()
        if isinstance(name, str) and name.startswith(prefix)
    }


def _yaml_at(path: Path) -> dict[str, Any]:
    """Return what a YAML file holds; nothing if there is none or it cannot be read."""
    try:
        stat = path.stat()
        return dict(_parsed(path, stat.st_mtime_ns, stat.st_size))
    except (OSError, ConfigurationError):
        return {}


@functools.lru_cache(maxsize=256)
def _parsed(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    return read_config(path)


def common_metric(records: Iterable[RunRecord]) -> str | None:
    """Return the metric of evaluations that is compared unless one is chosen; None without one."""
    shared = set.intersection(*(set(record.evaluated()) for record in records))
    return min(shared, key=_preference, default=None)


def _preference(metric: str) -> tuple[bool, int, str]:
    quantity = metric.partition("/")[2]
    quantities = [name.partition("/")[2] for name in PREFERRED_METRICS]
    place = quantities.index(quantity) if quantity in quantities else len(quantities)
    return metric not in PREFERRED_METRICS, place, metric
