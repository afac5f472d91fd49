"""MetaWorld's scripted policies, measured by our evaluator and by MetaWorld's evaluation."""

import gymnasium as gym
import metaworld
import metaworld.evaluation
import metaworld.policies
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.rollout import Evaluator
from tests.helpers.fakes import InOrder

TASKS = list(metaworld.ALL_V3_ENVIRONMENTS)[::17]
NUM_GOALS = 2


class ScriptedPolicies:
    """One policy an environment, behind our interface and behind MetaWorld's."""

    def __init__(self, names):
        self.policies = [metaworld.policies.ENV_POLICY_MAP[name]() for name in names]

    def act(self, observation_ED, task_E, mode):
        assert mode == "exploit" and task_E.tolist() == list(range(len(self.policies)))
        return self.eval_action(observation_ED)

    def eval_action(self, observation_ED):
        rows = zip(self.policies, observation_ED, strict=True)
        return np.stack([policy.get_action(observation) for policy, observation in rows])

    def reset(self, env_mask):
        pass


def upstream_success(name, goals):
    """Success of a task by upstream's environment, wrappers, vector environment and evaluation."""

    def make():
        env = metaworld.ALL_V3_ENVIRONMENTS[name](reward_function_version="v2")
        env = metaworld.wrappers.AutoTerminateOnSuccessWrapper(env)
        return InOrder(gym.wrappers.RecordEpisodeStatistics(env), goals)

    envs = SyncVectorEnv([make], autoreset_mode=AutoresetMode.SAME_STEP)
    *_, success, _ = metaworld.evaluation.evaluation(
        ScriptedPolicies([name]), envs, num_episodes=len(goals)
    )
    envs.close()
    return success[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant.*may be too high")
def test_scripted_policies_succeed_as_in_metaworlds_evaluation(monkeypatch):
    evaluator = Evaluator(
        MetaWorld(TASKS, num_goals=NUM_GOALS), num_episodes=NUM_GOALS, num_workers=2
    )
    evaluation = evaluator.evaluate(ScriptedPolicies(TASKS))
    evaluator.close()
    # upstream draws the first two of its fifty goals, and faster
    monkeypatch.setattr(metaworld, "_N_GOALS", NUM_GOALS)
    expected = {
        name: upstream_success(name, metaworld.MT1(name, seed=0).train_tasks) for name in TASKS
    }
    assert dict(zip(TASKS, evaluation.success_T, strict=True)) == expected
    assert np.mean(list(expected.values())) > 0.9
