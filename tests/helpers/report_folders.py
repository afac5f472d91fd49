"""Folders of runs as a run leaves them, without one being trained."""

from __future__ import annotations

import csv

import yaml

STEPS = (100, 200, 300)
PROTOCOL = {"benchmark": "toy", "horizon": 20}


def options_of(seed=1, name="a", **changed):
    """Return options as ``config.yaml`` holds them; ``actor`` and ``critic`` are class names."""
    networks = {part: changed.pop(part, "MLP") for part in ("actor", "critic")}
    arguments = {
        part: {"class_path": f"mtrl_lightning.networks.{kind}", "init_args": {"width": 16}}
        for part, kind in networks.items()
    }
    return {
        "seed_everything": seed,
        "name": name,
        "root": "runs",
        "model": {
            "class_path": "mtrl_lightning.algorithms.SAC",
            "init_args": {**arguments, "seed": seed, "tau": changed.pop("tau", 0.005)},
        },
        "data": {
            "benchmark": {"class_path": "mtrl_lightning.envs.ToyReach", "init_args": {}},
            "seed": seed,
        },
        "rollout": {"total_steps": 400, "seed": seed, **changed.pop("rollout", {})},
        "evaluation": {"num_episodes": 10, "every": 100},
        **changed,
    }


def make_run(folder, scores, steps=STEPS, options=None, protocol=PROTOCOL, extra=(), rate=10.0):
    """Write the folder of a run.

    Args:
        folder: of the run.
        scores: success of each task at each step, by the task's name; empty for no evaluation.
        steps: environment steps of the evaluations.
        options: of ``config.yaml``; None for none.
        protocol: in ``hparams.yaml``.
        extra: further rows of ``metrics.csv``.
        rate: environment steps per second.
    """
    folder.mkdir(parents=True)
    if options is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
    hparams = {f"protocol/{key}": value for key, value in protocol.items()}
    (folder / "hparams.yaml").write_text(yaml.safe_dump({**hparams, "version/torch": "2.9"}))
    rows = []
    for place, env_steps in enumerate(steps):
        row = {"env_steps": env_steps}
        for task, values in scores.items():
            row[f"eval/success/{task}"] = values[place]
            row[f"eval/return/{task}"] = 100 * values[place]
        if scores:
            row["eval/success"] = sum(values[place] for values in scores.values()) / len(scores)
            row["eval/return"] = 100 * row["eval/success"]
        rows.append(row)
        rows.append({"env_steps": env_steps, "time/env_steps_per_second": rate})
    rows += extra
    names = ["env_steps", *sorted({name for row in rows for name in row} - {"env_steps"})]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["env_steps"]))
    return folder
