"""Exported policies act as the policy that they were made from, or are refused."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning.algorithms import PPO, SAC, TD3, Distral
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export import POLICY_FILES
from mtrl_lightning.export.policy import (
    TOLERANCE,
    export_policy,
    load_exported,
    max_difference,
    observations_of,
)
from mtrl_lightning.networks import MultiHead, Standardize
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.rollout import ActionNoise
from tests.helpers.rollout import Scale

SPEC = ToyReach(3).spec
SIZED = SPEC._replace(
    observation_space=Box(-np.inf, np.inf, (4,), np.float64),
    action_space=Box(-1.0, 1.0, (3,), np.float32),
    observation_sizes=(4, 2, 3),
    action_sizes=(3, 1, 2),
    train_tasks=(0, 1),
)
"""Tasks of different sizes, one of which is not trained."""
NUM = 40


def agent(spec=SPEC, kind=SAC, **options):
    """A policy whose actions differ from observation to observation and from task to task."""
    network = partial(MultiHead, width=8, depth=1, output_bound=0.5)
    return kind(spec, **{"actor": network, "critic": network, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "kind"), [("onnx", SAC), ("torch.export", Distral), ("onnx", TD3)]
)
def test_all_that_acts_is_in_the_file(tmp_path, format, kind):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model = agent(SIZED, kind, encoder=Standardize)
    generator = np.random.default_rng(0)
    observation_ED = generator.normal(2.0, 3.0, (6, 4)) * SIZED.observation_mask_TD[[0, 1] * 3]
    model.encoder.observe(torch.tensor(observation_ED).float(), torch.tensor([0, 1] * 3))
    policy = LoadedPolicy(model)
    transforms = [ActionNoise(0.3), Scale(1.5), Scale(0.4)]
    file, difference = export_policy(policy, format, tmp_path, transforms, NUM)
    assert file == tmp_path / POLICY_FILES[format]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert 0 <= difference <= TOLERANCE
    exported = load_exported(file, format)
    for task, (rows, actions) in enumerate([(4, 3), (2, 1), (3, 2)]):
        own_D = generator.normal(size=rows)
        padded_1D = np.zeros((1, 4), np.float32)
        padded_1D[0, :rows] = own_D
        action_A = exported(padded_1D, np.array([task]))[0]
        wanted_A = 0.6 * policy.act(own_D, task)
        np.testing.assert_allclose(action_A[:actions], wanted_A, rtol=0, atol=TOLERANCE)
        assert np.abs(wanted_A).max() > 0.01 and not action_A[actions:].any()


@pytest.mark.slow
def test_ppo_with_observations_of_bytes_is_exported(tmp_path):
    spec = SPEC._replace(observation_space=Box(0, 255, (4,), np.uint8))
    policy = LoadedPolicy(agent(spec, PPO))
    file, _ = export_policy(policy, "torch.export", tmp_path, num_observations=NUM)
    observation_ED, task_E = observations_of(spec, NUM)
    assert observation_ED.dtype == np.uint8 and observation_ED.max() > 200
    action_EA = load_exported(file, "torch.export")(observation_ED, task_E)
    assert action_EA.std(0).min() > 0.01


def test_observations_are_of_every_task_and_within_the_space():
    low = np.array([-1.0, -np.inf, 0.0, -3e38], np.float32)
    high = np.array([1.0, np.inf, np.inf, 3e38], np.float32)
    spec = SIZED._replace(observation_space=Box(low, high, (4,), np.float32))
    observation_ED, task_E = observations_of(spec, 300)
    assert np.bincount(task_E).tolist() == [100, 100, 100]
    assert np.isfinite(observation_ED).all() and (observation_ED >= low).all()
    assert (observation_ED <= high).all() and observation_ED[task_E == 0].std(0).min() > 0.3
    assert not observation_ED[~spec.observation_mask_TD[task_E]].any()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda action_EA, task_E: action_EA * np.nan, np.nan),
        (lambda action_EA, task_E: action_EA + 0.5, 0.5),
        # wrong only for a single observation of one task
        (lambda action_EA, task_E: action_EA + 0.5 * (len(task_E) == 1 and task_E[0] == 2), 0.5),
    ],
)
def test_the_largest_difference_of_the_actions_is_found(change, difference):
    policy = LoadedPolicy(agent())
    found = max_difference(
        policy, lambda o_ED, t_E: change(policy.act(o_ED, t_E), t_E), num_observations=9
    )
    assert found == pytest.approx(difference, nan_ok=True)


class OwnAct(SAC):
    def act(self, observation_ED, task_E, mode):
        return -super().act(observation_ED, task_E, mode)


def test_policy_with_its_own_act_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ConfigurationError, match="differ"):
        export_policy(LoadedPolicy(agent(kind=OwnAct)), "torch.export", tmp_path)
    assert not any(tmp_path.iterdir())
