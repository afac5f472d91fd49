"""Rewards and returns brought to one scale, by hand and with the statistics of slow loops.

Statistics of returns of several iterations are in ``test_ppo.py``.
"""

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import (
    MeanReward,
    NormalizeReward,
    PopArt,
    ReturnRange,
    RewardScale,
    Transform,
)
from mtrl_lightning.networks.network import shared_parameters
from mtrl_lightning.transitions import TransitionBatch, Transitions
from tests.helpers.algorithms import attach, changed, copy_of, make_batch, make_sac, make_spec
from tests.helpers.command_line import SHORT
from tests.helpers.networks import NETWORKS
from tests.helpers.runs import checkpoint

SPEC = make_spec(3)
TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
REWARD_RN = torch.tensor([[1.0, -2.0], [3.0, 0.5], [4.0, -1.0]])
TASK_E = np.array([0, 0, 1, 2])
"""The tasks of four environments."""
DISCOUNT = 0.9


def step(reward_E, env_E, terminated_E, truncated_E):
    """Return the transitions of one vector step."""
    empty_ED = np.zeros((len(env_E), 1), np.float32)
    columns = (empty_ED, empty_ED, reward_E, empty_ED, terminated_E, truncated_E)
    return Transitions(*columns, TASK_E[env_E], env_E)


def random_steps(num_steps=60):
    """Return vector steps with pauses and ends, and which environments were rebuilt after each."""
    random = np.random.default_rng(0)
    scale_E = np.array([1.0, 1.0, 100.0, 0.01])
    for _ in range(num_steps):
        env_E = np.flatnonzero(random.random(4) < 0.8)
        reward_E = scale_E[env_E] * random.normal(0.2, 3, len(env_E))
        kind_E = random.choice(3, len(env_E), p=[0.7, 0.15, 0.15])
        rebuilt_N = np.flatnonzero(random.random(4) < 0.1)
        yield step(reward_E, env_E, kind_E == 1, kind_E == 2), rebuilt_N


def slow_statistics():
    """Return each task's discounted returns so far, and the largest return of an episode."""
    returns, largest = [[] for _ in range(3)], [0.0] * 3
    episodes = [[] for _ in TASK_E]
    for transitions, rebuilt_N in random_steps():
        ends = transitions.terminated_E, transitions.truncated_E
        for env, reward, terminated, truncated in zip(
            transitions.env_E, transitions.reward_E, *ends, strict=True
        ):
            rewards = episodes[env]
            rewards.append(reward)
            powers = DISCOUNT ** np.arange(len(rewards))
            returns[TASK_E[env]].append(powers[::-1] @ rewards)
            if not (terminated or truncated):
                continue
            # a truncated episode goes on with its mean reward
            after = np.mean(rewards) / (1 - DISCOUNT) if truncated else 0.0
            for first in range(len(rewards)):
                later = [*rewards[first:], after]
                total = abs(DISCOUNT ** np.arange(len(later)) @ later)
                largest[TASK_E[env]] = max(largest[TASK_E[env]], total)
            episodes[env] = []
        for env in rebuilt_N:
            episodes[env] = []
    return returns, largest


def observed(make):
    """Return a scale after all steps; its state passes to another in the middle of episodes."""
    scale = make(SPEC, discount=DISCOUNT)
    scale.drop_episodes(np.array([3]))  # of an environment that has not been seen
    steps = list(random_steps())
    for i, (transitions, rebuilt_N) in enumerate(steps):
        if i == 20:
            state = scale.state_dict()
            scale.observe(transitions)  # a saved state does not move
            scale = make(SPEC, discount=DISCOUNT)
            scale.load_state_dict(state)
        scale.observe(transitions)
        scale.drop_episodes(rebuilt_N)
    return scale


def scaled(scale, alpha=(0.0, 0.0, 0.0), target_entropy=-2.0):
    """Return the scaled rewards ``[R][n]``."""
    observation_RnD = torch.arange(12.0).view(3, 2, 2)
    batch = TransitionBatch(
        observation_RnD, observation_RnD, REWARD_RN, observation_RnD, REWARD_RN > 9, TASK_RN
    )
    scale.quantities = {
        "temperature_T": lambda: torch.tensor(alpha),
        "target_entropy_T": lambda: torch.full((3,), target_entropy),
    }
    found = scale(batch)
    for name, value in batch._replace(reward_Rn=found.reward_Rn)._asdict().items():
        assert getattr(found, name) is value, "the rewards alone are changed"
    return found.reward_Rn.tolist()


def test_without_a_scale_rewards_stay_as_they_are():
    assert scaled(RewardScale(SPEC)) == REWARD_RN.tolist()


@pytest.mark.parametrize(
    ("means", "factors"),
    [
        ([0.5, 4.0, -1.0], [8.0, 1.0, 4.0]),
        # tasks without rewards or transitions
        ([0.0, 4.0, 2.0], [50.0, 1.0, 2.0]),
        ([1.0, np.nan, 4.0], [4.0, 50.0, 1.0]),
        ([0.0] * 3, [1.0, 1.0, 1.0]),
    ],
)
def test_mean_reward_makes_the_means_equal_up_to_a_bound(means, factors):
    scale = MeanReward(SPEC, max_factor=50.0)
    assert scaled(scale) == REWARD_RN.tolist(), "before the replay is known"
    scale.begin_learning(np.array(means))
    assert scaled(scale) == (torch.tensor(factors)[:, None] * REWARD_RN).tolist()


def test_return_range_is_the_largest_return_of_a_loop():
    scale = observed(ReturnRange)
    _, largest = slow_statistics()
    assert scale.largest_T.tolist() == pytest.approx(largest, rel=1e-6)


def test_return_range_by_hand():
    scale = ReturnRange(SPEC, discount=0.5, bound=10.0)
    assert scaled(scale, alpha=(0.5, 0.5, 0.5), target_entropy=0.0) == REWARD_RN.tolist()
    scale.largest_T.copy_(torch.tensor([3.0, 8.0, 0.0]))
    # the temperature's term is alpha H target_entropy / 2 = -2 alpha
    found_Rn = scaled(scale, alpha=(0.5, 0.0, 1.0))
    for found, factor, rewards in zip(found_Rn, (10 / 4, 10 / 8, 10 / 2), REWARD_RN, strict=True):
        assert found == pytest.approx((factor * rewards).tolist())


def test_rewards_are_divided_by_the_std_of_a_loops_returns():
    scale = observed(NormalizeReward)
    returns, _ = slow_statistics()
    counts, means, variances = (
        [function(of_task) for of_task in returns] for function in (len, np.mean, np.var)
    )
    assert scale.moments.count_T.tolist() == counts
    np.testing.assert_allclose(scale.moments.mean_T, means, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scale.moments.variance_T, variances, rtol=1e-9)
    clipped = NormalizeReward(SPEC, discount=DISCOUNT, clip=0.3)
    clipped.load_state_dict(scale.state_dict())
    wanted_Rn = REWARD_RN / torch.tensor(variances).float().sqrt()[:, None]
    assert (wanted_Rn.abs() > 0.3).any() and (wanted_Rn.abs() < 0.3).any()
    torch.testing.assert_close(torch.tensor(scaled(clipped)), wanted_Rn.clamp(-0.3, 0.3))


def test_a_run_drops_the_rewards_of_rebuilt_environments(command_line):
    # all three are rebuilt at the 47th of 50 vector steps, the seventh of an episode
    faulty = "--data.benchmark=tests.helpers.altered_reach.FaultyReach"
    scale = "--model.init_args.reward_scale=mtrl_lightning.algorithms.ReturnRange"
    with pytest.warns(UserWarning, match="rebuilding"):
        command_line(
            "fit", *SHORT, faulty, scale, "--data.total_steps=147", "--evaluation.every=999"
        )
    state = checkpoint(command_line)["state_dict"]["transforms.0._extra_state"]
    assert [len(rewards) for rewards in state["per_env"]["rewards"]] == [3, 3, 3]


class Tenfold(RewardScale):
    def factors(self):
        assert self.quantities["temperature_T"]().tolist() == [1, 1, 1]
        assert self.quantities["target_entropy_T"]().tolist() == [-2, -2, -2]
        return torch.full((3,), 10.0)


class Shift(Transform):
    """Add a number to rewards; remember what it received."""

    def __init__(self, spec):
        super().__init__(spec)
        self.received = []
        self.observe = self.begin_learning = self.received.append

    def forward(self, batch):
        return batch._replace(reward_Rn=batch.reward_Rn + 3 * (1 + batch.task_R1))


def test_an_update_learns_from_the_batch_after_all_transforms():
    one, other = make_sac(reward_scale=Tenfold, transforms=[Shift]), make_sac()
    batch = make_batch(one.spec)
    found = batch._replace(reward_Rn=10 * batch.reward_Rn + 3 * (1 + batch.task_Rn))
    for sac, given in ((one, batch), (other, found)):
        attach(sac)
        sac.training_step(given, 0)
    assert changed(one, copy_of(other)) == set()
    one.transforms.observe("transitions")
    one.transforms.begin_learning("means")
    _, shift = one.transforms
    assert shift.received == ["transitions", "means"]


WITH_HEADS = ("multi-head", "moore")
SEEN_T = torch.full((3,), 10.0)


def make_scale(name="multi-head", **options):
    """Return a critic and the scale of its returns."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = NETWORKS[name](4, 1, SPEC)
    return critic, PopArt(SPEC, critic, **options)


def full(value):
    return torch.full((3,), value)


@pytest.mark.parametrize("name", [*WITH_HEADS, "mlp", "separate"])
def test_the_values_stay_when_the_statistics_move(name):
    critic, scale = make_scale(name, step_size=0.3)
    generator = torch.Generator().manual_seed(1)
    x_BD = torch.randn(18, 4, generator=generator)
    mixed_B = torch.randperm(18, generator=generator)
    task_B = torch.arange(3).repeat_interleave(6)

    @torch.no_grad()
    def values(rows=slice(None)):
        tasks = task_B[rows]
        return scale.denormalize(scale(critic(x_BD[rows], tasks), tasks), tasks)

    assert shared_parameters(scale) == []
    before = copy_of(critic)
    # values begin at the mean of the first returns
    scale.observe(torch.tensor([0.5, -2.0, 30.0]), torch.tensor([0.5, 4.0, 100.0]), SEEN_T)
    assert changed(critic, before) == set()
    wanted_B = values()
    means = [[3.0, 40.0, -1.0], [-8.0, 41.0, 0.0], [100.0, 7.0, 30.0]]
    variances = [[9.0, 0.25, 1e3], [900.0, 0.0, 1e-3], [0.01, 1.0, 1e4]]
    for mean_T, variance_T in zip(torch.tensor(means), torch.tensor(variances), strict=True):
        old = scale.mean_T.clone(), scale.std_T.clone()
        scale.observe(mean_T, variance_T, SEEN_T)
        assert (scale.mean_T != old[0]).all() and (scale.std_T != old[1]).all()
        torch.testing.assert_close(values(), wanted_B, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(values(mixed_B), wanted_B[mixed_B], rtol=1e-5, atol=1e-4)
    # of the critic, only what follows the last shared layer
    heads = {"heads.weight", "heads.bias"} if name in WITH_HEADS else set()
    assert changed(critic, before) == heads


def test_the_variance_of_returns_far_from_zero_keeps_its_digits():
    # nu - mu^2 would be 0 in single precision
    _, scale = make_scale()
    for _ in range(50):
        scale.observe(full(1e4), full(0.25), SEEN_T)
    assert scale.variance_T.tolist() == pytest.approx([0.25] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["multi-head", "mlp"])
def test_tasks_without_returns_stay_as_they_are(name):
    critic, scale = make_scale(name, step_size=0.5)
    scale.observe(full(6.0), full(9.0), torch.tensor([10.0, 0.0, 10.0]))
    assert scale.mean_T.tolist() == [6, 0, 6]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 9])
    assert scale.is_known_T.tolist() == [True, False, True]
    weight_T = critic.heads.weight if name == "multi-head" else scale.weight_T
    before_T = weight_T.clone()
    scale.observe(full(8.0), full(9.0), torch.tensor([0.0, 0.0, 3.0]))
    assert scale.mean_T.tolist() == [6, 0, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 10])
    assert torch.equal(weight_T[:2], before_T[:2]) and (weight_T[2] != before_T[2]).all()
    # the task that was not seen takes its first statistics as they are
    scale.observe(full(1.0), full(4.0), torch.tensor([0.0, 1.0, 0.0]))
    assert scale.mean_T.tolist() == [6, 1, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 4, 10])


def test_deviations_have_a_lower_bound():
    _, scale = make_scale(min_std=0.5)
    scale.observe(full(1.0), torch.tensor([4.0, 9.0, 0.01]), SEEN_T)
    assert scale.std_T.tolist() == [2.0, 3.0, 0.5]
