"""The parts ``pace`` and ``ranks`` of ``benchmarks.gpu``: whole runs in windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.entrants import Entrant, of_command_line
from benchmarks.gpu_setup import Setup
from benchmarks.gpu_sheet import Sheet, cells_of
from benchmarks.gpu_windows import START_LIMIT, note_skipped, ready, windows_of
from benchmarks.measuring import NEVER, spread

ON_CPU = "CPU, 32-true"
"""Compared, and never trained with."""


class Variant(NamedTuple):
    """Options of a whole run."""

    name: str
    options: Mapping[str, Any]
    updates_per_step: int = 1


def run_variants(setup: Setup) -> list[Variant]:
    """Return options with which a run on a GPU is compared.

    More copies of each task make a vector step larger. With as many more updates per vector step,
    there are as many updates per environment step as in the protocol, and acting and stepping are
    waited for less often.
    """
    precision = "trainer.precision"
    graphs = {"model.init_args.compile": "cudagraphs"}
    several = {"rollout.envs_per_task": 4, "rollout.updates_per_step": 4}
    bf16 = {precision: "bf16-mixed"}
    if setup.is_dry:
        return [Variant("32-true", {}), Variant("bf16-mixed, 4 copies", bf16 | several, 4)]
    return [
        Variant("32-true", {}),
        Variant("bf16-mixed", bf16),
        Variant("bf16-mixed, replay on the host", bf16 | {"data.on_device": "false"}),
        Variant("32-true, cudagraphs", graphs),
        Variant("bf16-mixed, cudagraphs", bf16 | graphs),
        Variant("bf16-mixed, 4 copies", bf16 | several, 4),
        Variant("32-true, cudagraphs, 4 copies", graphs | several, 4),
        Variant("bf16-mixed, cudagraphs, 4 copies", bf16 | graphs | several, 4),
        Variant(ON_CPU, {"trainer.accelerator": "cpu"}),
    ]


def paced(name: str, options: Mapping[str, Any], setup: Setup, settle: int) -> Entrant:
    """Return a whole run through the command line whose updates are made in windows."""
    folder = setup.path("runs")
    folder.mkdir(exist_ok=True)
    sizes = setup.sizes
    never = {f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")}
    given = {
        "root": folder,
        "name": "pace",
        "trainer.accelerator": setup.accelerator,
        "trainer.enable_progress_bar": "false",
        "rollout.warmup_steps": 60 if setup.is_dry else 8_000,
        "rollout.total_steps": NEVER,
        **never,
        **sizes.run_options,
        **options,
    }
    command = of_command_line(sizes.configs, given, sizes.run_updates, settle)
    return Entrant(name, "ours", command, folder, START_LIMIT)


def pace(setup: Setup, sheet: Sheet) -> None:
    """Measure whole runs with several options, in turn."""
    variants = {variant.name: variant for variant in run_variants(setup)}
    entrants = {
        name: paced(name, variant.options, setup, setup.sizes.settle)
        for name, variant in variants.items()
    }
    note_runs(entrants, variants, "env steps per second of whole runs", setup, sheet)
    note_skipped(setup.path("runs"), sheet)


def note_runs(
    entrants: Mapping[str, Entrant],
    variants: Mapping[str, Variant],
    title: str,
    setup: Setup,
    sheet: Sheet,
) -> None:
    """Let whole runs take turns, and note a row for each."""
    sizes = setup.sizes
    with ready(entrants, sheet) as able:
        seconds = windows_of(able, setup, sheet)
        for name, values in seconds.items():
            entrant = able[name]
            environments = entrant.about["environments"]
            steps = sizes.run_updates / variants[name].updates_per_step * environments
            rates = spread([steps / value for value in values])
            parts = entrant.fractions()
            sheet.row(
                title,
                variant=name,
                **cells_of("env_steps_per_s", rates),
                updates_per_s=rates["median"] * sizes.run_updates / steps,
                start_up_s=entrant.ready_seconds,
                **{f"{part}_share": share for part, share in parts.items()},
            )


def ranks(setup: Setup, sheet: Sheet) -> None:
    """Measure whole runs of two processes beside one of one, each with the batch of the one."""
    rows = 12 if setup.is_dry else 1280
    numbers = (2,) if setup.is_dry else (1, 2)
    entrants = {}
    variants = {}
    for number in numbers:
        name = f"{number} process" if number == 1 else f"{number} processes"
        options = {
            "trainer.devices": number,
            "data.batch_size": number * rows,
            "rollout.envs_per_task": number,
        }
        if setup.is_dry:
            options["rollout.timeout"] = 60
        variants[name] = Variant(name, options)
        entrants[name] = paced(name, options, setup, setup.sizes.settle)
    note_runs(entrants, variants, "env steps per second of several processes", setup, sheet)
