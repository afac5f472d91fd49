"""Sampling: only what was written, the same from every task, independently."""

import numpy as np
import pytest
import torch

from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer
from tests.helpers.replay import columns_in, ids_of, make_spec, make_transitions


def filled(sizes, capacity=None, seed=0, tasks=None):
    """A buffer of which environment ``i`` holds ``sizes[i]`` rows, ``1000 i, 1000 i + 1, ...``.

    Without ``tasks`` each environment has a task of its own.
    """
    tasks = list(range(len(sizes))) if tasks is None else tasks
    capacity = capacity or max(sizes) * len(sizes)
    buffer = ReplayBuffer(make_spec(max(tasks) + 1), capacity, seed, tasks=tasks)
    for env, size in enumerate(sizes):
        for row in range(size):
            buffer.add(make_transitions([1000 * env + row], [tasks[env]], [env]))
    return buffer


def test_a_replay_on_a_device_does_not_wait_for_it():
    device = torch.device("meta")  # has no number to give: who asks for one gets an error
    buffer = ReplayBuffer(make_spec(3), 30, device=device)
    for step in range(20):
        buffer.add(make_transitions(range(3 * step, 3 * step + 3), [2, 0, 1]))
    batch = buffer.sample(12)
    columns = [*columns_in(batch).values(), batch.task_Rn]
    assert [(column.device, column.shape[:2]) for column in columns] == [(device, (3, 4))] * 6
    with pytest.raises(RuntimeError, match="item"):
        float(batch.reward_Rn.sum())


def test_tasks_are_drawn_at_places_of_their_own():
    drawn = ids_of(filled([50, 20, 35], seed=2).sample(60_000)).reshape(3, -1) % 1000
    correlation = np.corrcoef(drawn)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 5 / np.sqrt(20_000)
    equal = (drawn[0] == drawn[1]).mean()
    assert equal == pytest.approx(1 / 50, abs=0.006)


def test_draws_depend_on_seed_and_rank_only(monkeypatch):
    def draw(seed):
        return ids_of(filled([30, 30], seed=seed).sample(64)).tolist()

    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    drawn = draw(4)
    assert drawn == draw(4) != draw(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert draw(4) != drawn


def test_default_is_one_env_per_trained_task():
    buffer = ReplayBuffer(make_spec(5, (1, 3)), capacity=9)
    assert (buffer.storage.num_envs, buffer.storage.capacity, buffer.capacity) == (2, 4, 8)
    buffer.add(make_transitions([7, 8], [3, 1], [1, 0]))
    batch = buffer.sample(4)
    assert batch.task_Rn.tolist() == [[1, 1], [3, 3]]
    assert ids_of(batch).tolist() == [8, 8, 7, 7]


@pytest.mark.parametrize(("sizes", "capacity"), [([5, 1, 0, 2], None), ([70, 9, 33, 2], 120)])
def test_draws_are_uniform_over_rows_and_equal_over_tasks(sizes, capacity):
    tasks, num_draws = [0, 1, 0, 0], 100_000
    buffer = filled(sizes, capacity, seed=5, tasks=tasks)
    drawn = ids_of(buffer.sample(2 * num_draws)).reshape(2, num_draws)
    most = capacity // 4 if capacity else max(sizes)
    for task, rows in enumerate(drawn):
        kept = [
            1000 * env + row
            for env, size in enumerate(sizes)
            if tasks[env] == task
            for row in range(max(0, size - most), size)
        ]
        numbers, counts = np.unique(rows, return_counts=True)
        assert numbers.tolist() == kept
        assert counts.sum() == num_draws
        expected = num_draws / len(kept)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # mean n - 1, variance 2 (n - 1): five standard deviations on either side
        freedom = len(counts) - 1
        assert abs(chi_square - freedom) <= 5 * np.sqrt(2 * freedom)


def test_mean_rewards_are_over_all_rings_in_double_precision():
    buffer = filled([2, 3, 7, 0], capacity=20, tasks=[0, 0, 1, 2])
    kept = [[0, 1, 1000, 1001, 1002], [2000 + row for row in range(2, 7)]]
    wanted = [-2.0 * np.mean(rows) for rows in kept]
    means = buffer.mean_rewards()
    assert means[:2].tolist() == pytest.approx(wanted, rel=1e-12)
    assert np.isnan(means[2])
    buffer = filled([], capacity=5, tasks=[0])
    for reward in (1e8, 1.0, 1.0, 1.0, 1.0):  # in single precision 1e8 + 1 is 1e8
        row = make_transitions([0], [0], [0])
        buffer.add(row._replace(reward_E=np.array([reward], np.float32)))
    assert buffer.mean_rewards().tolist() == [(1e8 + 4) / 5]
