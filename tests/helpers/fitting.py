"""Short runs of small networks on two tasks, by Lightning's trainer."""

import json
from functools import partial

import lightning

from mtrl_lightning import PPO, SAC
from mtrl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, MetricsCallback
from mtrl_lightning.data import ReplayData, RolloutData
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.networks import MLP

SMALL = {name: partial(MLP, width=8, depth=1) for name in ("actor", "critic")}
QUIET = {
    "max_epochs": -1,
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def parts(kind="sac", total_steps=120, extras=None, **more):
    """Return an algorithm and its data: 2 environments of 5 steps, 30 vector steps of warm-up."""
    benchmark = ToyReach(2, horizon=5)
    if kind == "ppo":
        data = RolloutData(benchmark, total_steps, num_workers=0, extras=extras)
        return PPO(data.spec, num_steps=10, num_epochs=1, num_minibatches=2, **SMALL), data
    options = {"batch_size": 8, "capacity": 200, "warmup_steps": 60, "num_workers": 0}
    data = ReplayData(benchmark, total_steps, extras=extras, **options, **more)
    return SAC(data.spec, **SMALL), data


def fit(
    folder,
    *callbacks,
    kind="sac",
    total_steps=120,
    ckpt_path=None,
    every=40,
    extras=None,
    data=None,
    **options,
):
    """Train with evaluations every 60 steps and rows of metrics every 20; return the trainer."""
    trainer = lightning.Trainer(
        **{**QUIET, "default_root_dir": folder, **options},
        callbacks=[
            EvaluationCallback(60, num_episodes=1, num_workers=0),
            MetricsCallback(20),
            EnvStepCheckpoint(every, save_top_k=-1),
            *callbacks,
        ],
    )
    algorithm, data = parts(kind, total_steps, extras, **(data or {}))
    trainer.fit(algorithm, data, ckpt_path=ckpt_path)
    return trainer


def rows_of(folder):
    """Return the rows of ``metrics.jsonl`` without times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
