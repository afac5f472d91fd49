"""The part ``training`` of ``benchmarks.gpu``: a run for a time, and the projection."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks.gpu_runs import ON_CPU, Variant, run_variants
from benchmarks.gpu_setup import Setup
from benchmarks.gpu_sheet import Sheet, read_sheet
from benchmarks.gpu_windows import printing_to
from benchmarks.trial import COMMAND
from mtrl_lightning.reports.metrics_file import METRICS, Curve, read_metrics

TARGET = 20_000_000
"""Environment steps of the MetaWorld+ protocol on MT10, which the projection is made for."""
EXTRAS = ("evaluate", "checkpoint")
SETTLING_ROWS = 2


def training(setup: Setup, sheet: Sheet) -> None:
    """Train for a time, and project how long the whole protocol takes.

    The options are those of the quickest variant that ``pace`` has found, or bf16-mixed with CUDA
    graphs where it has not been run. See ``projection`` for the formula.
    """
    variant = quickest(setup)
    sheet.note(f"options: {variant.name}")
    root = setup.path("runs")
    is_dry = setup.is_dry
    options = {
        "root": root,
        "name": "training",
        "seed_everything": 1,
        "trainer.accelerator": setup.accelerator,
        "trainer.enable_progress_bar": "false",
        "trainer.max_time": clock(setup.minutes),
        "metrics.every": 60 if is_dry else 10_000,
        "metrics.system": "true",
        **setup.sizes.run_options,
        **variant.options,
    }
    if is_dry:
        options |= {"rollout.warmup_steps": 60, "rollout.total_steps": 600, "evaluation.every": 300}
    command = [sys.executable, *COMMAND, "fit"]
    command += [word for config in setup.sizes.configs for word in ("-c", config)]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = setup.path("training.log")
    with watched(setup, sheet):
        returncode = printing_to(log, command, setup)
    if returncode != 0:
        reason = "fit: over its time" if returncode is None else f"fit ended with {returncode}"
        sheet.failure(reason, log.read_text())
    runs = [*(root / "training").glob(f"version_*/{METRICS}")]
    if not runs:
        return
    newest = max(runs, key=lambda path: path.stat().st_mtime)
    note_training(read_metrics(newest.parent), sheet)


@contextlib.contextmanager
def watched(setup: Setup, sheet: Sheet) -> Iterator[None]:
    """Note how busy the GPU is in a block, where ``nvidia-smi`` is."""
    fields = "utilization.gpu,power.draw,memory.used"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-l", "5"]
    log = setup.path("busy.csv")
    with log.open("w") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.kill()
            process.wait()
    means = mean_columns(log.read_text())
    for name, value in zip(("% of the time busy", "W", "MiB"), means, strict=False):
        sheet.row("the GPU, from the start of fit", what=name, mean=value)


def mean_columns(text: str) -> list[float]:
    """Return the mean of each column of numbers, without lines that have others."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            rows.append([float(cell) for cell in line.split(",")])
    return np.mean(rows, axis=0).tolist() if rows else []


def clock(minutes: float) -> str:
    """Return a time as Lightning's trainer takes it, ``DD:HH:MM:SS``."""
    left, seconds = divmod(round(60 * minutes), 60)
    hours, left = divmod(left, 60)
    return f"00:{hours:02d}:{left:02d}:{seconds:02d}"


def quickest(setup: Setup) -> Variant:
    """Return the options for training."""
    found = read_sheet(setup.path("pace.json"))["tables"]
    rows = [row for table in found.values() for row in table]
    variants = {variant.name: variant for variant in run_variants(setup)}
    known = [row for row in rows if row["variant"] in variants and row["variant"] != ON_CPU]
    if known:
        return variants[max(known, key=lambda row: row["env_steps_per_s"])["variant"]]
    return variants.get("bf16-mixed, cudagraphs", next(iter(variants.values())))


def note_training(curves: Mapping[str, Curve], sheet: Sheet) -> None:
    """Note what a run's metrics say of its speed, and the projection."""
    found = projection(curves)
    for name, value in found.items():
        sheet.row("training", what=name, value=value)
    for name in ("eval/success", "system/cpu_percent", "system/gpu_memory_gib"):
        if name in curves:
            env_steps, values = curves[name]
            sheet.row("training", what=f"{name} after {env_steps[-1]:,} steps", value=values[-1])


def projection(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return rates of a run, and the hours that ``TARGET`` environment steps take.

    A row ``i`` of ``metrics.csv`` covers ``n_i`` environment steps in ``t_i = n_i / r_i`` seconds,
    ``r_i`` being ``time/env_steps_per_second``. Of them ``e_i t_i`` are spent on evaluations and
    ``c_i t_i`` on checkpoints. The first two rows with updates are left out: losses are compiled
    and graphs recorded there. Then

      rate while training    ``r = sum n_i / sum t_i (1 - e_i - c_i)``
      rate with all          ``w = sum n_i / sum t_i``
      hours                  ``TARGET / r / 3600`` and ``TARGET / w / 3600``

    The second is right for the schedule of evaluations and checkpoints that the run had.
    """
    steps, rates = (np.asarray(column, float) for column in curves["time/env_steps_per_second"])
    _, updates_per_s = curves["time/updates_per_second"]
    spent = np.sum([curves[f"time/{name}_fraction"][1] for name in EXTRAS], axis=0)
    n = np.diff(steps, prepend=0.0)
    is_learning = np.asarray(updates_per_s) > 0
    is_counted = is_learning & (np.cumsum(is_learning) > SETTLING_ROWS) & (n > 0)
    if not is_counted.any():
        return {"env steps": float(steps[-1])}
    n = n[is_counted]
    seconds = n / rates[is_counted]
    learning = (seconds * (1 - spent[is_counted])).sum()
    updates = (np.asarray(updates_per_s)[is_counted] * seconds).sum()
    rate = float(n.sum() / learning)
    whole = float(n.sum() / seconds.sum())
    return {
        "env steps": float(steps[-1]),
        "env steps that are counted": float(n.sum()),
        "seconds of them": float(seconds.sum()),
        "env steps per second while training": rate,
        "updates per second while training": float(updates / learning),
        "env steps per second with evaluations and checkpoints": whole,
        "hours to 20 M env steps without evaluations and checkpoints": TARGET / rate / 3600,
        "hours to 20 M env steps with them": TARGET / whole / 3600,
    }
