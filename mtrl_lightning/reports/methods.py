"""Runs grouped into methods: the same options but the seed, and a label from what differs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import RunRecord

WITHOUT_EFFECT = re.compile(
    r"(.*\.)?seed|seed_everything|name|root|config|ckpt_path|overwrite_metrics|verbose"
    r"|weights_only|(metrics|checkpoint|replay)\..*"
    r"|rollout\.(total_steps|window|timeout|max_restarts|listeners|num_workers|learner_threads)"
    r"|evaluation\.(every|at_start|envs_per_task|num_workers|timeout|max_restarts)"
    r"|data\.(memory_map|info_keys|store_info|on_device)"
    r"|trainer\.(?!precision$).*"
)
"""Options that make no other method of a run."""
LONGEST_LABEL = 60


class Method(NamedTuple):
    """Runs that differ in their seeds alone."""

    label: str
    runs: list[RunRecord]
    options: dict[str, Any]
    """Options in which it differs from another method, by their full names."""


def group(labelled: Sequence[tuple[str | None, RunRecord]]) -> list[Method]:
    """Group runs into methods, in the order in which they are given.

    Args:
        labelled: runs, each with the label of its method; None where it follows from the options.

    Raises:
        ConfigurationError: if two runs of a method have the same seed.
    """
    groups: dict[tuple[str | None, str], list[RunRecord]] = {}
    for label, run in labelled:
        options = effective(run)
        # a run whose options are not recorded is of the method that it is named after
        key = json.dumps(options, sort_keys=True, default=str) if options else run.name
        groups.setdefault((label, "" if label else key), []).append(run)
    for runs in groups.values():
        _check_seeds(runs)
    all_options = [effective(runs[0]) for runs in groups.values()]
    names = dict.fromkeys(name for options in all_options for name in options)
    differing = [n for n in names if any(o.get(n) != all_options[0].get(n) for o in all_options)]
    differing_options = [
        {n: options[n] for n in differing if n in options} for options in all_options
    ]
    counts: Counter[str] = Counter()
    methods = []
    for ((chosen, _), runs), from_options, options in zip(
        groups.items(), make_labels(differing_options), differing_options, strict=True
    ):
        label = chosen or from_options or runs[0].name
        counts[label] += 1
        unique = label if counts[label] == 1 else f"{label} ({counts[label]})"
        methods.append(Method(unique, runs, options))
    return methods


def effective(run: RunRecord) -> dict[str, Any]:
    """Return the options that make a run's method, by their full names, without empty ones."""
    return {
        name: value
        for name, value in _flat(run.options)
        if value is not None and value != {} and WITHOUT_EFFECT.fullmatch(name) is None
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option by its full name, such as ``rollout.total_steps``."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def make_labels(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each method from the options that differ; an empty one if it has none.

    Arguments of a class are left out where the classes alone tell the methods apart.

    Args:
        methods: values of the options that differ, by their full names.
    """
    suffix = ".class_path"
    classes = [n.removesuffix(suffix) for one in methods for n in one if n.endswith(suffix)]
    arguments = tuple(f"{name}.init_args." for name in classes)
    labels = [
        _label({name: value for name, value in one.items() if not name.startswith(arguments)})
        for one in methods
    ]
    if len(set(labels)) < len(labels):
        labels = [_label(one) for one in methods]
    return [one if len(one) <= LONGEST_LABEL else f"{one[: LONGEST_LABEL - 1]}…" for one in labels]


def _label(options: Mapping[str, Any]) -> str:
    """Return a label from options and values, actor and critic together where they agree."""
    short = {_short_name(name): _short_value(value) for name, value in options.items()}
    pieces: dict[str, str] = {}
    for name, value in short.items():
        rest = re.sub(r"^(actor|critic)(?=\b|_)", "", name)
        both = {short.get(f"actor{rest}"), short.get(f"critic{rest}")}
        if rest != name and both == {value}:
            name = rest.lstrip("._") or "network"
        pieces[name] = value
    return ", ".join(f"{name} {value}" for name, value in pieces.items())


def _short_name(name: str) -> str:
    name = name.removesuffix(".class_path").replace(".init_args.", ".")
    return name.removeprefix("model.") if name.count(".") else name


def _short_value(value: Any) -> str:
    if isinstance(value, str):
        return value.rpartition(".")[2] or value
    return json.dumps(value, default=str)


def _check_seeds(runs: Sequence[RunRecord]) -> None:
    seen: dict[int, RunRecord] = {}
    for run in runs:
        if run.seed is None:
            continue
        if run.seed in seen:
            raise ConfigurationError(
                f"{seen[run.seed].folder} and {run.folder} have the same options and the same seed,"
                f" {run.seed}: they would count as two seeds. Leave one out, or tell them apart by"
                " labels, as in `compare before=RUN after=RUN`"
            )
        seen[run.seed] = run
