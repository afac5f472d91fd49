"""Runs grouped into methods: sets of runs whose options differ only in the seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtrl_lightning.compare.record import RunRecord
from mtrl_lightning.errors import ConfigurationError

WITHOUT_EFFECT = re.compile(
    # identity of the run, and the checkpoint it starts from
    r"(.*\.)?seed|seed_everything|name|root|config|ckpt_path|weights_only"
    # its length, what is logged and saved
    r"|(metrics|checkpoint|best)\..*"
    r"|data\.init_args\.(total_steps|window|listeners|info_keys|store_info"
    r"|\w*replay\w*|save_last|chunk_mebibytes)"
    r"|evaluation\.(every|at_start)"
    # faults
    r"|(data\.init_args|evaluation)\.(timeout|max_restarts)"
    r"|model\.init_args\.(on_nonfinite|max_skipped_updates)"
    # on what it computes
    r"|evaluation\.envs_per_task|(data\.init_args|evaluation)\.num_workers"
    r"|data\.init_args\.(learner_threads|memory_map|on_device)"
    r"|model\.init_args\.(compile|\w+_optimizer\.init_args\.(fused|foreach|capturable))"
    r"|trainer\.(?!precision$).*"
)
"""Options that do not affect learning: runs that differ only in these are the same method."""


class Method(NamedTuple):
    """Runs that differ only in their seeds."""

    label: str
    """The specified label, or the name of its first run."""
    runs: list[RunRecord]
    options: dict[str, Any]
    """Options that differ between methods, by full name."""


def group(labelled: Sequence[tuple[str | None, RunRecord]]) -> list[Method]:
    """Group runs into methods, in the given order.

    Args:
        labelled: runs with the label of their method; None for the name of its first run.
    """
    groups: dict[tuple[str | None, str], list[RunRecord]] = {}
    for label, run in labelled:
        options = effective(run)
        # runs without recorded options are grouped by name
        key = json.dumps(options, sort_keys=True, default=str) if options else run.name
        groups.setdefault((label, "" if label else key), []).append(run)
    all_options = [effective(runs[0]) for runs in groups.values()]
    names = dict.fromkeys(name for options in all_options for name in options)
    differing = [n for n in names if any(o.get(n) != all_options[0].get(n) for o in all_options)]
    counts: Counter[str] = Counter()
    methods = []
    for ((chosen, _), runs), options in zip(groups.items(), all_options, strict=True):
        seeds = [run.seed for run in runs if run.seed is not None]
        if len(set(seeds)) < len(seeds):
            listed = ", ".join(f"{run.folder} (seed {run.seed})" for run in runs)
            raise ConfigurationError(
                f"runs with the same options and the same seed would count twice: {listed}."
                " Exclude one, or distinguish them by labels, as in `compare before=RUN after=RUN`"
            )
        label = chosen or runs[0].name
        counts[label] += 1
        unique = label if counts[label] == 1 else f"{label} ({counts[label]})"
        methods.append(Method(unique, runs, {n: options[n] for n in differing if n in options}))
    return methods


def effective(run: RunRecord) -> dict[str, Any]:
    """Return the options that define a run's method, by full name, without empty ones."""
    return {
        name: value
        for name, value in _flat(run.options)
        if value is not None and value != {} and WITHOUT_EFFECT.fullmatch(name) is None
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all options by full name, such as ``evaluation.every``."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def option_table(methods: Sequence[Method]) -> list[list[str]]:
    """Return a header and a row for each option that differs between methods."""
    names = dict.fromkeys(name for method in methods for name in method.options)
    lines = [["option", *(method.label for method in methods)]]
    lines += [[name, *(str(method.options.get(name, "-")) for method in methods)] for name in names]
    return lines
