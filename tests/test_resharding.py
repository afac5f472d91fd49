"""Each part of a run says itself what of its state a process of another number of them has."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import own_part, parts_of
from mtrl_lightning.data import ReplayData
from mtrl_lightning.data.run_io import reshard
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.learning.metrics import MeanMetrics
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.share import SavedEnv, Share
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.rollout import ActionNoise, ActionTransform, Collector, EpisodeListener
from mtrl_lightning.rollout.episodes import EpisodeWindows
from mtrl_lightning.schema import transition_fields
from tests.helpers.fakes import Constant
from tests.helpers.runs import assert_same

OPTIONS = [
    "--data.envs_per_task=4",
    "--data.warmup_steps=60",
    "--data.total_steps=132",
    "--data.batch_size=48",
    "--data.capacity=72",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
    "--data.action_transforms+={class_path: mtrl_lightning.rollout.ActionNoise,"
    " init_args: {std: 0.1}}",
]
NOISE = "mtrl_lightning.rollout.action_transforms.ActionNoise:0"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(finished_runs):
    return finished_runs("resharded", *OPTIONS)[0]


@pytest.fixture
def whole(folder):
    return load_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.fixture
def data(folder):
    data = ReplayData(ToyReach(), total_steps=132)
    envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=0)
    data.collector = Collector(envs, Constant(), action_transforms=[ActionNoise(0.1)])
    algorithm = SAC.load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    state = SimpleNamespace(fn="fit")
    data.trainer = SimpleNamespace(state=state, lightning_module=algorithm)
    return data


@pytest.fixture
def two(whole, data):
    return as_saved_by(2, whole, data)


def read_by(rank, size, checkpoint, data):
    """Return a checkpoint as a process reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: rank)
        patch.setattr(distributed, "world_size", lambda: size)
        return reshard(checkpoint, data)


def as_saved_by(size, checkpoint, data):
    """Return the checkpoint as ``size`` processes would save it, without their replay."""
    with pytest.warns(UserWarning, match=str(size)):
        parts = [own_part(read_by(rank, size, checkpoint, data)) for rank in range(size)]
    for part in parts:
        part["data"] = {**part["data"], "replay": None}
    return {**checkpoint, "ranks": copy.deepcopy(parts)}


# ---- environments move with their episodes and rings ----


@pytest.mark.parametrize("path", [[2], [4], [2, 4], [4, 2]])
def test_way_to_other_numbers_of_processes_and_back(whole, data, path):
    found = whole
    for size in path:
        found = as_saved_by(size, found, data)
    (back,) = parts_of(as_saved_by(1, found, data))
    former, now = own_part(whole)["data"]["collector"], back["data"]["collector"]
    for name in ("tasks", "running", "observation", "envs"):
        assert_same(former[name], now[name])
    assert former["windows"]["counts"] == now["windows"]["counts"]
    for one, other in zip(former["windows"]["windows"], now["windows"]["windows"], strict=True):
        assert sorted(map(repr, one)) == sorted(map(repr, other))
    for name in ("algorithm", "extra_states"):
        assert_same(own_part(whole)[name], back[name])


def test_every_ring_is_read_by_one_of_two_processes(folder, whole, data):
    manifest = whole["ReplayData"]["replay"]
    fields, capacity = transition_fields(ToyReach().spec), manifest["capacity"]
    joined = RingStorage(fields, 12, capacity)
    ReplaySnapshots(folder / "replay").load(manifest, joined)
    read = []
    for rank in range(2):
        with pytest.warns(UserWarning, match="2"):
            (moved,) = read_by(rank, 2, whole, data)["ReplayData"]["replay"]["moved"]
        own = RingStorage(fields, 6, capacity)
        ReplaySnapshots(folder / "replay").load_rings(moved["manifest"], own, moved["rings"])
        for old, new in moved["rings"]:
            assert own.added_E[new] == joined.added_E[old] == 11
            places = ((joined, old), (own, new))
            rows = [storage.take(*storage.numbers(ring, 5, 11)) for storage, ring in places]
            assert_same(*rows)
            read.append(old)
    assert sorted(read) == list(range(12))


# ---- new processes draw numbers of their own ----


def test_each_of_more_processes_sends_noise_of_its_own(whole, two, data):
    for former, size in ((whole, 2), (two, 4)):
        noise = []
        for rank, part in enumerate(as_saved_by(size, former, data)["ranks"]):
            transform = ActionNoise(0.1)
            transform.seed(rank)  # as the run does before it reads the checkpoint
            state = part["data"]["collector"]
            envs = VectorEnv(ToyReach(), state["tasks"], num_workers=0)
            Collector(envs, Constant(), action_transforms=[transform]).set_state(state)
            noise.append(transform.transform(np.zeros((3, 2), np.float32), envs.task_E, True))
        assert len(np.unique(noise)) == size * 3 * 2
    kept = own_part(whole)["data"]["collector"]["action_transforms"]
    assert two["ranks"][0]["data"]["collector"]["action_transforms"] == kept
    assert two["ranks"][1]["data"]["collector"]["action_transforms"] == {NOISE: {}}


def test_generators_differ_where_their_owner_says_so(monkeypatch):
    """And not where a name begins like one of those."""
    names = ("act", "action", "learn", "learning_rate", "noise")
    draws = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        generators = Generators(3, per_rank=("act", "learn"))
        generators.per_rank.add("noise")
        draws.append([float(torch.rand((), generator=generators.get(n, CPU))) for n in names])
    differs = [first != second for first, second in zip(*draws, strict=True)]
    assert differs == [True, False, True, False, True]


def test_an_algorithm_says_which_of_its_generators_differ(data):
    assert data.algorithm.generators.per_rank == {"act", "learn", "transform_0"}


def test_new_process_starts_its_own_generators():
    saved = Generators(3, per_rank=["act"])
    for name in ("act", "gradient"):
        saved.get(name, CPU)
    states = [saved.state_dict()] * 2
    for rank, names in ((0, {"act", "gradient"}), (1, {"act", "gradient"}), (2, {"gradient"})):
        assert saved.reshard(states, Share(rank, 3, 1, ()))["used"].keys() == names


# ---- parts by hand ----

SHARE = Share(rank=0, size=1, num_envs=2, saved_envs=(SavedEnv(1, 0), SavedEnv(0, 1)))


def test_state_of_environments_moves_with_them():
    assert SHARE.of_envs([["a", "b"], ["c", "d"]]) == ["c", "b"]
    assert SHARE.of_named_envs([{"0": "a", "1": "b"}, {"1": "d"}]) == {"1": "b"}


def test_the_first_process_has_the_sums_of_all():
    states = [
        {"sums": {"q": 1.0}, "counts": {"q": 2}},
        {"sums": {"q": 3.0, "v": 4.0}, "counts": {"q": 5, "v": 6}},
    ]
    joined = {"sums": {"q": 4.0, "v": 4.0}, "counts": {"q": 7, "v": 6}}
    assert MeanMetrics.reshard(states, SHARE) == joined
    assert MeanMetrics.reshard(states, SHARE._replace(rank=1)) == {"sums": {}, "counts": {}}


def test_windows_are_divided_and_the_first_process_counts():
    states = [
        {"windows": [["a", "b"], ["c"]], "counts": [2, 1]},
        {"windows": [["d"], []], "counts": [7, 0]},
    ]
    parts = [EpisodeWindows.reshard(states, Share(rank, 2, 2, ())) for rank in range(2)]
    assert parts[0] == {"windows": [["a", "d"], ["c"]], "counts": [9, 1]}
    assert parts[1] == {"windows": [["b"], []], "counts": [0, 0]}


class Inert(ActionTransform):
    """Remember each environment's last action, under a name of its own."""

    @staticmethod
    def reshard(states, share):
        return {"last": share.of_envs([state["last"] for state in states])}


class Counting(EpisodeListener):
    """Count episodes of all processes."""

    @staticmethod
    def reshard(states, share):
        return {"episodes": sum(state["episodes"] for state in states)}


class Silent(EpisodeListener):
    """Have a state, and leave to the base class what becomes of it."""


class Memory(torch.nn.Module):
    """Remember something for each environment, as a network or encoder may."""

    def get_extra_state(self):
        return {}

    @staticmethod
    def reshard(states, share):
        return {"seen": share.of_named_envs([state["seen"] for state in states])}


def test_parts_of_a_user_reshard_their_own_state(two, data):
    collector = data.collector
    collector.action_transforms = [Inert()]
    collector.listeners = [Counting(), Silent()]
    data.algorithm.memory = Memory()
    name = f"{__name__}.{{}}:0"
    for rank, part in enumerate(two["ranks"]):
        place = 10 * rank
        part["data"]["collector"]["action_transforms"] = {
            name.format("Inert"): {"last": [place + env for env in range(6)]}
        }
        part["data"]["collector"]["listeners"] = {
            name.format("Counting"): {"episodes": 3 + rank},
            name.format("Silent"): {"rank": rank},
        }
        part["extra_states"]["memory._extra_state"] = {"seen": {"1": place}}
    two["state_dict"]["memory._extra_state"] = {}
    (one,) = parts_of(as_saved_by(1, two, data))
    assert one["data"]["collector"]["action_transforms"] == {
        name.format("Inert"): {"last": [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]}
    }
    assert one["data"]["collector"]["listeners"] == {
        name.format("Counting"): {"episodes": 7},
        name.format("Silent"): {"rank": 0},
    }
    assert one["extra_states"]["memory._extra_state"] == {"seen": {"1": 0, "3": 10}}
    four = as_saved_by(4, two, data)["ranks"]
    found = [part["data"]["collector"]["listeners"][name.format("Silent")] for part in four]
    assert found == [{"rank": 0}, {"rank": 1}, {}, {}]


# ---- what a file may say ----


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        (("data", "collector"), "the collector"),
        (("data", "collector", "running"), "the running episodes"),
        (("data", "collector", "windows"), "the windows"),
        (("data",), "the data"),
    ],
)
def test_state_that_nobody_can_divide_is_named(two, data, path, whose):
    for part in two["ranks"]:
        state = part
        for key in path:
            state = state[key]
        state["novel"] = [1]
    with pytest.raises(ConfigurationError, match=whose):
        read_by(0, 1, two, data)
    assert own_part(read_by(1, 2, two, data)) == two["ranks"][1]
