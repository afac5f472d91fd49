import pytest

from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.rollout import Evaluator

OPTIONS = "--data.benchmark.init_args.tasks=[reach]"


@pytest.mark.slow
def test_sac_learns_to_reach_what_a_random_policy_does_not(command_line):
    benchmark = MetaWorld(["reach"], horizon=200)
    evaluator = Evaluator(benchmark, num_episodes=20, envs_per_task=10)
    assert evaluator.evaluate(UniformPolicy(benchmark.spec)).success_T[0] <= 0.1
    evaluator.close()
    command_line(
        "fit",
        OPTIONS,
        "--data.batch_size=128",
        "--data.total_steps=18000",
        "--data.warmup_steps=4000",
        "--data.envs_per_task=8",
        "--evaluation.every=18000",
        "--evaluation.num_episodes=20",
        "--evaluation.envs_per_task=10",
        "--trainer.enable_progress_bar=false",
        configs=["quickstart"],
        small=False,
    )
    curves = read_metrics(command_line.folder("quickstart"))
    # with seeds 1 to 3 about 0.8, 0.7 and 0.7
    assert curves["eval/success/reach-v3"][1][-1] >= 0.4
