"""How fast a whole training run with PPO is, beside Stable-Baselines3's PPO.

``python -m benchmarks.on_policy`` trains multi-task PPO on MT10 through the command line, as users
do: ``configs/algorithm/mtppo.yaml`` with standardized observations, an MLP as actor and a
multi-head critic with LayerNorm. Beside it is Stable-Baselines3's PPO with the same numbers of
environments, steps, epochs and rows of a minibatch, networks of the same sizes, and its own
defaults otherwise. It steps MetaWorld's own environments in its process and in processes of their
own, and ours is compared with the quicker of the two; ``--sb3_environments ours`` lets it step this
package's environments, which are cheaper.

Each is a process of its own. All are started and make an iteration; then they take turns: one
makes a window, which is one iteration (collection and all its updates), while the others wait.
Start-up, evaluation, checkpoints and logging are not in the windows. No iteration is ended early
by the KL divergence.

``products`` makes only the matrix products of an iteration's updates (forward and backward of
actor and critic), which nothing can do without: the time of the updates is shown as a multiple.
The updates of ours include an iteration's values, advantages and diagnostics; Stable-Baselines3
computes values and advantages while it collects.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import add_variants, name_of, variants
from benchmarks.entrants import Entrant, of_command_line, of_module, started
from benchmarks.measuring import (
    NEVER,
    alternate,
    end_on_sigterm,
    heading,
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
    shown,
    spread,
    times_as_fast,
)
from benchmarks.on_policy_peers import OnPolicyJob
from benchmarks.upstream import names_of, tasks_option
from mtrl_lightning.envs.vector.vector import default_num_workers

CONFIGS = [
    "configs/base.yaml",
    "configs/env/metaworld_mt10.yaml",
    "configs/algorithm/mtppo.yaml",
    "configs/encoder/standardize.yaml",
]
SIZES = {
    "copies": (10, "of each task's environment"),
    "horizon": (200, "steps of an episode"),
    "num_steps": (200, "steps of each environment in an iteration"),
    "num_epochs": (8, "passes over an iteration's transitions"),
    "num_minibatches": (16, "of a pass"),
    "width": (256, "of the hidden layers"),
    "depth": (3, "number of hidden layers"),
}
"""Default and meaning of the sizes of the work."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("on_policy", __doc__, repeats=5)
    add = parser.add_argument
    kinds = ["ours", "sb3", "products"]
    add("--contestants", nargs="+", choices=kinds, default=kinds, help="(default all)")
    vectors = ["dummy", "subproc"]
    add(
        "--sb3_vectors",
        nargs="+",
        choices=vectors,
        default=vectors,
        help="vector environments of Stable-Baselines3, each a variant (default both)",
    )
    environments = ["metaworld", "ours"]
    add(
        "--sb3_environments",
        nargs="+",
        choices=environments,
        default=["metaworld"],
        help="what Stable-Baselines3 steps, MetaWorld's own environments or this package's, each a"
        " variant (default %(default)s); with subproc, an environment takes about 120 MiB",
    )
    parser.set_defaults(precisions=["32-true"])
    add_variants(parser)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--configs", nargs="+", default=CONFIGS, help="what ours trains (default %(default)s)")
    add(
        "--tasks",
        nargs="+",
        default=["MT10"],
        help="MT10, MT25, MT50, or names (default %(default)s)",
    )
    for name, (default, meaning) in SIZES.items():
        add(f"--{name}", type=positive, default=default, help=f"{meaning} (default %(default)s)")
    add(
        "--settle",
        type=positive,
        default=1,
        help="iterations before the windows (default %(default)s)",
    )
    add(
        "--minutes",
        type=float,
        default=20.0,
        help="after which no further round is started (default %(default)s)",
    )
    options = parser.parse_args(args)
    for config in options.configs:
        if not Path(config).is_file():
            parser.error(f"{config} is not there: start in the repository's folder")
    rows = options.copies * options.num_steps
    if rows % options.num_minibatches:
        parser.error(
            f"an iteration's env steps of a task ({options.copies} copies times"
            f" {options.num_steps} steps) cannot be shared out equally among"
            f" {options.num_minibatches} minibatches: give a divisor of {rows}"
        )
    with refusing(parser):
        if "sb3" in options.contestants:
            require("stable_baselines3", "leave it out with --contestants ours products")
        names_of(options.tasks)
    return options


def job_of(options: argparse.Namespace) -> OnPolicyJob:
    """Return the work that all do."""
    sizes = {name: getattr(options, name) for name in SIZES}
    return OnPolicyJob(
        tasks=options.tasks,
        device=options.device,
        threads=options.peer_threads,
        settle=options.settle,
        **sizes,
    )


def entrants(options: argparse.Namespace, job: OnPolicyJob, folder: Path) -> list[Entrant]:
    """Return what takes part, not started yet."""
    found: list[Entrant] = []
    if "ours" in options.contestants:
        for chosen in variants(options):
            settings = options_of_ours(job, folder) | chosen
            steps = job.updates
            command = of_command_line(options.configs, settings, steps, job.settle * steps)
            found.append(Entrant(name_of(chosen), "ours", command, folder))
    if "sb3" in options.contestants:
        for environments in options.sb3_environments:
            for vector in options.sb3_vectors:
                more = {"kind": "sb3", "vector": vector, "environments": environments}
                name = f"sb3 {vector}"
                if environments == "ours":
                    name += ", our environments"
                command = of_module("on_policy_peers", asdict(job) | more)
                found.append(Entrant(name, f"sb3 {environments}", command, folder))
    if "products" in options.contestants:
        threads = {products_name(number): number for number in threads_of(options).values()}
        for name, number in threads.items():
            more = {"kind": "products", "threads": number}
            command = of_module("on_policy_peers", asdict(job) | more)
            found.append(Entrant(name, "products", command, folder))
    return found


def options_of_ours(job: OnPolicyJob, folder: Path) -> dict[str, Any]:
    """Return the command line's options: the sizes, and no evaluation, checkpoint or KL stop."""
    sizes = {"width": job.width, "depth": job.depth}
    networks = {
        "actor": {
            "class_path": "mtrl_lightning.networks.MLP",
            "init_args": {**sizes, "output_bound": 1e-3},
        },
        "critic": {
            "class_path": "mtrl_lightning.networks.MultiHead",
            "init_args": {**sizes, "layer_norm": True},
        },
    }
    return {
        "root": folder,
        "trainer.accelerator": "gpu" if job.device == "cuda" else "cpu",
        "trainer.enable_progress_bar": "false",
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.benchmark.init_args.horizon": job.horizon,
        "rollout.total_steps": NEVER,
        "rollout.envs_per_task": job.copies,
        **{f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")},
        **{f"model.init_args.{name}": json.dumps(value) for name, value in networks.items()},
        "model.init_args.num_steps": job.num_steps,
        "model.init_args.num_epochs": job.num_epochs,
        "model.init_args.num_minibatches": job.num_minibatches,
        "model.init_args.max_kl": "null",
    }


def threads_of(options: argparse.Namespace) -> dict[str, int | None]:
    """Return PyTorch's threads of each kind of work; None for its own choice.

    Returns:
        of every variant of ours by its name, and of the peers under ``sb3``.
    """
    found: dict[str, int | None] = {}
    if "ours" in options.contestants:
        for chosen in variants(options):
            number = chosen.get("rollout.learner_threads")
            found[name_of(chosen)] = None if number is None else int(number)
    if "sb3" in options.contestants or not found:
        found["sb3"] = options.peer_threads
    return found


def products_name(threads: int | None) -> str:
    """Return the name of the products with a number of threads."""
    return "products" if threads is None else f"products, {threads} threads"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start all, let them take turns, and return the JSON's content."""
    job = job_of(options)
    with tempfile.TemporaryDirectory(prefix="on_policy-") as folder:
        taking_part = entrants(options, job, Path(folder))
        with started(taking_part):
            say(f"{options.repeats} rounds of one iteration each, {job.env_steps:,} env steps")
            seconds = alternate(
                {entrant.name: entrant.window for entrant in taking_part},
                options.repeats,
                options.minutes,
            )
            memory = {entrant.name: entrant.memory() for entrant in taking_part}
    products = {e.name: seconds[e.name] for e in taking_part if e.kind == "products"}
    programs = [entrant for entrant in taking_part if entrant.kind != "products"]
    training = {entrant.name: seconds[entrant.name] for entrant in programs}
    references = [
        quickest(training, [entrant.name for entrant in programs if entrant.kind == kind])
        for kind in ("sb3 metaworld", "sb3 ours")
    ]
    threads = threads_of(options)
    rows = results(training, references, scale=1.0)
    for row, entrant in zip(rows, programs, strict=True):
        number = threads[entrant.name if entrant.kind == "ours" else "sb3"]
        row["env_steps_per_second"] = spread([job.env_steps / value for value in row["rounds"]])
        row["time_fractions"] = entrant.fractions()
        row["update"] = beside_products(
            entrant.seconds_of("update"), products.get(products_name(number))
        )
        row["seconds_until_ready"] = entrant.ready_seconds
        row["memory_mib"] = memory[entrant.name]
        row["command"] = entrant.command
    return {
        **heading("on_policy", options),
        "threads": {
            "torch": torch.get_num_threads(),
            "peers": options.peer_threads or torch.get_num_threads(),
        },
        "default_workers": default_num_workers(job.num_tasks * job.copies, spare=0),
        "iteration": {
            "env_steps": job.env_steps,
            "updates": job.updates,
            "batch_size": job.batch_size,
        },
        "unit": "s per iteration",
        "results": rows,
        "products": {
            name: {"rounds": values, **spread(values)} for name, values in products.items()
        },
    }


def beside_products(seconds: Sequence[float], products: Sequence[float] | None) -> dict[str, Any]:
    """Return the updates' seconds of each round, and how many times the products' they are.

    Args:
        seconds: of an iteration's updates, by round.
        products: seconds of their matrix products alone in the same rounds; None if not measured.
    """
    found: dict[str, Any] = {"rounds": list(seconds), **spread(seconds)}
    found["times_the_products"] = None if products is None else times_as_fast(products, seconds)
    return found


def text_of(content: Mapping[str, Any]) -> str:
    """Return the table."""
    settings = content["settings"]
    iteration = content["iteration"]
    lines = []
    if content["results"]:
        title = (
            f"{' '.join(settings['tasks'])} on {settings['device']}, {settings['copies']} copies of"
            f" each task, horizon {settings['horizon']}; an iteration has"
            f" {iteration['env_steps']:,} env steps and {iteration['updates']} updates"
            f" ({settings['num_epochs']} epochs) with {iteration['batch_size']:,} rows,"
            f" {settings['depth']} x {settings['width']}; threads of PyTorch"
            f" {content['threads']['torch']}, of the peers {content['threads']['peers']}, workers"
            f" of ours {content['default_workers']}, unless the variant says otherwise"
        )
        rows = [row | _cells(row) for row in content["results"]]
        lines.append(report(title, rows, content["unit"], list(_cells(rows[0]))))
    for name, found in content["products"].items():
        lines.append(f"{name}: {shown(found)} s for the matrix products of an iteration's updates")
    return "\n\n".join(lines)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    times = row["update"]["times_the_products"]
    return {
        "env steps/s": f"{row['env_steps_per_second']['median']:,.0f}",
        "s of updates": shown(row["update"]),
        "times the products": "-" if times is None else shown(times),
        "MiB": f"{row['memory_mib']:,.0f}",
        "where the time goes": shares(row["time_fractions"]),
    }


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
