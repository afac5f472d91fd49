"""How long an update takes: in the model, with Lightning's trainer, in a plain PyTorch loop.

``python -m benchmarks.updating`` measures one update of multi-task multi-head SAC
(critics, actor, temperatures, targets) on batches that are there already, with the numbers of
``configs/experiment/mtmhsac.yaml``:

  direct    ``SAC.training_step`` called in a loop
  trainer   the same, called by Lightning's trainer without our callbacks: the difference is
            Lightning's cost
  plain     a plain PyTorch loop of the same algorithm (as in CleanRL), with the same losses
  sb3       Stable-Baselines3's SAC of the same sizes, with the task's one-hot in the observation;
            it draws its batch itself
  products  only the hidden layers' matrix products, by the functions of our large layers: in
            float32 on x86 oneDNN's, where ``plain`` and ``sb3`` multiply by PyTorch's

Further tables show other sizes (``--sizes``: the quickstart's, a minibatch of PPO with
``configs/experiment/mt10_cpu.yaml``, and networks so small that calling the operations is what
costs), and how the cost grows with tasks, width and batch. Each variant is a process of its
own; the variants of a table take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.entrants import Entrant, of_module, started
from benchmarks.measuring import (
    add_precisions,
    alternate,
    choose_precisions,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    refusing,
    report,
    require,
    results,
    say,
    shown,
    spread,
    times_as_fast,
)
from benchmarks.updaters import OBSERVATION, Work, options_of
from mtrl_lightning.learning.compiling import check_compile

GROWING = {"tasks": [1, 10, 25, 50], "width": [400, 1024, 2048], "batch": [320, 1280, 5120]}
"""What the cost is shown against, unless other values are given."""
GROWN = ("direct", "plain")
"""Variants that are shown there."""
SIZES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "quickstart": (
        ("direct", "products"),
        {"tasks": 3, "batch_size": 192, "width": 256, "depth": 2, "layer_norm": True},
    ),
    "minibatch": (
        ("ppo", "ppo_products"),
        {"tasks": 10, "batch_size": 1250, "width": 256, "depth": 3, "layer_norm": True},
    ),
    "small": (("direct", "plain"), {"tasks": 1, "batch_size": 8, "width": 32, "depth": 2}),
    "small_3": (("direct", "plain"), {"tasks": 3, "batch_size": 24, "width": 32, "depth": 2}),
}
"""Variants and work of the tables of other sizes."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("updating", __doc__, repeats=5)
    add = parser.add_argument
    kinds = ["direct", "trainer", "plain", "sb3", "products"]
    add(
        "--variants",
        nargs="+",
        choices=kinds,
        default=kinds,
        help="of the first table (default all)",
    )
    add_precisions(parser)
    add(
        "--compile",
        nargs="+",
        choices=["none", "default", "cudagraphs"],
        default=["none"],
        help="values of SAC's option, each a variant (default %(default)s)",
    )
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="PyTorch's (default its own choice, one per core)")
    add("--num_tasks", type=positive, default=10, help="of the first table (default %(default)s)")
    add(
        "--width",
        type=positive,
        default=400,
        help="of the hidden layers, in the first table (default %(default)s)",
    )
    add("--depth", type=positive, default=3, help="number of hidden layers (default %(default)s)")
    add("--rows", type=positive, default=128, help="of a batch for each task (default %(default)s)")
    add(
        "--updates",
        type=positive,
        default=20,
        help="of a window; fewer where one is longer (default %(default)s)",
    )
    add(
        "--settle",
        type=int,
        default=5,
        help="updates before the first window (default %(default)s)",
    )
    add(
        "--sizes",
        nargs="*",
        choices=list(SIZES),
        default=list(SIZES),
        help="tables of other sizes (default all)",
    )
    add(
        "--grow",
        nargs="*",
        choices=list(GROWING),
        default=list(GROWING),
        help="further tables (default all)",
    )
    for name, values in GROWING.items():
        add(f"--grow_{name}", nargs="+", type=int, default=values, help="(default %(default)s)")
    options = parser.parse_args(args)
    with refusing(parser):
        for how in options.compile:
            check_compile(how, torch.device(options.device))
        if "sb3" in options.variants:
            require(
                "stable_baselines3", "leave it out with --variants direct trainer plain products"
            )
    choose_precisions(options)
    return options


def base_of(options: argparse.Namespace) -> Work:
    """Return the work of the first table."""
    return Work(
        tasks=options.num_tasks,
        batch_size=options.rows * options.num_tasks,
        width=options.width,
        depth=options.depth,
        precision="32-true",
        compile="none",
        device=options.device,
        threads=options.threads,
        steps=options.updates,
        settle=options.settle,
    )


def cost(work: Work) -> float:
    """Return the multiplications of a network's pass, roughly proportional to its time."""
    return (
        work.batch_size * work.width * ((OBSERVATION + work.tasks) + work.width * (work.depth - 1))
    )


def grown(base: Work, name: str, value: int) -> Work:
    """Return the base with one size changed, fewer updates per window where one takes longer."""
    changes: dict[str, dict[str, Any]] = {
        "tasks": {"tasks": value, "batch_size": base.batch_size // base.tasks * value},
        "width": {"width": value},
        "batch": {"batch_size": max(1, value // base.tasks) * base.tasks},
    }
    work = replace(base, **changes[name])
    return replace(work, steps=max(2, round(base.steps * min(1.0, cost(base) / cost(work)))))


def entrants(
    work: Work, kinds: Sequence[str], options: argparse.Namespace, folder: Path
) -> list[Entrant]:
    """Return the variants of one table, not started yet.

    Stable-Baselines3 has no options for precision and compilation.
    """
    found = []
    for kind in kinds:
        for precision in options.precisions if kind != "sb3" else ["32-true"]:
            for compiled in options.compile if kind in ("direct", "trainer") else ["none"]:
                chosen = replace(work, precision=precision, compile=compiled)
                name = f"{kind} {precision}"
                if compiled != "none":
                    name += f", compile {compiled}"
                command = of_module("updaters", options_of(chosen, kind))
                found.append(Entrant(name, kind, command, folder))
    return found


def compare(
    title: str, work: Work, kinds: Sequence[str], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Let the variants take turns; return one table's content."""
    say(title)
    taking_part = entrants(work, kinds, options, folder)
    with started(taking_part):
        seconds = alternate(
            {entrant.name: entrant.window for entrant in taking_part}, options.repeats
        )
        memory = [entrant.memory() for entrant in taking_part]
    an_update = {name: [value / work.steps for value in values] for name, values in seconds.items()}
    references = [
        f"{kind} {options.precisions[0] if kind == 'plain' else '32-true'}"
        for kind in ("sb3", "plain")
    ]
    rows = results(an_update, [name for name in references if name in an_update])
    for row, mib in zip(rows, memory, strict=True):
        row["updates_per_second"] = spread([1e3 / value for value in row["rounds"]])
        row["memory_mib"] = mib
    add_products(rows, an_update)
    framework = {
        name.removeprefix("trainer "): spread(
            [
                (a - b) * 1e3
                for a, b in zip(values, an_update[name.replace("trainer", "direct")], strict=True)
            ]
        )
        for name, values in an_update.items()
        if name.startswith("trainer") and name.replace("trainer", "direct") in an_update
    }
    sizes = {
        name: getattr(work, name) for name in ("tasks", "batch_size", "width", "depth", "steps")
    }
    return {
        "title": title,
        "sizes": sizes,
        "unit": "ms per update",
        "results": rows,
        "framework_ms": framework,
    }


def add_products(rows: Sequence[dict[str, Any]], an_update: Mapping[str, Sequence[float]]) -> None:
    """Add how many times the products' time of the same precision each variant takes."""
    products = {
        name.split()[1]: values
        for name, values in an_update.items()
        if name.split()[0].endswith("products")
    }
    for row in rows:
        _, precision = row["variant"].split(",")[0].split()
        alone = products.get(precision)
        own = an_update[row["variant"]]
        row["times_the_products"] = None if alone is None else times_as_fast(alone, own)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    base = base_of(options)
    tables = []
    with tempfile.TemporaryDirectory(prefix="updating-") as path:
        folder = Path(path)
        tables.append(compare("one update", base, options.variants, options, folder))
        for name in options.sizes:
            kinds, changes = SIZES[name]
            tables.append(compare(name, replace(base, **changes), kinds, options, folder))
        for growing in options.grow:
            for value in getattr(options, f"grow_{growing}"):
                work = grown(base, growing, value)
                tables.append(compare(f"{growing} {value}", work, GROWN, options, folder))
    return {
        **heading("updating", options),
        "threads": options.threads or torch.get_num_threads(),
        "tables": tables,
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    left_out = content["settings"]["left_out"]
    parts = [left_out] if left_out else []
    for found in content["tables"]:
        sizes = found["sizes"]
        title = (
            f"{found['title']}: {sizes['tasks']} tasks, batch {sizes['batch_size']},"
            f" {sizes['depth']} x {sizes['width']}, on {content['settings']['device']},"
            f" {content['threads']} threads of PyTorch, windows of {sizes['steps']} updates"
        )
        rows = [
            {
                **row,
                "updates/s": f"{row['updates_per_second']['median']:,.1f}",
                "times the products": (
                    "-" if row["times_the_products"] is None else shown(row["times_the_products"])
                ),
                "MiB": f"{row['memory_mib']:,.0f}",
            }
            for row in found["results"]
        ]
        parts.append(report(title, rows, found["unit"], ("updates/s", "times the products", "MiB")))
        parts += [
            f"Lightning's trainer costs {shown(v)} ms per update, {k}"
            for k, v in found["framework_ms"].items()
        ]
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
