"""What the benchmarks share: options, processes that take turns, statistics, and tables.

Every variant of a comparison is measured once per round, in turn, so that other load on the machine
affects all alike. Only ratios within a run can be compared with another machine.

PyTorch is imported where it is needed: processes that only step environments do without it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.utils.cores import usable_cores
from mtrl_lightning.utils.text import UNKNOWN, number, text_table, with_interval

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("torch", "lightning", "gymnasium", "numpy", "metaworld", "mujoco", "stable_baselines3")
"""Whose versions are printed with a result."""
NEVER = 10**12
"""Environment steps that no run reaches: an interval, or a run's end."""
SB3 = ("stable_baselines3", "bench")
"""The module, and what pip installs it with."""
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""How many of each unit a second has."""


# ---- the command line ----


class Table(NamedTuple):
    """A result: rows with a value per column."""

    title: str
    rows: list[dict[str, Any]]


def positive(text: str) -> int:
    """Return a number from the command line that must be 1 or more."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return value


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows a description as it is written, and the default of each option."""


def parser_of(
    name: str, description: str | None, device: bool = False, precisions: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark.

    Args:
        name: of the benchmark's module.
        description: for ``--help``.
        device: whether it has ``--device``.
        precisions: whether it has ``--precisions`` and ``--threads``.
    """
    prog = f"python -m benchmarks.{name}"
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=_Help)
    add = parser.add_argument
    add("--rounds", type=positive, default=5, help="each measures every variant, in turn")
    if device:
        add("--device", choices=["cpu", "cuda"], help="None: a GPU if there is one")
    if precisions:
        choices = ["32-true", "bf16-mixed"]
        text = "each a variant of ours"
        add("--precisions", nargs="+", choices=choices, default=choices, help=text)
        add("--threads", type=positive, help="of PyTorch; None: its own choice, one per core")
    return parser


def run(
    parser: argparse.ArgumentParser,
    args: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Sequence[Table]],
) -> None:
    """Parse the command line, measure, and print the tables with the machine.

    Args:
        parser: of the benchmark.
        args: of the command line; None for those of this process.
        measure: returns the tables of the options. A ``ConfigurationError`` is a wrong option.
    """
    # SIGTERM ends it as an error does, so that no process is left
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parser.parse_args(args)
    if "device" in options and options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if args is None else args)])
    origin = f"{command}\n{commit()}\n{machine()}"  # as it is before the measurement
    try:
        tables = measure(options)
    except ConfigurationError as error:
        parser.error(str(error))
    print("\n\n".join([origin, *map(table_text, tables)]))


# ---- statistics ----


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of each round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def rows_of(
    seconds: Mapping[str, Sequence[float]],
    references: Sequence[str] = (),
    unit: str = "ms",
    rate: str | None = None,
    amount: float = 1.0,
) -> list[dict[str, Any]]:
    """Return a row per variant: the spread of its rounds, and its speed relative to others.

    Args:
        seconds: of each variant's rounds.
        references: names of variants; those that were not measured are left out.
        unit: of the times in the rows, a name in ``UNITS``.
        rate: name of a column with what is made in a second; None for none.
        amount: that is made in the time of a round.
    """
    known = [name for name in dict.fromkeys(references) if name in seconds]
    rows = []
    for name, values in seconds.items():
        row: dict[str, Any] = {"variant": name}
        row[unit] = spread([value * UNITS[unit] for value in values])
        row |= {f"times as fast as {other}": ratios(seconds[other], values) for other in known}
        if rate is not None:
            row[rate] = spread([amount / value for value in values])
        rows.append(row)
    return rows


def alternate(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure every variant once per round, in turn; each returns its seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            seconds[name].append(measure())
    return seconds


def turns(
    calls: Mapping[str, Callable[[], Any]], times: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of calls in this process, in turn, after one round that is not counted.

    Args:
        calls: what is measured.
        times: how often each is called in a round; its seconds are the mean.
        rounds: number of rounds.
    """
    measures = {name: timed(call, times) for name, call in calls.items()}
    alternate(measures, 1)  # memory is touched, code is loaded
    return alternate(measures, rounds)


def timed(call: Callable[[], Any], times: int = 1) -> Callable[[], float]:
    """Return a function that measures the seconds of one call, as the mean of several."""

    def measure() -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronize()
        return (time.perf_counter() - start) / times

    return measure


def synchronize() -> None:
    """Wait for the GPU, if one is used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- processes that take turns ----


class Pacer:
    """Run a window of steps for each request of the parent process, and send its seconds.

    Args:
        steps: of a window: vector steps, or updates.
        settle: steps before the first window.
        drain: returns the seconds spent on named things since the last call.
        about: is sent when it is ready for the first window.
    """

    connection: Connection
    """To the parent process; set in the process of a variant."""

    def __init__(
        self,
        steps: int,
        settle: int,
        drain: Callable[[], dict[str, float]] = dict,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._steps = steps
        self._left = settle
        self._drain = drain
        self._about = dict(about or {})
        self._start_time: float | None = None

    def tick(self) -> bool:
        """Count a step that is about to start; wait at a window's end; False after the last."""
        if self._left == 0:
            synchronize()
            Pacer.connection.send(self._measured())
            try:
                Pacer.connection.recv()
            except EOFError:
                return False
            self._drain()
            self._left = self._steps
            self._start_time = time.perf_counter()
        self._left -= 1
        return True

    def _measured(self) -> dict[str, Any]:
        if self._start_time is None:
            return self._about
        seconds = time.perf_counter() - self._start_time
        shares = {name: spent / seconds for name, spent in self._drain().items()}
        return {"seconds": seconds, "shares": shares}


class Variant:
    """A process that runs one window at a time and waits between them.

    Args:
        name: in the table.
        function: of the process; it has to use a ``Pacer``.
        **options: of the function.
    """

    def __init__(self, name: str, function: Callable[..., None], **options: Any) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        """What it sent when it was ready."""
        self.memory_mib = 0.0
        """Of all its processes, after the last window of ``take_turns``."""
        self._call = function, options
        self._windows: list[dict[str, Any]] = []

    def start(self) -> None:
        """Start it and wait until its warm-up is over."""
        self._connection, theirs = multiprocessing.Pipe()
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (close)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, self._log.name, *self._call))
        self._process.start()
        theirs.close()
        self.about = self._answer()

    def window(self) -> float:
        """Let it run a window; return the window's seconds."""
        self._windows.append(self.ask("go"))
        return self._windows[-1]["seconds"]

    def ask(self, request: Any) -> dict[str, Any]:
        """Send a request; return the answer."""
        self._connection.send(request)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        while not self._connection.poll(1.0):
            if not self._process.is_alive():
                break
        else:
            with contextlib.suppress(EOFError):
                return self._connection.recv()
        printed = Path(self._log.name).read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.name} ended; it printed:\n{printed}")

    def shares(self) -> dict[str, float]:
        """Return the median share of the time that named things took, largest first."""
        windows = [window["shares"] for window in self._windows]
        names = {name for shares in windows for name in shares}
        medians = {n: statistics.median(shares.get(n, 0.0) for shares in windows) for n in names}
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """End it with all that it started."""
        self._connection.close()
        self._process.join(10)  # it ends by itself if it waits for a request
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._log.close()


def _serve(
    connection: Connection, log: str, function: Callable[..., None], options: dict[str, Any]
) -> None:
    """Call the function of a variant in its process, whose output goes to a file."""
    os.setsid()  # what it starts ends with it
    with open(log, "wb", buffering=0) as file:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file.fileno(), descriptor)
    Pacer.connection = connection
    function(**options)


@contextlib.contextmanager
def started(variants: Sequence[Variant]) -> Iterator[None]:
    """Start processes one after the other, and end them."""
    with contextlib.ExitStack() as stack:
        for variant in variants:
            say(f"{variant.name}: start-up and warm-up")
            stack.callback(variant.close)
            variant.start()
        yield


def take_turns(variants: Sequence[Variant], rounds: int, steps: int = 1) -> dict[str, list[float]]:
    """Start processes, run their windows in turn, and end them.

    Args:
        variants: not started yet.
        rounds: windows of each.
        steps: of a window.

    Returns:
        The seconds per step in each window, by the variants' names.
    """
    with started(variants):
        seconds = alternate({one.name: one.window for one in variants}, rounds)
        for one in variants:
            one.memory_mib = proportional_set_size(one.pid)
    return {name: [value / steps for value in values] for name, values in seconds.items()}


def proportional_set_size(pid: int | None = None) -> float:
    """Return the MiB of a process and its descendants; shared pages are divided among sharers."""
    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            memory = one.memory_full_info()
            total += getattr(memory, "pss", memory.uss)  # only Linux has the proportional size
    return total / 2**20


# ---- the result ----


def commit() -> str:
    """Return the commit of the clone, and whether files were changed."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    result = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown commit"


def machine() -> str:
    """Return the hardware and the versions of a measurement."""
    import torch

    parts = [_processor(), f"{usable_cores()} cores", f"Python {platform.python_version()}"]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name(0))
    parts += [f"{name} {version}" for name, version in installed_versions(PACKAGES).items()]
    return ", ".join(parts)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table_text(table: Table) -> str:
    """Return a table with its title: a column per entry of its rows."""
    columns = list(dict.fromkeys(key for row in table.rows for key in row))
    lines = [columns, *([cell(row.get(name)) for name in columns] for row in table.rows)]
    return f"{table.title}\n{text_table(lines, num_texts=1)}"


def cell(value: Any) -> str:
    """Return a value of a row as text.

    Spreads are ``median [smallest, largest]``; shares of the time are percentages.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, Mapping):
        if "median" in value:
            decimals = 2 if abs(value["median"]) >= 0.1 else 4
            return with_interval(value["median"], (value["min"], value["max"]), decimals)
        return ", ".join(f"{name} {part:.0%}" for name, part in value.items()) or UNKNOWN
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
