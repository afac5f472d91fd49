"""Everything that needs a GPU, in one command and at most 40 minutes.

``python -m benchmarks.gpu`` runs, one after the other:

  tests      the tests that need a GPU (marker ``cuda``)
  updates    one update of SAC at MT10's sizes with networks of width 400, 1024 and 4096, at the
             quickstart's sizes, and of PPO's minibatches: eager, compiled and with CUDA graphs, in
             both precisions, beside a plain PyTorch loop and the CPU
  gradients  an update with every gradient method, as a multiple of the mean's time
  replay     drawing a batch from the host's memory, pinned or not, and from the GPU's
  pixels     an update from images, and sampling batches of them
  pace       environment steps per second of whole MT10 runs with several options
  ranks      whole runs of two processes, if there are two GPUs
  training   MT10 for some minutes with the quickest of these options, and the projection to 20
             million environment steps

Each part is a process of its own with a time limit. One that fails is reported and the others go
on; then the exit status is 1. ``report.md`` and ``report.json`` in the folder are rewritten after
each part. Without a GPU it says so, and runs all parts on the CPU with tiny sizes: their numbers
mean nothing, but the program is known to work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu_parts import PARTS, sheet_path
from benchmarks.gpu_setup import Setup
from benchmarks.gpu_sheet import read_sheet, write_json
from benchmarks.measuring import (
    REPOSITORY,
    described,
    end_on_sigterm,
    environment,
    machine,
    say,
)
from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError

LIMITS = {
    "tests": 270.0,
    "updates": 540.0,
    "gradients": 150.0,
    "replay": 90.0,
    "pixels": 180.0,
    "pace": 300.0,
    "ranks": 120.0,
    "training": 120.0,
}
"""Seconds that a part may take; ``--minutes`` are added for training."""
DRY_LIMIT = 120.0
"""Seconds of each part of a dry run; all of them take some 40 s on two idle cores."""
END_TIMEOUT = 10.0
"""Seconds that a part has to end after a signal."""
FURTHER_PACKAGES = ("numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
FAILED_STATES = ("failed", "over its time")
"""States of a part that make the exit status 1."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="(default all); with the same folder, other parts of its report stay",
    )
    add("--minutes", type=float, default=10.0, help="of training (default %(default)s; dry 0.1)")
    add(
        "--folder",
        type=Path,
        default=Path("runs/gpu"),
        help="of the report and of what the parts print (default %(default)s)",
    )
    add("--dry", action="store_true", help="run on the CPU with tiny sizes, also where a GPU is")
    add("--commit", help="of the code, where git does not know it")
    options = parser.parse_args(args)
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}: give more than 0")
    return options


def limit_of(part: str, minutes: float, is_dry: bool) -> float:
    """Return the seconds that a part may take."""
    if is_dry:
        return DRY_LIMIT
    return LIMITS[part] + (60 * minutes if part == "training" else 0)


def heading(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a report begins with: hardware, versions, command, commit."""
    found = machine()
    for name in FURTHER_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return {
        "benchmark": "gpu",
        "is_dry": options.dry,
        "machine": found,
        "gpus": gpus(),
        "commit": options.commit or commit(),
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *options.given]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "parts": {},
    }


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU."""
    fields = "name,memory.total,driver_version,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return _output(command).splitlines()


def commit() -> str:
    """Return the commit of the clone, and whether files were changed."""
    found = _output(["git", "rev-parse", "HEAD"])
    if not found:
        return "unknown"
    is_changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return f"{found} with changes" if is_changed else found


def _output(command: Sequence[str]) -> str:
    """Return what a command prints; nothing if it is not there or fails."""
    try:
        ended = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def reason_against(part: str, is_dry: bool) -> str | None:
    """Return why a part cannot be run here; None if it can."""
    number = torch.cuda.device_count()
    if part == "ranks" and not is_dry and number < 2:
        return f"{number} device" if number == 1 else f"{number} devices"
    return None


def run(setup: Setup) -> dict[str, Any]:
    """Run a part in a process of its own; return its state and what it has found."""
    reason = reason_against(setup.part, setup.is_dry)
    if reason is not None:
        say(f"{setup.part}: not run: {reason}")
        return {"state": f"not run: {reason}", "seconds": 0.0}
    sheet_path(setup).unlink(missing_ok=True)  # of a former call
    say(f"{setup.part}: starts, has {setup.limit:.0f} s")
    begin = time.monotonic()
    returncode = in_own_process(setup)
    found = read_sheet(sheet_path(setup))
    if returncode is None:
        state = "over its time"
    elif returncode or found["failures"]:
        state = "failed"
    else:
        state = "done"
    if returncode and not found["failures"]:
        found["failures"].append({"what": setup.part, "error": f"ended with {returncode}"})
    seconds = time.monotonic() - begin
    say(f"{setup.part}: {state} after {seconds:.0f} s")
    return {"state": state, "seconds": seconds, **found}


def run_all(setups: Sequence[Setup], at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run parts, and yield the name of each with what it has found, in their order.

    Args:
        setups: the parts.
        at_once: parts that run at the same time, where times mean nothing.
    """
    if at_once == 1:
        for setup in setups:
            yield setup.part, run(setup)
        return
    with ThreadPoolExecutor(at_once) as pool:
        yield from zip([setup.part for setup in setups], pool.map(run, setups), strict=True)


def in_own_process(setup: Setup) -> int | None:
    """Run a part in a process of its own; return its exit code, None if it was over its time."""
    variables = {"OMP_NUM_THREADS": "1"} if setup.is_dry else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_parts", json.dumps(asdict(setup))],
        cwd=REPOSITORY,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        return process.wait(setup.limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT)
    for one in started:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.kill()
    process.wait()


def markdown(content: Mapping[str, Any]) -> str:
    """Return the report as text."""
    lines = ["# Report of a GPU", ""]
    if content["is_dry"]:
        lines += [
            "**A dry run on the CPU with tiny sizes: it shows that the program works, and its"
            " numbers mean nothing.**",
            "",
        ]
    hardware = content["gpus"] or ["no GPU"]
    lines += [f"- GPU: {text}" for text in hardware]
    lines += [
        f"- {described(content['machine'])}, {content['machine']['memory_gib']} GiB of memory",
        f"- commit {content['commit']}",
        f"- `{content['command']}`, started {content['started']}",
        "",
    ]
    rows = [
        {
            "part": name,
            **{key: part[key] for key in ("state", "seconds", "started")},
            "commit": part["commit"][:7],
        }
        for name, part in content["parts"].items()
    ]
    lines += [*markdown_table(rows), ""]
    for name, part in content["parts"].items():
        if part["state"].startswith("not run"):
            continue
        lines += [f"## {name}", ""]
        for note in part["notes"]:
            lines += [note, ""]
        for title, found in part["tables"].items():
            lines += [f"### {title}", "", *markdown_table(found), ""]
        for failure in part["failures"]:
            lines += [f"### failed: {failure['what']}", "", "```", failure["error"], "```", ""]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with all columns that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(name)) for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(value: Any) -> str:
    """Return a cell's text: numbers with three digits or more, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 1_000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def former_parts(path: Path, is_dry: bool) -> dict[str, Any]:
    """Return the parts of a report that is there already.

    Raises:
        ConfigurationError: if it is of a run on a GPU and this is a dry run, or the reverse.
    """
    if not path.is_file():
        return {}
    former: dict[str, Any] = json.loads(path.read_text())
    if former["is_dry"] != is_dry:
        kind = "a dry run" if former["is_dry"] else "a run on a GPU"
        raise ConfigurationError(f"{path} is of {kind}: give another --folder")
    parts: dict[str, Any] = former["parts"]
    return parts


def main(args: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    options = parse(args)
    options.given = list(sys.argv[1:] if args is None else args)
    if not options.dry and not torch.cuda.is_available():
        say("no GPU that PyTorch can use: a dry run on the CPU with tiny sizes, no measurement")
        options.dry = True
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    content = heading(options)
    report = folder / "report.json"
    try:
        content["parts"] = former_parts(report, options.dry)
    except ConfigurationError as error:
        say(f"error: {error}")
        return 2
    minutes = 0.1 if options.dry else options.minutes
    setups = [
        Setup(part, str(folder), options.dry, minutes, limit_of(part, minutes, options.dry))
        for part in options.parts
    ]
    for part, found in run_all(setups, usable_cores() if options.dry else 1):
        when = {"commit": content["commit"], "started": content["started"]}
        content["parts"][part] = {**found, **when}
        write_json(report, content)
        (folder / "report.md").write_text(markdown(content))
    states = {part: content["parts"][part]["state"] for part in options.parts}
    print("\n".join(f"{part}: {state}" for part, state in states.items()))
    print(f"report: {folder / 'report.md'}")
    return int(any(state in FAILED_STATES for state in states.values()))


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
