"""Tasks of MetaWorld are learned, and imitated from scripted policies."""

from functools import partial

import pytest

from mtrl_lightning import BehaviourCloning, MetaWorld, train
from mtrl_lightning.algorithms import LinearRate
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.demonstrations.scripted import ScriptedPolicy
from mtrl_lightning.networks import MultiHead, Standardize
from mtrl_lightning.rollout import Evaluator
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.runs import HERE, QUIET

pytestmark = pytest.mark.slow


def test_sac_learns_to_reach_what_a_random_policy_does_not(command_line):
    benchmark = MetaWorld(["reach"], horizon=200)
    evaluator = Evaluator(benchmark, num_episodes=20, envs_per_task=10)
    assert evaluator.evaluate(UniformPolicy(benchmark.spec)).success_T[0] <= 0.1
    evaluator.close()
    command_line(
        "fit",
        "--data.benchmark.init_args.tasks=[reach]",
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


def test_two_tasks_of_metaworld_are_solved_by_imitation(tmp_path):
    benchmark = MetaWorld(["reach", "drawer-close"], horizon=100)
    policy = ScriptedPolicy(benchmark.spec)
    folder = write_demonstrations(tmp_path / "scripted", benchmark, policy, 60, noise=0.2)
    network = partial(MultiHead, width=128, depth=2)
    run = train(
        benchmark,
        partial(BehaviourCloning, actor=network, encoder=Standardize, learning_rate=LinearRate),
        total_steps=2_500,
        root=str(tmp_path),
        data={"demonstrations": str(folder)},
        evaluation={"every": 2_500, "num_episodes": 20, **HERE},
        trainer=QUIET,
    )
    for task in benchmark.spec.task_names:
        assert run.evaluation[f"eval/success/{task}"] >= 0.9, run.evaluation
