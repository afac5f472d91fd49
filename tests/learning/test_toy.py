import pytest

from mtrl_lightning.callbacks import read_metrics
from tests.helpers.command_line import CONFIGS


@pytest.mark.slow
def test_sac_learns_the_toy_tasks_that_a_random_policy_fails(command_line):
    arguments = [
        "--rollout.total_steps=4500",
        "--rollout.num_workers=0",
        "--rollout.warmup_steps=900",
        "--evaluation.every=4500",
        "--evaluation.num_episodes=20",
        "--evaluation.num_workers=0",
        "--metrics.every=300",
        "--model.init_args.actor.init_args.width=64",
        "--model.init_args.critic.init_args.width=64",
        "--model.init_args.actor_optimizer.init_args.lr=1e-3",
        "--model.init_args.critic_optimizer.init_args.lr=1e-3",
        "--model.init_args.temperature.init_args.initial=0.1",
        "--trainer.enable_progress_bar=false",
    ]
    configs = [*CONFIGS[:3], "network/multi_head", CONFIGS[4]]
    command_line("fit", *arguments, configs=configs, small=False)
    curves = read_metrics(command_line.folder())
    assert curves["rollout/success"][1][0] < 0.5  # the random warm-up
    for task in range(3):
        assert curves[f"eval/success/goal-{task}"][1][-1] >= 0.9
        assert curves[f"eval/success_last/goal-{task}"][1][-1] >= 0.8
