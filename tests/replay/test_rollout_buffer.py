"""The minibatches of an on-policy iteration: every row once in an epoch, and exact resumption."""

import numpy as np
import pytest
import torch

from mtrl_lightning.checkpoints import of_envs
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.rollout_buffer import RolloutBuffer
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import RolloutConfig
from tests.helpers.replay import assert_same_batch, ids_of, make_spec, make_transitions

NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES = 6, 3, 4
TASKS = [0, 0, 1, 1, 2, 2]
"""Two environments for each task: 12 rows of a task, 3 of them in a minibatch."""
COLLECTION = RolloutConfig(NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES)
POLICY_FIELDS = (Field("unclipped_action", (2,)), Field("log_prob"), Field("foreign", (), "bool"))


def make(collection=COLLECTION, tasks=TASKS, seed=0, spec=None):
    return RolloutBuffer(spec or make_spec(3), tasks, collection, POLICY_FIELDS, seed)


def row_id(step, env, iteration=0):
    return 10_000 * iteration + 1000 * env + step


def collect(buffer, first=0, end=None, tasks=TASKS, missing=(), iteration=0):
    """Add the transitions of vector steps, without those of environments that broke."""
    for step in range(first, buffer.collection.num_steps if end is None else end):
        envs = [env for env in range(len(tasks)) if (step, env) not in missing]
        ids = np.array([row_id(step, env, iteration) for env in envs])
        transitions = make_transitions(ids, [tasks[env] for env in envs], envs)
        extra = {
            "unclipped_action": np.stack([ids / 7, -ids / 7], axis=1),
            "log_prob": -0.5 * ids,
            "foreign": ids % 3 == 0,
        }
        buffer.add(transitions._replace(extra=extra, truncated_E=ids % 5 == 0))


def begin(buffer):
    """Begin with a column that carries each row's number, as advantages would be."""
    observation_SED = buffer.collected().columns["observation"]
    buffer.begin({"advantage": 3 * observation_SED[:, :, 0]})


def ready(seed=0, **options):
    """Return a buffer that hands out minibatches of its second iteration."""
    buffer = make(seed=seed)
    collect(buffer, iteration=1)
    begin(buffer)
    buffer.clear()
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


def epoch(buffer):
    """The rows' numbers of one epoch, ``[minibatches, R * n]``."""
    num_minibatches = buffer.collection.num_minibatches
    return np.stack([checked_ids(buffer.next_minibatch()) for _ in range(num_minibatches)])


def all_ids(missing=()):
    places = [(step, env) for step in range(NUM_STEPS) for env in range(len(TASKS))]
    return sorted(row_id(*place) for place in places if place not in missing)


def test_each_epoch_uses_every_row_once_in_an_order_of_its_own(monkeypatch):
    buffer = ready()
    orders = [epoch(buffer) for _ in range(NUM_EPOCHS)]
    assert buffer.is_used_up
    assert [sorted(order.ravel()) for order in orders] == [all_ids()] * NUM_EPOCHS
    assert np.array_equal(epoch(ready()), orders[0])
    other_seed = epoch(ready(5))
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    other_rank = epoch(ready())
    all_orders = [*orders, other_seed, other_rank]
    assert len({tuple(order.ravel()) for order in all_orders}) == NUM_EPOCHS + 2
    steps_MRn = orders[0].reshape(NUM_MINIBATCHES, 3, 3) % 1000
    assert (steps_MRn[:, 0] != steps_MRn[:, 1]).any(), "tasks have orders of their own, too"


def test_minibatch_names_the_trained_tasks():
    buffer = make(RolloutConfig(4, 1, 2), [1, 4], spec=make_spec(5, (1, 4)))
    collect(buffer, tasks=[1, 4])
    begin(buffer)
    batch = buffer.next_minibatch()
    assert batch.task_Rn.tolist() == [[1, 1], [4, 4]]
    assert (checked_ids(batch) // 1000).tolist() == [0, 0, 1, 1]


PAUSED = {(step, env) for step in range(NUM_STEPS) for env in (1, 4)}
"""Of tasks 0 and 2 one of two environments steps."""
ONE_ROW = {(step, env) for step in range(NUM_STEPS) for env in (2, 3)} - {(4, 3)}


@pytest.mark.parametrize(
    ("missing", "counts"),
    [
        ({(0, 2), (3, 2), (3, 3), (4, 5)}, [[1] * 12, [1] * 6 + [2] * 3, [1] * 10 + [2]]),
        (ONE_ROW, [[1] * 12, [12], [1] * 12]),
        # 6 steps of (1 + 4 + 1) / (1 + 2 + 1) environments are 9 rows, rounded up to 4 minibatches
        (PAUSED, [[2] * 6, [1] * 12, [2] * 6]),
    ],
    ids=["faults", "one row is left", "paused"],
)
def test_missing_rows_are_replaced_within_their_task(missing, counts):
    buffer = ready(missing=missing)
    for _ in range(NUM_EPOCHS):
        ids_MTn = epoch(buffer).reshape(NUM_MINIBATCHES, 3, -1)
        assert set(ids_MTn.ravel().tolist()) == set(all_ids(missing))
        for task in range(3):
            found = np.unique(ids_MTn[:, task], return_counts=True)[1]
            assert sorted(found) == counts[task]


def test_a_task_without_any_row_is_a_fault_that_names_it():
    buffer = make()
    collect(buffer, missing=ONE_ROW | {(4, 3)})
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        buffer.collected()


def test_every_transition_of_a_task_is_drawn_equally_often():
    # 2 environments step in task 0, 1 in task 1: (4 + 1) / (2 + 1) of 4 steps, 7 rows
    tasks, num_epochs = [0, 0, 1, 1], 500
    buffer = make(RolloutConfig(4, num_epochs, 1), tasks, spec=make_spec(2))
    collect(buffer, tasks=tasks, missing={(step, 3) for step in range(4)})
    begin(buffer)
    drawn = np.concatenate([checked_ids(buffer.next_minibatch()) for _ in range(num_epochs)])
    for envs, expected in ((drawn < 2000, 7 / 8), (drawn >= 2000, 7 / 4)):
        counts = np.unique(drawn[envs], return_counts=True)[1]
        # at most the binomial's variance: five standard deviations on either side
        assert np.abs(counts - num_epochs * expected).max() < 5 * np.sqrt(num_epochs * 0.25)


def test_the_memory_is_that_of_one_iteration():
    # single precision: 3 + 3 numbers of observations, 2 + 2 of actions, the reward and the log
    # density; a byte for each of the two ends, and one for whether another task's policy acted
    row_bytes = 4 * (3 + 3 + 2 + 2 + 1 + 1) + 3
    assert make().num_bytes == NUM_STEPS * len(TASKS) * row_bytes


def test_computed_column_replaces_a_collected_one():
    buffer = make()
    collect(buffer)
    column_SE = buffer.collected().columns["observation"][:, :, 0]
    buffer.begin({"log_prob": 2 * column_SE})
    other = resumed(buffer.state_dict())
    for _ in range(2):  # also in the middle of an epoch
        batch = buffer.next_minibatch()
        same = other.next_minibatch()
        assert_same_batch(batch, same)
        assert torch.equal(batch.extra["log_prob"].flatten(), 2.0 * torch.tensor(ids_of(batch)))
        assert torch.equal(other.collected().columns["log_prob"], -0.5 * column_SE)
        other = resumed(buffer.state_dict())


def resumed(state, **options):
    """Another buffer, with another seed, that continues from a state."""
    other = make(**{"seed": 99, **options})
    other.load_state_dict(state)
    return other


def test_an_iteration_whose_rest_is_left_out_stays_over():
    buffer = ready()
    epoch(buffer)
    buffer.skip_rest()
    assert buffer.is_used_up and resumed(buffer.state_dict()).is_used_up
    buffer.clear()
    assert (len(buffer), buffer.is_full, buffer.has_begun) == (0, False, False)


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
    with pytest.raises(ConfigurationError, match="iteration"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [
        {"collection": COLLECTION._replace(num_steps=8)},
        {"collection": COLLECTION._replace(num_epochs=5)},
        {"collection": COLLECTION._replace(num_minibatches=6)},
        {"tasks": [0] * 4 + [1] * 4 + [2] * 4},
    ],
)
def test_other_numbers_are_taken_only_between_iterations(other):
    first = ready()
    with pytest.raises(ConfigurationError, match="iteration"):
        resumed(first.state_dict(), **other)
    first.clear()
    between = first.state_dict()
    collect(first, end=2)
    with pytest.raises(ConfigurationError, match="iteration"):
        resumed(first.state_dict(), **other)
    assert resumed(between, **other).is_empty
