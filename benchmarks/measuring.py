"""What the benchmarks share: alternating rounds, medians and ratios with spread, the machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.precision import ProductTimes, time_products

REPOSITORY = Path(__file__).parents[1]
PACKAGES = (
    "lightning",
    "gymnasium",
    "numpy",
    "metaworld",
    "dm_control",
    "mujoco",
    "shimmy",
    "stable_baselines3",
)
START_TIME = time.monotonic()
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on: hardware, versions, threads."""
    flags = _cpu_info("flags").split()
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": _cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_features": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
    }


def _cpu_info(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() == key:
                return line.split(":", 1)[1].strip()
    return ""


def described(found: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    hardware = [
        f"{found['cpu']} ({' '.join(found['cpu_features'])})",
        f"{found['cores']} cores",
        found["gpu"],
    ]
    left_out = ("cpu", "cpu_features", "cores", "memory_gib", "gpu", "system")
    return ", ".join(
        [*filter(None, hardware), *(f"{k} {v}" for k, v in found.items() if k not in left_out)]
    )


PRECISIONS = ("32-true", "bf16-mixed")
NEVER = 10**12
"""Environment steps that no run reaches: an interval, or a run's end."""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports these benchmarks, wherever it is started.

    Args:
        variables: further environment variables.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def slow_bfloat16(device: str) -> ProductTimes | None:
    """Return the times of matrix products if bfloat16 is slower than float32 there, else None.

    Args:
        device: ``cpu`` or ``cuda``, where nothing is timed.
    """
    times = time_products() if device == "cpu" else None
    return times if times is not None and times.is_bfloat16_slower else None


def add_precisions(parser: argparse.ArgumentParser) -> None:
    """Add ``--precisions``, whose default ``choose_precisions`` sets."""
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        help="of ours, each a variant (default both, without bf16-mixed where it is slower)",
    )


def choose_precisions(options: argparse.Namespace) -> None:
    """Set ``options.precisions`` where none were given: both, but not a bfloat16 that is slower.

    ``options.left_out`` is set to a sentence that says so, or to nothing.
    """
    options.left_out = ""
    if options.precisions is not None:
        return
    options.precisions = list(PRECISIONS)
    times = slow_bfloat16(options.device)
    if times is not None:
        options.precisions.remove("bf16-mixed")
        options.left_out = (
            f"bf16-mixed is left out: matrix products take {times.slowdown:.1f} times as long"
            " in bfloat16 as in float32 on this processor; --precisions bf16-mixed measures it"
        )
        say(options.left_out)


def positive(text: str) -> int:
    """Return a number from the command line that must be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number


def option_and_value(text: str) -> str:
    """Return an option of the command line with its value, as ``--also`` takes it."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text}: takes OPTION=VALUE, as rollout.num_workers=0")
    return text


def parser_of(name: str, text: str | None, repeats: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; ``--repeats`` only with a default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of the table"
    )
    if repeats is not None:
        text = "rounds, each measuring every variant once (default %(default)s)"
        parser.add_argument("--repeats", type=positive, default=repeats, help=text)
    return parser


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program as a wrong option does where a ``ConfigurationError`` is raised."""
    try:
        yield
    except ConfigurationError as error:
        parser.error(str(error))


def require(module: str, instead: str) -> None:
    """Check that a peer is installed.

    Args:
        module: the peer's name.
        instead: what to do without it.

    Raises:
        ConfigurationError: naming the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(
            f'{module} is not installed: pip install "mtrl_lightning[bench]", or {instead}'
        )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def times_as_fast(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast as a reference something is, round by round, as a spread.

    Args:
        seconds: of each round.
        reference: seconds of the same rounds.
    """
    return spread([b / a for a, b in zip(seconds, reference, strict=True)])


def alternate(
    variants: Mapping[str, Callable[[], float]], repeats: int, minutes: float = float("inf")
) -> dict[str, list[float]]:
    """Measure every variant once per round, in turn, so that other load hits all alike.

    Args:
        variants: each measures itself and returns seconds.
        repeats: number of rounds, at least 1.
        minutes: since the program's start, after which no further round is started.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for k in range(repeats):
        if k > 0 and time.monotonic() - START_TIME > minutes * 60:
            say(f"{k} of {repeats} rounds: the time is over")
            break
        for name, measure in variants.items():
            found[name].append(measure())
    return found


def quickest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    """Return the name with the smallest median; None if none of the names was measured."""
    return min(
        (n for n in names if n in seconds),
        key=lambda n: statistics.median(seconds[n]),
        default=None,
    )


def results(
    seconds: Mapping[str, Sequence[float]], references: Sequence[str | None], scale: float = 1e3
) -> list[dict[str, Any]]:
    """Return a row for each variant: its rounds, their spread, and its speed beside the references.

    Args:
        seconds: of each variant's rounds.
        references: names of variants, of which None are left out.
        scale: of what is shown, 1e3 for milliseconds.
    """
    rows = []
    for name, values in seconds.items():
        scaled = [value * scale for value in values]
        ratios = {
            r: times_as_fast(values, seconds[r]) for r in dict.fromkeys(references) if r is not None
        }
        rows.append(
            {"variant": name, "rounds": scaled, **spread(scaled), "times_as_fast_as": ratios}
        )
    return rows


def proportional_set_size(pid: int | None = None) -> float:
    """Return the MiB of a process and its descendants; shared pages are divided among sharers."""
    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found = one.memory_full_info()
            total += getattr(found, "pss", found.uss)  # only Linux knows the proportional size
    return total / 2**20


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, the first of them a header; numbers are right-aligned."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def shown(found: Mapping[str, float], digits: int = 2) -> str:
    """Return a spread as text: ``median [min, max]``."""
    return f"{found['median']:.{digits}f} [{found['min']:.{digits}f}, {found['max']:.{digits}f}]"


def shares(fractions: Mapping[str, float]) -> str:
    """Return shares of the time as text, such as ``update 60%, step 30%``."""
    return ", ".join(f"{name} {part:.0%}" for name, part in fractions.items()) or "-"


def report(
    title: str, rows: Sequence[Mapping[str, Any]], unit: str, columns: Sequence[str] = ()
) -> str:
    """Return a table of ``results``.

    Args:
        title: what is compared.
        rows: what ``results`` returned, perhaps with more in it.
        unit: of the medians.
        columns: further entries of the rows to show.
    """
    references = list(dict.fromkeys(r for row in rows for r in row["times_as_fast_as"]))
    lines = [["variant", unit, *(f"times as fast as {r}" for r in references), *columns]]
    for row in rows:
        ratios = [shown(row["times_as_fast_as"][r]) for r in references]
        lines.append(
            [row["variant"], shown(row), *ratios, *(str(row.get(c, "-")) for c in columns)]
        )
    return f"{title}: median [smallest, largest] of {len(rows[0]['rounds'])} rounds\n{table(lines)}"


def say(text: str) -> None:
    """Print progress with the seconds since the program's start."""
    print(f"[{time.monotonic() - START_TIME:5.0f} s] {text}", file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """Let a signal end the program as an error does, so that no process is left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def heading(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the JSON of every benchmark begins with."""
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "json"
    }
    return {"benchmark": name, "machine": machine(), "settings": settings}


def program(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    text_of: Callable[[Any], str],
) -> Callable[[Sequence[str] | None], int]:
    """Return a benchmark's ``main``, which measures, prints, and returns the exit code.

    Args:
        parse: returns the options.
        measure: returns the JSON's content.
        text_of: returns the content as tables.
    """

    def main(args: Sequence[str] | None = None) -> int:
        options = parse(args)
        content = measure(options)
        finish(content, text_of(content), options.json)
        return 0

    return main


def finish(content: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print the JSON, or the machine and the tables."""
    print(json.dumps(content) if as_json else f"{described(content['machine'])}\n\n{text}")
