"""MetaWorld's scripted policies behind our interface."""

import metaworld
import numpy as np
import pytest
from metaworld.policies import ENV_POLICY_MAP

from mtrl_lightning.demonstrations import ScriptedPolicy
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.errors import ConfigurationError

SOME = ["reach-v3", "door-open-v3", "peg-insert-side-v3"]
ALL = list(metaworld.ALL_V3_ENVIRONMENTS)


@pytest.mark.usefixtures("few_goals")
@pytest.mark.filterwarnings("ignore:Constant.*may be too high")
@pytest.mark.parametrize("tasks", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_the_actions_are_metaworlds_own(tasks):
    """In all tasks at once."""
    benchmark = MetaWorld(tasks)
    policy = ScriptedPolicy(benchmark.spec)
    task_E = np.arange(len(tasks))[::-1]
    envs = [benchmark.make_env(int(task), "train", seed=3) for task in task_E]
    experts = [ENV_POLICY_MAP[benchmark.task_names[task]]() for task in task_E]
    observations = [env.reset(seed=5)[0] for env in envs]
    was_clipped = False
    for _ in range(12):
        given_ED = np.stack(observations)
        action_EA = policy.act(given_ED, task_E)
        np.testing.assert_array_equal(given_ED, observations)
        pairs = zip(experts, observations, strict=True)
        expected_EA = np.stack([expert.get_action(row.copy()) for expert, row in pairs])
        was_clipped |= bool((np.abs(expected_EA) > 1).any())
        np.testing.assert_array_equal(action_EA, expected_EA.clip(-1, 1).astype(np.float32))
        assert action_EA.dtype == np.float32
        observations = [env.step(a)[0] for env, a in zip(envs, action_EA, strict=True)]
    assert was_clipped


def test_observations_of_wrappers_are_refused():
    spec, wrapped = MetaWorld(["reach-v3"]).spec, ToyReach(2).spec.observation_space
    with pytest.raises(ConfigurationError, match="shape"):
        ScriptedPolicy(spec._replace(observation_space=wrapped))
