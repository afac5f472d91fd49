"""Measure what a run survives: ``python -m benchmarks.faults``.

A small MetaWorld run goes through the real command line, undisturbed once, and then with faults at
random moments. With ``--ranks 2`` it is a run of two processes on the toy benchmark. The table
shows how many were injected and survived, how many transitions were lost or false, and whether the
end is that of the undisturbed run, bit for bit. The exit code is 1 if any row fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bench import Bench, Row, table
from benchmarks.breakages import exhausted_row, hang_row, nan_row, worker_row
from benchmarks.corruption import corruption_row
from benchmarks.interruptions import disk_row, kill_row, signal_row
from benchmarks.measuring import described, end_on_sigterm, machine
from benchmarks.rank_faults import (
    rank_hang_row,
    rank_kill_row,
    rank_restart_row,
    rank_worker_row,
)
from benchmarks.trial import TOTAL_STEPS

ROWS: dict[str, Callable[[Bench, Row], None]] = {
    "kill": kill_row,
    "signal": signal_row,
    "worker": worker_row,
    "hang": hang_row,
    "nan": nan_row,
    "exhausted": exhausted_row,
    "disk": disk_row,
    "corruption": corruption_row,
}
RANK_ROWS: dict[str, Callable[[Bench, Row], None]] = {
    "rank_kill": rank_kill_row,
    "rank_restart": rank_restart_row,
    "rank_hang": rank_hang_row,
    "rank_worker": rank_worker_row,
}
"""Those of a run of several processes."""
COMPARED = {"kill", "signal", "disk", "corruption", "rank_kill", "rank_restart", "rank_hang"}
"""Rows that need the undisturbed run."""
COUNTS = {
    "kills": (20, "SIGKILLs of the main process"),
    "signals": (4, "SIGTERMs and SIGINTs of the main process"),
    "worker_kills": (20, "SIGKILLs of workers"),
    "hangs": (2, "workers stopped so that they hang"),
    "nans": (6, "NaNs, infinite rewards and exceptions of environments"),
    "mutations": (240, "damaged files read"),
    "continued": (6, "runs continued with damaged files"),
    "rank_kills": (20, "SIGKILLs of a rank"),
    "rank_restarts": (2, "SIGKILLs of a rank that torchrun starts again"),
    "rank_hangs": (2, "ranks stopped so that they hang"),
    "rank_workers": (6, "SIGKILLs of a rank's workers"),
}


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the runs and of all faults (default %(default)s)"
    )
    for name, (number, text) in COUNTS.items():
        parser.add_argument(
            f"--{name}", type=int, default=number, help=f"{text} (default %(default)s)"
        )
    parser.add_argument(
        "--total_steps", type=int, default=TOTAL_STEPS, help="of a run (default %(default)s)"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*ROWS, *RANK_ROWS],
        help="rows to run (default all)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="processes of a run; with several, it is one of the toy benchmark, and the rows are"
        f" {', '.join(RANK_ROWS)} (default %(default)s)",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="PATH",
        help="write JSON, in place of the table or to a file",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    parser.add_argument(
        "--folder", type=Path, help="of the runs; it must not exist yet (default a temporary one)"
    )
    options = parser.parse_args(args)
    if options.folder is not None and options.folder.exists():
        parser.error(f"{options.folder} exists: give a folder that does not")
    offered = RANK_ROWS if options.ranks > 1 else ROWS
    options.rows = list(offered) if options.rows is None else options.rows
    wrong = [name for name in options.rows if name not in offered]
    if wrong:
        parser.error(f"{', '.join(wrong)}: with --ranks {options.ranks}, give {', '.join(offered)}")
    return options


def run_row(bench: Bench, name: str, run: Callable[[Bench, Row], None]) -> Row:
    """Run a row; an error is its failure."""
    start = time.monotonic()
    row = Row(name)
    try:
        run(bench, row)
    except Exception as error:  # one row's failure shall not hide the others
        row.failures.append(f"{type(error).__name__}: {error}")
    row.seconds = time.monotonic() - start
    bench.say(f"{name}: {'ok' if row.ok else 'FAILED'} after {row.seconds:.0f} s")
    return row


def report(rows: list[Row], json_path: str | None) -> int:
    """Print the table, write JSON, and return the exit code."""
    ok = bool(rows) and all(row.ok for row in rows)
    content = json.dumps(
        {"ok": ok, "machine": machine(), "rows": [row.as_dict() for row in rows]}, indent=1
    )
    if json_path == "-":
        print(content)
    else:
        print(described(machine()))
        print(table(rows))
        print(
            f"{'all rows are ok' if ok else 'SOME ROWS FAILED'}"
            f" ({sum(row.seconds for row in rows) / 60:.1f} min)"
        )
    if json_path not in (None, "-"):
        Path(str(json_path)).write_text(content + "\n")
    return 0 if ok else 1


def main(args: Sequence[str] | None = None) -> int:
    """Run the rows and return the exit code."""
    options = parse(args)
    if options.folder is not None:
        options.folder.mkdir(parents=True)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="faults-")).resolve()
    bench = Bench(
        folder,
        options.seed,
        {name: getattr(options, name) for name in COUNTS},
        options.total_steps,
        options.ranks,
    )
    try:
        if COMPARED & {*options.rows}:
            _ = bench.wanted
        rows = [
            run_row(bench, name, run)
            for name, run in (ROWS | RANK_ROWS).items()
            if name in options.rows
        ]
    finally:
        bench.close()
        if options.keep:
            bench.say(f"the runs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return report(rows, options.json)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
