"""How long updates from images take, how fast images are encoded, and the memory of a run.

``python -m benchmarks.encoders`` has three parts, all with random images in stacks of 3 frames:

  updates  one update of SAC and the forward pass of its encoder, for each encoder, precision and
           memory format; a frame is one observation, as an environment step gives it
  methods  one update with each method that trains an encoder of 64 x 64 pixels
  memory   what a replay and updates in the first precision add to the memory of a process of
           their own, beside the estimate that ``fit`` prints for the replay

All learn 4 tasks with the networks of ``configs/experiment/pixels_drq.yaml``, and update the actor
and the targets every second time, as in ``configs/algorithm/sac_ae.yaml``. The variants of a table
take turns in one process. A run acts in 32-true, also where it trains in bf16-mixed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from benchmarks.measuring import (
    add_precisions,
    alternate,
    choose_precisions,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    report,
    results,
    say,
    shown,
    spread,
)
from benchmarks.measuring import table as table_of
from benchmarks.pixels import (
    METHODS,
    NUM_TASKS,
    RECORDED,
    STRIDES,
    Encoding,
    encode,
    pixel_replay,
    pixel_sac,
    pixel_spec,
)
from benchmarks.replay import timed
from benchmarks.updaters import Work, direct_update
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.types import TransitionBatch

PARTS = ("updates", "methods", "memory")


def parse_encoding(text: str) -> Encoding:
    """Return the encoder that ``NAME:SIZE`` on the command line names."""
    name, _, size = text.partition(":")
    if name not in STRIDES or not size.isdecimal():
        known = " or ".join(STRIDES)
        raise argparse.ArgumentTypeError(f"{text}: takes NAME:SIZE, where NAME is {known}")
    return Encoding(name, int(size))


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("encoders", __doc__, repeats=5)
    add = parser.add_argument
    encodings = [Encoding("pixels", 84), Encoding("pixels_small", 64), Encoding("pixels_small", 48)]
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default all)")
    add(
        "--encoders",
        nargs="+",
        type=parse_encoding,
        default=encodings,
        metavar="NAME:SIZE",
        help="of the updates and the memory"
        f" (default {' '.join(f'{name}:{size}' for name, size in encodings)})",
    )
    add(
        "--method_encoder",
        type=parse_encoding,
        default=Encoding("pixels_small", 64),
        metavar="NAME:SIZE",
        help="of the methods (default pixels_small:64)",
    )
    add("--rows", type=positive, default=32, help="of a batch for each task (default %(default)s)")
    add("--width", type=positive, default=256, help="of the hidden layers (default %(default)s)")
    add("--depth", type=positive, default=2, help="number of hidden layers (default %(default)s)")
    add(
        "--updates",
        type=positive,
        default=4,
        help="in a round, an even number (default %(default)s)",
    )
    add(
        "--calls",
        type=positive,
        default=5,
        help="of the encoder in a round; ten times as many with one image (default %(default)s)",
    )
    add(
        "--capacity",
        type=positive,
        default=100_000,
        help="transitions of the replay whose memory is measured (default %(default)s)",
    )
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_precisions(parser)
    add("--threads", type=positive, default=1, help="PyTorch's (default %(default)s)")
    options = parser.parse_args(args)
    if options.updates % 2 == 1:
        parser.error(
            f"--updates is {options.updates}: give an even number, since every second update"
            " includes the actor"
        )
    choose_precisions(options)
    return options


def work_of(options: argparse.Namespace, precision: str) -> Work:
    """Return what is updated, and how."""
    return Work(
        tasks=NUM_TASKS,
        batch_size=options.rows * NUM_TASKS,
        width=options.width,
        depth=options.depth,
        precision=precision,
        compile="none",
        device=options.device,
        threads=options.threads,
        steps=options.updates,
        settle=0,
    )


def batch_of_images(size: int, options: argparse.Namespace) -> TransitionBatch:
    """Return a batch on the device, as a replay gives it."""
    buffer = pixel_replay(pixel_spec(size), RECORDED * NUM_TASKS)
    batch = buffer.sample(options.rows * NUM_TASKS)
    return move_data_to_device(batch, torch.device(options.device))


def update_table(encoding: Encoding, options: argparse.Namespace) -> dict[str, Any]:
    """Let precisions and memory formats of an encoder take turns; return its tables' content."""
    say(str(encoding))
    batch = batch_of_images(encoding.size, options)
    batch_size = batch.reward_Rn.numel()
    first = TransitionBatch(*(column[:1, :1] for column in batch[:-1]))  # type: ignore[arg-type]
    variants = []
    measures: dict[str, Callable[[], float]] = {}
    for precision, channels_last in itertools.product(options.precisions, (False, True)):
        variant = f"{precision}, channels_last {str(channels_last).lower()}"
        variants.append(variant)
        work = work_of(options, precision)
        sac = pixel_sac(work, encoding, channels_last)
        update = partial(direct_update(work, sac), batch)
        measures[f"updates: {variant}"] = timed(update, options.updates)
        for rows, calls in ((first, 10 * options.calls), (batch, options.calls)):
            call = partial(encode, work, sac, rows)
            measures[f"{rows.reward_Rn.numel()}: {variant}"] = timed(call, calls)
    alternate(measures, 1)  # memory is touched, code is loaded
    seconds = alternate(measures, options.repeats)
    tables = {}
    for what, number in {"updates": 1, "1": 1, str(batch_size): batch_size}.items():
        found = {variant: seconds[f"{what}: {variant}"] for variant in variants}
        tables[what] = results(found, variants[:1])
        for row in tables[what]:
            row["per_second"] = spread([number / value for value in found[row["variant"]]])
    return {"encoder": str(encoding), "batch_size": batch_size, "results": tables}


def method_table(precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the methods take turns; return a table's content."""
    say(f"methods, {precision}")
    batch = batch_of_images(options.method_encoder.size, options)
    work = work_of(options, precision)
    measures = {}
    for method in METHODS:
        sac = pixel_sac(work, options.method_encoder, method=method)
        measures[method] = timed(partial(direct_update(work, sac), batch), options.updates)
    alternate(measures, 1)
    seconds = alternate(measures, options.repeats)
    rows = results(seconds, [])
    for row in rows:
        pairs = zip(seconds[row["variant"]], seconds["sac"], strict=True)
        row["times_sac"] = spread([value / sac for value, sac in pairs])
    return {"precision": precision, "encoder": str(options.method_encoder), "results": rows}


def memory_of(encoding: Encoding, options: argparse.Namespace) -> dict[str, float]:
    """Return the MiB of a replay and of updates; measured in a process that does nothing else."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    spec = pixel_spec(encoding.size)
    before = resident_mebibytes("VmRSS")
    buffer = pixel_replay(spec, options.capacity)
    filled = resident_mebibytes("VmRSS")
    storage = buffer.storage
    estimated = replay_bytes(spec, storage.fields, storage.num_envs, storage.capacity)
    work = work_of(options, options.precisions[0])
    update = direct_update(work, pixel_sac(work, encoding))
    for _ in range(4):
        update(move_data_to_device(buffer.sample(work.batch_size), torch.device(work.device)))
    peak = resident_mebibytes("VmHWM")
    return {
        "before": before,
        "replay_estimated": estimated / 2**20,
        "replay_measured": filled - before,
        "updates": peak - filled,
        "peak": peak,
    }


def resident_mebibytes(name: str) -> float:
    """Return this process' resident memory, ``VmRSS``, or its peak, ``VmHWM``, as Linux has it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 2**10


def in_own_process(call: Callable[[], Any]) -> Any:
    """Return what a call returns in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call).result()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does
    memory = {}
    if "memory" in options.parts:
        for encoding in options.encoders:
            say(f"memory, {encoding}")
            memory[str(encoding)] = in_own_process(partial(memory_of, encoding, options))
    updates = []
    methods = []
    if "updates" in options.parts:
        updates = [update_table(encoding, options) for encoding in options.encoders]
    if "methods" in options.parts:
        methods = [method_table(precision, options) for precision in options.precisions]
    return {
        **heading("encoders", options),
        "unit": "ms",
        "updates": updates,
        "methods": methods,
        "memory_mib": memory,
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    where = f"{settings['device']}, {settings['threads']} threads of PyTorch"
    parts = [settings["left_out"]] if settings["left_out"] else []
    for found in content["updates"]:
        for what, table in found["results"].items():
            title = f"updates of SAC, batch {found['batch_size']}"
            counted = "updates/s"
            if what != "updates":
                title = f"encoding {what} at once"
                counted = "frames/s"
            rows = [{**row, counted: f"{row['per_second']['median']:,.1f}"} for row in table]
            parts.append(report(f"{found['encoder']}, {title}; {where}", rows, "ms", (counted,)))
    for found in content["methods"]:
        rows = [{**row, "times sac": shown(row["times_sac"])} for row in found["results"]]
        title = f"methods, {found['encoder']}, {found['precision']}; {where}"
        parts.append(report(title, rows, "ms", ("times sac",)))
    if content["memory_mib"]:
        names = next(iter(content["memory_mib"].values()))
        lines = [["MiB of a process", *(name.replace("_", ", ") for name in names)]]
        for encoder, found in content["memory_mib"].items():
            lines.append([encoder, *(f"{number:,.0f}" for number in found.values())])
        title = f"a replay of {settings['capacity']:,} transitions, and updates"
        parts.append(f"{title}\n{table_of(lines)}")
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
