"""Compare the metrics of small runs before and after a change that changes no number.

``python -m tests.frozen hashes.json`` writes the hashes; with ``--check`` it compares with the
file's, and ends with 1 if any differs. Hashes belong to one kind of processor and one
version of PyTorch, so none are kept with the code.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.fuzzing import exit_code_of, import_what_runs_need
from tests.helpers.matrix import GRADIENTS

TIMES = ("time/", "system/")
"""Beginnings of the columns that differ between two equal runs."""
COMMON = [
    "--seed_everything=1",
    "--rollout.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.num_episodes=2",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]
NARROW = [
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.critic.init_args.width=16",
]
OFF_POLICY = [
    *COMMON,
    "--data.batch_size=96",
    "--data.capacity=3000",
    "--rollout.warmup_steps=120",
    "--rollout.total_steps=330",
    "--evaluation.every=150",
    "--metrics.every=60",
    "--checkpoint.every=150",
]
ON_POLICY = [
    *COMMON,
    "--model.init_args.num_steps=30",
    "--model.init_args.num_minibatches=2",
    "--rollout.total_steps=360",
    "--evaluation.every=150",
    "--metrics.every=60",
    "--checkpoint.every=100",
]
NETWORKS = (
    "film",
    "film_scalar",
    "mlp",
    "mlp_residual",
    "moore",
    "multi_head",
    "multi_head_mtrl",
    "paco",
    "separate",
    "soft_modularization",
)
ENCODERS = (
    "care",
    "mixture",
    "mlp_context",
    "shared_task_embedding",
    "standardize",
    "task_embedding",
    "task_encoder",
)
ASSIGNMENTS = ("Average", "Gate")
"""Of a mixture of encoders, beside its configuration's."""


def configs(
    algorithm: str = "mtsac",
    env: str = "toy",
    network: str = "mlp",
    gradient: str = "mean",
    encoder: str = "",
) -> list[str]:
    """Return the options that name the configuration files of a run."""
    names = [f"env/{env}", f"algorithm/{algorithm}", f"network/{network}", f"gradient/{gradient}"]
    names += [f"encoder/{encoder}"] if encoder else []
    return ["-c=base", *(f"-c={name}" for name in names)]


def runs() -> Iterator[tuple[str, list[str]]]:
    """Yield the runs: a name and the options of ``fit``."""
    yield "sac", [*configs(), *OFF_POLICY, *NARROW]
    yield "sac workers", [*configs(), *OFF_POLICY, *NARROW, "--rollout.num_workers=2"]
    more = ["--rollout.updates_per_step=1.5", "--resets.every=200", "--evaluation.at_start=true"]
    yield "sac ratio", [*configs(), *OFF_POLICY, *NARROW, *more, "--checkpoint.at_start=true"]
    yield "sac ranks", [*configs(), *OFF_POLICY, *NARROW, "--trainer.devices=2", *TWO_COPIES]
    yield "td3", [*configs("mttd3"), *OFF_POLICY, *NARROW]
    yield "ppo", [*configs("mtppo"), *ON_POLICY, *NARROW]
    yield "ppo workers", [*configs("mtppo"), *ON_POLICY, *NARROW, "--rollout.num_workers=2"]
    yield "ppo ranks", [*configs("mtppo"), *ON_POLICY, *NARROW, "--trainer.devices=2", *TWO_COPIES]
    yield "distral", [*configs("distral"), *OFF_POLICY]
    for algorithm in ("sac_ae", "deepmdp", "hipbmdp"):
        encoder = "mlp_context" if algorithm == "hipbmdp" else "mlp"
        yield algorithm, [*configs(algorithm, encoder=encoder), *OFF_POLICY]
    for algorithm, options in (("mtsac", OFF_POLICY), ("mtppo", ON_POLICY)):
        tasks = ['--data.benchmark.init_args.tasks=["reach","push"]']
        horizon = "--data.benchmark.init_args.horizon=50"
        yield (
            f"metaworld {algorithm}",
            [*configs(algorithm, "metaworld_custom"), *options, *NARROW, *tasks, horizon],
        )
    for network in NETWORKS:
        yield f"network {network}", [*configs(network=network), *OFF_POLICY]
    for gradient in GRADIENTS:
        if gradient == "mean":  # the other runs have it
            continue
        yield f"gradient {gradient}", [*configs(gradient=gradient), *OFF_POLICY, *NARROW]
        yield f"ppo {gradient}", [*configs("mtppo", gradient=gradient), *ON_POLICY, *NARROW]
    for encoder in ENCODERS:
        yield f"encoder {encoder}", [*configs(encoder=encoder), *OFF_POLICY, *NARROW]
    for assignment in ASSIGNMENTS:
        option = f"--model.init_args.encoder.init_args.assignment={assignment}"
        yield f"mixture {assignment}", [*configs(encoder="mixture"), *OFF_POLICY, *NARROW, option]


TWO_COPIES = ["--rollout.envs_per_task=2"]


def hash_of(metrics: Path) -> str:
    """Return the hash of a file's rows without the columns that measure time."""
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = [
        {name: value for name, value in row.items() if not name.startswith(TIMES) and value}
        for row in rows
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def train(name: str, options: list[str], root: Path) -> str:
    """Make a run in a process of its own; return the hash of its metrics, or its last output."""
    folder = name.replace(" ", "_")
    log = root / f"{folder}.txt"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            arguments = ["fit", *options, f"--root={root}", f"--name={folder}"]
            if "--trainer.devices=2" in options:  # the other rank repeats this program's command
                os.execv(sys.executable, [sys.executable, "-m", "mtrl_lightning", *arguments])
            code = exit_code_of(arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        return f"ended with {status}: {log.read_text()[-1500:]}"
    return hash_of(root / folder / "version_0" / "metrics.csv")


def main() -> None:
    """Write or compare the hashes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--only", nargs="+", default=[], help="runs whose names begin so")
    options = parser.parse_args()
    known = json.loads(options.file.read_text()) if options.check else {}
    found: dict[str, str] = {}
    import_what_runs_need()
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in runs():
            if options.only and not name.startswith(tuple(options.only)):
                continue
            found[name] = train(name, arguments, Path(folder))
            mark = (
                "" if not options.check else "  same" if found[name] == known[name] else "  OTHER"
            )
            if not options.check:
                options.file.write_text(json.dumps(found, indent=1))
            print(f"{name:24} {found[name]}{mark}", flush=True)
    if options.check and any(known[name] != value for name, value in found.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
