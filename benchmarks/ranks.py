"""What ``scaling`` measures: ranks that update, exchange or train together, each a process.

``python -m benchmarks.ranks OPTIONS`` is the first rank and starts the others; ``OPTIONS`` is JSON.
With ``arguments`` the ranks train through the command line, as ``torchrun`` starts it, in windows
(``pacing.py``). Without them the first rank answers each line of its standard input, a request of
``REQUESTS``, with a line of JSON.

Each rank computes with one thread on one core, its own where there are enough. The clock of the
times is that of the machine, so that those of different ranks can be compared.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gradients import METHODS
from benchmarks.updaters import Work, direct_update, make_batches, make_sac
from mtrl_lightning.callbacks.drift import check_equal
from mtrl_lightning.ranks import distributed
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.rollout.episodes import EpisodeWindows
from mtrl_lightning.types import Episode, TransitionBatch

EXCHANGES = ("all_reduce", "all_gather", "broadcast")
"""Functions of ``torch.distributed`` that an update calls."""
AVERAGES = ("average", "average_gradients", "gather_tensor", "largest")
"""Functions of ``mtrl_lightning.ranks.distributed`` that also copy what they exchange."""
WINDOW = 50
"""Finished episodes of each task whose statistics a row of metrics gathers."""
AGREED = 8
"""Numbers that the ranks agree on after a vector step."""


@dataclass
class Group:
    """Ranks on this machine."""

    rank: int
    size: int
    port: int

    @property
    def core(self) -> int | None:
        """Return the core of this rank; None where a process cannot choose."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        cores = sorted(os.sched_getaffinity(0))
        return cores[self.rank % len(cores)]

    @classmethod
    def start(cls, size: int) -> Group:
        """Start the ranks from 1 on, which end with their process group; return this one's place.

        They are copies of this process, which has only imported modules: that takes seconds.
        """
        port = free_port()
        for rank in range(1, size):
            if os.fork() == 0:
                return cls(rank, size, port)
        return cls(0, size, port)

    def enter(self) -> None:
        """Set what ``torchrun`` sets, and compute with one thread on this rank's core."""
        if self.size > 1:
            numbers = {
                "RANK": self.rank,
                "LOCAL_RANK": self.rank,
                "WORLD_SIZE": self.size,
                "LOCAL_WORLD_SIZE": self.size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.port,
                "TORCHELASTIC_RUN_ID": "scaling",
            }
            os.environ.update({name: str(value) for name, value in numbers.items()})
        core = self.core
        if core is not None:
            os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ExchangeLog:
    """Note when this rank enters and leaves each exchange, how many bytes it gives, and copying.

    It replaces functions of ``torch.distributed`` and of ``mtrl_lightning.ranks.distributed``.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.num_bytes = 0
        self.averaging = 0.0
        """Seconds in ``AVERAGES``, with the exchanges in them."""
        self.averaged = 0.0
        """Seconds of these exchanges."""
        self._depth = 0
        for name in EXCHANGES:
            setattr(dist, name, self._noting(getattr(dist, name)))
        for name in AVERAGES:
            setattr(distributed, name, self._timing(getattr(distributed, name)))

    def clear(self) -> None:
        """Forget what was noted."""
        self.times = []
        self.num_bytes = 0
        self.averaging = self.averaged = 0.0

    def _noting(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(exchange)
        def noting(first: Any, *more: Any, **options: Any) -> Any:
            tensor = first if isinstance(first, Tensor) else more[0]
            begin = time.perf_counter()
            result = exchange(first, *more, **options)
            end = time.perf_counter()
            self.times.append((begin, end))
            self.num_bytes += tensor.nbytes
            if self._depth:
                self.averaged += end - begin
            return result

        return noting

    def _timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timing(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.averaging += time.perf_counter() - begin

        return timing


def parts_of(
    seconds_N: list[float], times_NX2: list[list[tuple[float, float]]], copying_N: list[float]
) -> dict[str, float]:
    """Split the seconds of a window into ``compute``, ``reduction`` and ``waiting``.

    An exchange starts when the last rank has entered it: until then the others wait. From then on
    until a rank leaves it is reduction, and so is the copying before and after. Everything else is
    compute. All three are means over the ranks.

    Args:
        seconds_N: of the window, on each rank.
        times_NX2: when each rank has entered and left each exchange.
        copying_N: seconds in which each rank has copied what was exchanged.
    """
    seconds = float(np.mean(seconds_N))
    times = np.array(times_NX2).reshape(len(seconds_N), -1, 2)
    last_X = times[:, :, 0].max(0)
    waiting = float((last_X - times[:, :, 0]).sum(1).mean())
    # a rank that is late to read may leave before another one enters the next exchange
    reduction = float((times[:, :, 1] - last_X).clip(min=0).sum(1).mean() + np.mean(copying_N))
    return {
        "compute": seconds - waiting - reduction,
        "reduction": reduction,
        "waiting": waiting,
    }


class Updater:
    """One rank that answers requests together with the others.

    Args:
        works: what is updated by name: the options of ``Work`` and ``method``, a gradient method.
    """

    def __init__(self, works: dict[str, dict[str, Any]]) -> None:
        self._log = ExchangeLog()
        self._updates: dict[str, Callable[[TransitionBatch], None]] = {}
        self._batches: dict[str, Iterator[TransitionBatch]] = {}
        self._algorithms = {}
        for name, options in works.items():
            method = METHODS[options.pop("method")]
            work = Work(**options)
            algorithm = make_sac(work, actor_gradient=method, critic_gradient=method)
            self._algorithms[name] = algorithm
            self._updates[name] = direct_update(work, algorithm)
            self._batches[name] = itertools.cycle(make_batches(work))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked for; all ranks get the same request."""
        options = dict(request)
        return REQUESTS[options.pop("request")](self, **options)

    def update(self, name: str, times: int) -> dict[str, Any]:
        """Make updates.

        Args:
            name: of the work.
            times: number of updates.

        Returns:
            ``seconds`` of the window; for each update ``parts``, the seconds of ``parts_of``, and
            ``bytes`` and ``messages``.
        """
        self._log.clear()
        distributed.total(0)
        self._log.clear()
        begin = time.perf_counter()
        for _ in range(times):
            self._updates[name](next(self._batches[name]))
        seconds = time.perf_counter() - begin
        log = self._log
        own = (seconds, log.times, log.averaging - log.averaged)
        num_bytes = log.num_bytes / times
        messages = len(log.times) / times
        parts = parts_of(*map(list, zip(*distributed.gather(own), strict=True)))  # type: ignore[arg-type]
        return {
            "seconds": seconds,
            "parts": {key: value / times for key, value in parts.items()},
            "bytes": num_bytes,
            "messages": messages,
        }

    def exchange(self, num_bytes: int, times: int) -> dict[str, Any]:
        """Average a tensor of so many bytes; return ``seconds``."""
        tensor = torch.zeros(max(1, num_bytes // 4))
        return _timed(lambda: distributed.average([tensor]), times)

    def agree(self, times: int) -> dict[str, Any]:
        """Exchange what the ranks agree on after a vector step; return ``seconds``."""
        return _timed(lambda: distributed.gather_numbers([0] * AGREED), times)

    def log_metrics(self, name: str, times: int) -> dict[str, Any]:
        """Gather a row of metrics of full windows; return ``seconds``."""
        algorithm = self._algorithms[name]
        num_tasks = algorithm.num_trained
        windows = EpisodeWindows(num_tasks, WINDOW)
        episodes = [Episode(task, 1.0, 500, True, True) for task in range(num_tasks)]
        for _ in range(WINDOW):
            windows.add(episodes)
        metrics = {f"metric {number}": torch.tensor(0.0) for number in range(AGREED)}

        def row() -> None:
            algorithm.mean_metrics.add(metrics)
            algorithm.drain_metrics()
            EpisodeWindows.joined(distributed.gather(windows.state_dict()))

        return _timed(row, times)

    def check(self, name: str, times: int) -> dict[str, Any]:
        """Compare the checksums of all ranks; return ``seconds``."""
        return _timed(lambda: check_equal(self._algorithms[name]), times)


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "update": Updater.update,
    "exchange": Updater.exchange,
    "agree": Updater.agree,
    "log_metrics": Updater.log_metrics,
    "check": Updater.check,
}


def _timed(call: Callable[[], Any], times: int) -> dict[str, Any]:
    """Return the seconds of calls that all ranks begin together."""
    call()
    distributed.total(0)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return {"seconds": time.perf_counter() - begin}


def serve(group: Group, works: dict[str, dict[str, Any]], descriptor: int) -> None:
    """Answer the requests on the first rank's standard input, until it ends.

    Args:
        group: this rank's place.
        works: see ``Updater``.
        descriptor: of the first rank's open file that the answers are written to.
    """
    keep_freed_memory()  # as a run does
    if group.size > 1:
        dist.init_process_group("gloo")
    updater = Updater(works)
    out = os.fdopen(descriptor, "w", buffering=1) if group.rank == 0 else None
    if out is not None:
        out.write(json.dumps({"core": group.core}) + "\n")
    while True:
        request = None
        if group.rank == 0:
            line = sys.stdin.readline()
            request = json.loads(line) if line else None
        request = distributed.broadcast(request)
        if request is None:
            break
        found = updater.answer(request)
        if out is not None:
            out.write(json.dumps(found) + "\n")


def main() -> None:
    """Be one of the ranks."""
    options = json.loads(sys.argv[1])
    group = Group.start(options["size"])
    if group.rank > 0 and "descriptor" in options:
        os.close(options["descriptor"])  # the first rank writes to it
    group.enter()
    if "arguments" in options:
        from mtrl_lightning.__main__ import main as command_line

        command_line(options["arguments"])
    else:
        serve(group, options["works"], options["descriptor"])


if __name__ == "__main__":
    main()
