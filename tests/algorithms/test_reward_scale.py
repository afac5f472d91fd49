"""Rewards brought to one scale, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import MeanReward, ReturnRange, RewardScale
from mtrl_lightning.transitions import TransitionBatch, Transitions
from tests.helpers.algorithms import attach, make_batch, make_sac, make_spec
from tests.helpers.command_line import SHORT
from tests.helpers.runs import checkpoint

TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
REWARD_RN = torch.tensor([[1.0, -2.0], [3.0, 0.5], [4.0, -1.0]])


def step(rewards, tasks, envs, terminated=(), truncated=()):
    n = len(rewards)
    empty = np.zeros((n, 1), np.float32)
    ended = [np.array([env in which for env in envs]) for which in (terminated, truncated)]
    return Transitions(
        empty, empty, np.array(rewards), empty, *ended, np.array(tasks), np.array(envs)
    )


def scaled(scale, alpha=(0.0, 0.0, 0.0), target_entropy=-2.0):
    observation_RnD = torch.arange(12.0).view(3, 2, 2)
    batch = TransitionBatch(
        observation_RnD, observation_RnD, REWARD_RN, observation_RnD, REWARD_RN > 9, TASK_RN
    )
    quantities = {
        "temperature_T": torch.tensor(alpha),
        "target_entropy_T": torch.full((3,), target_entropy),
    }
    changed = scale(batch, **{name: quantities[name] for name in scale.requires})
    for name, value in batch._replace(reward_Rn=changed.reward_Rn)._asdict().items():
        assert getattr(changed, name) is value, "the rewards alone are changed"
    return changed.reward_Rn.tolist()


def test_without_a_scale_rewards_stay_as_they_are():
    assert scaled(RewardScale(make_spec(3))) == REWARD_RN.tolist()


def test_mean_reward_makes_the_means_equal():
    scale = MeanReward(make_spec(3))
    assert scaled(scale) == REWARD_RN.tolist(), "before the replay is known"
    scale.begin_learning(np.array([0.5, 4.0, -1.0]))
    # 4 / 0.5, 4 / 4 and 4 / |-1|
    assert scaled(scale) == [[8.0, -16.0], [3.0, 0.5], [16.0, -4.0]]


def test_mean_reward_is_bounded_for_tasks_without_rewards():
    scale = MeanReward(make_spec(3), max_factor=50.0)
    scale.begin_learning(np.array([0.0, 4.0, 2.0]))
    assert scale.factor_T.tolist() == [50, 1, 2]
    scale.begin_learning(np.zeros(3))
    assert scale.factor_T.tolist() == [1, 1, 1]


def test_return_range_by_hand():
    scale = ReturnRange(make_spec(3), discount=0.5, bound=10.0)
    scale.observe(step([1.0, -1.0], [0, 1], [0, 1]))
    assert scale.largest_T.tolist() == [0, 0, 0], "no episode has ended"
    scale.observe(step([3.0, -5.0], [0, 1], [0, 1], terminated=[0], truncated=[1]))
    # task 0 ends: 3 and 1 + 1.5. Task 1 is cut off: it goes on with 2 x its mean of -3: -5 - 3 = -8
    # and -1 - 4 = -5
    assert scale.largest_T.tolist() == [3, 8, 0]
    # the temperature's term is alpha H target_entropy / 2 = -2 alpha
    found_Rn = scaled(scale, alpha=(0.5, 0.0, 1.0))
    assert found_Rn[0] == pytest.approx([10 / 4, -20 / 4])
    assert found_Rn[1] == pytest.approx([30 / 8, 5 / 8])
    assert found_Rn[2] == pytest.approx([40 / 2, -10 / 2])


def test_return_range_keeps_the_largest_of_all_episodes():
    scale = ReturnRange(make_spec(3), discount=0.5)
    scale.observe(step([8.0], [0], [0], terminated=[0]))
    scale.observe(step([1.0], [0], [0], terminated=[0]))
    assert scale.largest_T[0] == 8


def test_return_range_keeps_the_episode_of_a_paused_environment():
    scale = ReturnRange(make_spec(3), discount=0.5)
    scale.observe(step([8.0, 1.0], [0, 1], [0, 1]))
    scale.observe(step([1.0], [1], [1]))
    scale.observe(step([2.0, 1.0], [0, 1], [0, 1], terminated=[0]))
    assert scale.largest_T.tolist() == [8 + 0.5 * 2, 0, 0]


def test_return_range_drops_the_episode_of_a_rebuilt_environment():
    scale = ReturnRange(make_spec(3), discount=0.5)
    scale.observe(step([100.0, 1.0], [0, 1], [0, 1]))
    scale.drop_episodes(np.array([0, 2]))
    scale.observe(step([1.0], [1], [1]))
    scale.observe(step([2.0, 1.0], [0, 1], [0, 1], terminated=[0]))
    assert scale.largest_T.tolist() == [2, 0, 0]


def test_return_range_goes_on_in_the_middle_of_an_episode():
    scale, other = ReturnRange(make_spec(3), discount=0.5), ReturnRange(make_spec(3), discount=0.5)
    scale.observe(step([4.0, 1.0], [0, 1], [0, 1]))
    other.load_state_dict(scale.state_dict())
    for one in (scale, other):
        one.observe(step([2.0, 1.0], [0, 1], [0, 1], terminated=[0]))
    assert scale.largest_T.tolist() == other.largest_T.tolist() == [5, 0, 0]


def test_return_range_leaves_rewards_before_any_episode():
    scale = ReturnRange(make_spec(3), discount=0.5)
    assert scaled(scale, alpha=(0.5, 0.5, 0.5), target_entropy=0.0) == REWARD_RN.tolist()


def test_a_task_without_transitions_has_the_largest_factor():
    scale = MeanReward(make_spec(3), max_factor=10.0)
    scale.begin_learning(np.array([1.0, np.nan, 4.0]))
    assert scale.factor_T.tolist() == [4, 10, 1]


class Tenfold(RewardScale):
    requires = ("temperature_T", "target_entropy_T")

    def factors(self, temperature_T, target_entropy_T):
        assert temperature_T.tolist() == [1, 1, 1] and target_entropy_T.tolist() == [-2, -2, -2]
        return torch.full((3,), 10.0)


def test_sac_learns_from_the_scaled_rewards():
    spec = make_spec(3)
    batch = make_batch(spec)
    one, two = make_sac(spec, reward_scale=Tenfold), make_sac(spec)
    for sac, given in ((one, batch), (two, batch._replace(reward_Rn=10 * batch.reward_Rn))):
        attach(sac)
        sac.training_step(given, 0)
    for a, b in zip(one.critic.parameters(), two.critic.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_drops_the_rewards_of_rebuilt_environments(command_line):
    # all three are rebuilt at the 47th of 50 vector steps, the seventh of an episode
    faulty = "--data.benchmark=tests.helpers.altered_reach.FaultyReach"
    scale = "--model.init_args.reward_scale=mtrl_lightning.algorithms.ReturnRange"
    with pytest.warns(UserWarning, match="rebuilt"):
        command_line(
            "fit", *SHORT, faulty, scale, "--data.total_steps=147", "--evaluation.every=999"
        )
    state = checkpoint(command_line)["state_dict"]["transforms.0._extra_state"]
    assert [len(rewards) for rewards in state["per_env"]["rewards"]] == [3, 3, 3]
