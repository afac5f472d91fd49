"""What all rows of the fault benchmark share: folder, draws, the undisturbed run, the table."""

from __future__ import annotations

import copy
import random
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.judging import (
    Outcome,
    compare_rows,
    differences,
    examine,
    examine_toy,
    read_outcome,
)
from benchmarks.trial import (
    HORIZON,
    TOTAL_STEPS,
    TOY_TASKS,
    Session,
    Trial,
    small_run,
    toy_run,
)

HEADER = ("fault", "injected", "survived", "lost", "false", "exact", "ok", "seconds")


@dataclass
class Row:
    """What came of one kind of fault."""

    name: str
    """The row's name on the command line."""
    injected: int = 0
    """Faults that were injected."""
    survived: int = 0
    """Faults after which the run continued, or was continued, as it must."""
    lost: int | None = None
    """Transitions that happened and are not in the replay; None where it is not asked."""
    false: int | None = None
    """Transitions in the replay that never happened."""
    exact: bool | None = None
    """Whether the end is the undisturbed run's in every bit; None where the fault prevents it."""
    checks: list[str] = field(default_factory=list)
    """What else was seen."""
    failures: list[str] = field(default_factory=list)
    """What must not be."""
    seconds: float = 0.0
    """How long it took."""

    def expect(self, condition: bool, failure: str) -> None:
        """Note a failure unless a condition holds."""
        if not condition:
            self.failures.append(failure)

    @property
    def ok(self) -> bool:
        """Whether faults were injected and all went as it must."""
        counts_right = 0 < self.injected == self.survived and not self.lost and not self.false
        return counts_right and self.exact is not False and not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "ok": self.ok}


class Bench:
    """A folder for runs, named draws, and the undisturbed run that others are compared with.

    Args:
        folder: of all runs.
        seed: of the runs and of all faults.
        counts: how many faults of each kind.
        total_steps: environment steps of a run.
        ranks: processes of a run; with several, it is one of ``ToyReach``.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        counts: dict[str, int],
        total_steps: int = TOTAL_STEPS,
        ranks: int = 1,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.counts = counts
        self.total_steps = total_steps
        self.ranks = ranks
        self._start_time = time.monotonic()
        self._trials: list[Trial] = []

    def draws(self, name: str) -> random.Random:
        """Return the generator of a row's draws."""
        return random.Random(f"{self.seed} {name}")

    def config(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """Return the small run's configuration with changes, by section."""
        if self.ranks > 1:
            config = toy_run(self.seed, self.total_steps, self.ranks)
        else:
            config = small_run(self.seed, self.total_steps)
        config = copy.deepcopy(config)
        for name, changes in sections.items():
            config[name] |= changes
        return config

    def trial(
        self, name: str, config: dict[str, Any] | None = None, root: Path | None = None
    ) -> Trial:
        """Return a run that is not started yet."""
        logs = self.folder / name
        if config is None:
            config = self.config()
        self._trials.append(Trial(root or logs / "runs", config, logs))
        return self._trials[-1]

    @cached_property
    def undisturbed(self) -> Trial:
        """The run without any fault."""
        trial = self.trial("undisturbed")
        self.say("undisturbed: the run that the others are compared with")
        start = time.monotonic()
        trial.finish()
        self.say(f"undisturbed: {self.total_steps:,} env steps in {time.monotonic() - start:.0f} s")
        return trial

    @cached_property
    def wanted(self) -> Outcome:
        """What the undisturbed run left behind; its own transitions are true.

        Raises:
            AssertionError: if they are not, because then the check itself is wrong.
        """
        outcome = read_outcome(self.undisturbed.folder, self.undisturbed.config)
        for ring, rows in enumerate(outcome.rings):
            if self.ranks > 1:
                chain = examine_toy(rows, ring % TOY_TASKS, from_beginning=False)
            else:
                chain = examine(rows, HORIZON, from_beginning=False)
            assert not any(chain), (
                f"the undisturbed run's transitions are not as they must be: {chain}"
            )
        return outcome

    def judge_exact(self, row: Row, trial: Trial) -> None:
        """Compare a run's end with that of the undisturbed run."""
        found = read_outcome(trial.folder, trial.config)
        parts = [
            p
            for name, a in self.wanted._asdict().items()
            for p in differences(a, getattr(found, name), name)
        ]
        rows = compare_rows(self.wanted.rings, found.rings)
        row.lost = (row.lost or 0) + rows.lost
        row.false = (row.false or 0) + rows.false
        row.exact = row.exact is not False and not parts
        row.expect(
            not parts,
            f"differs from the undisturbed run in {len(parts)} places: {', '.join(parts[:4])}",
        )
        row.expect(
            found.counters["env_steps"] == self.total_steps,
            f"ended after {found.counters['env_steps']} steps",
        )
        row.expect(not trial.unfinished(), f"unfinished files are left: {trial.unfinished()}")

    def judge_remains(self, row: Row, session: Session) -> float:
        """Check that nothing of an ended process is left; return for how long something was."""
        left, seconds = session.remains()
        row.expect(not left, f"left after {seconds:.0f} s: {left}")
        return seconds

    def say(self, text: str) -> None:
        """Print the progress."""
        print(f"[{time.monotonic() - self._start_time:5.0f} s] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End every process that is left."""
        for trial in self._trials:
            trial.close()


def table(rows: list[Row]) -> str:
    """Return the table as text, with the other checks and the failures of each row below it."""

    def number(value: int | None) -> str:
        return "-" if value is None else str(value)

    cells = [HEADER]
    for row in rows:
        exact = {None: "-", True: "yes", False: "no"}[row.exact]
        numbers = (str(row.injected), str(row.survived), number(row.lost), number(row.false))
        verdict = "ok" if row.ok else "FAILED"
        cells.append((row.name, *numbers, exact, verdict, f"{row.seconds:.0f}"))
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    lines.insert(1, "-" * len(lines[0]))
    for row in rows:
        lines += [f"{row.name}: {text}" for text in row.checks]
        lines += [f"{row.name}: FAILED: {text}" for text in row.failures]
    return "\n".join(lines)
