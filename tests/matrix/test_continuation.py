"""The state of networks and gradient methods is in the checkpoint.

A continued run equals the uninterrupted run.
"""

from __future__ import annotations

import numpy as np
import pytest

from mtrl_lightning.algorithms import PPO, SAC, TD3, Distral
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.loading import load_policy
from tests.helpers.matrix import NETWORKS, STACKS
from tests.helpers.runs import assert_same, assert_same_end

pytestmark = pytest.mark.slow

PAIRS = [
    ("brc", "famo"),
    ("care", "pcgrad"),
    ("paco", "gradnorm"),
    ("soft_modularization", "nash_mtl"),
]
"""Networks and gradient methods with a state of their own."""


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_a_continued_run_is_the_same_run(command_line, network, gradient):
    options = [
        *NETWORKS[network],
        "--rollout.warmup_steps=63",
        "--rollout.num_workers=0",
        "--evaluation.num_workers=0",
        "--evaluation.every=60",
        "--evaluation.num_episodes=1",
        "--metrics.every=30",
        "--checkpoint.every=60",
        "--checkpoint.keep_last=-1",
        "--resets.every=50",
        "--trainer.enable_progress_bar=false",
        "--trainer.accelerator=cpu",
        "--data.benchmark.init_args.horizon=7",
    ]
    if network == "paco":
        # some tasks are masked and reinitialized
        options.append("--model.init_args.critic.init_args.max_loss=0.5")

    def run(total, *extra):
        configs = (
            "base",
            "algorithm/mtsac",
            *STACKS[network],
            "env/toy",
            f"gradient/{gradient}",
        )
        command_line(
            "fit", *options, f"--rollout.total_steps={total}", *extra, configs=configs, small=False
        )

    run(180, "--name=whole")
    run(120, "--name=parts")
    run(180, "--name=parts", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.parametrize("kind", [SAC, PPO, TD3, Distral])
def test_a_continued_run_with_tasks_of_different_sizes_is_the_same_run(
    command_line, monkeypatch, kind
):
    batches = []
    training_step = kind.training_step

    def step(self, batch, batch_idx):
        batches.append(batch)
        training_step(self, batch, batch_idx)

    monkeypatch.setattr(kind, "training_step", step)
    tasks = "{line: tests.helpers.fakes.point_on_a_line, space: tests.helpers.fakes.point_in_space}"
    options = [
        "--data.benchmark=mtrl_lightning.envs.GymnasiumTasks",
        f"--data.benchmark.init_args.tasks={tasks}",
        "--data.benchmark.init_args.horizon=7",
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
        *NETWORKS["mlp"],
        "--rollout.num_workers=0",
        "--evaluation.num_workers=0",
        "--evaluation.every=60",
        "--evaluation.num_episodes=1",
        "--metrics.every=30",
        "--checkpoint.every=60",
        "--checkpoint.keep_last=-1",
        "--trainer.enable_progress_bar=false",
        "--trainer.accelerator=cpu",
    ]
    if kind is not PPO:
        options += ["--rollout.warmup_steps=42", "--data.batch_size=8"]
    else:
        options += [
            "--model.init_args.num_steps=15",
            "--model.init_args.num_epochs=2",
            "--model.init_args.num_minibatches=3",
        ]

    def run(total, *extra):
        name = "distral" if kind is Distral else f"mt{kind.__name__.lower()}"
        configs = ("base", "env/toy", f"algorithm/{name}", "network/mlp")
        more = [f"--rollout.total_steps={total}", *extra]
        command_line("fit", *options, *more, configs=(*configs, "gradient/pcgrad"), small=False)

    run(180, "--name=whole")
    run(120, "--name=parts")
    run(180, "--name=parts", "--ckpt_path=last")
    paths = [command_line.folder(name) / "checkpoints" / "last.ckpt" for name in ("whole", "parts")]
    assert_same(*(load_checkpoint(path) for path in paths))
    assert command_line.rows("whole") == command_line.rows("parts")

    assert len(batches) > 20
    for batch in batches:
        is_on_line_Rn = batch.task_Rn == 0
        assert not batch.observation_RnD[is_on_line_Rn][:, 1:].any()
        assert not batch.next_observation_RnD[is_on_line_Rn][:, 1:].any()
        assert not batch.action_RnA[is_on_line_Rn][:, 1:].any()
        assert batch.action_RnA[~is_on_line_Rn].all()
    policy = load_policy(paths[1])
    assert policy.act(np.ones(1), "line").shape == (1,)
    assert policy.act(np.ones(3), "space").shape == (3,)
