"""An environment's state: restored, it continues bit for bit, or it is refused by name.

This holds through any wrappers.
"""

import enum
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import gymnasium as gym
import metaworld
import mujoco
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.spaces import Box
from gymnasium.wrappers import (
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
)

from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.envs.state.simulator import MujocoState
from mtrl_lightning.envs.state.state import EnvState
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.environments import HORIZON, future, numbers, play, through_a_file
from tests.helpers.fakes import Scripted
from tests.helpers.tiers import METAWORLD_TASKS, slow_unless

ALL = list(metaworld.ALL_V3_ENVIRONMENTS)


def arrays_of(simulator):
    """Every array of a MuJoCo object, copied; nothing is left out here."""
    found = {}
    for name in dir(simulator):
        if not name.startswith("_"):
            value = getattr(simulator, name, None)
            if type(value) is np.ndarray and value.dtype != object:
                found[name] = value.copy()
    return found


def assert_same_arrays(found, wanted):
    assert found.keys() == wanted.keys()
    for name in found:
        same = found[name] == wanted[name]
        if found[name].dtype.kind == "f":
            same |= np.isnan(found[name]) & np.isnan(wanted[name])
        assert same.all(), name


def goal_of(env):
    return env.unwrapped._last_rand_vec.tolist()


# ---- MetaWorld, every task ----


@pytest.mark.slow
@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("name", ALL)
def test_every_task_goes_on_bit_for_bit_from_the_middle_of_its_second_episode(name):
    benchmark = MetaWorld([name], horizon=HORIZON, num_goals=6)
    env, other = (benchmark.make_env(0, "train", seed) for seed in (1, 2))
    ours, theirs = EnvState(env), EnvState(other)
    env.reset()
    play(env, HORIZON, seed=1)
    env.reset()
    play(env, 5, seed=2)
    state = ours.get()
    saved = through_a_file(state)
    model, goal = arrays_of(env.unwrapped.model), goal_of(env)
    expected = future(env)
    assert state == saved, "a state does not move with its environment"
    after = ours.get()
    assert after != state
    for past in ("none", "another goal"):
        if past == "another goal":
            other.reset(seed=7)
            while goal_of(other) == goal:
                other.reset()
            play(other, 2, seed=4)
        theirs.set(saved)
        assert theirs.get() == saved, "nothing is forgotten"
        assert_same_arrays(arrays_of(other.unwrapped.model), model)
        assert future(other) == expected
        assert theirs.get() == after
        assert_same_arrays(arrays_of(other.unwrapped.model), arrays_of(env.unwrapped.model))
    truncated = [step[4] for step in expected if isinstance(step, tuple)]
    assert np.flatnonzero(truncated).tolist() == [2, 2 + HORIZON]


@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("name", slow_unless(METAWORLD_TASKS, ALL))
def test_a_test_episode_of_every_task_is_the_same_whatever_happened_before(name):
    env = MetaWorld([name], horizon=HORIZON, num_goals=6).make_env(0, "eval", 1)

    def episode(k):
        first, _ = env.reset(seed=k)
        return first.tobytes(), future(env, HORIZON, seed=k)

    never_used = episode(2)
    others = [episode(k) for k in (0, 5)]
    play(env, 3, seed=9)  # and stop in the middle
    assert episode(2) == never_used
    assert [episode(k) for k in (0, 5)] == others
    assert len({never_used[0], *(other[0] for other in others)}) > 1 or len({goal_of(env)}) == 1
    assert episode(8)[1][0] != episode(2)[1][0], "its actions are others"


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("task", [0, 1, 2])
def test_the_toy_goes_on_bit_for_bit(split, task):
    benchmark = ToyReach(3, horizon=HORIZON)
    env, other = (benchmark.make_env(task, split, seed) for seed in (1, 2))
    ours, theirs = EnvState(env), EnvState(other)
    env.reset()
    play(env, HORIZON, seed=1)
    env.reset()
    play(env, 5, seed=2)
    state = through_a_file(ours.get())
    theirs.set(state)
    assert theirs.get() == state
    assert future(other) == future(env)
    assert theirs.get() == ours.get() != state


def test_a_state_can_be_restored_again_and_again_and_into_its_own_environment():
    env = ToyReach(horizon=HORIZON).make_env(0, "train", 1)
    ours = EnvState(env)
    env.reset()
    play(env, 3, seed=0)
    state = ours.get()
    expected = future(env)
    for _ in range(3):
        ours.set(state)
        assert future(env) == expected


def test_an_environment_that_was_not_reset_is_saved_too():
    benchmark = ToyReach(horizon=HORIZON)
    env, other = (benchmark.make_env(0, "train", seed) for seed in (1, 2))
    EnvState(other).set(through_a_file(EnvState(env).get()))
    assert other.reset()[0].tobytes() == env.reset()[0].tobytes()


# ---- Gymnasium's own ----


def wrapped(env):
    env = NormalizeObservation(RecordEpisodeStatistics(TimeLimit(env, 5)))
    return NormalizeReward(FrameStackObservation(env, 3))


@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize(
    "benchmark", [ToyReach(3, HORIZON), MetaWorld(["door-open"], horizon=HORIZON, num_goals=6)]
)
def test_gymnasiums_wrappers_are_saved_with_the_environment(benchmark):
    env, other = (wrapped(benchmark.make_env(0, "train", seed)) for seed in (1, 2))
    ours, theirs = EnvState(env), EnvState(other)
    for each, seed in ((env, 1), (other, 2)):
        each.reset()
        play(each, 5, seed)
        each.reset()
        play(each, 3, seed)
    state = through_a_file(ours.get())
    theirs.set(state)
    assert theirs.get() == state
    assert future(other) == future(env)


# the reward of the last two is the change of a position that lies half a step behind the state
@pytest.mark.parametrize("name", ["Reacher-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5"])
def test_gymnasiums_mujoco_environments_go_on_bit_for_bit(name):
    env, other = gym.make(name), gym.make(name)
    ours, theirs = EnvState(env), EnvState(other)
    env.reset(seed=1)
    other.reset(seed=2)
    play(env, 7, seed=1)
    play(other, 3, seed=2)
    state = through_a_file(ours.get())
    theirs.set(state)
    assert future(other) == future(env)


# ---- MuJoCo: edits of the model, arrays that look into it ----


class Randomised(gym.Wrapper):
    """Another mass and another friction in every episode, as domain randomisation has it."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.generator = np.random.default_rng(seed)
        self.mass = env.unwrapped.model.body_mass.copy()

    def reset(self, **kwargs):
        model = self.unwrapped.model
        model.body_mass[:] = self.mass * self.generator.uniform(0.5, 2, model.nbody)
        model.geom_friction[3] *= self.generator.uniform(0.9, 1.1)
        return self.env.reset(**kwargs)


@pytest.mark.usefixtures("few_goals")
def test_edits_of_the_model_are_saved_and_undone():
    benchmark = MetaWorld(["push"], horizon=HORIZON, num_goals=6)
    env, other = (Randomised(benchmark.make_env(0, "train", seed), seed) for seed in (1, 2))
    ours, theirs = EnvState(env), EnvState(other)
    pristine, clean = arrays_of(env.unwrapped.model), ours.get()
    for each, seed in ((env, 1), (other, 2)):
        each.reset()
        play(each, 5, seed)
    assert not np.array_equal(env.unwrapped.model.body_mass, other.unwrapped.model.body_mass)
    state = through_a_file(ours.get())
    theirs.set(state)
    assert theirs.get() == state
    assert_same_arrays(arrays_of(other.unwrapped.model), arrays_of(env.unwrapped.model))
    theirs.set(clean)
    assert_same_arrays(arrays_of(other.unwrapped.model), pristine)
    theirs.set(state)
    env_future = future(env)
    assert future(other) == env_future


XML = """
<mujoco><worldbody>
  <body name="arm">
    <joint name="j" type="hinge" axis="0 1 0" damping="0.1"/>
    <geom name="g" size="0.1" pos="0.5 0 0"/>
    <body name="hand" pos="1 0 0">
      <joint name="k" type="hinge" axis="0 1 0"/>
      <geom size="0.05" pos="0.3 0 0"/>
    </body>
  </body>
</worldbody></mujoco>
"""


class Arm(gym.Env):
    """A small simulation whose attributes a test may add to."""

    observation_space = Box(-np.inf, np.inf, (6,), np.float64)
    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, seed=0, **attributes):
        self.model = mujoco.MjModel.from_xml_string(XML)
        self.data = mujoco.MjData(self.model)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32, seed=seed)
        self.generator = np.random.default_rng(seed)
        vars(self).update(attributes)

    def reset(self, *, seed=None, options=None):
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.generator.uniform(-1, 1, 2)
        mujoco.mj_forward(self.model, self.data)
        return self.observe(), {}

    def step(self, action):
        self.data.qfrc_applied[:] = action
        mujoco.mj_step(self.model, self.data, 5)
        return self.observe(), float(self.data.qvel.sum()), False, self.data.time > 0.1, {}

    def observe(self):
        return np.concatenate([self.data.qpos, self.data.qvel, self.data.xpos[2, ::2]])


def copied(env, other):
    """Carry the state of an environment through a file into another; return the other."""
    ours, theirs = EnvState(env), EnvState(other)
    state = through_a_file(ours.get())
    theirs.set(state)
    assert theirs.get() == state
    return other


def used_arm(seed, **attributes):
    env = Arm(seed, **attributes)
    env.reset()
    play(env, 3, seed)
    return env


def test_a_small_simulation_goes_on_bit_for_bit():
    env = used_arm(1)
    for other in (Arm(2), used_arm(3)):
        before = env.data.time
        copied(env, other)
        assert other.data.time == before > 0
        assert other.data.qfrc_applied.tolist() == env.data.qfrc_applied.tolist() != [0, 0]
    assert future(copied(env, used_arm(4))) == future(env)


def test_what_the_simulation_computes_from_its_state_is_there_before_the_next_step():
    env, other = used_arm(1), Arm(2)
    copied(env, other)
    # half a step apart at most
    np.testing.assert_allclose(other.observe(), env.observe(), atol=0.02)
    assert np.abs(env.data.xpos).max() > 0.5


def test_arrays_that_look_into_the_simulation_still_do():
    env, other = used_arm(1), used_arm(2)
    for each in (env, other):
        each.position, each.last = each.data.qpos, each.data.qvel[1:]
        each.backwards, each.joint = each.data.qpos[::-1], each.model.body_pos[2]
    copied(env, other)
    other.data.qpos[:] = [3.0, 4.0]
    other.data.qvel[1] = 5.0
    other.model.body_pos[2, 1] = 6.0
    assert other.position.tolist() == [3, 4]
    assert other.backwards.tolist() == [4, 3]
    assert other.last.tolist() == [5]
    assert other.joint[1] == 6
    other.position[0] = 7.0
    assert other.data.qpos[0] == 7
    assert env.data.qpos[0] != 7, "its own simulation, and not the other's"


def test_an_array_that_was_copied_from_the_simulation_is_a_copy_still():
    env, other = used_arm(1), used_arm(2)
    env.start, other.start = env.data.qpos.copy(), other.data.qpos
    copied(env, other)
    wanted = env.start.tolist()
    other.data.qpos[:] = 9.0
    assert other.start.tolist() == wanted


# ---- attributes ----


@dataclass
class Memory:
    count: int
    places: np.ndarray
    below: object = None


def test_two_attributes_that_share_an_array_still_share_it():
    shared, memory = np.arange(3.0), Memory(1, np.zeros(2))
    env = Arm(a=shared, b=[shared, shared], c=shared.copy(), memory=memory, list=[memory, memory])
    other = Arm(
        a=np.zeros(3),
        b=[np.zeros(3)] * 2,
        c=np.zeros(3),
        memory=Memory(0, np.ones(1)),
        list=[None, None],
    )
    other.list = [other.memory, other.memory]
    copied(env, other)
    other.a[0] = 9.0
    assert other.b[0] is other.b[1] is other.a
    assert other.c.tolist() == [0, 1, 2]
    assert other.list[0] is other.list[1] is other.memory
    assert other.memory.count == 1 and other.memory.below is None
    assert other.memory.places.tolist() == [0, 0]
    assert shared[0] == 0


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_of_every_kind_go_on(kind):
    def make(seed):
        return np.random.Generator(getattr(np.random, kind)(seed))

    env, other = Arm(draws=make(1)), Arm(draws=make(2))
    env.draws.normal(size=7)
    env.draws.integers(3, dtype=np.int32)  # leaves half a word behind
    copied(env, other)
    assert other.draws.integers(1000, size=20, dtype=np.int32).tolist() == (
        env.draws.integers(1000, size=20, dtype=np.int32).tolist()
    )
    assert other.draws.normal(size=20).tolist() == env.draws.normal(size=20).tolist()


def test_the_old_generator_and_those_of_the_spaces_go_on():
    env, other = Arm(1, old=np.random.RandomState(1)), Arm(2, old=np.random.RandomState(2))
    env.old.normal(size=3)  # leaves a second normal number behind
    env.action_space.sample()
    env.np_random.random(3)
    other.np_random.random(5)
    copied(env, other)
    assert other.old.normal(size=9).tolist() == env.old.normal(size=9).tolist()
    assert other.action_space.sample().tolist() == env.action_space.sample().tolist()
    assert other.action_space == env.action_space
    assert other.np_random.random(4).tolist() == env.np_random.random(4).tolist()


def test_a_generator_that_is_shared_is_shared_still():
    env, other = Arm(), Arm()
    env.one = env.two = np.random.default_rng(1)
    other.one = other.two = np.random.default_rng(2)
    copied(env, other)
    assert other.one is other.two


VALUES = {
    "numbers": [1, -2.5, True, None, "text", b"bytes", 2**80, float("inf"), -0.0],
    "numpy numbers": [np.float32(0.1), np.int64(3), np.bool_(True), np.uint8(7), np.float64(-0.0)],
    "tuples": (1, (2.0, [3, ("four",)]), ()),
    "deque": deque([1, (2, 3), [4]], maxlen=5),
    "endless deque": deque([1, 2]),
    "sets": [{3, 1, 2}, frozenset({"b"}), set()],
    "dicts": {"a": {1: [2]}, (None): {}, 3.5: {"b": (1,)}},
    "order of a dict": {"b": 1, "a": 2},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_every_kind_come_back(name):
    value = VALUES[name]
    other = copied(Arm(value=value), Arm(value="something else"))
    assert repr(other.value) == repr(value)
    assert type(other.value) is type(value)
    if isinstance(value, deque):
        assert other.value.maxlen == value.maxlen


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.array(2.5),
        np.arange(12, dtype=np.int16).reshape(3, 4)[::2, ::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3, dtype=">f8"),
        np.array([True, False]),
        np.array(["one", "three"]),
        np.array([np.nan, np.inf, -0.0]),
        np.array([1 + 2j]),
    ],
    ids=str,
)
def test_arrays_of_every_kind_come_back_and_may_be_written(array):
    other = copied(Arm(value=array), Arm(value=np.ones(2)))
    assert other.value.dtype == array.dtype and other.value.shape == array.shape
    assert other.value.tobytes() == array.tobytes()
    other.value[...] = other.value
    assert not np.shares_memory(other.value, array)


def test_objects_within_objects_come_back_in_place():
    env = Arm(
        memory=Memory(5, np.arange(2), Memory(6, np.arange(3), {"deep": Memory(7, np.arange(4))}))
    )
    other = Arm(
        memory=Memory(0, np.zeros(1), Memory(0, np.zeros(1), {"deep": Memory(0, np.zeros(1))}))
    )
    outer, inner = other.memory, other.memory.below.below["deep"]
    copied(env, other)
    assert other.memory is outer and other.memory.below.below["deep"] is inner
    assert (inner.count, inner.places.tolist()) == (7, [0, 1, 2, 3])
    assert env.memory.below.below["deep"] is not inner


def test_an_object_that_knows_its_owner_and_one_that_knows_itself_come_back():
    env, other = Arm(memory=Memory(1, np.zeros(1))), Arm(memory=Memory(2, np.zeros(1)))
    for each in (env, other):
        each.memory.below = each.memory
    copied(env, other)
    assert other.memory.count == 1
    assert other.memory.below is other.memory


def test_attributes_that_came_later_come_back_and_those_that_are_gone_go():
    env, other = Arm(), Arm(extra=3)
    env.found = {"at": 5}
    copied(env, other)
    assert other.found == {"at": 5}
    assert not hasattr(other, "extra")


# ---- what cannot be saved ----


class Phase(enum.Enum):
    LIFT = 1
    PLACE = 2


class Slotted:
    __slots__ = ("count",)

    def __init__(self, count):
        self.count = count


class Half(Slotted):
    """Has a dictionary beside its parent's slots."""


Pair = namedtuple("Pair", "a b")


UNSAVABLE = {
    "a lock": lambda _: threading.Lock(),
    "an open file": lambda folder: (folder / "log").open("w"),
    "an array of objects": lambda _: np.array([{}, None], dtype=object),
    "a generator of Python": lambda _: numbers(),
    "an iterator": lambda _: iter([1, 2]),
    "a dict with unusual keys": lambda _: {(1, 2): 3},
    "a set of tuples": lambda _: {(1, 2)},
    "an object with slots": lambda _: Slotted(1),
    "a named tuple": lambda _: Pair(1, 2),
    "a defaultdict": lambda _: defaultdict(int, a=1),
    "a condition": lambda _: threading.Condition(),
}


@pytest.mark.parametrize("where", ["attribute", "list", "object", "wrapper"])
@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_named_with_a_remedy(name, where, tmp_path):
    value = UNSAVABLE[name](tmp_path)
    env = Arm()
    if where == "attribute":
        env.thing, path = value, r"Arm\.thing"
    elif where == "list":
        env.thing, path = {"deep": [0, value]}, r"Arm\.thing\['deep'\]\[1\]"
    elif where == "object":
        env.thing, path = Memory(0, np.zeros(1), value), r"Arm\.thing\.below"
    else:
        env = TimeLimit(env, 5)
        env.thing, path = value, r"TimeLimit\.thing"
    with pytest.raises(
        ConfigurationError,
        match=rf"attribute {path}(\._\w+)? is a \w+, .*get_state\(\) and set_state\(dict\)",
    ):
        EnvState(env).get()


MADE = {
    "Python's generator": lambda folder, i: random.Random(i),
    "an OrderedDict": lambda folder, i: OrderedDict(a=i),
    "a Counter": lambda folder, i: Counter("a" * i),
    "a tensor": lambda folder, i: torch.full((3,), float(i)),
    "a masked array": lambda folder, i: np.ma.masked_array([i, 2], [False, True]),
    "a matrix": lambda folder, i: np.array([[i, 2]]).view(np.matrix),
    "a list with attributes": lambda folder, i: type("Stack", (list,), {})([i] * i),
    "an object with half its slots": lambda folder, i: Half(i),
}


def said(value):
    """All that can be seen of a value."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Half):
        return value.count
    if isinstance(value, np.ma.MaskedArray):
        return value.tolist()
    return repr(value)


@pytest.mark.parametrize("name", MADE)
def test_what_is_saved_comes_back_or_is_refused(name, tmp_path):
    """Nothing is half saved: a state that was taken can be restored, and restores everything."""
    env, other = Arm(thing=MADE[name](tmp_path, 1)), Arm(thing=MADE[name](tmp_path, 2))
    try:
        state = EnvState(env).get()
    except ConfigurationError as refused:
        assert "Arm.thing" in str(refused)
        return
    EnvState(other).set(through_a_file(state))
    assert said(other.thing) == said(env.thing)


def test_an_enumerations_member_comes_back_or_is_refused_and_stays_itself():
    env, other = Arm(phase=Phase.PLACE), Arm(phase=Phase.LIFT)
    try:
        state = EnvState(env).get()
    except ConfigurationError as refused:
        assert "Arm.phase" in str(refused)
        return
    try:
        EnvState(other).set(through_a_file(state))
        names = (Phase.LIFT.name, Phase.LIFT.value)
    finally:
        Phase.LIFT._name_, Phase.LIFT._value_ = "LIFT", 1
    assert names == ("LIFT", 1)
    assert other.phase is Phase.PLACE


class Alternating(Arm):
    def __init__(self, left):
        super().__init__()
        self.move = self.go_left if left else self.go_right

    def go_left(self):
        return -1

    def go_right(self):
        return 1


def test_a_function_that_was_exchanged_comes_back_or_is_refused():
    env, other = Alternating(left=True), Alternating(left=False)
    try:
        state = through_a_file(EnvState(env).get())
        EnvState(other).set(state)
    except ConfigurationError as refused:
        assert "move" in str(refused)
        return
    assert other.move() == -1


def test_a_function_in_a_list_stays_as_it_was_made_and_another_is_refused():
    env, other = Arm(moves=[1, math.sin]), Arm(moves=[2, math.sin])
    assert copied(env, other).moves == [1, math.sin]
    with pytest.raises(
        ConfigurationError, match=r"Arm\.moves\[1\] was .*sin, here it is .*cos: give"
    ):
        EnvState(Arm(moves=[2, math.cos])).set(EnvState(env).get())


def test_an_object_that_is_one_of_several_comes_back_as_that_one():
    """The acting one is the first when the environment is made, the second when it is saved."""

    def make(acting, counts):
        players = [Memory(count, np.zeros(1)) for count in counts]
        return Arm(acting=players[acting], players=players)

    other = copied(make(1, (5, 6)), make(0, (1, 2)))
    assert [player.count for player in other.players] == [5, 6]
    assert other.acting is other.players[1]


def test_a_list_that_holds_itself_comes_back_or_is_refused():
    env, other = Arm(loop=[1]), Arm(loop=[])
    env.loop.append(env.loop)
    try:
        state = EnvState(env).get()
    except ConfigurationError as refused:
        assert "Arm.loop" in str(refused)
        return
    EnvState(other).set(through_a_file(state))
    assert other.loop[1] is other.loop


def test_a_simulation_within_an_object_is_refused():
    with pytest.raises(ConfigurationError, match=r"Arm\.inner\.(model|data) is a Mj"):
        EnvState(Arm(inner=Arm())).get()


def test_a_model_that_is_simulated_nowhere_is_refused():
    with pytest.raises(ConfigurationError, match=r"Arm\.nominal is a MjModel"):
        EnvState(Arm(nominal=mujoco.MjModel.from_xml_string(XML))).get()


# ---- a state of another environment ----


def test_a_state_of_another_environment_is_refused_before_anything_is_changed():
    toy = ToyReach().make_env(0, "train", 0)
    toy.reset()
    arm = used_arm(1)
    envs = [
        toy,
        TimeLimit(toy, 5),
        arm,
        TimeLimit(arm, 5),
        RecordEpisodeStatistics(arm),
        Scripted(3).make_env(0, "", 0),
    ]
    states = [through_a_file(EnvState(env).get()) for env in envs]
    for i, env in enumerate(envs):
        before = EnvState(env).get()
        for k, state in enumerate(states):
            if i != k:
                with pytest.raises(ConfigurationError, match="the state is of another environment"):
                    EnvState(env).set(state)
        assert EnvState(env).get() == before


def test_an_object_of_another_class_is_refused():
    env, other = Arm(thing=Memory(1, np.zeros(1))), Arm(thing=Half(1))
    with pytest.raises(
        ConfigurationError, match=r"Arm\.thing was a Memory, here it is a Half: give the class"
    ):
        EnvState(other).set(EnvState(env).get())


# ---- environments that answer for themselves ----


class OwnAnswer(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.lock = threading.Lock()
        self.count = 0
        self.scratch = [0]

    def step(self, action):
        self.count += 1
        self.scratch[0] += 1
        return self.env.step(action)

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_a_layers_own_get_state_and_set_state_are_used_and_those_of_the_other_layers_beside_it():
    env, other = (TimeLimit(OwnAnswer(Arm(seed)), 4) for seed in (1, 2))
    ours, theirs = EnvState(env), EnvState(other)
    for each in (env, other):
        each.reset()
    play(env, 3, seed=1)
    state = through_a_file(ours.get())
    assert ["OwnAnswer", {"count": 3}] in state
    theirs.set(state)
    assert theirs.get() == state
    assert (other.env.count, other.env.scratch) == (3, [0]), "what it leaves out is left alone"
    assert future(other) == future(env)


def test_the_whole_of_an_environment_may_be_its_own_answer():
    env, other = Scripted(3).make_env(1, "train", 0), Scripted(3).make_env(1, "train", 0)
    env.reset(seed=2)
    env.step(np.zeros(2))
    state = through_a_file(EnvState(env).get())
    assert state[1:] == [["ScriptedEnv", {"episode": 2, "steps": 1}]]
    EnvState(other).set(state)
    assert other.step(np.ones(2))[0].tolist() == env.step(np.ones(2))[0].tolist() == [1, 2, 2, 1]
    assert other.num_resets == 0


class ArmThatAnswers(Arm):
    """Saves its own simulation and generator; its lock could not be saved."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.simulation, self.lock = MujocoState(self.model, self.data), threading.Lock()

    def reset(self, **kwargs):
        self.model.body_mass[1] = self.generator.uniform(1, 2)
        self.model.opt.gravity[2] = -self.generator.uniform(5, 12)
        return super().reset(**kwargs)

    def get_state(self):
        return {"simulation": self.simulation.get(), "draws": self.generator.bit_generator.state}

    def set_state(self, state):
        self.simulation.set(state["simulation"])
        self.generator.bit_generator.state = state["draws"]


def test_an_environments_own_answer_may_use_the_mujoco_helper():
    env, other = TimeLimit(ArmThatAnswers(1), 4), TimeLimit(ArmThatAnswers(2), 4)
    ours, theirs = EnvState(env), EnvState(other)
    for each, seed in ((env, 1), (other, 2)):
        each.reset()
        play(each, 3, seed)
    assert not np.array_equal(env.unwrapped.model.body_mass, other.unwrapped.model.body_mass)
    state = through_a_file(ours.get())
    assert state[0] == [], "the simulation is saved once: in the environment's own answer"
    theirs.set(state)
    assert theirs.get() == state
    assert_same_arrays(arrays_of(other.unwrapped.model), arrays_of(env.unwrapped.model))
    assert other.unwrapped.observe().tolist() == env.unwrapped.observe().tolist()
    assert future(other) == future(env)


def test_the_mujoco_helper_restores_edits_options_and_what_was_computed():
    env, other = used_arm(1), used_arm(2)
    simulations = []
    for each in (env, other):
        fresh = Arm()
        each.model, each.data = fresh.model, fresh.data
        simulations.append(MujocoState(each.model, each.data))
    untouched = simulations[0].get()
    env.model.body_mass[1], env.model.opt.gravity[2] = 3.5, -2.0
    env.reset()
    play(env, 3, seed=1)
    state = simulations[0].get()
    saved = through_a_file({"state": state})["state"]
    computed = env.data.xpos.copy()
    play(env, 1, seed=2)
    assert saved == state, "a state does not change with its simulation"
    simulations[1].set(saved)
    assert simulations[1].get() == saved
    assert (other.model.body_mass[1], other.model.opt.gravity[2]) == (3.5, -2.0)
    assert other.data.xpos.tolist() == computed.tolist()
    simulations[1].set(untouched)
    assert simulations[1].get() == untouched
    assert other.model.body_mass[1] != 3.5 and other.model.opt.gravity[2] == -9.81


def test_set_state_of_gymnasiums_mujoco_environments_is_not_taken_for_an_answer():
    class Asked(HalfCheetahEnv):
        def get_state(self):
            return self.data.qpos

    env, other = Asked(), Asked()
    ours, theirs = EnvState(env), EnvState(other)
    env.reset(seed=1)
    other.reset(seed=2)
    play(env, 3, seed=1)
    theirs.set(through_a_file(ours.get()))
    assert future(other) == future(env)


# ---- what a review found ----


def test_an_adapter_that_is_no_wrapper_is_saved_with_what_it_holds():
    class Adapter(gym.Env):
        def __init__(self, seed):
            self.env = ToyReach().make_env(0, "train", seed)
            self.env.reset()

    one, other = Adapter(1), Adapter(2)
    EnvState(other).set(through_a_file(EnvState(one).get()))
    assert np.array_equal(one.env._position, other.env._position)
    assert np.array_equal(one.env.reset()[0], other.env.reset()[0])


def test_an_array_that_looks_into_another_still_does():
    one, other = Arm(whole=np.arange(6.0)), Arm(whole=np.zeros(6))
    one.part, other.part = one.whole[1:3], other.whole[1:3]
    one.turned = one.whole.reshape(2, 3).T
    EnvState(other).set(through_a_file(EnvState(one).get()))
    other.whole[:] += 10
    assert other.part.tolist() == [11, 12] and other.turned.tolist() == (one.turned + 10).tolist()


def test_slots_of_an_environment_are_refused():
    class Slotted(gym.Env):
        __slots__ = ("place",)

    with pytest.raises(ConfigurationError, match="Slotted has __slots__"):
        EnvState(Slotted()).get()


def test_an_own_answer_may_hold_arrays():
    class Own(gym.Env):
        def get_state(self):
            return {"place": self.place}

        def set_state(self, state):
            self.place = state["place"]

    one, other = Own(), Own()
    one.place, other.place = np.array([1.5, np.nan]), None
    EnvState(other).set(through_a_file(EnvState(one).get()))
    assert other.place.tolist()[0] == 1.5 and np.isnan(other.place[1])


def test_generators_that_are_spawned_after_a_restore_are_the_same():
    one, other = Arm(generator=np.random.default_rng(5)), Arm(generator=np.random.default_rng(6))
    one.generator.spawn(2)
    EnvState(other).set(through_a_file(EnvState(one).get()))
    assert one.generator.spawn(1)[0].random() == other.generator.spawn(1)[0].random()


def test_an_object_that_only_a_reset_makes_is_refused_when_it_is_saved():
    arm = Arm(episode=None)
    state = EnvState(arm)
    arm.episode = Memory(1, np.zeros(1))
    with pytest.raises(
        ConfigurationError, match=r"Arm\.episode is a Memory, and a new environment has none"
    ):
        state.get()
