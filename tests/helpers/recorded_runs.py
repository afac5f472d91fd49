"""Folders of runs as a run leaves them, without one being trained."""

from __future__ import annotations

import json

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
            "class_path": "mtrl_lightning.data.ReplayData",
            "init_args": {
                "benchmark": {"class_path": "mtrl_lightning.envs.ToyReach", "init_args": {}},
                "total_steps": 400,
                "seed": seed,
            },
        },
        "evaluation": {"num_episodes": 10, "every": 100},
        **changed,
    }


def make_run(
    folder,
    scores,
    steps=STEPS,
    options=None,
    protocol=PROTOCOL,
    extra=(),
    rate=10.0,
    rate_name="time/env_steps_per_second",
):
    """Write the folder of a run.

    Args:
        folder: of the run.
        scores: success of each task at each step, by the task's name; empty for no evaluation.
        steps: environment steps of the evaluations.
        options: of ``config.yaml``; None for none.
        protocol: in ``hparams.yaml``.
        extra: further rows of ``metrics.jsonl``.
        rate: environment steps per second.
        rate_name: its metric.
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
        rows.append({"env_steps": env_steps, rate_name: rate})
    rows += extra
    rows.sort(key=lambda row: row["env_steps"])
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
