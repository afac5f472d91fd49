"""Our MetaWorld beside MetaWorld's own.

Whatever can be seen is equal to the last bit, and MetaWorld stays as it is.
"""

import copy
import functools
import importlib.metadata
import platform
import sys
import types
import warnings

import gymnasium as gym
import metaworld
import mujoco
import numpy as np
import psutil
import pytest
import scipy.spatial.transform
from metaworld.policies import ENV_POLICY_MAP
from metaworld.utils import reward_utils

from mtrl_lightning.envs import MetaWorld, Pixels
from mtrl_lightning.envs.benchmarks.metaworld_goals import sampled_goals
from mtrl_lightning.envs.fast import arithmetic
from mtrl_lightning.envs.fast.guard import unchecked_versions
from mtrl_lightning.envs.fast.metaworld_fast import (
    CHECKED,
    _FastSawyer,
    fast_class,
    steps_like_upstream,
)
from mtrl_lightning.envs.fast.metaworld_models import VISUAL_ARRAYS, _compiled, new_model
from mtrl_lightning.envs.render.renderer import SimulationRenderer
from mtrl_lightning.envs.simulator import arrays_of
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.tiers import METAWORLD_TASKS, slow_unless

ALL = list(metaworld.ALL_V3_ENVIRONMENTS)
HORIZON = {"v1": 250, "v2": 500}
UNSOLVED = {("hand-insert-v3", "v1"), ("peg-insert-side-v3", "v1"), ("stick-push-v3", "v1")}
"""Where the scripted policy does not succeed with the first goal."""
ENOUGH = 15
"""Steps with success, after which little new happens in an episode."""


def same(found, wanted):
    """Whether two values are equal in type and to the last bit, with signs of zeros, and NaN."""
    if isinstance(wanted, (tuple, list)):
        return (
            type(found) is type(wanted)
            and len(found) == len(wanted)
            and all(map(same, found, wanted))
        )
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (np.ndarray, np.generic)):
        return (
            type(found) is type(wanted)
            and found.dtype == wanted.dtype
            and found.tobytes() == wanted.tobytes()
        )
    return type(found) is type(wanted) and repr(found) == repr(wanted)


def pair(name, version="v2", horizon=500):
    """Ours and MetaWorld's own environment of a task, each with its wrappers."""
    return [
        MetaWorld([name], reward_version=version, horizon=horizon, num_goals=3, fast=fast).make_env(
            0, "eval", 0
        )
        for fast in (True, False)
    ]


@pytest.fixture(autouse=True, scope="module")
def three_goals():
    """Three goals a task, and models compiled once: both take most of MetaWorld's own time."""
    compiled = functools.lru_cache(maxsize=2)(mujoco.MjModel.from_xml_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mujoco.MjModel, "from_xml_path", lambda path: copy.copy(compiled(path)))
        patched.setattr(metaworld, "_N_GOALS", 3)
        patched.setattr("mtrl_lightning.envs.benchmarks.metaworld._goals", metaworlds_goals)
        yield


@functools.cache
def metaworlds_goals(name, seed, fast):
    """Goals for both: that ours are MetaWorld's is tested on its own."""
    return sampled_goals(name, seed)


def scripted(name, horizon, generator):
    """A policy that solves the task, disturbed in the middle and at the end."""
    policy = ENV_POLICY_MAP[name]()

    def act(observation, step):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action = policy.get_action(observation)
        noise = (0.0, 0.0, 0.3, 0.0, 1.0)[5 * step // horizon]
        return (action + generator.normal(0, 1, 4) * noise).astype(np.float32)

    return act


# ---- Stepping ----


@pytest.mark.parametrize(
    ("name", "version"),
    [
        pytest.param(name, version, marks=() if name in METAWORLD_TASKS else pytest.mark.slow)
        for version, names in {"v2": ALL, "v1": sorted({*METAWORLD_TASKS, *ALL[::4]})}.items()
        for name in names
    ],
    scope="module",  # so that the tests of a task follow one another
)
def test_every_task_gives_metaworlds_own_numbers(name, version):
    horizon = HORIZON[version]
    ours, theirs = pair(name, version, horizon)
    assert type(theirs.unwrapped) is metaworld.ALL_V3_ENVIRONMENTS[name] is not type(ours.unwrapped)
    generator = np.random.default_rng(ALL.index(name))
    act = scripted(name, horizon, generator)
    observation, info = ours.reset(seed=0)
    assert same([observation, info], list(theirs.reset(seed=0)))
    successes = 0
    for step in range(horizon):
        action = act(observation, step)
        result, expected = ours.step(action), theirs.step(action)
        assert same(result, expected), step
        assert not np.shares_memory(result[0], ours.unwrapped._last_stable_obs), (
            "the caller may write into it"
        )
        assert result[3] == (step == horizon - 1)
        observation = result[0]
        successes += result[4]["success"]
        if successes == ENOUGH:
            break
    assert successes or (name, version) in UNSOLVED, (
        "the parts of a reward that are paid for success were not seen"
    )
    for _ in range(2):
        assert same(ours.reset(), theirs.reset())
        for _ in range(40):
            action = generator.uniform(-1.5, 1.5, 4)  # double precision, and out of bounds
            assert same(ours.step(action), theirs.step(action))


ACTIONS = {
    "single": np.array([0.3, -0.2, 0.9, 0.7], np.float32),
    "double": np.array([0.3, -0.2, 0.9, 0.7]),
    "a list": [0.3, -0.2, 0.9, 0.7],
    "out of bounds": np.array([-7.0, 1.0001, np.inf, -np.inf], np.float32),
    "a NaN": np.array([0.1, np.nan, 0.2, 0.3], np.float32),
    "too short": np.zeros(3, np.float32),
}


def outcome(env, action):
    """What a step gives, or how it fails."""
    try:
        return env.step(action)
    except Exception as error:
        return [type(error).__name__, str(error)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", ACTIONS)
def test_unusual_actions_give_the_same_or_fail_in_the_same_way(kind):
    ours, theirs = pair("pick-place-v3")
    assert same(ours.reset(seed=1), theirs.reset(seed=1))
    for _ in range(25):
        assert same(outcome(ours, ACTIONS[kind]), outcome(theirs, ACTIONS[kind]))
    assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos)


def test_a_hand_at_the_edge_of_its_space_stays_there():
    ours, theirs = pair("reach-v3")
    assert same(ours.reset(seed=1), theirs.reset(seed=1))
    corners = [
        np.array([x, y, z, 1], np.float32) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)
    ]
    for action in corners:
        for _ in range(60):
            assert same(ours.step(action), theirs.step(action))
    assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos)


def test_observations_are_clipped_to_their_space():
    ours, theirs = pair("reach-v3")
    for env in (ours, theirs):
        env.reset(seed=1)
        space = env.unwrapped.sawyer_observation_space
        space.low[2] = 0.3
        space.low[20] = 0.35
        space.high[1] = 0.5
        space.high[38] = 0.1
    for _ in range(5):
        result = ours.step(np.ones(4, np.float32))
        assert same(result, theirs.step(np.ones(4, np.float32)))
        assert result[0][[2, 20, 1, 38]].tolist() == [0.3, 0.35, 0.5, 0.1]


def test_misuse_is_refused_as_in_metaworld():
    action = np.ones(4, np.float32)
    ours, theirs = pair("reach-v3", horizon=2)
    for env in (ours, theirs):
        env.reset(seed=0)
        assert [env.step(action)[3] for _ in range(2)] == [False, True]
    refusal = outcome(ours, action)
    assert refusal == outcome(theirs, action)
    assert refusal[0] == "ValueError"
    assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos)
    kind = metaworld.ALL_V3_ENVIRONMENTS["reach-v3"]
    assert outcome(fast_class(kind)(), action) == outcome(kind(), action)
    assert outcome(kind(), action)[0] == "RuntimeError"


def test_an_unstable_simulation_is_answered_as_metaworld_does():
    ours, theirs = pair("push-v3")
    for env in (ours, theirs):
        env.reset(seed=0)
        env.step(np.ones(4, np.float32))
        env.unwrapped._did_see_sim_exception = True
    for _ in range(3):
        assert same(ours.step(np.ones(4, np.float32)), theirs.step(np.ones(4, np.float32)))
    assert same(ours.unwrapped.data.qpos, theirs.unwrapped.data.qpos)


def test_a_goal_that_is_hidden_is_hidden():
    kind = metaworld.ALL_V3_ENVIRONMENTS["reach-v3"]
    (task,) = metaworld.ML1("reach-v3", seed=0).train_tasks[:1]
    ours, theirs = fast_class(kind)(), kind()
    for env in (ours, theirs):
        env.set_task(task)
    assert same(ours.reset(), theirs.reset())
    for _ in range(5):
        result = ours.step(np.ones(4, np.float32))
        assert same(result, theirs.step(np.ones(4, np.float32)))
        assert not result[0][-3:].any()


# ---- Goals and models ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL, scope="module")
def test_goals_of_every_task_are_metaworlds_own(name):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metaworld, "_N_GOALS", 4)
        before = str(np.random.get_state())
        seed = 100 * ALL.index(name)
        assert sampled_goals(name, seed) == metaworld.MT1(name, seed=seed).train_tasks
        assert str(np.random.get_state()) == before


def arrays(model):
    found = {name: getattr(model, name, None) for name in dir(model) if not name.startswith("_")}
    return {name: value.copy() for name, value in found.items() if type(value) is np.ndarray}


def stepped(model):
    """The arrays that a step uses."""
    return {name: array.copy() for name, array in arrays_of(model)}


@pytest.mark.parametrize("name", slow_unless(METAWORLD_TASKS, ALL), scope="module")
def test_model_without_visuals_is_equal_in_all_that_steps_use(name):
    kind = metaworld.ALL_V3_ENVIRONMENTS[name]
    ours, theirs = fast_class(kind)().model, kind().model
    found, wanted = dict(arrays_of(ours)), dict(arrays_of(theirs))
    assert len(found) > 150
    differing = {key for key in wanted if not same(found.pop(key), wanted[key])}
    assert differing == {*VISUAL_ARRAYS} and not found
    for part in ("body", "geom", "joint", "site"):
        numbers = range(getattr(ours, f"n{part.replace('joint', 'jnt')}"))
        names = [[getattr(model, part)(i).name for i in numbers] for model in (ours, theirs)]
        assert names[0] == names[1]
    colliding = np.flatnonzero(theirs.geom_contype | theirs.geom_conaffinity)
    assert same(ours.geom_type[colliding], theirs.geom_type[colliding])
    assert theirs.npair == 0, "no pair collides in spite of its bits"
    assert 5 * ours.nbuffer < theirs.nbuffer


@pytest.mark.parametrize("name", ["basketball-v3", "lever-pull-v3", "box-close-v3"])
def test_a_model_is_compiled_once_and_belongs_to_one_environment(name):
    sampled_goals(name, 0)
    compiled = _compiled.cache_info().misses
    kind = metaworld.ALL_V3_ENVIRONMENTS[name]
    ours = fast_class(kind)()
    second = fast_class(kind)()
    (task,) = sampled_goals(name, 1)[:1]
    assert _compiled.cache_info().misses == compiled
    assert second.model is not ours.model
    new = stepped(second.model)
    assert same(stepped(ours.model), new), "drawing goals leaves no trace"
    ours.set_task(task)
    ours.reset()
    assert not same(stepped(ours.model), new), "a task edits its model"
    assert same(stepped(second.model), new)
    assert same(stepped(fast_class(kind)().model), new)


@pytest.mark.skipif(platform.system() != "Linux", reason="pages are returned to Linux")
def test_a_further_model_of_a_task_takes_two_mebibytes_at_most():
    path = metaworld.ALL_V3_ENVIRONMENTS["reach-v3"]().fullpath
    models = [new_model(path, is_drawable=False)]
    before = psutil.Process().memory_full_info().uss
    models += [new_model(path, is_drawable=False) for _ in range(20)]
    taken = psutil.Process().memory_full_info().uss - before
    assert taken < 20 * 2 * 2**20 < 20 * models[0].nbuffer


class _Halved(gym.ActionWrapper):
    def action(self, action):
        return action / 2


class _OfHalvedActions(MetaWorld):
    def make_env(self, task, split, seed):
        return _Halved(super().make_env(task, split, seed))


def test_pictures_are_metaworlds_own_pixel_for_pixel():
    skip_without_renderer()
    images = []
    for fast in (True, False):
        benchmark = _OfHalvedActions(["door-open-v3"], horizon=5, num_goals=1, fast=fast)
        env = Pixels(benchmark, 84, 2).make_env(0, "eval", 0)
        assert isinstance(env.env, _Halved), "a subclass's own environments are drawn"
        env.reset(seed=0)
        images.append([env.step(np.ones(4, np.float32))[0] for _ in range(2)])
        env.close()
    assert images[0][0].std() > 20 and not same(*images[0])
    assert same(*images)


def test_env_without_meshes_is_not_rendered():
    env = MetaWorld(["reach"], num_goals=1).make_env(0, "eval", 0)
    for draw in (SimulationRenderer(env, None, (16, 16)), env.unwrapped.render):
        with pytest.raises(ConfigurationError, match=r"with the benchmark's make_rendered_env\("):
            draw()


# ---- When it is off, and what it leaves alone ----


def test_the_installed_versions_were_compared():
    assert unchecked_versions(CHECKED) == []


@pytest.mark.parametrize("package", ["metaworld", "mujoco"])
def test_fast_is_off_with_unchecked_versions(package, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.8.7" if name == package else version(name)
    )
    with pytest.warns(UserWarning, match=f"{package} 9.8.7$"):
        benchmark = MetaWorld(["reach"])
    assert not benchmark.fast
    assert (
        type(benchmark.make_env(0, "train", 0).unwrapped)
        is metaworld.ALL_V3_ENVIRONMENTS["reach-v3"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MetaWorld(["reach"], fast=False)


@pytest.fixture
def fresh_check():
    steps_like_upstream.cache_clear()
    yield
    steps_like_upstream.cache_clear()


@pytest.mark.parametrize("fault", [1e-16, KeyError("co_freevars")])
def test_it_is_off_with_a_warning_where_steps_differ(fault, fresh_check, monkeypatch):
    """In the last bit of a number, or because a method fails on another Python."""
    get_obs = _FastSawyer._get_obs

    def altered(env):
        if isinstance(fault, Exception):
            raise fault
        observation = get_obs(env)
        observation[np.abs(observation).argmin()] += fault
        return observation

    monkeypatch.setattr(_FastSawyer, "_get_obs", altered)
    with pytest.warns(UserWarning, match=f"other numbers with Python .* NumPy {np.__version__}$"):
        assert not MetaWorld(["reach"]).fast


def test_it_is_on_without_a_warning_and_off_when_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on, off = MetaWorld(["reach"]), MetaWorld(["reach"], fast=False)
    kind = metaworld.ALL_V3_ENVIRONMENTS["reach-v3"]
    assert type(on.make_env(0, "train", 0).unwrapped) is fast_class(kind)
    assert type(off.make_env(0, "train", 0).unwrapped) is kind
    assert on.spec == off.spec, "a checkpoint of one is continued with the other"


def test_metaworlds_classes_and_modules_stay_as_they_are():
    for name in ALL:
        fast_class(metaworld.ALL_V3_ENVIRONMENTS[name])
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "metaworld"]
    functions = []
    for module in modules:
        for value in vars(module).values():
            for part in vars(value).values() if isinstance(value, type) else [value]:
                function = getattr(part, "__func__", getattr(part, "fget", part))
                functions += [function] if isinstance(function, types.FunctionType) else []
    assert len(functions) > 500
    assert not [f for f in functions if f.__module__.startswith("mtrl_lightning")]
    assert {id(vars(module)["np"]) for module in modules if "np" in vars(module)} == {id(np)}
    tasks = [sys.modules[kind.__module__] for kind in metaworld.ALL_V3_ENVIRONMENTS.values()]
    assert {id(task.reward_utils) for task in tasks if hasattr(task, "reward_utils")} == {
        id(reward_utils)
    }
    assert np.linalg.norm.__module__ == "numpy.linalg"


# ---- Arithmetic ----


def call(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return [type(error).__name__, str(error)]


@pytest.mark.filterwarnings("ignore:(divide|invalid|overflow)")
@pytest.mark.parametrize("sigmoid", ["gaussian", "long_tail", "linear", "quadratic", "no such"])
def test_tolerance_is_metaworlds(sigmoid):
    xs = [0.0, -0.0, 0.05, 0.1, 1, 0.3, 7.0, -2.0, np.inf, np.nan, 1e200]
    xs += [np.float32(0.3), np.array([0.02, 0.4])]
    xs += np.random.default_rng(0).uniform(-1, 1, 50).tolist()
    limits = [(0, 0.05), (0.1, 0.1), (-np.inf, 0.2), (np.float64(0.01), 0.3), (0.2, 0.1)]
    limits += [(np.nan, 1.0)]
    for x in [*xs, *map(np.float64, xs[:11])]:
        for bounds in limits:
            for margin in (0.0, 0, 0.3, 2, np.float64(0.37), -0.1, np.nan, np.float32(0.2)):
                told = {"bounds": bounds, "margin": margin, "sigmoid": sigmoid}
                found = call(arithmetic.tolerance, x, **told)
                assert same(found, call(reward_utils.tolerance, x, **told)), (x, told)
    if sigmoid in arithmetic.METAWORLDS_SIGMOIDS:
        told = {"bounds": (0.0, 0.05), "margin": 0.37, "sigmoid": sigmoid}
        for x in (
            np.random.default_rng(0).uniform(0.1, 2, 30_000).tolist()
        ):  # one power in a thousand is no product
            assert arithmetic.tolerance(x, **told) == reward_utils.tolerance(x, **told)
    told = {"bounds": (0, 0.1), "margin": 0.4, "sigmoid": "long_tail", "value_at_margin": 0.2}
    assert (
        arithmetic.tolerance(0.3, **told)
        == reward_utils.tolerance(0.3, **told)
        != pytest.approx(0.1)
    )
    assert same(arithmetic.tolerance(0.3), reward_utils.tolerance(0.3))


def test_norm_clip_absolute_and_hstack_are_numpys():
    generator = np.random.default_rng(0)
    block = generator.normal(size=(500, 9))
    vectors = [row[:n] for row in block for n in (1, 2, 3, 4, 9)]
    vectors += [block[:, 0], block[0, ::2], block[0, ::-1], block[:3, :3]]
    vectors += [block[0].astype(np.float32), np.arange(3), np.float64(-0.3), np.float32(0.3)]
    vectors += [-0.3, [0.3, 0.4], np.array([np.nan, 1.0]), np.array([np.inf, 1.0])]
    for vector in vectors:
        assert same(arithmetic.norm(vector), np.linalg.norm(vector))
    for vector in (block[0], block[0, :3], block[:3, :3]):
        assert same(arithmetic.norm(vector, ord=2), np.linalg.norm(vector, ord=2))
        assert same(arithmetic.norm(vector, ord=1), np.linalg.norm(vector, ord=1))
    numbers = [0.3, -0.3, 1, -0.0, 0.0, 1.0, 5.0, np.nan]
    for number in [*numbers, *map(np.float64, numbers), *map(np.float32, numbers), block[0]]:
        assert same(arithmetic.absolute(number), np.abs(number))
        for bounds in ((-1, 1), (0.0, 1.0), (np.float64(-1), 1.0)):
            assert same(arithmetic.clip(number, *bounds), np.clip(number, *bounds))
    pairs = (block[0], block[1, :3]), [block[:2], block[:2]], (1.0, block[0]), ([1.0, 2.0], [3.0])
    for parts in pairs:
        assert same(arithmetic.hstack(parts), np.hstack(parts))


def scipys(matrix):
    return scipy.spatial.transform.Rotation.from_matrix(matrix).as_quat()


def test_quaternions_are_scipys():
    generator, matrix = np.random.default_rng(0), np.zeros(9)
    turns = [
        *np.eye(4),
        *(np.array(signs) for signs in ([1, 1, 1, 1], [1, -1, 1, 1], [1, 1, 0, 0], [1, 0, 0, -1])),
    ]
    turns += list(generator.normal(size=(2000, 4)) * 10.0 ** generator.integers(-9, 1, (2000, 4)))
    for turn in turns:
        mujoco.mju_quat2Mat(matrix, turn / np.linalg.norm(turn))
        rotation = matrix.reshape(3, 3)
        assert same(arithmetic.quaternion(rotation), scipys(rotation))
    for scale in (1.1, 1 + 1e-9):  # no rotation: made one
        assert same(arithmetic.quaternion(rotation * scale), scipys(rotation * scale))
    for wrong in (-np.eye(3), np.zeros((3, 3))):
        assert call(arithmetic.quaternion, wrong) == call(scipys, wrong)
        assert call(scipys, wrong)[0] == "ValueError"
