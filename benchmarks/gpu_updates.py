"""The parts ``updates`` and ``gradients`` of ``benchmarks.gpu``."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks import gradients
from benchmarks.entrants import Entrant, of_module
from benchmarks.gpu_setup import Setup, Shape
from benchmarks.gpu_sheet import Sheet, cells_of
from benchmarks.gpu_windows import START_LIMIT, note_skipped, ready, windows_of
from benchmarks.measuring import (
    PRECISIONS,
    say,
    slow_bfloat16,
    spread,
)
from benchmarks.updaters import Work, options_of


def updates(setup: Setup, sheet: Sheet) -> None:
    """Measure one update, on the GPU and beside it on the CPU."""
    for shape in setup.sizes.shapes:
        say(f"updates of {shape.name}")
        with sheet.trying(shape.name):
            measure_shape(shape, setup, sheet)
    note_skipped(setup.path("updates"), sheet)


def measure_shape(shape: Shape, setup: Setup, sheet: Sheet) -> None:
    """Let the variants of a shape take turns, and note a row for each."""
    works = works_of(shape, setup)
    folder = setup.path("updates")
    folder.mkdir(exist_ok=True)
    entrants = {
        name: Entrant(
            f"{shape.name} {name}",
            kind,
            of_module("updaters", options_of(work, kind)),
            folder,
            START_LIMIT,
        )
        for name, (kind, work) in works.items()
    }
    with ready(entrants, sheet) as able:
        seconds = windows_of(able, setup, sheet)
        memory = {name: able[name].memory() for name in seconds}
        for name, values in seconds.items():
            _, work = works[name]
            milliseconds = spread([value / work.steps * 1e3 for value in values])
            eager = f"{setup.device} {shape.kind} {work.precision}"
            reference = seconds.get(eager)
            gain = None
            if reference is not None and work.device == setup.device:
                per_update = np.median(reference) / works[eager][1].steps * 1e3
                gain = float(per_update / milliseconds["median"])
            sheet.row(
                f"ms per update: {shape.name}, batch {shape.batch_size}",
                variant=name,
                **cells_of("ms", milliseconds),
                per_second=1e3 / milliseconds["median"],
                times_eager=gain,
                start_up_s=able[name].ready_seconds,
                host_mib=memory[name],
            )


def works_of(shape: Shape, setup: Setup) -> dict[str, tuple[str, Work]]:
    """Return what is compared, as kind and work by name."""
    sizes = setup.sizes
    first = sizes.shapes[0]
    # a GPU has room for more than the first shape, so that its time grows more slowly
    share = min(1.0, 30 * _cost(first) / _cost(shape))

    def work(device: str, precision: str, how: str) -> Work:
        steps = max(2, round(share * sizes.updates))
        settle = sizes.settle
        if device == "cpu" and not setup.is_dry:
            steps = max(2, round(0.05 * share * sizes.updates))
            settle = 2
        return Work(
            tasks=shape.tasks,
            batch_size=shape.batch_size,
            width=shape.width,
            depth=shape.depth,
            precision=precision,
            compile=how,
            device=device,
            threads=1 if setup.is_dry else None,
            steps=steps,
            settle=settle,
        )

    found = {}
    # a dry run starts one process for each shape: starting them takes nearly all of its time
    precisions = [PRECISIONS[shape is not first]] if setup.is_dry else PRECISIONS
    for precision, how in itertools.product(precisions, sizes.compile):
        suffix = "" if how == "none" else f", compile {how}"
        name = f"{setup.device} {shape.kind} {precision}{suffix}"
        found[name] = (shape.kind, work(setup.device, precision, how))
    if setup.is_dry:
        return found
    if shape is first:
        for kind in ("trainer", "plain"):
            for precision in PRECISIONS:
                name = f"{setup.device} {kind} {precision}"
                found[name] = (kind, work(setup.device, precision, "none"))
    for precision in PRECISIONS:
        if precision == "32-true" or slow_bfloat16("cpu") is None:
            found[f"cpu {shape.kind} {precision}"] = (shape.kind, work("cpu", precision, "none"))
    return found


def _cost(shape: Shape) -> float:
    """Return what a network's pass multiplies, roughly."""
    return shape.batch_size * shape.width**2 * shape.depth


def gradient_methods(setup: Setup, sheet: Sheet) -> None:
    """Measure an update with every gradient method, each beside the mean."""
    methods = [name for name in gradients.METHODS if name != "mean"]
    options = [f"--device={setup.device}", *setup.sizes.gradient_options]
    groups = [methods] if setup.is_dry else [[name] for name in methods]
    for group in groups:
        with sheet.trying(", ".join(group)):
            found = gradients.measure(gradients.parse([*options, "--methods", *group]))
            for table in found["tables"]:
                for row in table["results"]:
                    if row["variant"] == "mean" and group is not groups[0]:
                        continue
                    sheet.row(
                        f"ms per update: {table['tasks']} tasks, batch {table['batch_size']}",
                        method=row["variant"],
                        **cells_of("ms", row),
                        times_the_mean=row["times_the_mean"]["median"],
                    )
