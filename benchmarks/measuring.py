"""What the benchmarks share: options, processes that take turns, statistics, and the result.

Every variant of a comparison is measured once per round, in turn, so that other load on the machine
hits all alike. Only ratios within a run can be compared with another machine.

PyTorch is imported where it is needed: processes that only step environments do without it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.formats import UNKNOWN, number, text_table, with_interval

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
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
START_TIME = time.monotonic()
COMMAND = ["-m", "mtrl_lightning"]
NEVER = 10**12
"""Environment steps that no run reaches: an interval, or a run's end."""
SB3 = ("stable_baselines3", '"mtrl_lightning[bench]"')
"""The module, and what pip installs it with."""
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""How many of each unit a second has."""
PIPE = "BENCHMARK_PIPE"
"""Environment variable with the descriptor that a process writes its windows to."""
WINDOW_TIMEOUT = 3_600.0
"""Seconds to wait for a window, or for the end of start-up and warm-up: machines may be slow."""


# ---- the command line ----


def positive(text: str) -> int:
    """Return a number from the command line that must be 1 or more."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return value


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows a description as it is written, and the default of each option."""


class Program:
    """A benchmark's command line, which measures and prints the result or writes it to a file.

    Args:
        name: of the benchmark's module.
        description: for ``--help``.
        add_options: adds the benchmark's own options by the ``add_argument`` that it gets.
        measure: returns the content of the JSON: ``tables``, and more that is not printed. It may
            add to the options' ``notes``. The exit code is 1 if the content's ``ok`` is false.
        check: completes the options. Its ``ConfigurationError`` ends the program as a wrong option
            does.
        rounds: default of ``--rounds``; None for a program without it.
        device: whether it has ``--device``.
        precisions: whether it has ``--precisions``, for which it needs a device.
        threads: whether it has ``--threads``.
    """

    def __init__(
        self,
        name: str,
        description: str | None,
        add_options: Callable[[Callable[..., Any]], None],
        measure: Callable[[argparse.Namespace], Mapping[str, Any]],
        check: Callable[[argparse.Namespace], object] = lambda options: None,
        *,
        rounds: int | None = 5,
        device: bool = False,
        precisions: bool = False,
        threads: bool = False,
    ) -> None:
        self._name = name
        self._measure = measure
        self._check = check
        self._parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}", description=description, formatter_class=_Help
        )
        add = self._parser.add_argument
        text = "print the result as JSON, or write it to a file and print tables"
        add("--json", nargs="?", const="-", metavar="FILE", help=text)
        if rounds is not None:
            text = "each measures every variant, in turn"
            add("--rounds", type=positive, default=rounds, help=text)
        if device:
            add("--device", choices=["cpu", "cuda"], help="None: a GPU if there is one")
        if precisions:
            choices = ["32-true", "bf16-mixed"]
            text = "each a variant of ours"
            add("--precisions", nargs="+", choices=choices, default=choices, help=text)
        if threads:
            add("--threads", type=positive, help="of PyTorch; None: its own choice, one per core")
        add_options(add)

    def options_of(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options of words, or of this process, with ``command`` and ``notes``."""
        options = self._parser.parse_args(args)
        words = sys.argv[1:] if args is None else args
        options.command = shlex.join([*self._parser.prog.split(), *words])
        options.notes = []
        if "device" in options and options.device is None:
            import torch

            options.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._check(options)
        except ConfigurationError as error:
            self._parser.error(str(error))
        return options

    def main(self, args: Sequence[str] | None = None) -> int:
        """Measure; return the exit code."""
        # SIGTERM ends it as an error does, so that no process is left
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        options = self.options_of(args)
        for note in options.notes:
            say(note)
        commit()  # before anything is measured, which may take hours
        measured = self._measure(options)
        own = ("json", "command", "notes")
        settings = {key: value for key, value in vars(options).items() if key not in own}
        content = {"benchmark": self._name, **provenance(options.command), **measured}
        content |= {"settings": settings, "notes": options.notes}
        as_json = functools.partial(json.dumps, content, default=str)
        if options.json == "-":
            print(as_json())
        else:
            if options.json is not None:
                Path(options.json).write_text(as_json(indent=1) + "\n")
            known = {name: value for name, value in content["machine"].items() if value}
            print(", ".join(f"{name} {value}" for name, value in known.items()))
            print(content["command"], content["commit"], sep="\n")
            print(f"\n{text_of_tables(content)}")
        return int(not content.get("ok", True))


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
    """Return a row per variant: the spread of its rounds, and its speed beside the references.

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
        scaled = [value * UNITS[unit] for value in values]
        row: dict[str, Any] = {"variant": name, unit: spread(scaled)}
        row |= {f"times as fast as {other}": ratios(seconds[other], values) for other in known}
        if rate is not None:
            row[rate] = spread([amount / value for value in values])
        rows.append(row | {"rounds": scaled})
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
    """Run a window of steps for each line of the standard input, and write its seconds as JSON.

    Args:
        steps: of a window: vector steps, or updates.
        settle: steps before the first window.
        drain: returns the seconds spent on named things since the last call.
        about: is written when it is ready for the first window.
        examine: returns further results after a window; its time does not count.
    """

    def __init__(
        self,
        steps: int,
        settle: int,
        drain: Callable[[], dict[str, float]] = dict,
        about: Mapping[str, Any] | None = None,
        examine: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._steps = steps
        self._left = settle
        self._drain = drain
        self._about = dict(about or {})
        self._examine = examine
        self._out = os.fdopen(int(os.environ[PIPE]), "w", buffering=1)
        self._start_time: float | None = None

    def tick(self) -> bool:
        """Count a step that is about to begin; wait at a window's end; False after the last."""
        if self._left == 0:
            synchronize()
            self._out.write(json.dumps(self._measured()) + "\n")
            if not sys.stdin.readline():
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
        return {"seconds": seconds, "shares": shares, **self._examine()}


class Variant:
    """A process that runs one window at a time and waits between them.

    Args:
        name: in the table.
        command: to start; it has to use a ``Pacer``.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.command = command
        self.ready_seconds = 0.0
        """From the start to the end of the warm-up."""
        self.about: dict[str, Any] = {}
        """What it wrote when it was ready."""
        self.memory_mib = 0.0
        """Of all its processes, after the last window of ``take_turns``."""
        self._windows: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._results = -1
        self._rest = b""

    def start(self) -> None:
        """Start it and wait until its warm-up is over.

        Raises:
            RuntimeError: if it ends before that, with the end of its output.
        """
        self._results, written = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (close)
        start = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment(**{PIPE: str(written)}),
            pass_fds=[written],
            start_new_session=True,
        )
        os.close(written)
        self.about = self._answer()
        self.ready_seconds = time.monotonic() - start

    def window(self) -> float:
        """Let it run a window; return the window's seconds.

        Raises:
            RuntimeError: if it ends, with the end of its output.
        """
        self._windows.append(self.ask("go"))
        return self._windows[-1]["seconds"]

    def ask(self, request: str) -> dict[str, Any]:
        """Send a line; return the answer."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reported with its output by _answer
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        end = time.monotonic() + WINDOW_TIMEOUT
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._results], [], [], 1.0)
            read = os.read(self._results, 65536) if readable else b""
            self._rest += read
            is_over = (readable and not read) or self._process.poll() is not None
            if is_over or time.monotonic() > end:
                break
        line, _, self._rest = self._rest.partition(b"\n")
        if not line:
            self._log.seek(0)
            printed = self._log.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name} gave no answer; it printed:\n{printed}")
        return json.loads(line)

    def shares(self) -> dict[str, float]:
        """Return the median share of the time that named things took, largest first."""
        windows = [window["shares"] for window in self._windows]
        names = {name for shares in windows for name in shares}
        medians = {n: statistics.median(shares.get(n, 0.0) for shares in windows) for n in names}
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """End it with all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._results)
            self._log.close()
            if self._process.stdin is not None:
                self._process.stdin.close()


def call_of(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return the command that calls a function of a benchmark in a process of its own."""
    module = Path(sys.modules[function.__module__].__file__ or "").stem
    name = function.__name__
    code = f"import json, sys; from benchmarks.{module} import {name}"
    return [sys.executable, "-c", f"{code}; {name}(**json.loads(sys.argv[1]))", json.dumps(options)]


@contextlib.contextmanager
def started(variants: Sequence[Variant]) -> Iterator[None]:
    """Start processes one after the other, and end them.

    Raises:
        ConfigurationError: if two have the same name.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"give each variant once: {', '.join(names)}")
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


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports these benchmarks, wherever it starts."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


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


def provenance(command: str) -> dict[str, Any]:
    """Return what every result says of its origin: command, commit, machine."""
    return {"command": command, "commit": commit(), "machine": machine()}


@functools.cache
def commit() -> str:
    """Return the commit of the clone at the first call, and whether files were changed."""
    try:
        changes = ["status", "--porcelain", "--untracked-files=no"]
        revision, changed = (
            subprocess.check_output(["git", *words], cwd=REPOSITORY, text=True, timeout=30)
            for words in (["rev-parse", "HEAD"], changes)
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return revision.strip() + (" with changes" if changed.strip() else "")


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of a measurement."""
    import torch

    flags = _cpu_info("flags").split()
    found = {
        "cpu": _cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_features": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    return found | installed_versions(PACKAGES)


def _cpu_info(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() == key:
                return line.split(":", 1)[1].strip()
    return ""


def text_of_tables(content: Mapping[str, Any]) -> str:
    """Return the notes and tables of a result."""
    tables = [table_text(table) for table in content["tables"]]
    return "\n\n".join([*content["notes"], *tables])


def table_text(table: Mapping[str, Any]) -> str:
    """Return a table with its title: a column per entry of its rows, but for the rounds."""
    rows = table["rows"]
    columns = [name for name in dict.fromkeys(key for row in rows for key in row)]
    columns = [name for name in columns if name not in ("rounds", "command")]
    lines = [columns, *([cell(row.get(name)) for name in columns] for row in rows)]
    return f"{table['title']}\n{text_table(lines, num_texts=1)}"


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
    """Print progress with the seconds since the program's start."""
    print(f"[{time.monotonic() - START_TIME:5.0f} s] {text}", file=sys.stderr, flush=True)
