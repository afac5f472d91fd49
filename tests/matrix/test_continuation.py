"""The state of networks and gradient methods is in the checkpoint.

A continued run equals the uninterrupted run.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mtrl_lightning.algorithms import PPO, SAC, TD3, BehaviourCloning, Distral
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import GymnasiumTasks
from mtrl_lightning.policy import load_policy
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.fakes import point_in_space, point_on_a_line
from tests.helpers.matrix import NETWORKS, STACKS
from tests.helpers.runs import assert_continues_exactly

pytestmark = pytest.mark.slow

OPTIONS = [
    "--data.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=60",
    "--evaluation.num_episodes=1",
    "--metrics.every=30",
    "--checkpoint.every_n_env_steps=60",
    "--checkpoint.save_top_k=-1",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--data.benchmark.init_args.horizon=7",
]
PAIRS = [
    ("brc", "famo"),
    ("care", "pcgrad"),
    ("mlp_context", "mean"),
    ("paco", "gradnorm"),
    ("soft_modularization", "nash_mtl"),
]
"""Networks and gradient methods with a state of their own."""


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_a_continued_run_is_the_same_run(command_line, network, gradient):
    options = [
        *OPTIONS,
        *NETWORKS[network],
        "--data.warmup_steps=63",
        "--resets.every=50",
    ]
    if network == "paco":
        # some tasks are masked and reinitialized
        options.append("--model.init_args.critic.init_args.max_loss=0.5")

    if network == "mlp_context":
        names = ("HiPBMDP", "Reconstruction")
        losses = ",".join(f"mtrl_lightning.auxiliaries.{name}" for name in names)
        options.append(f"--model.init_args.auxiliaries=[{losses}]")

    configs = ("base", "algorithm/mtsac", *STACKS[network], "env/toy", f"gradient/{gradient}")
    run = partial(command_line, "fit", *options, configs=configs, small=False)
    assert_continues_exactly(command_line, run, 120, 180)


@pytest.mark.parametrize("kind", [SAC, PPO, TD3, Distral, BehaviourCloning])
def test_run_with_tasks_of_different_sizes_continues_exactly(
    command_line, monkeypatch, tmp_path, kind
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
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
        *OPTIONS,
        *NETWORKS["mlp"],
    ]
    if kind is BehaviourCloning:
        benchmark = GymnasiumTasks({"line": point_on_a_line, "space": point_in_space}, horizon=7)
        policy = UniformPolicy(benchmark.spec)
        folder = write_demonstrations(tmp_path / "random", benchmark, policy)
        unknown = (".critic.", "data.num_workers")
        options = [option for option in options if not any(part in option for part in unknown)]
        options += [f"--data.demonstrations={folder}", "--data.batch_size=8"]
    elif kind is not PPO:
        options += ["--data.warmup_steps=42", "--data.batch_size=8"]
    else:
        options += [
            "--model.init_args.num_steps=15",
            "--model.init_args.num_epochs=2",
            "--model.init_args.num_minibatches=3",
        ]

    names = {Distral: "distral", BehaviourCloning: "bc"}
    name = names.get(kind, f"mt{kind.__name__.lower()}")
    configs = ("base", "env/toy", f"algorithm/{name}", "network/mlp", "gradient/pcgrad")
    run = partial(command_line, "fit", *options, configs=configs, small=False)
    assert_continues_exactly(command_line, run, 120, 180)
    assert len(batches) > 20
    for batch in batches:
        is_on_line_Rn = batch.task_Rn == 0
        assert not batch.observation_RnD[is_on_line_Rn][:, 1:].any()
        assert not batch.next_observation_RnD[is_on_line_Rn][:, 1:].any()
        assert not batch.action_RnA[is_on_line_Rn][:, 1:].any()
        assert batch.action_RnA[~is_on_line_Rn].all()
    policy = load_policy(command_line.folder("parts") / "checkpoints" / "last.ckpt")
    assert policy.act(np.ones(1), "line").shape == (1,)
    assert policy.act(np.ones(3), "space").shape == (3,)
