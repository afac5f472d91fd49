"""Folders of runs as a run leaves them, without one being trained."""

import json
from statistics import fmean

import yaml

STEPS = (100, 200, 300)
PROTOCOL = {"benchmark": "toy", "horizon": 20}


def options_of(seed=1, name="a", **changed):
    """Return options as ``config.yaml`` holds them; ``network`` is a class name."""
    path = f"mtrl_lightning.networks.{changed.pop('network', 'MLP')}"
    network = {"class_path": path, "init_args": {"width": 16}}
    arguments = {"actor": network, "critic": network}
    return {
        "seed_everything": seed,
        "name": name,
        "model": {
            "class_path": "mtrl_lightning.algorithms.SAC",
            "init_args": {**arguments, "seed": seed, "tau": changed.pop("tau", 0.005)},
        },
        "data": {
            "class_path": "mtrl_lightning.data.ReplayData",
            "init_args": {
                "benchmark": {"class_path": "mtrl_lightning.envs.ToyReach", "init_args": {}},
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
    rate=10.0,
):
    """Write the folder of a run with these scores: the success of each task at each step."""
    folder.mkdir(parents=True)
    if options is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
    hparams = {f"protocol/{key}": value for key, value in protocol.items()}
    (folder / "hparams.yaml").write_text(yaml.safe_dump({**hparams, "version/torch": "2.9"}))
    rows = []
    for place, env_steps in enumerate(steps):
        success = {f"/{task}": values[place] for task, values in scores.items()}
        if success:
            success[""] = fmean(success.values())
        row = {f"eval/success{name}": value for name, value in success.items()}
        row |= {f"eval/return{name}": 100 * value for name, value in success.items()}
        rows += [
            {"env_steps": env_steps, **row},
            {"env_steps": env_steps, "time/env_steps_per_second": rate},
        ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
