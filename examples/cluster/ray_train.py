"""Train on the workers of Ray Train, which restarts them after a failure.

    python examples/cluster/ray_train.py ROOT

If a worker fails, Ray stops the others and restarts all; training continues from ``last.ckpt``. On
several machines, put ``ROOT`` on a shared file system and add ``num_nodes`` to the options of the
trainer. On GPUs, remove ``accelerator``, add ``use_gpu=True`` to the ``ScalingConfig``, and set the
backend to ``cpu:gloo,cuda:nccl``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

NUM_WORKERS = 2


def train_on_worker(config: dict[str, str]) -> None:
    """Train as one process of the run."""
    from mtrl_lightning import SAC, train
    from mtrl_lightning.envs import ToyReach

    train(
        ToyReach(3),
        SAC,
        total_steps=1_200,
        root=config["root"],
        num_workers=0,
        data={"envs_per_task": NUM_WORKERS, "batch_size": 96},
        metrics={"every": 300},
        checkpoint={"every_n_env_steps": 300},
        trainer={"accelerator": "cpu", "devices": NUM_WORKERS},
    )


if __name__ == "__main__":
    root = str(Path(sys.argv[1]).resolve())
    TorchTrainer(
        train_on_worker,
        train_loop_config={"root": root},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(
            storage_path=f"{root}/ray", failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
