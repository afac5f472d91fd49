"""Runs grouped into methods: the same options but the seed, and a label from what differs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import SEED_AT_END, RunRecord, flat

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
    groups: dict[Any, list[RunRecord]] = {}
    labels: dict[Any, str | None] = {}
    for label, run in labelled:
        options = effective(run)
        # a run whose options are not recorded is of the method that it is named after
        key = label or (_key(options) if options else run.name)
        groups.setdefault(key, []).append(run)
        labels[key] = label
    for runs in groups.values():
        _check_seeds(runs)
    options_of = {key: effective(runs[0]) for key, runs in groups.items()}
    differing = _differing(list(options_of.values()))
    made = make_labels([{n: o.get(n) for n in differing} for o in options_of.values()])
    methods = []
    for (key, runs), from_options in zip(groups.items(), made, strict=True):
        label = labels[key] or from_options or _name(runs)
        own = {n: options_of[key][n] for n in differing if n in options_of[key]}
        methods.append(Method(label, runs, own))
    return _unique(methods)


def effective(run: RunRecord) -> dict[str, Any]:
    """Return the options that make a run's method, by their full names, without empty ones."""
    return {
        name: value
        for name, value in flat(run.options)
        if value is not None and value != {} and WITHOUT_EFFECT.fullmatch(name) is None
    }


def make_labels(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each method from the options that differ; no two are the same if possible.

    Args:
        options: for each method the values of the options that differ; None where it has none.
    """
    suffix = ".class_path"
    roots = {n.removesuffix(suffix) for one in options for n in one if n.endswith(suffix)}

    def is_detail(name: str) -> bool:
        return any(name.startswith(f"{root}.init_args.") for root in roots)

    usual = _usual(options)
    found: list[str] = []
    for omit_usual, with_details in ((True, False), (True, True), (False, False), (False, True)):
        found = [
            _label(
                {
                    name: value
                    for name, value in one.items()
                    if (with_details or not is_detail(name))
                    and not (omit_usual and name in usual and usual[name] == value)
                }
            )
            for one in options
        ]
        if len(set(found)) == len(found):
            break
    return [_shortened(label) for label in found]


def _usual(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that more than half of the methods have, if there are three or more."""
    usual: dict[str, Any] = {}
    for name in {name for one in options for name in one} if len(options) > 2 else ():
        for value in (one.get(name) for one in options):
            if 2 * sum(one.get(name) == value for one in options) > len(options):
                usual[name] = value
    return usual


def _label(options: Mapping[str, Any]) -> str:
    """Return a label from options and values, actor and critic together where they agree."""
    short = {_short_name(n): _short_value(v) for n, v in options.items() if v is not None}
    pieces: dict[str, str] = {}
    for name, value in short.items():
        rest = re.sub(r"^(actor|critic)(?=\b|_)", "", name)
        pair = {short.get(f"actor{rest}"), short.get(f"critic{rest}")}
        if rest != name and pair == {value}:
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


def _shortened(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _unique(methods: Sequence[Method]) -> list[Method]:
    """Number methods whose labels are the same."""
    seen: dict[str, int] = {}
    found = []
    for method in methods:
        number = seen[method.label] = seen.get(method.label, 0) + 1
        found.append(method if number == 1 else method._replace(label=f"{method.label} ({number})"))
    return found


def _name(runs: Sequence[RunRecord]) -> str:
    """Return what the names of a method's runs have in common, without the number of a seed."""
    names = [run.name for run in runs]
    pairs = zip(min(names), max(names), strict=False)
    shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if len(set(names)) > 1:
        shared = SEED_AT_END.sub("", shared)
    return shared or names[0]


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True, default=str)


def _differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options that do not have one value in all methods, in the order of the first."""
    names = dict.fromkeys(name for one in options for name in one)
    return [name for name in names if any(one.get(name) != options[0].get(name) for one in options)]


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
