"""The state of networks and gradient methods is in the checkpoint.

A continued run equals the uninterrupted run.
"""

from __future__ import annotations

import pytest

from tests.matrix import NETWORKS, STACKS
from tests.test_exact_continuation import assert_same_end

PAIRS = [
    ("brc", "famo"),
    ("care", "pcgrad"),
    ("language", "cagrad_fast"),
    ("mixture_gate", "cagrad"),
    ("moore", "aligned_mtl"),
    ("multi_head", "fairgrad"),
    ("paco", "gradnorm"),
    ("soft_modularization", "nash_mtl"),
]


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
        "--resets.every=90",
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

    run(240, "--name=whole")
    run(120, "--name=parts")
    run(240, "--name=parts", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")
