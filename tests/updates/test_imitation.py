"""Behaviour cloning imitates MetaWorld's scripted policies."""

from __future__ import annotations

from functools import partial

import pytest

from mtrl_lightning import BehaviourCloning, MetaWorld, train
from mtrl_lightning.algorithms import LinearRate
from mtrl_lightning.demonstrations.scripted import ScriptedPolicy
from mtrl_lightning.networks import MultiHead, Standardize
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.runs import HERE, QUIET


@pytest.mark.slow
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
