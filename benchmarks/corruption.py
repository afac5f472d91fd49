"""Damaged files: every one is refused by name, or what is read from it is what was written."""

from __future__ import annotations

import io
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.bench import Bench, Row
from benchmarks.judging import differences, load_replay, rings_of, spec_of
from mtrl_lightning.callbacks import MetricsCSV
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.run.checkpoint_file import load_newest_whole
from mtrl_lightning.run.data import manifest_of

FILES = ("checkpoint", "chunk", "metrics")
REGIONS = 18
"""Sixteen equal parts of a file, its first and its last 64 bytes."""
HARMS = ("flip", "zero", "truncate", "insert")
FOREIGN = ("empty", "missing", "text", "other run", "code", "other torch file", "tensor")


class Mutation(NamedTuple):
    """What is done to which file."""

    file: str
    """One of ``FILES``."""
    harm: str
    """One of ``HARMS`` or ``FOREIGN``."""
    region: int = 0
    """Which part of the file, for ``HARMS``."""


class _Code:
    """A value that would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def mutations(number: int, draws: random.Random) -> list[Mutation]:
    """Return foreign files first, then regions in a random order, repeated with other draws."""
    foreign = [Mutation(file, harm) for harm in FOREIGN for file in FILES]
    regions = [Mutation(file, harm, i) for i in range(REGIONS) for harm in HARMS for file in FILES]
    draws.shuffle(regions)
    return (foreign + regions * (number // len(regions) + 1))[:number]


def harmed(content: bytes, mutation: Mutation, draws: random.Random) -> bytes:
    """Return a file's content with bits flipped, zeroed or inserted in a region, or cut off."""
    size = len(content)
    part = -(-size // 16)
    first = {16: 0, 17: max(size - 64, 0)}.get(mutation.region, mutation.region * part)
    end = min(size, first + (64 if mutation.region >= 16 else part))
    place = draws.randrange(min(first, size - 1), max(end, first + 1)) if first < size else size - 1
    if mutation.harm == "truncate":
        return content[:place]
    if mutation.harm == "insert":
        return content[:place] + draws.randbytes(draws.randint(1, 64)) + content[place:]
    changed = bytearray(content)
    if mutation.harm == "flip":
        changed[place] ^= 1 << draws.randrange(8)
    else:
        block = min(draws.choice([16, 512, 4096]), end - place)
        changed[place : place + block] = bytes(block)
    return bytes(changed)


def judge(load: Callable[[], Any], original: Any, name: str) -> str:
    """Return what became of a damaged file: ``refused``, ``harmless``, or what is wrong."""
    try:
        loaded = load()
    except ConfigurationError as error:
        return "refused" if name in str(error) else f"refused without the file's name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    different = differences(original, loaded)
    return f"read as another: {different[0]}" if different else "harmless"


class Specimen:
    """A copy of a run in which one file at a time is damaged.

    Args:
        folder: of the copy.
        foreign: folder of another run.
        config: of the run.
    """

    def __init__(self, folder: Path, foreign: Path, config: dict[str, Any]) -> None:
        self._folder = folder
        self._foreign = foreign
        self._spec = spec_of(config)
        last = folder / "checkpoints" / "last.ckpt"
        self._whole = {path.name: load_checkpoint(path) for path in last.parent.glob("*.ckpt")}
        self._manifest = manifest_of(self._whole["last.ckpt"])
        self._rings = self._load_rings()
        self._paths = {
            "checkpoint": last,
            "chunk": folder / "replay" / self._manifest["chunks"][0]["file"],
            "metrics": folder / "metrics.csv",
        }
        self._fingerprint = MetricsCSV(str(folder)).fingerprint()
        self._metrics = self._load_metrics()[0]
        self._executed = folder / "executed"

    def try_out(self, mutation: Mutation, draws: random.Random) -> str:
        """Damage a file, read it as a resumed run does, and put it back."""
        path = self._paths[mutation.file]
        if mutation.file == "chunk":  # any of them
            path = path.parent / draws.choice(self._manifest["chunks"])["file"]
        original = path.read_bytes()
        content = self._content(mutation, path, original, draws)
        path.unlink()  # what is mapped into memory stays as it was
        if content is not None:
            path.write_bytes(content)
        try:
            verdict = self._read(mutation, path, original, content)
        finally:
            path.unlink(missing_ok=True)
            path.write_bytes(original)
        return "it was executed" if self._executed.exists() else verdict

    def _content(
        self, mutation: Mutation, path: Path, original: bytes, draws: random.Random
    ) -> bytes | None:
        if mutation.harm in HARMS:
            return harmed(original, mutation, draws)
        if mutation.harm == "missing":
            return None
        if mutation.harm in ("empty", "text"):
            return b"a list of groceries\n" * 50 if mutation.harm == "text" else b""
        if mutation.harm == "other run":
            pattern = {"chunk": "replay/*.npy"}.get(
                mutation.file, str(path.relative_to(self._folder))
            )
            return sorted(self._foreign.glob(pattern))[0].read_bytes()
        made = io.BytesIO()
        if mutation.file == "chunk" and mutation.harm == "code":
            np.save(made, np.array([_Code(self._executed)], object), allow_pickle=True)
        else:
            values = {
                "code": _Code(self._executed),
                "tensor": torch.zeros(3),
                "other torch file": {"a": torch.ones(2)},
            }
            torch.save(values[mutation.harm], made)
        return made.getvalue()

    def _read(self, mutation: Mutation, path: Path, original: bytes, content: bytes | None) -> str:
        if mutation.file == "metrics":
            return self._judge_metrics(original, content or b"")
        foreign = mutation.file == "checkpoint" and mutation.harm == "other run"
        newest = self._judge_newest("replay file" if foreign else path.name)
        if mutation.file == "chunk":
            verdict = judge(self._load_rings, self._rings, path.name)
        elif foreign:  # whole in itself; its replay is not there
            return newest
        else:
            verdict = judge(lambda: load_checkpoint(path), self._whole["last.ckpt"], path.name)
        return verdict if verdict == newest or verdict not in ("refused", "harmless") else newest

    def _judge_newest(self, name: str) -> str:
        """Judge what ``--ckpt_path last`` reads: a whole checkpoint, warning if not the last."""
        last = self._paths["checkpoint"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                path, loaded = load_newest_whole(last, with_replay=True)
            except ConfigurationError as error:
                if name in str(error):
                    return "refused"
                return f"refused without the file's name: {error}"
            except Exception as error:
                return f"{type(error).__name__}: {str(error)[:100]}"
        if different := differences(self._whole[path.name], loaded):
            return f"{path.name} was read as another: {different[0]}"
        if path == last:
            return "harmless"
        texts = " ".join(str(warning.message) for warning in said)
        if name in texts and "GOING BACK" in texts:
            return "refused"
        return f"went back to {path.name} silently"

    def _load_rings(self) -> list[Any]:
        ReplaySnapshots(self._folder / "replay").verify(self._manifest)
        return rings_of(load_replay(self._folder / "replay", self._manifest, self._spec))

    def _load_metrics(self) -> tuple[list[dict[str, float]], str]:
        logger = MetricsCSV(str(self._folder))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logger.resume_from(10**12, self._fingerprint)
        return logger.rows(), " ".join(str(warning.message) for warning in said)

    def _judge_metrics(self, original: bytes, content: bytes) -> str:
        """Judge ``metrics.csv``: untouched rows stay, and a warning names the file."""
        try:
            rows, said = self._load_metrics()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:100]}"
        if rows == self._metrics:
            return "harmless"
        header, *lines = original.splitlines(keepends=True)
        touched = Counter(lines) - Counter(content.splitlines(keepends=True))
        if content.startswith(header):
            kept = [
                row for line, row in zip(lines, self._metrics, strict=True) if not touched[line]
            ]
            if any(row not in rows for row in kept):
                return "rows that were not touched are lost"
        return "refused" if "metrics.csv" in said else "read as another without a warning"


def copy_run(source: Path, target: Path) -> None:
    """Copy a run's folder with the names that are links to the same file."""
    shutil.copytree(source, target)
    for alias in ("last.ckpt", "best.ckpt"):
        path = target / "checkpoints" / alias
        for other in (source / "checkpoints").glob("step_*.ckpt"):
            if path.exists() and other.samefile(source / "checkpoints" / alias):
                path.unlink()
                os.link(target / "checkpoints" / other.name, path)


def corruption_row(bench: Bench, row: Row) -> None:
    """Damage files; read them in this process, and resume runs with them on the command line."""
    draws = bench.draws(row.name)
    number = bench.counts["mutations"]
    wanted = bench.undisturbed
    other = bench.trial("foreign", bench.config() | {"seed_everything": bench.seed + 1})
    other.finish("--rollout.total_steps=600")
    copy = bench.folder / row.name / "version_0"
    shutil.copytree(wanted.folder, copy)
    specimen = Specimen(copy, other.folder, wanted.config)
    verdicts: Counter[str] = Counter()
    for mutation in mutations(number, draws):
        verdict = specimen.try_out(mutation, draws)
        right = verdict in ("refused", "harmless")
        verdicts[verdict if right else "WRONG"] += 1
        row.expect(
            right, f"{mutation.harm} in region {mutation.region} of a {mutation.file}: {verdict}"
        )
        row.injected += 1
        row.survived += right
    counted = ", ".join(f"{verdicts[name]} {name}" for name in ("refused", "harmless", "WRONG"))
    row.checks.append(counted)
    bench.say(f"corruption: {counted}")
    for k, harm in enumerate(_for_the_command_line(bench.counts["continued"])):
        _continue_damaged(bench, row, harm, k, draws)


def _for_the_command_line(number: int) -> Iterator[Mutation]:
    harms = ("flip", "truncate", "zero", "missing", "insert", "empty")
    yield from (
        Mutation(FILES[k % 2], harms[k % len(harms)], k * 5 % REGIONS) for k in range(number)
    )


def _continue_damaged(
    bench: Bench, row: Row, mutation: Mutation, k: int, draws: random.Random
) -> None:
    """Damage the last checkpoint or its newest chunk in place, and continue."""
    trial = bench.trial(f"damaged-{k}")
    folder = trial.root / "run" / "version_0"
    copy_run(bench.undisturbed.folder, folder)
    last = folder / "checkpoints" / "last.ckpt"
    newest = manifest_of(load_checkpoint(last))["chunks"][-1]["file"]
    path = last if mutation.file == "checkpoint" else folder / "replay" / newest
    if mutation.harm == "missing":
        path.unlink()
    elif mutation.harm == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(harmed(path.read_bytes(), mutation, draws))
    row.injected += 1
    session = trial.start("--ckpt_path=last")
    session.expect_end(0)
    loud = "GOING BACK" in session.text() and path.name in session.text()
    row.expect(
        loud or mutation.harm == "flip", f"{mutation}: the run did not say that it goes back"
    )
    bench.judge_exact(row, trial)
    row.survived += 1
    row.checks.append(
        f"--ckpt_path last with a {mutation.file} {mutation.harm}:"
        f" {'went back' if loud else 'unharmed'}"
    )
    bench.say(
        f"corruption {k + 1}: {mutation.file} {mutation.harm},"
        f" {'went back' if loud else 'unharmed'}, continued"
    )
