"""Runs of the command line that several ranks make together."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import zlib
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.cli.lightning_cli import main
from tests.helpers.command_line import CONFIGS, SMALL, config_args, leave_out_curves

BOTH = ["--rollout.envs_per_task=2", "--trainer.devices=2"]
CONTINUED = [
    *BOTH,
    "--rollout.check_every=50",
    "--rollout.warmup_steps=60",
    "--metrics.every=30",
    "--evaluation.every=60",
    "--data.capacity=120",
    "--model.init_args.transforms+=mtrl_lightning.algorithms.NormalizeObservation",
    "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
]
"""The checkpoint of 132 steps is in the middle of episodes of 20 steps, the rings are full."""
STILL = [
    "--data.benchmark=tests.helpers.ranks.still.Still",
    "--model=tests.helpers.ranks.still.Steady",
    *(
        f"--model.init_args.{part}={{class_path: mtrl_lightning.networks.MLP,"
        " init_args: {width: 16, depth: 2}}"
        for part in ("actor", "critic")
    ),
    "--rollout.envs_per_task=2",
    "--rollout.warmup_steps=30",
    "--rollout.total_steps=150",
    "--model.init_args.actor_gradient=mtrl_lightning.gradients.PCGrad",
    "--model.init_args.critic_gradient=mtrl_lightning.gradients.PCGrad",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.MeanReward",
]
"""Every transition of a task is the same one, so that draws do not matter."""
ON_POLICY = ("base", "env/toy", "algorithm/mtppo", "network/mlp", "gradient/mean")
PPO = [
    *BOTH,
    "--rollout.check_every=60",
    "--model.init_args.num_steps=10",
    "--model.init_args.num_minibatches=2",
    "--rollout.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=60",
    "--evaluation.num_episodes=1",
    "--metrics.every=30",
    "--checkpoint.every=30",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.critic.init_args.width=16",
]
OFFLINE = ("base", "env/toy", "algorithm/bc", "network/multi_head")
CLONING = [
    "--trainer.devices=2",
    "--trainer.callbacks+=tests.helpers.ranks.runs.PrintWeights",
    "--data.batch_size=12",
    "--evaluation.num_workers=0",
    "--evaluation.every=20",
    "--evaluation.num_episodes=1",
    "--metrics.every=10",
    "--checkpoint.every=20",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--model.init_args.actor.init_args.width=16",
]
DEMONSTRATIONS = "demonstrations"
"""Folder of the collection, beside that of the runs."""
SHORT = [
    "--rollout.envs_per_task=2",
    "--rollout.warmup_steps=30",
    "--rollout.total_steps=60",
]
TWO_NODES = ["--trainer.devices=1", "--trainer.num_nodes=2"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "whole": ("whole", [*CONTINUED, "--rollout.total_steps=180"]),
    "parts": ("parts", [*CONTINUED, "--rollout.total_steps=132"]),
    "parts continued": (
        "parts",
        [*CONTINUED, "--rollout.total_steps=180", "--ckpt_path=last"],
    ),
    "still": ("still", [*STILL, "--trainer.devices=2"]),
    "ppo whole": ("ppo_whole", [*PPO, "--rollout.total_steps=120"]),
    "ppo parts": ("ppo_parts", [*PPO, "--rollout.total_steps=60"]),
    "ppo parts continued": (
        "ppo_parts",
        [*PPO, "--rollout.total_steps=120", "--ckpt_path=last"],
    ),
    "bc whole": ("bc_whole", [*CLONING, "--rollout.total_steps=60"]),
    "bc parts": ("bc_parts", [*CLONING, "--rollout.total_steps=33"]),
    "bc parts continued": (
        "bc_parts",
        [*CLONING, "--rollout.total_steps=60", "--ckpt_path=last"],
    ),
    "three copies": ("refused", [*BOTH, "--rollout.envs_per_task=3"]),
    "odd batch": ("refused", [*BOTH, "--data.batch_size=99"]),
    "fewer devices": ("refused", [*BOTH, "--trainer.devices=1"]),
    "short timeout": ("refused", [*BOTH, "--rollout.rank_timeout=100"]),
    "two nodes": ("nodes", [*SHORT, *TWO_NODES]),
    "slurm": ("slurm", [*SHORT, *TWO_NODES]),
}
"""The name of the run's folder, and the options, of each."""


class PrintWeights(Callback):
    """Prints a checksum of the weights at the end."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print it."""
        checksum = 0
        for weights in pl_module.state_dict().values():
            checksum = zlib.crc32(weights.cpu().numpy().tobytes(), checksum)
        print(f"weights {checksum:08x}")


def environment(name: str) -> dict[str, str]:
    """Return the environment variables of a run, of which ``torchrun`` has set some.

    It has started one process on each of two nodes. Most runs see two processes of one node.
    """
    rank = os.environ["RANK"]
    of_torchrun = {"TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    if name == "two nodes":
        return dict(os.environ)
    if name == "slurm":
        kept = {key: value for key, value in os.environ.items() if key not in of_torchrun}
        return kept | {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_ID": "77",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": rank,
        }
    size = os.environ["WORLD_SIZE"]
    return {**os.environ, "GROUP_RANK": "0", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}


def ended(name: str, root: Path) -> dict[str, str | int]:
    """Make a run; return its exit code and what it has printed."""
    run, options = RUNS[name]
    configs, small = CONFIGS, SMALL
    if run.startswith("ppo"):
        configs, small = ON_POLICY, []
    if run.startswith("bc"):
        configs, small = OFFLINE, [f"--data.demonstrations={root.parent / DEMONSTRATIONS}"]
    arguments = ["fit", *config_args(*configs), *small, f"--root={root}", f"--name={run}"]
    printed = io.StringIO()
    code: int | str | None = 0
    logger = logging.getLogger("lightning.pytorch")
    handler = logging.StreamHandler(printed)  # the logger's own has the former stderr
    logger.addHandler(handler)
    with (
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(printed),
        mock.patch.dict(os.environ, environment(name), clear=True),
        pytest.MonkeyPatch.context() as patched,
    ):
        leave_out_curves(patched)
        try:
            main([*arguments, *options])
        except SystemExit as error:
            code = error.code
    logger.removeHandler(handler)
    return {"code": int(code or 0), "printed": printed.getvalue()}
