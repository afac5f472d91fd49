"""Sampling: only what was written, the same from every task, independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer
from tests.helpers.replay import NaiveRings, columns_in, held, ids_of, make_spec, make_transitions


def filled(sizes, capacity=None, seed=0, tasks=None, train_tasks=None):
    """A buffer of which environment ``i`` holds ``sizes[i]`` rows, ``1000 i, 1000 i + 1, ...``.

    Without ``tasks`` each environment has a task of its own.
    """
    tasks = list(range(len(sizes))) if tasks is None else tasks
    spec = make_spec(max(tasks) + 1, train_tasks)
    buffer = ReplayBuffer(spec, capacity or max(sizes) * len(sizes), seed, tasks=tasks)
    for env, size in enumerate(sizes):
        for row in range(size):
            buffer.add(make_transitions([1000 * env + row], [tasks[env]], [env]))
    return buffer


def test_batch_has_equally_many_rows_per_task_in_order():
    batch = filled([5, 9, 2]).sample(12)
    assert batch.task_Rn.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]]
    assert batch.task_R1.tolist() == [[0], [1], [2]]
    assert batch.task_Rn.dtype == torch.int64
    assert (ids_of(batch) // 1000).tolist() == batch.task_Rn.flatten().tolist()
    assert {column.shape[:2] for column in columns_in(batch).values()} == {(3, 4)}
    assert batch.observation_RnD.shape == batch.next_observation_RnD.shape == (3, 4, 3)
    assert batch.action_RnA.shape == (3, 4, 2)


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


@pytest.fixture
def sentinels(monkeypatch):
    """Fill memory that was not written yet with what no row can hold."""
    empty = torch.empty

    def marked(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(1)

    monkeypatch.setattr(torch, "empty", marked)


@pytest.mark.usefixtures("sentinels")
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 9, 3], [10, 2, 5], [13, 14, 1]])
def test_rows_that_were_never_written_are_never_drawn(sizes):
    buffer = filled(sizes, capacity=30)
    batch = buffer.sample(3 * 5_000)
    for column in columns_in(batch).values():
        assert not column.isnan().any()
    held = [size if size <= 10 else 10 for size in sizes]
    seen = ids_of(batch).reshape(3, -1)
    for task, (size, kept) in enumerate(zip(sizes, held, strict=True)):
        assert set(seen[task].tolist()) == {1000 * task + row for row in range(size - kept, size)}


def rows_drawn(buffer, num_tasks, rows):
    return ids_of(buffer.sample(num_tasks * rows)).reshape(num_tasks, rows) % 1000


def test_draws_are_with_replacement():
    # expected are 200 (1 - 1/e) = 126
    assert len(set(rows_drawn(filled([200]), 1, 200)[0].tolist())) < 160


@pytest.mark.parametrize("sizes", [[50, 50, 50], [50, 20, 35]])
def test_tasks_are_drawn_at_places_of_their_own(sizes):
    drawn = rows_drawn(filled(sizes, seed=2), 3, 20_000)
    correlation = np.corrcoef(drawn)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 5 / np.sqrt(20_000)
    equal = (drawn[0] == drawn[1]).mean()
    assert equal == pytest.approx(1 / 50, abs=0.006)


def test_the_same_seed_gives_the_same_draws_and_another_does_not():
    first, second, other = (
        ids_of(filled([30, 30], seed=seed).sample(64)).tolist() for seed in (4, 4, 5)
    )
    assert first == second
    assert first != other


def test_draws_leave_the_global_generators_alone():
    buffer = filled([30, 30])
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = ids_of(buffer.sample(64)).tolist()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)
    torch.manual_seed(99)
    assert ids_of(filled([30, 30]).sample(64)).tolist() == first


def test_a_restored_generator_draws_what_would_have_been_drawn():
    before, after = filled([30, 30], seed=6), filled([30, 30], seed=7)
    before.sample(64)
    state = before.state_dict()
    wanted = [ids_of(before.sample(64)).tolist() for _ in range(3)]
    after.load_state_dict(state)
    assert [ids_of(after.sample(64)).tolist() for _ in range(3)] == wanted


def test_default_is_one_env_per_trained_task():
    buffer = ReplayBuffer(make_spec(5, (1, 3)), capacity=9)
    assert (buffer.storage.num_envs, buffer.storage.capacity, buffer.capacity) == (2, 4, 8)
    buffer.add(make_transitions([7, 8], [3, 1], [1, 0]))
    batch = buffer.sample(4)
    assert batch.task_Rn.tolist() == [[1, 1], [3, 3]]
    assert ids_of(batch).tolist() == [8, 8, 7, 7]


@pytest.mark.parametrize("tasks", [[0, 1], [0, 1, 2, 3], [1, 2]])
def test_envs_of_untrained_tasks_are_a_programming_error(tasks):
    with pytest.raises(AssertionError, match="trained"):
        ReplayBuffer(make_spec(4, (0, 1, 2)), capacity=20, tasks=tasks)


# ---- several environments per task ----


def test_each_env_has_its_own_ring_in_order():
    buffer = ReplayBuffer(make_spec(2), capacity=20, tasks=[0, 1, 0, 1])
    buffer.add(make_transitions([10, 11, 12, 13], [0, 1, 0, 1], [0, 1, 2, 3]))
    buffer.add(make_transitions([20, 22, 23], [0, 0, 1], [0, 2, 3]))  # one was rebuilt
    buffer.add(make_transitions([33, 31], [1, 1], [3, 1]))
    assert held(buffer.storage) == [[10, 20], [11, 31], [12, 22], [13, 23, 33]]
    assert len(buffer) == 9


def test_capacity_is_divided_among_envs_and_rings_wrap():
    tasks = [0, 0, 1, 0, 1]
    buffer = ReplayBuffer(make_spec(2), capacity=24, tasks=tasks)  # 4 rows per environment
    naive = NaiveRings(5, 4)
    generator = np.random.default_rng(0)
    for step in range(60):
        envs = np.flatnonzero(generator.random(5) < [1.0, 0.6, 0.9, 0.1, 0.5])
        ids = (1000 * envs + step).tolist()
        buffer.add(make_transitions(ids, [tasks[env] for env in envs], envs.tolist()))
        naive.add(envs.tolist(), ids)
        assert held(buffer.storage) == [list(ring) for ring in naive.rings]
        assert len(buffer) == sum(len(ring) for ring in naive.rings)
        if naive.rings[0] and naive.rings[2]:
            drawn = ids_of(buffer.sample(800)).reshape(2, 400)
            for task, rows in enumerate(drawn):
                rings = (
                    ring for ring, other in zip(naive.rings, tasks, strict=True) if other == task
                )
                assert set(rows.tolist()) == {number for ring in rings for number in ring}
    assert buffer.capacity == 20
    assert max(naive.added) == 60 and min(naive.added) > 4


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [([20, 20, 20, 20], None), ([3, 17, 1, 40], None), ([5, 1, 0, 2], None), ([70, 9, 33, 2], 120)],
)
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
        assert_uniform(counts, num_draws / len(kept))


def assert_uniform(counts, expected):
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # mean n - 1, variance 2 (n - 1): five standard deviations on either side
    freedom = len(counts) - 1
    assert abs(chi_square - freedom) <= 5 * np.sqrt(2 * freedom)


def test_mean_rewards_are_over_all_rings_of_a_task():
    buffer = filled([2, 3, 7, 0], capacity=20, tasks=[0, 0, 1, 2])
    kept = [[0, 1, 1000, 1001, 1002], [2000 + row for row in range(2, 7)]]
    wanted = [-2.0 * np.mean(rows) for rows in kept]
    means = buffer.mean_rewards()
    assert means[:2].tolist() == pytest.approx(wanted, rel=1e-12)
    assert np.isnan(means[2])


def test_rewards_are_summed_in_double_precision():
    buffer = filled([], capacity=5, tasks=[0])
    rewards = [1e8, 1.0, 1.0, 1.0, 1.0]  # in single precision 1e8 + 1 is 1e8
    for reward in rewards:
        row = make_transitions([0], [0], [0])
        buffer.add(row._replace(reward_E=np.array([reward], np.float32)))
    assert buffer.mean_rewards().tolist() == [(1e8 + 4) / 5]


def test_processes_draw_other_rows_from_one_seed(monkeypatch):
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        drawn.append(ids_of(filled([30, 30], seed=4).sample(64)).tolist())
    assert drawn[0] != drawn[1]


def test_an_addition_does_not_change_what_it_is_given():
    buffer = ReplayBuffer(make_spec(2), capacity=8)
    transitions = make_transitions([1, 2], [0, 1])
    buffer.add(transitions)
    transitions.observation_ED[:] = -1
    assert sorted(set(ids_of(buffer.sample(20)).tolist())) == [1, 2]
