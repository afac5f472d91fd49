"""A checkpoint is the same for any number of processes, each of which loads its own part."""

import numpy as np
import pytest
import torch

from mtrl_lightning.checkpoints import gathered, of_absent_ranks, of_envs
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.rollout import ActionNoise, ActionTransform, Collector, EpisodeWindows
from mtrl_lightning.transitions import Episode
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import MeanMetrics
from tests.helpers.algorithms import make_sac
from tests.helpers.fakes import Constant
from tests.helpers.replay import encode, held, make_rings
from tests.helpers.rollout import Diary
from tests.helpers.runs import assert_same

CPU = torch.device("cpu")
TASKS = [0, 0, 1, 1]
ENVS = [[0, 2], [1, 3]]
"""Two environments of each task, of which each of two ranks steps one."""


@pytest.fixture
def on_rank(monkeypatch):
    """Return a function that makes this process one of several."""

    def be(rank, size=2):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: size)

    return be


def test_env_entries_are_in_order_and_return_to_their_ranks():
    states = [
        {"per_env": {"a": {"b": ["e0", "e2"]}, "c": torch.tensor([[0], [2]]), "d": [7]}, "same": 1},
        {"per_env": {"a": {"b": ["e1", "e3"]}, "c": torch.tensor([[1], [3]]), "d": []}, "same": 1},
    ]
    of_run = gathered(states, ENVS, {})
    wanted = {
        "a": {"b": ["e0", "e1", "e2", "e3"]},
        "c": torch.arange(4)[:, None],
        "d": [7, None, None, None],
    }
    assert_same(of_run, {"per_env": wanted, "same": 1})
    states[0]["per_env"]["d"], states[1]["per_env"]["d"] = [7, None], [None, None]
    assert_same([of_envs(of_run, envs, 4) for envs in ENVS], states)
    with pytest.raises(ConfigurationError, match=r"4 .* 6"):
        of_envs(of_run, [0, 1], 6)


def test_states_of_ranks_that_are_absent_for_a_while_are_kept():
    states = [{"x": {"per_rank": {rank: f"r{rank}"}, "per_env": [rank]}} for rank in range(2)]
    of_two = gathered(states, [[0], [1]], {})
    of_one = [{"x": {"per_rank": {0: "new"}, "per_env": [0, 1]}}]
    of_run = gathered(of_one, [[0, 1]], of_absent_ranks(of_two, 1))
    assert of_run == {"x": {"per_rank": {0: "new", 1: "r1"}, "per_env": [0, 1]}}


def test_means_over_all_ranks_continue_with_fewer_and_more(on_rank):
    states = []
    for rank, values in enumerate([[1.0, 2.0], [9.0]]):
        on_rank(rank)
        metrics = MeanMetrics()
        for value in values:
            metrics.add({"q": torch.tensor(value)})
        states.append(metrics.state_dict())
    of_run = gathered(states, ENVS, {})
    counts = []
    for rank, size in ((0, 1), (0, 2), (1, 2), (2, 3)):
        on_rank(rank, size)
        metrics = MeanMetrics()
        metrics.load_state_dict(of_run)
        counts.append([(float(s), n) for *_, s, n in metrics.state_dict()["all_ranks"]["sums"]])
    assert counts == [[(12.0, 3)], [(3.0, 2)], [(9.0, 1)], []]


def test_last_episodes_of_ranks_are_ordered_as_they_finished():
    """One rank always succeeds, the other never."""
    spec = ToyReach().spec
    windows = [EpisodeWindows(3, 50) for _ in ENVS]
    for _ in range(30):
        for success, of_rank in enumerate(windows):
            of_rank.add([Episode(0, 0.0, 9, bool(success), bool(success), env=0)])
    of_run = gathered([one.state_dict() for one in windows], [[0], [1]], {})
    one = EpisodeWindows(3, 50)
    one.load_state_dict(of_run)
    assert one.recent_score(0, 20, spec) == 0.5
    assert one.success_from_reset() == {0: 0.5} and one.count_T.tolist() == [60, 0, 0]
    joined = EpisodeWindows.joined([part.of_tasks() for part in windows], 50)
    assert joined.summary() == one.summary()
    for rank in range(2):
        of_rank = EpisodeWindows(3, 50)
        of_rank.load_state_dict(of_envs(one.state_dict(), [rank], 2))
        assert of_rank.recent_score(0, 20, spec) == rank
        assert of_rank.state_dict() == windows[rank].state_dict()


class Inert(ActionTransform):
    """Remembers something for each environment, and something of its own."""

    def __init__(self, last, own):
        self.last, self.own = last, own

    def transform(self, action_EA, task_E, is_training):
        return action_EA

    def state_dict(self):
        return {"per_env": {"last": self.last}, "own": self.own}

    def load_state_dict(self, state):
        self.last, self.own = state["per_env"]["last"], state.get("own")


def collector_of(envs, transforms):
    vector = VectorEnv(ToyReach(), [TASKS[env] for env in envs], num_workers=0)
    return Collector(vector, Constant(), action_transforms=transforms, listeners=[Diary()])


def test_collector_parts_move_and_new_ranks_draw_their_own(on_rank):
    whole = collector_of(range(4), [Inert("abcd", 1), ActionNoise(0.1)])
    whole.listeners[0].num_ended = 5
    whole.sample(num_steps=4 * 7)
    saved = gathered([whole.get_state()], [range(4)], {})
    parts, noise = [], []
    for rank, envs in enumerate(ENVS):
        on_rank(rank)
        transforms = [Inert("", None), ActionNoise(0.1)]
        transforms[1].seed(rank)  # as the run does before it reads the checkpoint
        part = collector_of(envs, transforms)
        part.set_state(of_envs(saved, envs, 4))
        assert part.running.length_E.tolist() == [7, 7]
        assert np.array_equal(part.observation_ED, whole.observation_ED[envs])
        assert transforms[0].last == [*("ac" if rank == 0 else "bd")]
        own = transforms[0].own, part.listeners[0].num_ended
        assert own == ((1, 5) if rank == 0 else (None, 0))
        parts.append(part.get_state())
        noise.append(transforms[1].transform(np.zeros((2, 2), np.float32), [0, 1], True))
    assert len(np.unique(noise)) == 8
    again = gathered(parts, ENVS, {})
    for name in ("per_env", "windows", "running"):
        assert_same(again[name], saved[name])


def test_rings_of_several_ranks_are_read_by_one_and_back(tmp_path, on_rank):
    manifests, rings = [], []
    for rank, envs in enumerate(ENVS):
        on_rank(rank)
        storage = make_rings(2, 8)
        for row in range(5 + 6 * rank):
            storage.add(np.arange(2), encode([1000 * env + row for env in envs]))
        manifests.append(ReplaySnapshots(tmp_path, 1e-4, envs=envs).save(storage))
        rings.append(held(storage))
    on_rank(0, 1)
    of_run = gathered(manifests, ENVS, {})
    one, snapshots = make_rings(4, 8), ReplaySnapshots(tmp_path, envs=range(4))
    snapshots.load(of_envs(of_run, range(4), 4), one)
    assert held(one) == [rings[0][0], rings[1][0], rings[0][1], rings[1][1]]
    of_one = gathered([snapshots.save(one)], [range(4)], {})
    assert of_one["per_env"] == of_run["per_env"]
    snapshots.prune([of_one])
    names = [chunk["file"] for chunk in of_one["all_ranks"]["chunks"]]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    for rank, envs in enumerate(ENVS):
        on_rank(rank)
        storage = make_rings(2, 8)
        ReplaySnapshots(tmp_path, envs=envs).load(of_envs(of_one, envs, 4), storage)
        assert held(storage) == rings[rank]


def draws_of(generators, *names):
    return [float(torch.rand((), generator=generators.get(name, CPU))) for name in names]


def test_generators_differ_where_their_owner_says_so(on_rank):
    """And not where a name begins like one of those."""
    assert make_sac().generators.per_rank == {"act", "learn", "transform_0"}
    draws = []
    for rank in range(2):
        on_rank(rank)
        generators = Generators(3, per_rank=("act", "learn"))
        generators.per_rank.add("noise")
        draws.append(draws_of(generators, "act", "action", "learn", "learning_rate", "noise"))
    differs = [first != second for first, second in zip(*draws, strict=True)]
    assert differs == [True, False, True, False, True]


def test_new_rank_starts_its_own_generators(on_rank):
    saved = Generators(3, per_rank=["act"])
    drawn = draws_of(saved, "act", "gradient")
    of_run = gathered([saved.state_dict()], [[]], {})
    on_rank(2, 3)
    new, fresh = Generators(3, per_rank=["act"]), Generators(3, per_rank=["act"])
    new.load_state_dict(of_run)
    act, gradient = draws_of(new, "act", "gradient")
    fresh_act, fresh_gradient = draws_of(fresh, "act", "gradient")
    assert act == fresh_act and gradient != fresh_gradient
    assert not {act, gradient} & {*drawn}
