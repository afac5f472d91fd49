"""Tests and benchmarks of CUDA graphs on a GPU in one command, the most important first.

    python -m benchmarks.gpu --folder FOLDER

Parts (``--parts``): tests (those marked cuda), updates (times without graphs, compiled, and with
graphs of 1, 4 and 8 updates, by width), sac and ppo (whole runs of MT10: env steps/s and the
minutes that 20 million would take), acting (times of ``act`` on the GPU, by a graph, and by a copy
of the actor on the host), memory (over 10,000 updates), pixels, learning (the quickstart
with and without graphs, three seeds each).

Each part is a process with a time limit. Its output is in FOLDER/report.md as soon as it ends. A
part that is over its limit, or fails, does not end the others. ``--dry`` runs tiny sizes on the
CPU, where no graph is recorded: it shows that the commands work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import machine, say, synchronize, timed
from benchmarks.updates import (
    OBSERVATION,
    Work,
    direct_of,
    direct_update,
    make_batches,
    make_sac,
)
from mtrl_lightning import SAC
from mtrl_lightning.learning import graph
from mtrl_lightning.learning.acting_graphs import ActingGraphs
from mtrl_lightning.learning.compiling import AlgorithmGraphs
from mtrl_lightning.replay.static_batches import StaticBatches
from mtrl_lightning.reports.metrics_file import Curve, read_metrics
from mtrl_lightning.types import OwedUpdates

MINUTES = 28.0
"""Of all parts."""
GOAL_STEPS = 20_000_000
FIT = (sys.executable, "-m", "mtrl_lightning", "fit", "-c")
PACKAGES = ("metaworld", "mujoco", "dm_control", "jsonargparse[signatures]", "gymnasium")


class Part(NamedTuple):
    """One process of the report."""

    name: str
    limit_s: float
    command: Sequence[str]
    after: Callable[[], str] = str
    """Returns further text for the report."""


class NoGraph:
    """Replaces ``CudaCapture`` without CUDA: nothing can be recorded."""

    def run(self, function: Callable[[], None]) -> None:
        """Call the function."""
        function()

    def record(self, function: Any, generators: Any) -> graph.Replay:
        """Refuse."""
        raise RuntimeError("there is no GPU")


# ---- parts in processes of their own ----


def milliseconds(call: Callable[[], None], times: int) -> float:
    """Return the milliseconds of a call, without those of the first ones."""
    timed(call, 3)()
    return timed(call, times)() * 1e3


def capture_on(device: torch.device) -> graph.Capture:
    """Return what records graphs, or refuses to where there is no GPU."""
    return graph.CudaCapture(device) if device.type == "cuda" else NoGraph()


def graphs_on(device: torch.device, sac: SAC) -> AlgorithmGraphs:
    """Return graphs of updates and of acting."""
    updates = graph.UpdateGraphs(sac, capture_on(device))
    return AlgorithmGraphs(updates, ActingGraphs(sac, capture_on(device)))


def by_graphs(work: Work, updates_at_once: int) -> tuple[Callable[[], None], graph.UpdateGraphs]:
    """Return a call that makes so many updates by graphs of as many, and the graphs."""
    device = torch.device(work.device)
    sac = make_sac(work)
    sac.graphs = graphs_on(device, sac)
    graphs = sac.graphs.updates
    batches = make_batches(work)
    given = itertools.cycle(batches)
    owed: Any = OwedUpdates(StaticBatches(lambda: next(given), device), updates_at_once)
    update = direct_update(work, sac)

    def make() -> None:
        graph.UPDATES_PER_GRAPH = updates_at_once
        update(owed)

    return make, graphs


def print_updates(work: Work, widths: Sequence[int], times: int) -> None:
    """Print the milliseconds per update of each way, by width."""
    for width in widths:
        sized = replace(work, width=width)
        for how in ("none", "default"):
            spent = milliseconds(direct_of(replace(sized, compile=how)), times)
            print(f"width {width}, compile {how}: {spent:.3f} ms", flush=True)
        for at_once in (1, 4, 8):
            make, graphs = by_graphs(sized, at_once)
            spent = milliseconds(make, max(1, times // at_once)) / at_once
            kept = f"{graphs.num_graphs} kept"
            if graphs.reason:
                kept += f", without graphs because {graphs.reason}"
            print(f"width {width}, graphs of {at_once} ({kept}): {spent:.3f} ms", flush=True)


def print_acting(work: Work, times: int) -> None:
    """Print the milliseconds of a vector step's actions in each way, by number of environments."""
    sac = make_sac(work)
    by_graph = make_sac(work)
    by_graph.graphs = graphs_on(torch.device(work.device), by_graph)
    graphs = by_graph.graphs.acting
    on_host = make_sac(replace(work, device="cpu"))

    def copy_weights() -> None:
        on_host.set_weights(sac.get_weights(), 1)

    for num_each in (1, 8):
        task_E = np.repeat(np.arange(work.tasks), num_each)
        observation_ED = np.zeros((len(task_E), OBSERVATION))
        ways: dict[str, Callable[[], Any]] = {
            "on the device": partial(sac.act, observation_ED, task_E, "explore"),
            "on the host": partial(on_host.act, observation_ED, task_E, "explore"),
            "copy of the weights to the host": copy_weights,
            "by a graph": partial(by_graph.act, observation_ED, task_E, "explore"),
        }
        for name, call in ways.items():
            print(f"{len(task_E)} environments, {name}: {milliseconds(call, times):.3f} ms")
    print(f"{graphs.num_graphs} graphs of acting", flush=True)


def print_memory(work: Work, times: int) -> None:
    """Print the memory that the GPU has given, while updates are made."""
    make, _ = by_graphs(work, 4)
    for _ in range(5):
        for _ in range(times // 5 // 4):
            make()
        synchronize()
        used = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        print(f"{used / 2**20:,.2f} MiB", flush=True)


def run_here(name: str, is_dry: bool) -> None:
    """Run one of the parts ``updates``, ``acting`` and ``memory``."""
    device = "cpu" if is_dry else "cuda"
    work = Work(2 if is_dry else 10, 8 if is_dry else 1280, 8 if is_dry else 400, 3, device)
    if name == "memory":
        print_memory(work, 40 if is_dry else 10_000)
    elif name == "acting":
        print_acting(work, 2 if is_dry else 500)
    else:
        print_updates(work, [8] if is_dry else [400, 1024, 2048, 4096], 8 if is_dry else 200)


# ---- the report ----


def metric_of(folder: Path, name: str, metric: str) -> Curve:
    """Return env steps and values of a metric of the newest run of a name."""
    files = sorted((folder / "runs" / name).glob("version_*/metrics.csv"))
    return read_metrics(files[-1]).get(metric, ([], [])) if files else ([], [])


def pace_of(folder: Path, name: str) -> str:
    """Return a run's environment steps per second, and the minutes of 20 million steps."""
    _, rates = metric_of(folder, name, "time/env_steps_per_second")
    if not rates:
        return "no row of metrics"
    rate = np.mean(rates[len(rates) // 2 :])  # the first rows are of the warm-up
    return f"{rate:,.0f} env steps/s: {GOAL_STEPS / rate / 60:,.0f} min for {GOAL_STEPS:,}"


def success_of(folder: Path, name: str) -> str:
    """Return a run's success by environment steps."""
    evaluated = zip(*metric_of(folder, name, "eval/success"), strict=True)
    return ", ".join(f"{env_steps}: {success:.2f}" for env_steps, success in evaluated)


def parts_of(folder: Path, is_dry: bool) -> list[Part]:
    """Return the parts, the most important first."""
    here = [sys.executable, "-m", "benchmarks.gpu", *(["--dry"] if is_dry else []), "--run"]
    device = "cpu" if is_dry else "cuda"
    common = [f"--root={folder / 'runs'}", "--trainer.enable_progress_bar=false"]
    common += [f"--trainer.accelerator={'cpu' if is_dry else 'gpu'}"]
    graphs = [] if is_dry else ["--model.init_args.compile=graph"]
    tiny = ["--rollout.total_steps=400", "--rollout.num_workers=0"] if is_dry else []
    warm_up = ["--rollout.warmup_steps=60"] if is_dry else []
    few = ["--evaluation.num_episodes=1", "--evaluation.every=100000000"] if is_dry else []

    def run(name: str, config: str, minutes: str, *more: str) -> Part:
        options = [*common, *graphs, *tiny, *few, *more, f"--name={name}", "--metrics.every=200"]
        if not is_dry:
            options += [f"--trainer.max_time=00:00:{minutes}", "--metrics.every=5000"]
            options += ["--evaluation.every=100000000"]
        return Part(name, 300, [*FIT, config, *options], lambda: pace_of(folder, name))

    def learned(seed: int, how: str) -> Part:
        name = f"learning_{how}_{seed}"
        options = [*common, *tiny, *few, *warm_up, f"--name={name}", f"--seed_everything={seed}"]
        options += [f"--model.init_args.compile={'none' if is_dry else how}"]
        command = [*FIT, "quickstart", *options]
        return Part(name, 150, command, lambda: success_of(folder, name))

    sac = "quickstart" if is_dry else "experiment/mtmhsac"
    ppo = "quickstart_ppo" if is_dry else "experiment/mt10_mtppo"
    tests = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "tests/test_cuda.py"]
    pixels = ["--parts", "pixel_methods", f"--device={device}", "--precisions=32-true"]
    pixels += ["--rounds=1", "--updates=2"] if is_dry else ["--rounds=3"]
    return [
        Part("tests", 420, tests),
        Part("updates", 300, [*here, "updates"]),
        run("sac", sac, "03:00", *warm_up),
        run("ppo", ppo, "02:00"),
        Part("memory", 120, [*here, "memory"]),
        Part("acting", 60, [*here, "acting"]),
        *(learned(seed, how) for seed in (1, 2, 3) for how in ("graph", "none")),
        Part("pixels", 150, [sys.executable, "-m", "benchmarks.updates", *pixels]),
    ]


def run_part(part: Part, seconds: float) -> str:
    """Run a part for so many seconds at most; return its section of the report."""
    start = time.perf_counter()
    process = subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        state = "done" if process.returncode == 0 else f"failed with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()  # a run saves itself and ends its workers
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        state = "over its time"
    spent = time.perf_counter() - start
    kept = "\n".join(output.splitlines()[-60:])
    return f"\n## {part.name}: {state}, {spent:.0f} s\n\n{part.after()}\n\n```text\n{kept}\n```\n"


def main(args: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("gpu"), help="of report and runs")
    parser.add_argument("--parts", nargs="+", help="names, or their beginnings (default all)")
    parser.add_argument("--wheels", help="folder from which missing packages are installed")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--run", choices=("updates", "acting", "memory"), help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.run:
        run_here(options.run, options.dry)
        return 0
    if options.wheels:
        install = ["pip", "install", "--no-index", "--find-links", options.wheels, *PACKAGES]
        subprocess.run([sys.executable, "-m", *install], check=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    report = options.folder / "report.md"
    report.write_text(f"# On a GPU, with CUDA graphs\n\n{json.dumps(machine(), default=str)}\n")
    end = time.monotonic() + 60 * MINUTES
    for part in parts_of(options.folder, options.dry):
        if options.parts and not part.name.startswith(tuple(options.parts)):
            continue
        left = end - time.monotonic()
        say(f"{part.name}: {left / 60:.1f} min left")
        if left > 10:
            with report.open("a") as file:
                file.write(run_part(part, min(part.limit_s, left)))
    print(report.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
