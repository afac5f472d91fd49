"""How fast a whole training run is, beside Stable-Baselines3 and a plain PyTorch loop.

``python -m benchmarks.end_to_end`` trains ``configs/experiment/mtmhsac.yaml``
through the command line, as users do, in both precisions; Stable-Baselines3's SAC on the same
MetaWorld environments with the same sizes (batch, layers, twin critics, learning rates, one update
a vector step); and a plain PyTorch loop of our algorithm on Gymnasium's vector environments
(CleanRL's way). Peers are run with environments in their process and in processes of their own, and
compared by the quicker of the two.

Each is a process of its own. All are started and warmed up; then they take turns: one makes a
window of vector steps while the others wait. Start-up, warm-up, evaluation, checkpoints and logging
are not in the windows. A vector step is one step of every environment and one update.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Job
from benchmarks.entrants import Entrant, of_command_line, of_module, started
from benchmarks.measuring import (
    NEVER,
    add_precisions,
    alternate,
    choose_precisions,
    end_on_sigterm,
    heading,
    option_and_value,
    parser_of,
    positive,
    program,
    quickest,
    refusing,
    report,
    require,
    results,
    say,
    shares,
    spread,
)
from benchmarks.upstream import names_of, tasks_option
from mtrl_lightning.envs.vector.vector import default_num_workers

CONFIG = Path("configs/experiment/mtmhsac.yaml")
NETWORKS = ("actor", "critic")


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("end_to_end", __doc__, repeats=5)
    add = parser.add_argument
    add(
        "--contestants",
        nargs="+",
        choices=["ours", "sb3", "plain"],
        default=["ours", "sb3", "plain"],
    )
    add_precisions(parser)
    add_variants(parser)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--config", type=Path, default=CONFIG, help="what ours trains (default %(default)s)")
    add(
        "--tasks",
        nargs="+",
        default=["MT10"],
        help="MT10, MT25, MT50, or names (default %(default)s)",
    )
    add("--batch_size", type=positive, default=1280, help="(default %(default)s)")
    add("--width", type=positive, default=400, help="of the hidden layers (default %(default)s)")
    add("--depth", type=positive, default=3, help="number of hidden layers (default %(default)s)")
    add("--capacity", type=positive, default=1_000_000, help="of the replay (default %(default)s)")
    add(
        "--warmup",
        type=positive,
        default=100,
        help="vector steps with random actions (default %(default)s)",
    )
    add(
        "--settle",
        type=int,
        default=10,
        help="vector steps with updates before the windows (default %(default)s)",
    )
    add("--steps", type=positive, default=40, help="vector steps of a window (default %(default)s)")
    add(
        "--minutes",
        type=float,
        default=9.0,
        help="after which no further round is started (default %(default)s)",
    )
    options = parser.parse_args(args)
    if not options.config.is_file():
        parser.error(
            f"{options.config} is not there: start in the repository's folder, or give --config"
        )
    with refusing(parser):
        if "sb3" in options.contestants:
            require("stable_baselines3", "leave it out with --contestants ours plain")
        options.names = names_of(options.tasks)
    choose_precisions(options)
    return options


def add_variants(parser: argparse.ArgumentParser) -> None:
    """Add the options from which ``variants`` makes the variants of ours, and the peers' threads.

    ``variants`` needs ``options.precisions`` beside them.
    """
    add = parser.add_argument
    add(
        "--threads",
        nargs="+",
        type=int,
        help="PyTorch's threads for ours, each value a variant (default its own)",
    )
    add(
        "--workers",
        nargs="+",
        type=int,
        help="worker processes of ours, each a variant (default the program's)",
    )
    add(
        "--also",
        nargs="+",
        action="append",
        default=[],
        type=option_and_value,
        metavar="OPTION=VALUE",
        help="options of the command line, without the dashes, with which all variants of ours are"
        " measured once more",
    )
    add(
        "--peer_threads",
        type=int,
        help="PyTorch's threads for the peers (default its own choice, one per core)",
    )


def entrants(options: argparse.Namespace, folder: Path) -> list[Entrant]:
    """Return what takes part, not started yet."""
    sizes = (
        "tasks",
        "width",
        "depth",
        "batch_size",
        "capacity",
        "warmup",
        "steps",
        "settle",
        "device",
    )
    job = Job(**{name: getattr(options, name) for name in sizes}, threads=options.peer_threads)
    found: list[Entrant] = []
    for chosen in variants(options) if "ours" in options.contestants else []:
        command = ours(job, len(options.names), options.config, folder, chosen)
        found.append(Entrant(name_of(chosen), "ours", command, folder))
    for kind, vectors in (("sb3", ("dummy", "subproc")), ("plain", ("sync", "async"))):
        if kind in options.contestants:
            for vector in vectors:
                more: dict[str, Any] = {"kind": kind, "vector": vector}
                if kind == "plain":
                    more["bf16"] = False
                command = of_module("contestants", asdict(job) | more)
                found.append(Entrant(f"{kind} {vector}", kind, command, folder))
    return found


def variants(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the command line's options in which the variants of ours differ."""
    threads = options.threads or [None]
    workers = options.workers or [None]
    chosen = [
        {"trainer.precision": p, "rollout.learner_threads": t, "rollout.num_workers": w}
        for p, t, w in itertools.product(options.precisions, threads, workers)
    ]
    plain = [{name: value for name, value in one.items() if value is not None} for one in chosen]
    more: list[dict[str, Any]] = [
        dict(pair.split("=", 1) for pair in also) for also in options.also
    ]
    return plain + [one | also for also in more for one in plain]


def name_of(chosen: dict[str, Any]) -> str:
    """Return the name of a variant of ours, such as ``ours 32-true, learner_threads 1``."""
    first, *rest = chosen.items()
    return ", ".join(
        [f"ours {first[1]}", *(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in rest)]
    )


def ours(
    job: Job, num_tasks: int, config: Path, folder: Path, chosen: dict[str, Any]
) -> Callable[[int], list[str]]:
    """Return what makes a user's command line, with less warm-up, no evaluation, no checkpoint."""
    networks = {
        f"model.init_args.{n}.init_args.{k}": getattr(job, k)
        for n in NETWORKS
        for k in ("width", "depth")
    }
    options = {
        "root": folder,
        "trainer.accelerator": "gpu" if job.device == "cuda" else "cpu",
        "trainer.enable_progress_bar": "false",
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.batch_size": job.batch_size,
        "data.capacity": job.capacity,
        "rollout.warmup_steps": job.warmup * num_tasks,
        "rollout.total_steps": NEVER,
        **{f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")},
        **networks,
        **chosen,
    }
    return of_command_line([config], options, job.steps, job.settle)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start all, let them take turns, and return the JSON's content."""
    with tempfile.TemporaryDirectory(prefix="end_to_end-") as folder:
        taking_part = entrants(options, Path(folder))
        with started(taking_part):
            say(f"{options.repeats} rounds of {options.steps} vector steps each")
            seconds = alternate(
                {e.name: e.window for e in taking_part}, options.repeats, options.minutes
            )
            memory = {e.name: e.memory() for e in taking_part}
    a_step = {name: [value / options.steps for value in values] for name, values in seconds.items()}
    references = [
        quickest(a_step, [e.name for e in taking_part if e.kind == kind])
        for kind in ("sb3", "plain")
    ]
    rows = results(a_step, references)
    for row, entrant in zip(rows, taking_part, strict=True):
        environments = entrant.about.get("environments", len(options.names))
        row["env_steps_per_second"] = spread(
            [environments * 1e3 / value for value in row["rounds"]]
        )
        row["seconds_until_ready"] = entrant.ready_seconds
        row["memory_mib"] = memory[entrant.name]
        row["time_fractions"] = entrant.fractions()
        row["command"] = entrant.command
    return {
        **heading("end_to_end", options),
        "threads": {
            "torch": torch.get_num_threads(),
            "peers": options.peer_threads or torch.get_num_threads(),
        },
        "default_workers": default_num_workers(len(options.names)),
        "unit": "ms per vector step",
        "results": rows,
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    rows = []
    for row in content["results"]:
        rate = row["env_steps_per_second"]["median"]
        cells = {
            "env steps/s": f"{rate:,.0f}",
            "MiB": f"{row['memory_mib']:,.0f}",
            "where the time goes": shares(row["time_fractions"]),
        }
        rows.append({**row, **cells})
    settings = content["settings"]
    title = (
        f"{' '.join(settings['tasks'])} on {settings['device']},"
        f" batch {settings['batch_size']}, {settings['depth']} x {settings['width']},"
        f" one update per vector step, windows of {settings['steps']} vector steps;"
        f" threads of PyTorch {content['threads']['torch']},"
        f" workers of ours {content['default_workers']}, unless the variant says otherwise"
    )
    columns = ("env steps/s", "MiB", "where the time goes")
    table = report(title, rows, "ms per vector step", columns)
    return f"{settings['left_out']}\n\n{table}" if settings["left_out"] else table


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
