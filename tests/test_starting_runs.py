"""Runs that start from a trained policy, by ``train`` and by the command line."""

import shutil
from functools import partial

import numpy as np
import pytest
from torch.optim import Adam

from mtrl_lightning import SAC, ToyReach
from mtrl_lightning.networks import MultiHead
from tests.helpers.runs import assert_same_end, small

pytestmark = pytest.mark.slow


def test_train_starts_from_a_policy_of_other_tasks(tmp_path):
    network = partial(MultiHead, width=16, depth=1)
    fixed = partial(SAC, actor=network, critic=network, actor_optimizer=partial(Adam, lr=0.0))
    source = small(ToyReach(3), tmp_path, algorithm=fixed, name="source", total_steps=300)
    options = {"algorithm": fixed, "init_from": source.folder, "total_steps": 120, "seed": 2}
    run = small(ToyReach(2), tmp_path, name="next", **options)
    observation_ED = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    for task in ("goal-0", "goal-1"):
        expected = source.policy.act(observation_ED, task)
        np.testing.assert_allclose(run.policy.act(observation_ED, task), expected, atol=1e-6)


def test_metaworld_run_starts_from_other_tasks_and_resumes(command_line):
    fit = partial(
        command_line,
        "fit",
        "--data.benchmark=mtrl_lightning.envs.MetaWorld",
        "--data.benchmark.init_args.horizon=23",
        *(f"--{section}.every=150" for section in ("evaluation", "metrics")),
        "--checkpoint.every_n_env_steps=150",
        configs=("base", "env/toy", "algorithm/mtsac", "network/multi_head", "gradient/mean"),
    )
    three = "--data.benchmark.init_args.tasks=[reach,push,box-close]"
    fit(three, "--name=source", "--data.total_steps=330")
    source = command_line.folder("source")
    start = ["--data.benchmark.init_args.tasks=[box-close,drawer-open]", f"--init_from={source}"]
    start += ["--init_new_tasks=mean", "--data.warmup_steps=40"]
    fit(*start, "--name=whole", "--data.total_steps=300")
    fit(*start, "--name=parts", "--data.total_steps=150")
    shutil.rmtree(source)  # it is no longer needed
    parts = command_line.folder("parts")
    command_line("fit", f"--resume={parts}", "--data.total_steps=300", configs=(), small=False)
    assert_same_end(command_line, "whole", "parts")
