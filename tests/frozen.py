"""Compare the metrics of small runs before and after a change that changes no number.

``python -m tests.frozen hashes.json`` writes the hashes; with ``--check`` it compares with the
file's, and ends with 1 if any differs. Hashes belong to one kind of processor and one
version of PyTorch, so none are kept with the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.command_line import ROOT
from tests.helpers.processes import FORK

COMMON = [
    "--seed_everything=1",
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
    "--data.num_workers=0",
    "--data.batch_size=96",
    "--data.capacity=3000",
    "--data.warmup_steps=120",
    "--data.total_steps=330",
    "--evaluation.every=150",
    "--metrics.every=60",
    "--checkpoint.every_n_env_steps=150",
]
ON_POLICY = [
    *COMMON,
    "--data.num_workers=0",
    "--model.init_args.num_steps=30",
    "--model.init_args.num_minibatches=2",
    "--data.total_steps=360",
    "--evaluation.every=150",
    "--metrics.every=60",
    "--checkpoint.every_n_env_steps=100",
]
ENCODERS = (
    "care",
    "mixture",
    "mlp_context",
    "shared_task_embedding",
    "standardize",
    "task_embedding",
    "task_encoder",
)


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


def runs() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the runs: a name, and the arguments of each command in order; the last one is hashed.

    ``RUN`` in an argument is the folder of the previous ``fit``, ``ROOT`` that of all.
    """
    for name, options in single_runs():
        yield name, [["fit", *options]]
    yield from continued_runs()
    yield from started_runs()


def single_runs() -> Iterator[tuple[str, list[str]]]:
    """Yield the runs of one command: a name and the options of ``fit``."""
    yield "sac", [*configs(), *OFF_POLICY, *NARROW]
    yield "sac workers", [*configs(), *OFF_POLICY, *NARROW, "--data.num_workers=2"]
    more = ["--data.updates_per_step=1.5", "--resets.every=200", "--evaluation.at_start=true"]
    yield "sac ratio", [*configs(), *OFF_POLICY, *NARROW, *more]
    yield "sac ranks", [*configs(), *OFF_POLICY, *NARROW, "--trainer.devices=2", *TWO_COPIES]
    yield "td3", [*configs("mttd3"), *OFF_POLICY, *NARROW]
    yield "ppo", [*configs("mtppo"), *ON_POLICY, *NARROW]
    yield "ppo workers", [*configs("mtppo"), *ON_POLICY, *NARROW, "--data.num_workers=2"]
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
    for network in sorted(path.stem for path in ROOT.glob("configs/network/*.yaml")):
        if not network.endswith("_mt50"):  # it is large
            yield f"network {network}", [*configs(network=network), *OFF_POLICY]
    for gradient in sorted(path.stem for path in ROOT.glob("configs/gradient/*.yaml")):
        if gradient == "mean":  # the other runs have it
            continue
        yield f"gradient {gradient}", [*configs(gradient=gradient), *OFF_POLICY, *NARROW]
        yield f"ppo {gradient}", [*configs("mtppo", gradient=gradient), *ON_POLICY, *NARROW]
    for encoder in ENCODERS:
        yield f"encoder {encoder}", [*configs(encoder=encoder), *OFF_POLICY, *NARROW]
    for assignment in ("UniformGate", "TopKGate"):  # in addition to the configuration's
        option = f"--model.init_args.encoder.init_args.assignment={assignment}"
        yield f"mixture {assignment}", [*configs(encoder="mixture"), *OFF_POLICY, *NARROW, option]
    yield from rollout_runs()


TWO_COPIES = ["--data.envs_per_task=2"]
PAUSING = ["--data.extras+=mtrl_lightning.rollout.PauseSolved"]
REUSE = ["--data.extras+=mtrl_lightning.rollout.PolicyReuse"]
RETURN_RANGE = ["--model.init_args.reward_scale=mtrl_lightning.algorithms.ReturnRange"]
MIDWAY = [
    '--data.extras+={"class_path": "mtrl_lightning.rollout.StartMidway",'
    ' "init_args": {"fraction": 0.5}}'
]
ENDING = [
    '--data.extras+={"class_path": "mtrl_lightning.rollout.EndAfterSuccess",'
    ' "init_args": {"steps": 2}}'
]
METAWORLD = [
    '--data.benchmark.init_args.tasks=["reach","push"]',
    "--data.benchmark.init_args.horizon=50",
]
SHORT_SUITE = [
    '--data.benchmark.init_args.tasks=["cartpole-swingup","walker-walk"]',
    "--data.benchmark.init_args.horizon=50",
]
SOLVED_SOON = [*TWO_COPIES, "--data.total_steps=1500"]
"""The toy tasks have successes by then, so that pausing and reuse have something to do."""


def rollout_runs() -> Iterator[tuple[str, list[str]]]:
    """Yield runs that collect in a special way: pausing, reuse, midway starts, ends, noise."""
    sac = [*configs(), *OFF_POLICY, *NARROW]
    ppo = [*configs("mtppo"), *ON_POLICY, *NARROW]
    yield "sac pausing", [*sac, *SOLVED_SOON, *PAUSING]
    yield "sac pausing return range", [*sac, *SOLVED_SOON, *PAUSING, *RETURN_RANGE]
    yield "sac return range", [*sac, *RETURN_RANGE]
    yield "sac reuse", [*sac, *SOLVED_SOON, *REUSE]
    yield "sac after success", [*sac, *ENDING]
    yield "sac midway", [*sac, *SOLVED_SOON, *MIDWAY]
    yield "ppo pausing", [*ppo, *SOLVED_SOON, *PAUSING]
    yield "ppo reuse", [*ppo, *SOLVED_SOON, *REUSE]
    yield "ppo pausing reuse", [*ppo, *SOLVED_SOON, *PAUSING, *REUSE]
    yield "ppo midway", [*ppo, *SOLVED_SOON, *MIDWAY, *ENDING]
    noise = "--data.extras+=mtrl_lightning.rollout.CorrelatedNoise"
    yield "ppo correlated", [*ppo, noise, "--model.init_args.max_kl=null"]
    metaworld = [*configs("mtppo", "metaworld_custom"), *ON_POLICY, *NARROW, *METAWORLD]
    yield "metaworld midway", [*metaworld, *TWO_COPIES, *MIDWAY, *ENDING]
    for algorithm, options in (("mtsac", OFF_POLICY), ("mtppo", ON_POLICY)):
        yield f"suite {algorithm}", [*configs(algorithm, "dmc21"), *options, *NARROW, *SHORT_SUITE]


def continued_runs() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield runs that end in the middle of episodes, and continue with more steps."""
    sac = [*configs(), *OFF_POLICY, *NARROW]
    ppo = [*configs("mtppo"), *ON_POLICY, *NARROW]
    metaworld = [*configs(env="metaworld_custom"), *OFF_POLICY, *NARROW, *METAWORLD]
    suite = [*configs(env="dmc21"), *OFF_POLICY, *NARROW, *SHORT_SUITE]
    pausing = [*ppo, *TWO_COPIES, *PAUSING, *REUSE, *MIDWAY]
    two = [*TWO_COPIES, "--trainer.devices=2"]
    for name, first, steps, changed in (
        ("sac", sac, (213, 330), []),
        ("sac return range", [*sac, *RETURN_RANGE], (213, 330), []),
        ("sac workers", [*sac, "--data.num_workers=2"], (213, 330), []),
        ("td3", [*configs("mttd3"), *OFF_POLICY, *NARROW], (213, 330), []),
        ("distral", [*configs("distral"), *OFF_POLICY], (213, 330), []),
        ("ppo", ppo, (270, 540), []),
        ("ppo pausing reuse midway", pausing, (540, 1500), []),
        ("sac ranks", [*sac, *two], (210, 330), []),
        ("ranks to one", [*sac, *two], (210, 330), ["--trainer.devices=1"]),
        ("one to ranks", [*sac, *TWO_COPIES], (210, 330), ["--trainer.devices=2"]),
        ("metaworld", metaworld, (214, 330), []),
        ("suite", suite, (214, 330), []),
    ):
        begun = ["fit", *first, f"--data.total_steps={steps[0]}"]
        continued = ["fit", "--resume=RUN", f"--data.total_steps={steps[1]}", *changed]
        yield f"resume {name}", [begun, continued]


def started_runs() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield runs that start from something: a trained policy, demonstrations."""
    ppo = [*configs("mtppo"), *ON_POLICY, *NARROW]
    sac = [*configs(), *OFF_POLICY, *NARROW]
    more_tasks = "--data.benchmark.init_args.num_tasks=5"
    for name, options in (("ppo", ppo), ("sac", sac)):
        heads = [*options, "-c=network/multi_head", *NARROW]
        batch = ["--data.batch_size=100"] if name == "sac" else []
        starting = ["fit", *heads, more_tasks, *batch, "--init_from=RUN"]
        yield f"init_from {name}", [["fit", *heads], starting]
    collect = ["collect", "--policy=random", "--env=env/toy", "--episodes=3", "--num_workers=0"]
    collect += ["--folder=ROOT/collected"]
    cloning = [*configs("bc"), *COMMON, NARROW[0], "--data.demonstrations=ROOT/collected"]
    cloning += ["--data.batch_size=48", "--data.total_steps=60", "--evaluation.every=20"]
    cloning += ["--metrics.every=10", "--checkpoint.every_n_env_steps=20"]
    yield "bc", [collect, ["fit", *cloning]]
    resume = ["fit", "--resume=RUN", "--data.total_steps=60"]
    yield "resume bc", [collect, ["fit", *cloning, "--data.total_steps=37"], resume]


def hash_of(metrics: Path) -> str:
    """Return the hash of a file's rows without the columns that measure time."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [
        {
            name: str(value)
            for name, value in row.items()
            if not name.startswith("time/") and name != "step"
        }
        for row in rows
    ]
    # an evaluation's row before the others of the same step
    kept.sort(key=lambda row: (int(row["env_steps"]), not any(n.startswith("eval") for n in row)))
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def run_program(arguments: Sequence[str], output: int) -> None:
    """Run the program in this process, whose output goes to a file descriptor."""
    from mtrl_lightning.__main__ import main

    os.dup2(output, 1)
    os.dup2(output, 2)
    main(arguments)


def run_in_child(arguments: list[str], log: Path, ranks: bool) -> int | None:
    """Run the program in a process of its own; return its exit code.

    It is a fork, which imports nothing a second time, unless it starts ranks: they repeat its
    command line.
    """
    with log.open("ab") as file:
        if ranks:
            command = [sys.executable, "-m", "mtrl_lightning", *arguments]
            return subprocess.run(command, stdout=file, stderr=file, check=False).returncode
        process = FORK.Process(target=run_program, args=(arguments, file.fileno()))
        process.start()
        process.join()
        return process.exitcode


def train(name: str, commands: list[list[str]], root: Path) -> str:
    """Run the commands; return the hash of the last one's metrics, or the last output."""
    log = root / f"{name.replace(' ', '_')}.txt"
    run = root
    for number, command in enumerate(commands):
        resumed = "--resume=RUN" in command
        arguments = [
            part.replace("=RUN", f"={run}").replace("=ROOT", f"={root}") for part in command
        ]
        if command[0] == "fit" and not resumed:
            folder = f"{name.replace(' ', '_')}_{number}"
            arguments += [f"--root={root}", f"--name={folder}"]
            run = root / folder / "version_0"
        elif command[0] == "collect" and (root / "collected").exists():
            continue
        if status := run_in_child(arguments, log, ranks="ranks" in name):
            return f"ended with {status}: {log.read_text()[-1500:]}"
    return hash_of(run / "metrics.jsonl")


def import_what_runs_need() -> None:
    """Import in this process what each run would import; use one thread."""
    import matplotlib.pyplot  # noqa: F401
    import metaworld  # noqa: F401
    import torch

    import mtrl_lightning.cli.lightning_cli
    import mtrl_lightning.envs  # noqa: F401

    torch.set_num_threads(1)


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
            mark = ""
            if options.check:
                mark = "  same" if found[name] == known[name] else "  OTHER"
            else:
                options.file.write_text(json.dumps(found, indent=1))
            print(f"{name:24} {found[name]}{mark}", flush=True)
    if options.check and any(known[name] != value for name, value in found.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
