"""The minibatches of an on-policy iteration: every row once in an epoch, and exact resumption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.state import of_envs
from mtrl_lightning.replay.rollout_buffer import RolloutBuffer
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import RolloutConfig
from tests.helpers.replay import assert_same_batch, ids_of, make_spec, make_transitions

NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES = 6, 3, 4
TASKS = [0, 0, 1, 1, 2, 2]
"""Two environments for each task: 12 rows of a task, 3 of them in a minibatch."""
COLLECTION = RolloutConfig(NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES)
POLICY_FIELDS = (Field("unclipped_action", (2,)), Field("log_prob"))


def make(collection=COLLECTION, tasks=TASKS, seed=0, spec=None):
    return RolloutBuffer(spec or make_spec(3), tasks, collection, POLICY_FIELDS, seed)


def row_id(step, env, iteration=0):
    return 10_000 * iteration + 1000 * env + step


def add_step(buffer, step, tasks=TASKS, missing=(), iteration=0):
    """Add the transitions of one vector step, without those of environments that broke."""
    envs = [env for env in range(len(tasks)) if (step, env) not in missing]
    ids = np.array([row_id(step, env, iteration) for env in envs])
    transitions = make_transitions(ids, [tasks[env] for env in envs], envs)
    extra = {"unclipped_action": np.stack([ids / 7, -ids / 7], axis=1), "log_prob": -0.5 * ids}
    is_truncated_E = ids % 5 == 0
    is_foreign_E = np.array([row_id(step, env, iteration) % 3 == 0 for env in range(len(tasks))])
    buffer.add(transitions._replace(extra=extra, truncated_E=is_truncated_E), is_foreign_E)


def collect(buffer, first=0, end=None, **options):
    for step in range(first, buffer.collection.num_steps if end is None else end):
        add_step(buffer, step, **options)


def begin(buffer):
    """Begin with a column that carries each row's number, as advantages would be."""
    observation_SED = buffer.collected().columns["observation"]
    buffer.begin({"advantage": 3 * observation_SED[:, :, 0]})


def ready(**options):
    buffer = make()
    collect(buffer, **options)
    begin(buffer)
    return buffer


def checked_ids(batch):
    """The rows' numbers; fails if a row's fields do not belong together."""
    ids = ids_of(batch)
    id_Rn = torch.tensor(ids).view(batch.task_Rn.shape)
    assert torch.equal(batch.extra["log_prob"], -0.5 * id_Rn)
    torch.testing.assert_close(
        batch.extra["unclipped_action"], torch.stack([id_Rn / 7, -id_Rn / 7], dim=-1)
    )
    assert torch.equal(batch.extra["truncated"], id_Rn % 5 == 0)
    assert torch.equal(batch.extra["foreign"], id_Rn % 3 == 0)
    assert torch.equal(batch.extra["advantage"], 3.0 * id_Rn)
    names = {"log_prob", "unclipped_action", "truncated", "foreign", "advantage"}
    assert set(batch.extra) == names
    return ids


def epoch(buffer, num_minibatches=NUM_MINIBATCHES):
    """The rows' numbers of one epoch, ``[minibatches, R * n]``."""
    return np.stack([checked_ids(buffer.next_minibatch()) for _ in range(num_minibatches)])


def all_ids(missing=(), tasks=TASKS, num_steps=NUM_STEPS):
    places = [(step, env) for step in range(num_steps) for env in range(len(tasks))]
    return sorted(row_id(*place) for place in places if place not in missing)


# ---- minibatches ----


def test_each_epoch_uses_every_row_exactly_once():
    buffer = ready()
    for _ in range(NUM_EPOCHS):
        assert not buffer.is_used_up
        assert sorted(epoch(buffer).ravel()) == all_ids()
    assert buffer.is_used_up


def test_minibatch_names_the_trained_tasks():
    spec = make_spec(5, (1, 4))
    buffer = RolloutBuffer(spec, [1, 4], RolloutConfig(4, 1, 2), POLICY_FIELDS)
    collect(buffer, tasks=[1, 4])
    begin(buffer)
    batch = buffer.next_minibatch()
    assert batch.task_Rn.tolist() == [[1, 1], [4, 4]]
    assert (checked_ids(batch) // 1000).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("tasks", [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 2, 2]])
def test_envs_out_of_task_order_are_a_programming_error(tasks):
    collection = RolloutConfig(4, 1, 2)
    with pytest.raises(AssertionError, match="order"):
        make(collection, tasks, spec=make_spec(3, (0, 1)))
    make(collection, [0, 0, 1, 1], spec=make_spec(3, (0, 1)))


def test_epochs_have_orders_of_their_own():
    buffer = ready()
    orders = [epoch(buffer).tolist() for _ in range(NUM_EPOCHS)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    in_task_order = np.stack(orders).reshape(NUM_EPOCHS, NUM_MINIBATCHES, 3, 3)
    # the rows of one task are not drawn in the same order as those of another
    steps = in_task_order % 1000
    assert (steps[:, :, 0] != steps[:, :, 1]).any()


def test_seed_decides_the_orders():
    orders = []
    for seed in (4, 4, 5):
        buffer = make(seed=seed)
        collect(buffer)
        begin(buffer)
        orders.append([epoch(buffer).tolist() for _ in range(NUM_EPOCHS)])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_orders_are_uniform():
    # the place of each of 4 rows in the epoch's order, over many epochs
    buffer = make(RolloutConfig(4, 1000, 4), tasks=[0], spec=make_spec(1))
    collect(buffer, tasks=[0])
    begin(buffer)
    counts = np.zeros((4, 4))
    for _ in range(1000):
        drawn = [int(buffer.next_minibatch().reward_Rn) // -2 for _ in range(4)]
        counts[np.arange(4), drawn] += 1
    # binomial with the probability 1/4: five standard deviations on either side
    assert np.abs(counts - 250).max() < 5 * np.sqrt(1000 * 0.25 * 0.75)


# ---- phases ----


def test_an_iteration_goes_through_its_phases():
    buffer = make()
    for step in range(NUM_STEPS):
        assert not buffer.is_full
        assert len(buffer) == 6 * step
        add_step(buffer, step)
    assert buffer.is_full
    assert not buffer.has_begun
    assert not buffer.is_used_up
    begin(buffer)
    assert buffer.has_begun
    epoch(buffer)
    assert not buffer.is_used_up
    buffer.skip_rest()
    assert buffer.is_used_up
    buffer.clear()
    assert (len(buffer), buffer.is_full, buffer.has_begun) == (0, False, False)


def test_what_was_collected_is_what_was_added():
    buffer = make()
    missing = {(2, 3), (5, 0)}
    collect(buffer, missing=missing)
    collected = buffer.collected()
    assert collected.task_E.tolist() == TASKS
    assert not collected.valid_SE[2, 3]
    assert not collected.valid_SE[5, 0]
    assert collected.valid_SE.sum() == len(buffer) == 34
    step_SE, env_SE = np.indices((NUM_STEPS, len(TASKS)))
    ids_SE = torch.from_numpy(row_id(step_SE, env_SE)).float()
    valid_SE = collected.valid_SE
    rewards = collected.columns["reward"]
    assert torch.equal(rewards[valid_SE], -2 * ids_SE[valid_SE])
    assert torch.equal(collected.columns["log_prob"][valid_SE], -0.5 * ids_SE[valid_SE])
    assert torch.equal(collected.columns["truncated"][valid_SE], ids_SE[valid_SE] % 5 == 0)


def test_the_memory_is_that_of_one_iteration():
    buffer = make()
    # single precision: 3 + 3 numbers of observations, 2 + 2 of actions, the reward and the log
    # density; a byte for each of the two ends
    row_bytes = 4 * (3 + 3 + 2 + 2 + 1 + 1) + 2
    assert buffer.num_bytes == NUM_STEPS * len(TASKS) * row_bytes
    collect(buffer)
    # and one for whether the policy of another task acted, where it may
    assert buffer.num_bytes == NUM_STEPS * len(TASKS) * (row_bytes + 1)
    clear = buffer.num_bytes
    buffer.clear()
    collect(buffer)
    assert buffer.num_bytes == clear


# ---- faults ----


def test_dropped_rows_are_replaced_within_their_task():
    missing = {(0, 2), (3, 2), (3, 3), (4, 5)}
    buffer = make()
    # the places of the dropped rows hold those of the iteration before
    collect(buffer, iteration=1)
    begin(buffer)
    buffer.clear()
    collect(buffer, missing=missing)
    begin(buffer)
    for _ in range(NUM_EPOCHS):
        ids_MTn = epoch(buffer).reshape(NUM_MINIBATCHES, 3, -1)
        assert set(ids_MTn.ravel().tolist()) == set(all_ids(missing))
        for task, num_missing in enumerate([0, 3, 1]):
            counts = np.unique(ids_MTn[:, task], return_counts=True)[1]
            assert sorted(counts) == [1] * (12 - 2 * num_missing) + [2] * num_missing


def test_a_task_with_one_row_left_gives_its_full_share():
    missing = {(step, env) for step in range(NUM_STEPS) for env in (2, 3)} - {(4, 3)}
    buffer = make()
    collect(buffer, missing=missing)
    begin(buffer)
    ids_MTn = epoch(buffer).reshape(NUM_MINIBATCHES, 3, -1)
    assert set(ids_MTn[:, 1].ravel().tolist()) == {row_id(4, 3)}
    assert len(set(ids_MTn[:, 0].ravel().tolist())) == 12


def test_a_task_without_any_row_is_a_fault_that_names_it():
    missing = {(step, env) for step in range(NUM_STEPS) for env in (2, 3)}
    buffer = make()
    collect(buffer, missing=missing)
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        buffer.collected()


# ---- paused environments ----

PAUSED = {(step, env) for step in range(NUM_STEPS) for env in (1, 4)}
"""Of tasks 0 and 2 one of two environments steps."""


def test_paused_envs_leave_equally_many_rows_per_task():
    # 6 steps of (1 + 4 + 1) / (1 + 2 + 1) environments are 9 rows, rounded up to 4 minibatches
    ids_MTn = epoch(ready(missing=PAUSED)).reshape(NUM_MINIBATCHES, 3, 3)
    for task, num_rows in enumerate([6, 12, 6]):
        counts = np.unique(ids_MTn[:, task], return_counts=True)[1]
        assert sorted(counts) == [12 // num_rows] * num_rows


def test_every_transition_of_a_task_is_drawn_equally_often():
    # 2 environments step in task 0, 1 in task 1: (4 + 1) / (2 + 1) of 4 steps, 7 rows
    buffer = make(RolloutConfig(4, 1000, 1), tasks=[0, 0, 1, 1], spec=make_spec(2))
    collect(buffer, tasks=[0, 0, 1, 1], missing={(step, 3) for step in range(4)})
    begin(buffer)
    drawn = np.concatenate([checked_ids(buffer.next_minibatch()) for _ in range(1000)])
    for envs, expected in ((drawn < 2000, 7000 / 8), (drawn >= 2000, 7000 / 4)):
        counts = np.unique(drawn[envs], return_counts=True)[1]
        # at most the binomial's variance: five standard deviations on either side
        assert np.abs(counts - expected).max() < 5 * np.sqrt(1000 * 0.25)


# ---- resumption ----


def resumed(buffer, **options):
    """Another buffer, with another seed, that continues where this one is."""
    other = make(**{"seed": 99, **options})
    other.load_state_dict(buffer.state_dict())
    return other


def test_iteration_moves_to_other_ranks_before_updates(monkeypatch):
    collection = RolloutConfig(NUM_STEPS, NUM_EPOCHS, 2)
    whole, envs = make(collection), [1, 3, 5]
    collect(whole, end=4)
    part = make(collection, tasks=[TASKS[env] for env in envs])
    part.load_state_dict(of_envs(whole.state_dict(), envs, len(TASKS)))
    assert part.state_dict()["per_env"]["arrays"]["observation"].tolist() == [
        [[row_id(step, env) + x for x in (0, 0.25, 0.5)] for step in range(4)] for env in envs
    ]
    state = ready().state_dict()
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    with pytest.raises(ConfigurationError, match="middle of an iteration's updates"):
        make().load_state_dict(state)


def assert_same_rest(first, second):
    """Both hand out the same minibatches from here, in this iteration and the next."""
    while not first.is_used_up:
        assert not second.is_used_up
        assert_same_batch(second.next_minibatch(), first.next_minibatch())
    assert second.is_used_up
    for buffer in (first, second):
        buffer.clear()
        collect(buffer, iteration=2)
        begin(buffer)
    for _ in range(NUM_EPOCHS * NUM_MINIBATCHES):
        assert_same_batch(second.next_minibatch(), first.next_minibatch())


@pytest.mark.parametrize("num_steps", [0, 1, 4, NUM_STEPS])
def test_a_collection_is_resumed_in_its_middle(num_steps):
    first = make()
    collect(first, iteration=1)
    begin(first)
    epoch(first)
    first.clear()
    missing = {(0, 2), (2, 5)}
    collect(first, end=num_steps, missing=missing)
    second = resumed(first)
    assert len(second) == len(first)
    assert second.is_full == first.is_full
    for buffer in (first, second):
        collect(buffer, first=num_steps, missing=missing)
        begin(buffer)
    assert_same_rest(first, second)


def test_state_without_reuse_has_no_foreign_rows():
    first = make()
    collect(first, end=4)
    state = first.state_dict()
    assert state["per_env"]["arrays"].pop("foreign").any()
    second = make()
    second.load_state_dict(state)
    assert "foreign" not in second.state_dict()["per_env"]["arrays"]
    collect(second, first=4)
    is_foreign_SE = second.collected().columns["foreign"]
    assert not is_foreign_SE[:4].any() and is_foreign_SE[4:].any()


@pytest.mark.parametrize("num_made", [0, 1, 3, 4, 6, 11, 12])
@pytest.mark.parametrize("missing", [{(1, 4)}, PAUSED], ids=["fault", "paused"])
def test_the_minibatches_are_resumed_in_the_middle_of_an_epoch(num_made, missing):
    first = ready(missing=missing)
    for _ in range(num_made):
        first.next_minibatch()
    second = resumed(first)
    assert second.has_begun
    assert second.is_used_up == first.is_used_up == (num_made == 12)
    assert_same_rest(first, second)


def test_computed_column_replaces_a_collected_one():
    first = make()
    collect(first)
    column_SE = first.collected().columns["observation"][:, :, 0]
    first.begin({"log_prob": 2 * column_SE})
    first.next_minibatch()
    for buffer in (resumed(first), first):
        batch = buffer.next_minibatch()
        log_prob_B = batch.extra["log_prob"].flatten()
        assert torch.equal(log_prob_B, 2.0 * torch.tensor(ids_of(batch)))
        assert torch.equal(buffer.collected().columns["log_prob"], -0.5 * column_SE)
        buffer.clear()
        collect(buffer)
        begin(buffer)
        checked_ids(buffer.next_minibatch())


def test_an_iteration_whose_rest_is_left_out_stays_over():
    first = ready()
    epoch(first)
    first.skip_rest()
    second = resumed(first)
    assert second.is_used_up
    assert_same_rest(first, second)


def test_what_is_saved_does_not_change_with_what_follows():
    missing = {(1, 4), (2, 0)}
    first, reference = ready(missing=missing), ready(missing=missing)
    for buffer in (first, reference):
        buffer.next_minibatch()
    state = first.state_dict()
    first.skip_rest()
    first.clear()
    collect(first, iteration=3)
    second = make(seed=99)
    second.load_state_dict(state)
    assert len(second) == 34
    assert_same_rest(reference, second)


OTHERS = {
    "num_steps": {"collection": COLLECTION._replace(num_steps=8)},
    "num_epochs": {"collection": COLLECTION._replace(num_epochs=5)},
    "num_minibatches": {"collection": COLLECTION._replace(num_minibatches=6)},
    "environments": {"tasks": [0] * 4 + [1] * 4 + [2] * 4},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_learning", [False, True])
def test_other_numbers_are_refused_in_the_middle_of_an_iteration(other, is_learning):
    first = ready() if is_learning else make()
    if not is_learning:
        collect(first, end=2)
    with pytest.raises(ConfigurationError, match="iteration"):
        resumed(first, **OTHERS[other])


@pytest.mark.parametrize("other", list(OTHERS)[:3])
def test_other_numbers_are_taken_between_two_iterations(other):
    first = ready()
    epoch(first)
    first.clear()
    second = resumed(first, **OTHERS[other])
    collect(second)
    begin(second)
    collection = second.collection
    for _ in range(collection.num_epochs):
        ids = epoch(second, collection.num_minibatches).ravel()
        assert sorted(ids) == all_ids(num_steps=collection.num_steps)
    assert second.is_used_up
