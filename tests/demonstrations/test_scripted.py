"""MetaWorld's scripted policies behind our interface."""

import metaworld
import numpy as np
import pytest
from metaworld.policies import ENV_POLICY_MAP

from mtrl_lightning.demonstrations import ScriptedPolicy
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.errors import ConfigurationError

NUM_STEPS = 12
ALL_TASKS = list(metaworld.ALL_V3_ENVIRONMENTS)


def check_actions(tasks):
    """Compare the actions for all tasks at once with those of MetaWorld's own policies."""
    benchmark = MetaWorld(tasks)
    policy = ScriptedPolicy(benchmark.spec)
    task_E = np.arange(len(tasks))[::-1]
    envs = [benchmark.make_env(int(task), "train", seed=3) for task in task_E]
    observation_ED = np.stack([env.reset(seed=5)[0] for env in envs])
    experts = [ENV_POLICY_MAP[benchmark.task_names[task]]() for task in task_E]
    was_clipped = False
    for _ in range(NUM_STEPS):
        before_ED = observation_ED.copy()
        action_EA = policy.act(observation_ED, task_E)
        np.testing.assert_array_equal(observation_ED, before_ED)
        expected_EA = np.stack(
            [expert.get_action(row.copy()) for expert, row in zip(experts, before_ED, strict=True)]
        )
        was_clipped |= bool((np.abs(expected_EA) > 1).any())
        np.testing.assert_array_equal(action_EA, expected_EA.clip(-1, 1).astype(np.float32))
        assert action_EA.dtype == np.float32
        observation_ED = np.stack(
            [env.step(action)[0] for env, action in zip(envs, action_EA, strict=True)]
        )
    assert was_clipped


@pytest.mark.filterwarnings("ignore:Constant.*may be too high")
def test_the_actions_are_metaworlds_own():
    check_actions(["reach-v3", "door-open-v3", "peg-insert-side-v3"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant.*may be too high")
def test_the_actions_of_all_tasks_are_metaworlds_own():
    check_actions(ALL_TASKS)


def test_tasks_without_a_scripted_policy_are_refused():
    reach, toy = MetaWorld(["reach-v3"]).spec, ToyReach(2).spec
    other_space = reach._replace(observation_space=toy.observation_space)
    for spec in (toy, reach._replace(task_names=("reach-v9",)), other_space):
        with pytest.raises(ConfigurationError):
            ScriptedPolicy(spec)
