"""PPO on the toy; ``tests/test_readme.py`` trains it on MetaWorld tasks."""

import pytest

from mtrl_lightning.callbacks import read_metrics

pytestmark = pytest.mark.slow

OPTIONS = [
    "--evaluation.num_episodes=20",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--model.init_args.actor.init_args.width=64",
    "--model.init_args.critic.init_args.width=64",
]


def test_ppo_learns_the_toy_tasks_that_a_random_policy_fails(command_line):
    command_line(
        "fit",
        *OPTIONS,
        "--rollout.total_steps=12000",
        "--rollout.envs_per_task=4",
        "--rollout.num_workers=0",
        "--evaluation.every=12000",
        "--evaluation.num_workers=0",
        "--metrics.every=600",
        "--model.init_args.num_steps=50",
        "--model.init_args.num_minibatches=4",
        configs=(
            "base",
            "env/toy",
            "algorithm/mtppo",
            "network/multi_head",
            "gradient/fairgrad",
        ),
        small=False,
    )
    curves = read_metrics(command_line.folder())
    assert curves["rollout/success"][1][0] < 0.5
    for task in range(3):
        assert curves[f"eval/success/goal-{task}"][1][-1] >= 0.9
        assert curves[f"eval/success_last/goal-{task}"][1][-1] >= 0.8
