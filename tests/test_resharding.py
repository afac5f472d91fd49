"""Each part of a run says itself what of its state a process of another number of them has."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import manifests_of, own_part, parts_of
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.learning.metrics import MeanMetrics
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.share import SavedEnv, Share
from mtrl_lightning.rollout import ActionNoise, ActionTransform, Collector, EpisodeListener
from mtrl_lightning.rollout.episodes import EpisodeWindows
from mtrl_lightning.run.checkpoint_file import reshard
from mtrl_lightning.run.data import MultiTaskData
from tests.helpers.fakes import Constant

OPTIONS = [
    "--rollout.envs_per_task=4",
    "--rollout.warmup_steps=60",
    "--rollout.total_steps=132",
    "--data.batch_size=48",
    "--data.capacity=72",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
    "--rollout.action_transforms+={class_path: mtrl_lightning.rollout.ActionNoise,"
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
def session(folder):
    envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=0)
    collector = Collector(envs, Constant(), action_transforms=[ActionNoise(0.1)])
    algorithm = SAC.load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    return SimpleNamespace(algorithm=algorithm, collector=collector, data=MultiTaskData)


@pytest.fixture
def two(whole, session):
    return as_saved_by(2, whole, session)


def as_saved_by(size, checkpoint, session):
    """Return the checkpoint as ``size`` processes would save it, without their replay."""
    with pytest.warns(UserWarning, match=f"this run has {size}"):
        parts = [own_part(reshard(checkpoint, rank, size, session)) for rank in range(size)]
    for part in parts:
        part["data"] = {"replay": None, "buffer": part["data"]["buffer"]}
    return {**checkpoint, "ranks": copy.deepcopy(parts)}


# ---- new processes draw numbers of their own ----


def test_each_of_more_processes_sends_noise_of_its_own(whole, two, session):
    for former, size in ((whole, 2), (two, 4)):
        noise = []
        for rank, part in enumerate(as_saved_by(size, former, session)["ranks"]):
            transform = ActionNoise(0.1)
            transform.seed(rank)  # as the run does before it reads the checkpoint
            envs = VectorEnv(ToyReach(), part["collector"]["tasks"], num_workers=0)
            Collector(envs, Constant(), action_transforms=[transform]).set_state(part["collector"])
            noise.append(transform.transform(np.zeros((3, 2), np.float32), envs.task_E, True))
        assert len(np.unique(noise)) == size * 3 * 2
    kept = own_part(whole)["collector"]["action_transforms"]
    assert two["ranks"][0]["collector"]["action_transforms"] == kept
    assert two["ranks"][1]["collector"]["action_transforms"] == {NOISE: {}}


def test_generators_differ_between_processes_where_their_owner_says_so(monkeypatch):
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


def test_an_algorithm_says_which_of_its_generators_differ(session):
    assert session.algorithm.generators.per_rank == {"act", "learn", "transform_0"}


def test_a_new_process_begins_its_own_generators_and_has_the_shared_ones():
    saved = Generators(3, per_rank=["act"])
    for name in ("act", "gradient"):
        saved.get(name, CPU)
    states = [saved.state_dict()] * 2
    for rank, names in ((0, {"act", "gradient"}), (1, {"act", "gradient"}), (2, {"gradient"})):
        assert saved.reshard(states, Share(rank, 3, 1, ()))["used"].keys() == names


# ---- parts by hand ----

SHARE = Share(rank=0, size=1, num_envs=2, saved_envs=(SavedEnv(1, 0), SavedEnv(0, 1)))


def test_what_environments_have_moves_with_them():
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


def test_windows_are_shared_out_and_the_first_process_counts_for_all():
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


def test_parts_of_a_user_say_themselves_what_a_process_takes_over(two, session):
    collector = session.collector
    collector.action_transforms = [Inert()]
    collector.listeners = [Counting(), Silent()]
    session.algorithm.memory = Memory()
    name = f"{__name__}.{{}}:0"
    for rank, part in enumerate(two["ranks"]):
        place = 10 * rank
        part["collector"]["action_transforms"] = {
            name.format("Inert"): {"last": [place + env for env in range(6)]}
        }
        part["collector"]["listeners"] = {
            name.format("Counting"): {"episodes": 3 + rank},
            name.format("Silent"): {"rank": rank},
        }
        part["extra_states"]["memory._extra_state"] = {"seen": {"1": place}}
    two["state_dict"]["memory._extra_state"] = {}
    (one,) = parts_of(as_saved_by(1, two, session))
    assert one["collector"]["action_transforms"] == {
        name.format("Inert"): {"last": [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]}
    }
    assert one["collector"]["listeners"] == {
        name.format("Counting"): {"episodes": 7},
        name.format("Silent"): {"rank": 0},
    }
    assert one["extra_states"]["memory._extra_state"] == {"seen": {"1": 0, "3": 10}}
    four = as_saved_by(4, two, session)["ranks"]
    found = [part["collector"]["listeners"][name.format("Silent")] for part in four]
    assert found == [{"rank": 0}, {"rank": 1}, {}, {}]


# ---- what a file may say ----


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        (("collector",), "the collector"),
        (("collector", "running"), "the running episodes"),
        (("collector", "windows"), "the windows"),
        (("data",), "the data"),
    ],
)
def test_a_state_that_nobody_shares_out_is_named(two, session, path, whose):
    for part in two["ranks"]:
        state = part
        for key in path:
            state = state[key]
        state["novel"] = [1]
    with pytest.raises(ConfigurationError, match=f"state of {whose} has 'novel', which cannot be"):
        reshard(two, 0, 1, session)
    assert own_part(reshard(two, 1, 2, session)) == two["ranks"][1]


def put(*path, to):
    """Return a function that sets a value in the part of the second process."""

    def change(checkpoint):
        state = checkpoint["ranks"][1]
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to

    return change


def put_ranks(value):
    return lambda checkpoint: checkpoint.update(ranks=value)


def drop(checkpoint):
    del checkpoint["ranks"][1]["collector"]["running"]["length"]


REPLAY = {"folder": "rank_1", "fields": [], "capacity": 1, "added": [0] * 6, "oldest": [0] * 6}
DAMAGED = {
    "no list": put_ranks({"0": {}}),
    "no rank": put_ranks([]),
    "a rank that is none": put_ranks([None, None]),
    "a part without a collector": lambda c: c["ranks"][1].pop("collector"),
    "a part with more": put("callbacks", to={}),
    "other parts of the algorithm": put("algorithm", "counters", to={"env_steps": 10**9}),
    "the states of other modules": put("extra_states", "actor.weight", to=[1.0]),
    "a folder of another rank": put("data", "replay", to=REPLAY | {"folder": "rank_0"}),
    "a folder outside": put("data", "replay", to=REPLAY | {"folder": "../.."}),
    "rings of others": put("data", "replay", to={"moved": []}),
    "a replay that is none": put("data", "replay", to=[1]),
}
DAMAGED_FOR_OTHERS = {
    "a task of another": put("collector", "tasks", 5, to=7),
    "a task too few": put("collector", "tasks", to=[0, 1, 2]),
    "no tasks": put("collector", "tasks", to=None),
    "no collector": put("collector", to={}),
    "a return too few": put("collector", "running", "return", to=[0.0] * 5),
    "a length too many": put("collector", "running", "length", to=[0] * 7),
    "lengths in a text": put("collector", "running", "length", to="123456"),
    "no lengths": drop,
    "an environment too few": put("collector", "envs", to=[]),
    "windows of a task less": put("collector", "windows", "windows", to=[[], []]),
    "counts of a task less": put("collector", "windows", "counts", to=[0, 0]),
    "counts that are none": put("collector", "windows", "counts", to="many"),
    "a shorter observation": put("collector", "observation", 1, to="0123456789"),
    "another type": put("collector", "observation", 0, to="<i2"),
    "a type that is none": put("collector", "observation", 0, to="nonsense"),
    "no observation": put("collector", "observation", to=None),
    "a transform less": put("collector", "action_transforms", to={}),
    "an environment beyond the last": put(
        "extra_states", "transforms.0._extra_state", "returns", to={"6": 0.0}
    ),
    "returns that are none": put("extra_states", "transforms.0._extra_state", "returns", to=[1]),
    "sums that are none": put("algorithm", "metrics", to={"sums": {"q": 1}, "counts": {}}),
    "a ring too few": put("data", "replay", to=REPLAY | {"added": [0] * 5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_part_that_is_none_of_the_checkpoint_is_refused(two, session, name, size):
    DAMAGED[name](two)
    with pytest.raises(ConfigurationError, match="continue from another checkpoint"):
        reshard(two, 0, size, session)
    with pytest.raises(ConfigurationError, match="continue from another checkpoint"):
        manifests_of(two)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED_FOR_OTHERS)
def test_a_part_that_cannot_be_shared_out_is_refused(two, session, name):
    for part in two["ranks"]:
        part["data"]["replay"] = REPLAY | {"folder": "rank_0"}
    two["ranks"][1]["data"]["replay"] = dict(REPLAY)
    reshard(copy.deepcopy(two), 0, 1, session)
    DAMAGED_FOR_OTHERS[name](two)
    with pytest.raises(ConfigurationError, match="continue"):
        reshard(two, 0, 1, session)


def test_only_an_algorithm_with_demonstrations_has_no_environments(two, session):
    for part in two["ranks"]:
        part["collector"] = {}
        part["extra_states"]["transforms.0._extra_state"]["returns"] = {}
    with pytest.raises(ConfigurationError, match="continue from another checkpoint"):
        reshard(two, 0, 1, session)


def test_rings_of_other_processes_are_not_read_from_a_file(whole, session):
    whole["MultiTaskData"]["replay"] = {"moved": [{"manifest": {}, "rings": [[9, 0]]}]}
    with pytest.raises(ConfigurationError, match="list of replay files is none"):
        reshard(whole, 0, 1, session)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("running", "return"), [0.0], "return of 1 running episodes, and there are 6 environm"),
        (("running", "success"), [True] * 7, "success of 7 running episodes"),
        (("running", "length"), None, "running episodes cannot be restored"),
        (("observation",), ["<f4", "01234567"], "running episodes cannot be restored"),
        (("observation",), "<f4", "running episodes cannot be restored"),
        (("windows", "windows"), [[], []], "episodes of 2 tasks, this run has 3"),
        (("windows", "windows"), [[[2, 1.0, 1, True, True]], [], []], "task 2 among those of task"),
        (("windows", "windows"), [[[-1, 1.0, 1, True, True]], [], []], "an episode of task -1"),
        (("windows", "windows"), [[[0, 1.0]], [], []], "finished episodes cannot be restored"),
        (("windows", "counts"), [0, 0], "finished episodes cannot be restored"),
        (("tasks",), [0, 0, 1, 1, 2, 9], "the checkpoint has environments of tasks"),
    ],
)
def test_a_collector_refuses_what_is_not_of_its_environments(two, path, value, message):
    state = two["ranks"][1]["collector"]
    envs = VectorEnv(ToyReach(), state["tasks"], num_workers=0)
    owner = state
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with pytest.raises(ConfigurationError, match=message):
        Collector(envs, Constant()).set_state(state)
