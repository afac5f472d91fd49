"""Processes that train in turns: how each is started, asked for a window, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import environment, proportional_set_size, say
from benchmarks.trial import COMMAND
from mtrl_lightning.errors import ConfigurationError

TIMEOUT = 900.0
"""Seconds to wait for a window, or for the end of start-up and warm-up, unless others are given."""


class Entrant:
    """A process that trains one window at a time and waits between them.

    Args:
        name: in the table.
        kind: ``ours``, ``sb3``, ``plain`` or ``products``.
        command: what to start, given the descriptor of the file to write to.
        folder: of what it prints.
        timeout: seconds to wait for a window, or for the end of start-up and warm-up.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        command: Callable[[int], list[str]],
        folder: Path,
        timeout: float = TIMEOUT,
    ) -> None:
        self.name = name
        self.kind = kind
        self.ready_seconds = 0.0
        """From the start to the end of the warm-up."""
        self.about: dict[str, Any] = {}
        """What it said when it was ready."""
        self.command: list[str] = []
        self._make = command
        self._timeout = timeout
        self._log = folder / f"{name.replace(' ', '_').replace(',', '')}.log"
        self._windows: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._results = -1
        self._rest = b""

    def start(self) -> None:
        """Start it and wait until its warm-up is over."""
        self._results, written = os.pipe()
        start = time.monotonic()
        self.command = self._make(written)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
                pass_fds=[written],
                start_new_session=True,
            )
        os.close(written)
        self.about = self._answer()
        self.ready_seconds = time.monotonic() - start

    def window(self) -> float:
        """Let it train for a window; return the window's seconds."""
        answer = self.ask("go")
        self._windows.append(answer)
        return answer["seconds"]

    def ask(self, request: str) -> dict[str, Any]:
        """Send a line; return the answer."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # then there is no answer, which is said with what it printed
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        return self._answer()

    def fractions(self) -> dict[str, float]:
        """Return the median share of the time that named things took, largest first."""
        fractions = [window["fractions"] for window in self._windows]
        names = {name for found in fractions for name in found}
        medians = {
            name: statistics.median(found.get(name, 0.0) for found in fractions) for name in names
        }
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    def seconds_of(self, name: str) -> list[float]:
        """Return the seconds of each window that a named thing took."""
        return [window["seconds"] * window["fractions"].get(name, 0.0) for window in self._windows]

    def memory(self) -> float:
        """Return the MiB that it takes with all its processes."""
        assert self._process is not None
        return proportional_set_size(self._process.pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        end = time.monotonic() + self._timeout
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._results], [], [], 1.0)
            read = os.read(self._results, 65536) if readable else b""
            self._rest += read
            if (
                (readable and not read)
                or self._process.poll() is not None
                or time.monotonic() > end
            ):
                break
        line, _, self._rest = self._rest.partition(b"\n")
        if not line:
            raise RuntimeError(
                f"{self.name} gave no answer; it printed:\n{self._log.read_text()[-3000:]}"
            )
        return json.loads(line)

    def close(self) -> None:
        """End it with all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._results)
            if self._process.stdin is not None:
                self._process.stdin.close()


@contextlib.contextmanager
def started(entrants: Sequence[Entrant]) -> Iterator[None]:
    """Start processes one after the other, and end them.

    Raises:
        ConfigurationError: if two have the same name.
    """
    names = [entrant.name for entrant in entrants]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"give each variant once: {', '.join(names)}")
    with contextlib.ExitStack() as stack:
        for entrant in entrants:
            say(f"{entrant.name}: start-up and warm-up")
            stack.callback(entrant.close)
            entrant.start()
        yield


def of_module(module: str, options: dict[str, Any]) -> Callable[[int], list[str]]:
    """Return what starts a module of this package with options and the descriptor as JSON."""
    return lambda descriptor: [
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        json.dumps({**options, "descriptor": descriptor}),
    ]


def of_command_line(
    configs: Sequence[str | Path],
    options: Mapping[str, Any],
    steps: int,
    settle: int,
    num_episodes: int = 0,
) -> Callable[[int], list[str]]:
    """Return what starts a user's command line whose updates are made in windows.

    Args:
        configs: YAML files.
        options: of the command line, without the dashes.
        steps: updates of a window.
        settle: updates before the first window.
        num_episodes: test episodes per task after each window; 0 for none.
    """

    def paced(descriptor: int) -> list[str]:
        arguments = paced_arguments(configs, options, steps, settle, descriptor, num_episodes)
        return [sys.executable, *COMMAND, *arguments]

    return paced


def paced_arguments(
    configs: Sequence[str | Path],
    options: Mapping[str, Any],
    steps: int,
    settle: int,
    descriptor: int,
    num_episodes: int = 0,
) -> list[str]:
    """Return the arguments of the command line for ``of_command_line``."""
    pace = {
        "steps": steps,
        "settle": settle,
        "descriptor": descriptor,
        "num_episodes": num_episodes,
    }
    callback = {"class_path": "benchmarks.pace_callback.PaceCallback", "init_args": pace}
    arguments = ["fit"]
    for config in configs:
        arguments += ["-c", str(config)]
    arguments += [f"--{name}={value}" for name, value in options.items()]
    return [*arguments, f"--trainer.callbacks+={json.dumps(callback)}"]
