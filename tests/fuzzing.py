"""Continue runs from files that were changed on purpose, each in a process of its own.

Collections are changed in the same way, and loaded as demonstrations.

A checkpoint may be damaged, or made to do harm. Whatever one of its values is changed to, ``fit
--resume`` ends with an error of this package or trains; it does not crash, hang, take memory,
write outside the run's folder, or execute what the file says.

    python -m tests.fuzzing --files 3000
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import re
import reprlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from lightning.pytorch import Callback

from mtrl_lightning.callbacks import curves

SECONDS = 10
"""Seconds of a processor after which a continued run counts as one that hangs."""
MEBIBYTES = 2048
"""Resident memory that a continued run may take."""
ADDRESS_SPACE = 12 << 30
"""Bytes that a process may map, so that none takes the machine's memory."""
TRACEBACK, OUTSIDE, EXECUTED = 70, 71, 72
"""Exit codes of a continued run: an error that is not the package's, and what it did."""
SMALL = [
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.actor.init_args.depth=1",
    "--model.init_args.critic.init_args.width=16",
    "--model.init_args.critic.init_args.depth=1",
    "--evaluation.every=1000000",
    "--evaluation.num_episodes=1",
    "--evaluation.num_workers=0",
    "--rollout.num_workers=0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]
SAC = [
    "-c=base",
    "-c=env/toy",
    "-c=algorithm/mtsac",
    "-c=network/multi_head",
    "-c=gradient/mean",
    "--rollout.warmup_steps=30",
    "--data.batch_size=6",
    *SMALL,
]
BASES: dict[str, list[str]] = {
    "sac": [
        *SAC,
        "--data.capacity=300",
        "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
        '--model.init_args.transforms=[{"class_path": '
        '"mtrl_lightning.algorithms.NormalizeObservation"}]',
        '--rollout.action_transforms=[{"class_path": "mtrl_lightning.rollout.ActionNoise",'
        ' "init_args": {"std": 0.1}}]',
    ],
    "metaworld": [
        "-c=base",
        "-c=env/metaworld_mt1",
        "-c=algorithm/mtsac",
        "-c=network/multi_head",
        "-c=gradient/mean",
        "--data.benchmark.init_args.horizon=20",
        "--data.capacity=300",
        "--data.batch_size=4",
        "--rollout.warmup_steps=10",
        *SMALL,
    ],
    "ppo": [
        "-c=base",
        "-c=env/toy",
        "-c=algorithm/mtppo",
        "-c=network/multi_head",
        "-c=gradient/mean",
        "--rollout.exploration=mtrl_lightning.rollout.AdaptiveNoise",
        "--rollout.midway_starts=0.5",
        "--rollout.after_success=2",
        "--rollout.pausing={class_path: mtrl_lightning.rollout.PauseSolved,"
        " init_args: {success: 0.5, minimum: 0.5}}",
        "--rollout.reuse={class_path: mtrl_lightning.rollout.PolicyReuse,"
        " init_args: {success: 0.05, episodes: 2}}",
        "--rollout.envs_per_task=2",
        "--model.init_args.num_steps=32",
        "--model.init_args.num_minibatches=4",
        "--trainer.callbacks+=tests.fuzzing.StopAt",
        *SMALL,
    ],
    "ranks": [*SAC, "--data.capacity=300", "--rollout.envs_per_task=2", "--trainer.devices=2"],
    "pixels": [
        *SAC[:3],
        "-c=network/mlp",
        "-c=gradient/mean",
        *SAC[5:],
        "--data.capacity=120",
        "--data.pixels=mtrl_lightning.envs.Pixels",
        "--data.pixels.size=16",
        '--model.init_args.encoder={"class_path": "mtrl_lightning.networks.PixelEncoder",'
        ' "init_args": {"channels": 4, "strides": [2, 1], "out_dim": 4}}',
    ],
}
"""Options of the runs whose checkpoints are changed."""
COLLECTIONS: dict[str, Any] = {"collection": "replay", "minari": "minari"}
"""Formats of the collections whose files are changed."""
NAMES = [*BASES, *COLLECTIONS]
STEPS = {"sac": (62, 71), "metaworld": (31, 36), "ppo": (150, 200), "ranks": (62, 80)}
"""Environment steps of a run, which ends in mid-episode, and of the run that continues it."""
VIOLATIONS: list[int] = []
"""Exit codes of what this process did and must not do."""
LOG = "output.txt"
"""What a continued run prints, beside its folder."""
EVIL = "evil"
"""A module in the working directory that leaves a mark when it is imported."""


class StopAt(Callback):
    """Interrupt a run in the middle of an iteration's updates."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Ask the run to save itself and to end."""
        if pl_module.counters.updates == 5:
            signal.raise_signal(signal.SIGTERM)


class Change(NamedTuple):
    """How a file was changed."""

    kind: str
    """What the table shows it under."""
    text: str
    """What exactly, to repeat it by hand."""


# ------------------------------------------------------------------------------------------------
# values


def choose_path(root: Any, draws: random.Random) -> tuple[Any, ...]:
    """Choose a place in nested containers; each container counts as much as its siblings."""
    path: list[Any] = []
    value = root
    while isinstance(value, (dict, list, tuple)) and value:
        if path and draws.random() < 0.12:
            break
        place = draws.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path.append(place)
        value = value[place]
    return tuple(path)


def value_at(root: Any, path: Sequence[Any]) -> Any:
    """Return the value at a place."""
    for place in path:
        root = root[place]
    return root


def changed_at(root: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    """Return a copy whose value at a place is changed; the rest is shared."""
    if not path:
        return change(root)
    inner = changed_at(root[path[0]], path[1:], change)
    if isinstance(root, tuple):
        return (*root[: path[0]], inner, *root[path[0] + 1 :])
    copied = copy.copy(root)
    copied[path[0]] = inner
    return copied


INTEGERS = (0, 1, -1, 2, 7, 624, 625, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 63) - 1)
HUGE = (1 << 63, -(1 << 63), 1 << 64, 10**30, -(10**30), 1 << 5000)
FLOATS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324)
TEXTS = (
    "",
    "x",
    "|O",
    "O",
    "<f8",
    "|V8",
    "(1000000,)f8",
    "U1000000000",
    "evil",
    "evil.Evil",
    "evil.run",
    "os.system",
    "builtins.eval",
    "__class__",
    "close",
    "../../outside",
    "/tmp/outside",
    "step_000000000031.ckpt",
    "rank_1",
    "cuda",
    "PCG64",
    "MT19937",
    "jnt_qposadr",
    "efc_J",
    "\x00\xff",
    "\ud83d\ude00",
)


def another_value(value: Any, draws: random.Random) -> tuple[str, Any]:
    """Return a value that stands in place of another, and the kind of the change."""
    kinds: list[Callable[[], tuple[str, Any]]] = [
        lambda: ("another type", draws.choice([None, True, False, 3, -2.5, "x", b"x", [], {}, ()])),
        lambda: ("another type", [value]),
        lambda: ("another type", {"x": value}),
        lambda: ("size", draws.choice([*INTEGERS, *HUGE])),
        lambda: ("size", draws.choice(FLOATS)),
        lambda: ("text", draws.choice(TEXTS)),
        lambda: ("size", "x" * 3_000_000),
        lambda: ("size", unfolding(draws.choice([3, 8]))),
        lambda: ("size", nested(draws.choice([50, 250, 2000]))),
        lambda: ("dtype or shape", draws.choice(other_tensors())()),
    ]
    if type(value) is int:
        near = [value + 1, value - 1, -value, value * 1000, ~value]
        kinds += [lambda: ("sign or size", draws.choice(near))] * 6
        kinds += [lambda: ("sign or size", draws.choice([*INTEGERS, *HUGE]))] * 6
    if type(value) is float:
        kinds += [lambda: ("sign or size", draws.choice([-value, value * 1e6, *FLOATS]))] * 8
    if type(value) is bool:
        kinds += [lambda: ("sign or size", not value)] * 4
    if type(value) is str:
        kinds += [lambda: ("text", altered_text(value, draws))] * 8
        kinds += [lambda: ("text", draws.choice(TEXTS))] * 4
    if isinstance(value, dict) and value:
        kinds += [lambda: ("key", altered_keys(value, draws))] * 12
    if isinstance(value, (list, tuple)) and value:
        kinds += [lambda: ("length", type(value)(altered_list(list(value), draws)))] * 12
    if isinstance(value, torch.Tensor):
        kinds += [lambda: ("dtype or shape", altered_tensor(value, draws))] * 16
    return draws.choice(kinds)()


def unfolding(levels: int) -> list[Any]:
    """Return a list that is small in a file and has ten to the power of ``levels`` entries."""
    made: list[Any] = [0] * 10
    for _ in range(levels):
        made = [made] * 10
    return made


def nested(levels: int) -> list[Any]:
    """Return lists in lists."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def other_tensors() -> list[Callable[[], Any]]:
    """Return tensors that no run saves."""
    return [
        lambda: torch.zeros(1).expand(1 << 40),
        lambda: torch.zeros(0),
        lambda: torch.full((3,), 7, dtype=torch.uint8).view(torch.bool),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.empty(1 << 30, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.zeros(3, dtype=torch.complex64),
    ]


def altered_text(text: str, draws: random.Random) -> str:
    """Return a text of other characters or of another length."""
    if not text:
        return "x"
    place = draws.randrange(len(text))
    other = chr(draws.choice([0, 1, 65, 127, 255, 0x2603]))
    return draws.choice(
        [
            text[:place],
            text + text[place:],
            text[:place] + other + text[place + 1 :],
            text[:place] + other * 8 + text[place + 8 :],
            "".join(chr(draws.randrange(256)) for _ in text),
            text.swapcase(),
        ]
    )


def altered_keys(value: dict[Any, Any], draws: random.Random) -> dict[Any, Any]:
    """Return a dictionary with a name more, less, or another one, or with exchanged values."""
    made = copy.copy(value)
    key = draws.choice(list(value))
    other = draws.choice(list(value))
    action = draws.randrange(5)
    if action == 0:
        del made[key]
    elif action == 1:
        made[draws.choice(["x", 7, None, "evil", f"{key}x"])] = made.pop(key)
    elif action == 2:
        made[draws.choice(["x", 7, f"{key}x"])] = value[key]
    elif action == 3:
        made[key], made[other] = value[other], value[key]
    else:
        return {}
    return made


def altered_list(values: list[Any], draws: random.Random) -> list[Any]:
    """Return a list that is longer, shorter, or in another order."""
    place = draws.randrange(len(values))
    return draws.choice(
        [
            [],
            values[:place],
            values[place:],
            [*values, values[place]],
            [*values, None],
            values * 3,
            values[::-1],
            values * 100_000 if len(values) < 30 else values[:1],
        ]
    )


def altered_tensor(tensor: torch.Tensor, draws: random.Random) -> Any:
    """Return a tensor of another type, shape or content."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.bool]
    number = draws.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    is_real = tensor.is_floating_point()
    choices: list[Callable[[], Any]] = [
        lambda: tensor.to(draws.choice(dtypes)),
        lambda: tensor[None],
        lambda: tensor.flatten()[: draws.randrange(tensor.numel() + 1)],
        lambda: torch.cat([tensor.flatten()] * 2),
        lambda: tensor.mT if tensor.ndim > 1 else tensor.flatten()[:0],
        lambda: torch.full_like(tensor, number) if is_real else torch.full_like(tensor, 77),
        lambda: tensor.flatten().flip(0).view(tensor.shape),
        lambda: tensor.tolist(),
        lambda: torch.zeros(1, dtype=tensor.dtype).expand(max(1, tensor.numel())),
        lambda: draws.choice(other_tensors())(),
    ]
    return draws.choice(choices)()


# ------------------------------------------------------------------------------------------------
# files


class Evil:
    """A value that would leave a mark if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('executed', 'w').close()",)


def change_value(run: Path, draws: random.Random) -> Change:
    """Change a value of the checkpoint."""
    checkpoint = load(run)
    while True:
        path = choose_path(checkpoint, draws)
        kind, other = another_value(value_at(checkpoint, path), draws)
        saved = io.BytesIO()
        try:
            torch.save(changed_at(checkpoint, path, lambda _, other=other: other), saved)
        except RecursionError:
            continue  # Python cannot write it in this way either
        save(run, saved.getvalue())
        return Change(kind, f"{'/'.join(map(str, path))} = {reprlib.repr(other)[:80]}")


def splice_values(run: Path, draws: random.Random, others: Sequence[Path]) -> Change:
    """Put a part of another run's checkpoint in place of the same part or of another one."""
    checkpoint = load(run)
    other = load(draws.choice(others))
    path = choose_path(checkpoint, draws)
    is_in_other = True
    try:
        given = value_at(other, path)
    except (LookupError, TypeError):
        is_in_other = False
        given = value_at(other, choose_path(other, draws))
    saved = io.BytesIO()
    torch.save(changed_at(checkpoint, path, lambda _: given), saved)
    save(run, saved.getvalue())
    where = "same" if is_in_other else "another"
    return Change("spliced", f"{'/'.join(map(str, path))} from the {where} place of another run")


def change_bytes(run: Path, draws: random.Random, others: Sequence[Path]) -> Change:
    """Cut the checkpoint, exchange bytes of it, or write it in a way that hides something."""
    content = checkpoint_file(run).read_bytes()
    place = draws.randrange(len(content))
    action = draws.randrange(6)
    if action == 0:
        save(run, content[:place])
        return Change("truncated", f"at byte {place}")
    if action == 1:
        other = checkpoint_file(draws.choice(others)).read_bytes()
        save(run, content[:place] + other[place:])
        return Change("spliced", f"bytes from {place} on are of another run")
    if action == 2:
        save(run, rezipped(content, zipfile.ZIP_DEFLATED))
        return Change("archive", "compressed")
    if action == 3:
        save(run, with_pickle(content, draws))
        return Change("archive", "bytes of its values changed, checksum right")
    if action == 4:
        saved = io.BytesIO()
        section = draws.choice(list(load(run)))
        torch.save(changed_at(load(run), [section], lambda _: Evil()), saved)
        save(run, saved.getvalue())
        return Change("code", f"in place of {section}")
    size = draws.choice([1, 8, 4096])
    save(run, content[:place] + draws.randbytes(size) + content[place + size :])
    return Change("bytes", f"{size} at {place}")


def rezipped(content: bytes, compression: int) -> bytes:
    """Return an archive with its members written in another way."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(made, "w", compression) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    return made.getvalue()


def with_pickle(content: bytes, draws: random.Random) -> bytes:
    """Return a checkpoint with some bytes of its pickled values changed, and right checksums."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.infolist():
            data = bytearray(old.read(member))
            if member.filename.endswith("data.pkl"):
                for _ in range(draws.choice([1, 1, 3])):
                    data[draws.randrange(len(data))] = draws.randrange(256)
            new.writestr(member.filename, bytes(data))
    return made.getvalue()


def change_chunk(run: Path, draws: random.Random, others: Sequence[Path]) -> Change:
    """Change a file of the replay; half of the time the checkpoint has its new checksum."""
    chunks = sorted((run / "replay").rglob("rows_*.npy"))
    if not chunks:
        return change_value(run, draws)
    path = draws.choice(chunks)
    content = path.read_bytes()
    action = draws.choice(["cut", "bytes", "header", "header", "header", "columns", "number"])
    if action == "cut":
        made = content[: draws.randrange(len(content))]
    elif action == "bytes":
        place = draws.randrange(len(content))
        made = content[:place] + draws.randbytes(8) + content[place + 8 :]
    elif action == "header":
        made = with_header(content, draws)
    else:
        made = with_columns(content, draws)
    path.write_bytes(made)
    is_listed = draws.random() < 0.8
    if is_listed:
        name = re.sub(r"[0-9a-f]{8}\.npy", f"{zlib.crc32(made):08x}.npy", path.name)
        path.rename(path.with_name(name))
        save_listing(run, path.name, name, zlib.crc32(made))
    return Change("chunk", f"{action}{', checksum right' if is_listed else ''}")


def with_header(content: bytes, draws: random.Random) -> bytes:
    """Return a chunk with another type or shape in one of its headers."""
    headers = list(
        re.finditer(rb"\{'descr': ('[^']*'), 'fortran_order': \w+, 'shape': (\([^)]*\))", content)
    )
    found = draws.choice(headers)
    group = draws.choice([1, 2])
    others = {
        1: [b"'|O'", b"'<f8'", b"'|V8'", b"'<U9999'", b"[('a','|O')]", b"'|b1'", b"'>i8'"],
        2: [b"(99999999999999,)", b"(1,)", b"()", b"(-1,)", b"(4294967296, 2)", b"(0, 2)", b"x"],
    }
    other = draws.choice(others[group])
    start, end = found.span(group)
    # the header ends with blanks, which keep its length
    header_end = content.index(b"\n", end)
    grown = content[found.start() : start] + other + content[end:header_end].rstrip()
    room = header_end - found.start()
    if len(grown) > room:
        return content[:start]
    return content[: found.start()] + grown.ljust(room) + content[header_end:]


def with_columns(content: bytes, draws: random.Random) -> bytes:
    """Return a chunk with one column of other numbers, of another type or length."""
    stream = io.BytesIO(content)
    columns = []
    while stream.tell() < len(content):
        columns.append(np.load(stream, allow_pickle=False))
    place = draws.randrange(len(columns))
    column = columns[place]
    columns[place] = draws.choice(
        [
            column.astype(np.float64),
            column[:-1],
            np.concatenate([column, column]),
            column[..., None],
            np.full_like(column, 77).view(column.dtype),
            np.full(column.shape, "x"),
            np.full(column.nbytes, 7, np.uint8).view(column.dtype)[: len(column)],
        ]
    )
    if draws.random() < 0.2:
        columns.pop(place)
    made = io.BytesIO()
    for column in columns:
        np.save(made, column)
    return made.getvalue()


def save_listing(run: Path, old: str, new: str, crc32: int) -> None:
    """Let the checkpoint name a chunk by its new name and checksum."""
    checkpoint = load(run)
    parts = [part["data"] for part in checkpoint.get("ranks", [])] or [checkpoint["MultiTaskData"]]
    for part in parts:
        for chunk in part["replay"]["chunks"]:
            if chunk["file"] == old:
                chunk["file"] = new
                chunk["crc32"] = crc32
    saved = io.BytesIO()
    torch.save(checkpoint, saved)
    save(run, saved.getvalue())


def change_metrics(run: Path, draws: random.Random) -> Change:
    """Change ``metrics.csv``."""
    path = run / "metrics.csv"
    if not path.exists():
        return change_value(run, draws)
    content = path.read_bytes()
    place = draws.randrange(len(content))
    other = draws.choice([b"", b"nan", b"1e999", b"\xff\x00", b'"', b"\n\n", b"-1", b"," * 1000])
    end = draws.choice([place, place + 5, len(content)])
    path.write_bytes(content[:place] + other + content[end:])
    return Change("metrics.csv", f"{other[:8]!r} at {place}")


def change_file(run: Path, draws: random.Random, others: Sequence[Path]) -> Change:
    """Change one of a run's files."""
    lot = draws.random()
    if lot < 0.70:
        return change_value(run, draws)
    if lot < 0.78:
        return splice_values(run, draws, others)
    if lot < 0.87:
        return change_bytes(run, draws, others)
    if lot < 0.98:
        return change_chunk(run, draws, others)
    return change_metrics(run, draws)


def change_collection(folder: Path, draws: random.Random) -> Change:
    """Change one of a collection's files."""
    lot = draws.random()
    if lot < 0.5:
        return change_json(draws.choice(sorted(folder.rglob("*.json"))), draws)
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".npy", ".hdf5")]
    path = draws.choice(paths)
    content = path.read_bytes()
    if path.suffix == ".hdf5":
        if lot < 0.75:
            return change_array(path, draws)
        path.write_bytes(altered_bytes(content, draws))
        return Change("bytes", path.name)
    action = draws.choice(["cut", "bytes", "header", "header", "columns"])
    if action in ("cut", "bytes"):
        made = altered_bytes(content, draws)
    else:
        made = with_header(content, draws) if action == "header" else with_columns(content, draws)
    path.write_bytes(made)
    if draws.random() < 0.8:  # so that the content is looked at
        listing_file = folder / "collection.json"
        listed = json.loads(listing_file.read_text())
        name = re.sub(r"[0-9a-f]{8}\.npy", f"{zlib.crc32(made):08x}.npy", path.name)
        path.rename(path.with_name(name))
        for chunk in listed["replay"]["chunks"]:
            if chunk["file"] == path.name:
                chunk |= {"file": name, "crc32": zlib.crc32(made)}
        listing_file.write_text(json.dumps(listed))
    return Change("chunk", action)


def altered_bytes(content: bytes, draws: random.Random) -> bytes:
    """Return a file that is cut, or has other bytes at a place."""
    place = draws.randrange(len(content))
    if draws.random() < 0.3:
        return content[:place]
    return content[:place] + draws.randbytes(8) + content[place + 8 :]


def change_json(path: Path, draws: random.Random) -> Change:
    """Change a value of a JSON file, or its text."""
    content = json.loads(path.read_text())
    while True:
        place = choose_path(content, draws)
        _, other = another_value(value_at(content, place), draws)
        if isinstance(other, list) and len(other) == 10 and other[0] is other[1]:
            other = unfolding(3)  # JSON writes each entry
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # JSON has no such value
            made = json.dumps(changed_at(content, place, lambda _, other=other: other))
            break
    if draws.random() < 0.1:
        made = altered_bytes(made.encode(), draws).decode(errors="replace")
        place = ("text",)
    path.write_text(made)
    return Change("json", f"{'/'.join(map(str, place))} of {path.name}")


def change_array(path: Path, draws: random.Random) -> Change:
    """Put another array, or a link, in place of one of a file of Minari's."""
    import h5py

    with h5py.File(path, "a") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
        name = draws.choice(names)
        old = file[name][()]
        del file[name]
        kind = draws.choice(
            ["longer", "type", "huge", "text", "link", "other file", "gone", "rank"]
        )
        if kind == "longer":
            file[name] = np.concatenate([old, old])
        elif kind == "type":
            file[name] = old.astype(draws.choice(["f8", "i2", "u1", "bool"]))
        elif kind == "huge":
            file.create_dataset(name, (10**12,), "f4", chunks=(1024,), compression="gzip")
        elif kind == "text":
            file[name] = [b"text"] * len(old)
        elif kind == "link":
            file[name] = h5py.SoftLink("/")
        elif kind == "other file":
            file[name] = h5py.ExternalLink("/dev/zero", "x")
        elif kind == "rank":
            file[name] = old[..., None]
    return Change("array", f"{name} {kind}")


def checkpoint_file(run: Path) -> Path:
    """Return the only checkpoint of a prepared run."""
    (path,) = (run / "checkpoints").glob("step_*.ckpt")
    return path


def load(run: Path) -> dict[str, Any]:
    """Read the checkpoint of a prepared run."""
    return torch.load(checkpoint_file(run), weights_only=True)


def save(run: Path, content: bytes) -> None:
    """Write the checkpoint of a prepared run under both of its names."""
    path = checkpoint_file(run)
    last = path.with_name("last.ckpt")
    path.write_bytes(content)
    last.unlink(missing_ok=True)
    os.link(path, last)


# ------------------------------------------------------------------------------------------------
# runs


def prepare(name: str, folder: Path) -> Path:
    """Train a run whose files are changed, and keep its last checkpoint alone.

    Returns:
        The run's folder.
    """
    steps = STEPS.get(name, STEPS["sac"])[0]
    arguments = [
        *BASES[name],
        f"--name={name}",
        f"--root={folder}",
        f"--rollout.total_steps={steps}",
    ]
    if name == "ppo":
        arguments[-1] = "--rollout.total_steps=100000"
    arguments = ["fit", *arguments, "--seed_everything=1"]
    if name == "ranks":  # they are started with this program's command line
        command = [sys.executable, "-m", "mtrl_lightning", *arguments]
        code = subprocess.run(command).returncode
    else:
        code = _train(arguments)
    if code != (143 if name == "ppo" else 0):
        raise RuntimeError(f"{name} ended with {code}")
    run = folder / name / "version_0"
    last = (run / "checkpoints" / "last.ckpt").resolve()
    for path in (run / "checkpoints").glob("*.ckpt"):
        if path.name == "best.ckpt" or not path.samefile(last):
            path.unlink()
    (run / "curves.png").unlink(missing_ok=True)
    return run


def _train(arguments: Sequence[str]) -> int:
    """Run the program in a forked process; return its exit code."""
    child = os.fork()
    if child == 0:
        _leave_out_curves()
        os._exit(exit_code_of(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave_out_curves() -> None:
    """Write no curves.png in this process: it takes half of a run's time."""
    curves.plot_curves = lambda *args: None


def write_collection_of_toys(name: str, folder: Path) -> Path:
    """Write the collection whose files are changed; return its folder."""
    from mtrl_lightning.demonstrations import UniformPolicy, collect, write_collection
    from mtrl_lightning.envs import ToyReach

    benchmark = ToyReach()
    collected = collect(UniformPolicy(benchmark.spec), benchmark, 4, noise=0.1, num_workers=0)
    base = folder / name / "collection"
    facts = {"policy": "random", "seeds": collected.seeds}
    write_collection(base, benchmark.spec, collected.columns, facts, COLLECTIONS[name])
    return base


class Outcome(NamedTuple):
    """What became of a continued run."""

    word: str
    """refused, ran (bit for bit as from the unchanged files), ran otherwise, or what went wrong."""
    seconds: float
    """Of a processor."""
    mebibytes: float
    """The most that was resident."""
    output: str

    @property
    def is_allowed(self) -> bool:
        """Whether it is what a changed file may lead to."""
        return self.word in ("refused", "ran", "ran otherwise")


class Server:
    """Parse the command line that continues a run once, then fork for each change of its files.

    Parsing takes half of such a run's time, and is the same for all.

    Args:
        name: of the run.
        base: its folder, which stays as it is.
        others: folders of further runs, of which parts are put into this one.
        root: the folder in which nothing but the run's copy may be written.
        keep: where the runs are kept that did what they must not.
        report: receives a row for each change.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        others: Sequence[Path],
        root: Path,
        keep: Path | None,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._name = name
        self._base = base
        self._others = others
        self._run = root / name / base.name
        self._keep = keep
        self._report = report
        self._wanted: dict[str, torch.Tensor] | None = None

    def serve(self, indices: Sequence[int], seed: int) -> NoReturn:
        """Make changes and continue the run after each; end this process."""
        from mtrl_lightning.launch import start

        locate = start.locate_run

        def fork_for_each(*args: Any, **options: Any) -> start.RunLocation:
            for index in [-1, *indices]:
                if self._continues(index, seed):
                    return locate(*args, **options)
            os._exit(0)

        start.locate_run = fork_for_each
        self._copy_base()
        total = STEPS.get(self._name, STEPS["sac"])[1]
        arguments = ["fit", f"--resume={self._run}", f"--rollout.total_steps={total}"]
        if self._name == "ranks":
            arguments += ["--trainer.devices=1"]
        code = TRACEBACK
        try:
            code = exit_code_of(arguments)
        finally:
            os._exit(code)  # whatever was raised: this process must not clean up the folders

    def _copy_base(self) -> None:
        shutil.rmtree(self._run.parent, ignore_errors=True)
        shutil.copytree(self._base, self._run)
        save(self._run, checkpoint_file(self._run).read_bytes())

    def _continues(self, index: int, seed: int) -> bool:
        """Make a change, and fork; return true in the process that continues the run.

        Index -1 stands for no change.
        """
        self._copy_base()
        change = Change("none", "")
        if index >= 0:
            change = self._change(random.Random(f"{seed} {index}"))
        before = listing(self._run.parent.parent, self._run.parent)
        child = os.fork()
        if child == 0:
            if index < 0:  # its weights alone are compared
                _leave_out_curves()
            _restrict(self._run)
            return True
        outcome = self._judge(*_wait(child), before)
        if index < 0:
            if outcome.word != "ran":
                raise RuntimeError(f"{self._name} does not continue: {outcome}")
            self._wanted = self._weights()
        else:
            row = {"index": index, "run": self._name, **change._asdict(), **outcome._asdict()}
            self._report(row)
        if not outcome.is_allowed and self._keep is not None:
            shutil.copytree(self._run.parent, self._keep / str(index), dirs_exist_ok=True)
        return False

    def _change(self, draws: random.Random) -> Change:
        return change_file(self._run, draws, self._others)

    def _judge(self, status: int, usage: Any, before: Sequence[str]) -> Outcome:
        log = self._run.parent / LOG
        output = log.read_text(errors="replace") if log.exists() else ""
        seconds = usage.ru_utime + usage.ru_stime
        mebibytes = usage.ru_maxrss / 1024
        code = os.waitstatus_to_exitcode(status)
        word = {2: "refused", 1: "refused", 0: "ran"}.get(code, "TRACEBACK")
        if code in (-signal.SIGXCPU, -signal.SIGKILL) or seconds > SECONDS:
            word = "HANGS"
        elif code < 0:
            word = f"CRASH ({signal.Signals(-code).name})"
        elif code == EXECUTED or (self._run.parent / "executed").exists():
            word = "CODE EXECUTED"
        elif code == OUTSIDE or listing(self._run.parent.parent, self._run.parent) != before:
            word = "WROTE OUTSIDE"
        elif mebibytes > MEBIBYTES:
            word = "MEMORY"
        elif (
            code == 0 and self._wanted is not None and not _are_equal(self._weights(), self._wanted)
        ):
            word = "ran otherwise"
        return Outcome(word, seconds, mebibytes, output)

    def _weights(self) -> dict[str, Any]:
        path = self._run / "checkpoints" / "last.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]


class CollectionServer(Server):
    """Load a collection as demonstrations after each change of its files."""

    def serve(self, indices: Sequence[int], seed: int) -> NoReturn:
        """Make changes and load the collection after each; end this process."""
        from mtrl_lightning.envs import ToyReach
        from mtrl_lightning.errors import ConfigurationError
        from mtrl_lightning.run.demonstrations import load_demonstrations

        spec = ToyReach().spec
        load_demonstrations(str(self._base), spec, 0, torch.device("cpu"))  # imports
        for index in [-1, *indices]:
            if not self._continues(index, seed):
                continue
            code = TRACEBACK
            try:
                load_demonstrations(str(self._run), spec, 0, torch.device("cpu"))
                code = 0
            except ConfigurationError as error:
                print(error)
                code = 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(VIOLATIONS[0] if VIOLATIONS else code)
        os._exit(0)

    def _copy_base(self) -> None:
        shutil.rmtree(self._run.parent, ignore_errors=True)
        shutil.copytree(self._base, self._run)

    def _change(self, draws: random.Random) -> Change:
        return change_collection(self._run, draws)

    def _weights(self) -> dict[str, Any]:
        return {}


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], value) if isinstance(value, torch.Tensor) else True
        for key, value in other.items()
    )


def listing(folder: Path, without: Path) -> list[str]:
    """Return the files below a folder but those below another one."""
    return sorted(str(path) for path in folder.rglob("*") if without not in (path, *path.parents))


def _wait(child: int) -> tuple[int, Any]:
    give_up_at = time.monotonic() + 20 * SECONDS
    while time.monotonic() < give_up_at:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage


def _restrict(run: Path) -> None:
    """Let this process do what a continued run may do, and note what it must not."""
    os.chdir(run.parent)
    Path(f"{EVIL}.py").write_text("open('executed', 'w').close()\nrun = print\nEvil = object\n")
    handle = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_watch(run))


def exit_code_of(arguments: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    from mtrl_lightning.__main__ import main

    try:
        main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = TRACEBACK
    sys.stdout.flush()
    sys.stderr.flush()
    return VIOLATIONS[0] if VIOLATIONS else code


def _watch(run: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that notes what a continued run must not do."""
    inside = str(run.resolve()) + os.sep
    allowed = (inside, "/dev/", "/proc/", tempfile.gettempdir() + os.sep + "torch")
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changes = {"os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir"}
    changes |= {"os.truncate", "os.chmod", "os.chown", "shutil.rmtree", "shutil.move"}
    programs = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen"}

    def hook(event: str, given: tuple[Any, ...]) -> None:
        paths: list[Any] = []
        if event == "open" and isinstance(given[2], int) and given[2] & writes:
            paths = [given[0]]
        elif event in changes:
            paths = [one for one in given if isinstance(one, (str, bytes, os.PathLike))]
        elif event in programs:
            print(f"EXECUTED {event} {given}", file=sys.stderr)
            VIOLATIONS.append(EXECUTED)
        for path in paths:
            if isinstance(path, int):
                continue
            full = os.path.realpath(os.fsdecode(path))
            if not (full + os.sep).startswith(allowed):
                print(f"OUTSIDE {event} {full}", file=sys.stderr)
                VIOLATIONS.append(OUTSIDE)

    return hook


def import_what_runs_need() -> None:
    """Import in this process what each continued run would import."""
    import matplotlib.pyplot  # noqa: F401

    import mtrl_lightning.cli.lightning_cli
    import mtrl_lightning.envs  # noqa: F401

    with contextlib.suppress(ImportError):
        import metaworld  # noqa: F401
    torch.set_num_threads(1)


def fuzz(
    names: Sequence[str],
    indices: Sequence[int],
    seed: int,
    keep: Path | None,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Change files of some runs, and continue each.

    Args:
        names: of the runs, which take turns.
        indices: of the changes; each is the same whichever others are made.
        seed: of all changes.
        keep: where the runs are kept that did what they must not.
        report: receives a row for each change: index, run, kind, change, outcome.
    """
    import_what_runs_need()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bases = {name: prepare(name, root / "bases") for name in BASES if name in names}
        runs = [*bases.values()]
        for name in COLLECTIONS:
            if name in names:
                bases[name] = write_collection_of_toys(name, root / "bases")
        for name, base in bases.items():
            own = [index for index in indices if names[index % len(names)] == name]
            others = [other for other in runs if other != base] or [base]
            server = CollectionServer if name in COLLECTIONS else Server
            child = os.fork()
            if child == 0:
                try:
                    server(name, base, others, root / "changed", keep, report).serve(own, seed)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            if status:
                raise RuntimeError(f"the changes of {name} ended with {status}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return how the files of each kind of change ended, in Markdown."""
    words = ["refused", "ran", "ran otherwise"]
    words += sorted({row["word"] for row in rows} - {*words})
    kinds = sorted({row["kind"] for row in rows})
    lines = [f"| change | files | {' | '.join(words)} | seconds (most) | MiB (most) |"]
    lines.append("|---|" + "---|" * (len(words) + 3))
    for kind in [*kinds, ""]:
        chosen = [row for row in rows if kind in (row["kind"], "")]
        counts = Counter(row["word"] for row in chosen)
        seconds = max(row["seconds"] for row in chosen)
        mebibytes = max(row["mebibytes"] for row in chosen)
        cells = " | ".join(str(counts[word]) for word in words)
        lines.append(
            f"| {kind or 'all'} | {len(chosen)} | {cells} | {seconds:.1f} | {mebibytes:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Change files and continue the runs; end with 1 if one did what it must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100, help="number of changed files")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of changes to repeat")
    parser.add_argument("--seed", type=int, default=1, help="of the changes")
    parser.add_argument("--runs", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--json", type=Path, help="add a line for each changed file here")
    parser.add_argument("--keep", type=Path, help="keep the runs here that did what they must not")
    options = parser.parse_args()
    indices = options.only or range(options.files)
    with tempfile.TemporaryDirectory() as folder:
        log = options.json or Path(folder) / "rows.json"

        def report(row: dict[str, Any]) -> None:
            with log.open("a") as file:
                file.write(f"{json.dumps(row)}\n")

        fuzz(options.runs, indices, options.seed, options.keep, report)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    print(table(rows))
    for row in rows:
        if not Outcome(row["word"], 0, 0, "").is_allowed:
            print(f"{row['index']} {row['run']}: {row['word']}: {row['text']}")
    wrong = [row for row in rows if not Outcome(row["word"], 0, 0, "").is_allowed]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
