"""Our MetaWorld beside MetaWorld's own.

Whatever can be seen is equal to the last bit, and MetaWorld stays as it is.
"""

import copy
import functools
import importlib.metadata
import sys
import types
import warnings

import metaworld
import mujoco
import numpy as np
import pytest
import scipy.spatial.transform
from metaworld.policies import ENV_POLICY_MAP
from metaworld.utils import reward_utils

from mtrl_lightning.envs import MetaWorld, Pixels
from mtrl_lightning.envs.fast import arithmetic
from mtrl_lightning.envs.fast.metaworld_fast import _FastSawyer, fast_class, steps_like_upstream
from mtrl_lightning.envs.fast.metaworld_models import VISUAL_ARRAYS
from mtrl_lightning.envs.render.renderer import SimulationRenderer
from mtrl_lightning.envs.simulator import arrays_of
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.tiers import METAWORLD_TASKS, slow_unless

CLASSES = metaworld.ALL_V3_ENVIRONMENTS
ALL = list(CLASSES)
REACH = CLASSES["reach-v3"]
HORIZON = {"v1": 250, "v2": 500}
UNSOLVED = {("hand-insert-v3", "v1"), ("peg-insert-side-v3", "v1"), ("stick-push-v3", "v1")}
"""Where the scripted policy does not succeed with the first goal."""
ENOUGH = 15
"""Steps with success, after which little new happens in an episode."""
FORWARD = np.ones(4, np.float32)


def same(found, wanted):
    """Whether two values are equal in type and to the last bit, with signs of zeros, and NaN."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, (tuple, list)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return same([*found.items()], [*wanted.items()])
    if isinstance(wanted, (np.ndarray, np.generic)):
        is_same_kind = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return is_same_kind and found.tobytes() == wanted.tobytes()
    return repr(found) == repr(wanted)


def outcome(function, *args, **kwargs):
    """What a call returns, or how it fails."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]


def pair(name, version="v2", horizon=500):
    """Ours and MetaWorld's own environment of a task, each with its wrappers and goals."""
    return [
        MetaWorld([name], reward_version=version, horizon=horizon, num_goals=3, fast=fast).make_env(
            0, "eval", 0
        )
        for fast in (True, False)
    ]


def assert_steps_equal(ours, theirs, *actions):
    for action in actions:
        found = ours.step(action)
        assert same(found, theirs.step(action))
    assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos)
    return found


@pytest.fixture(autouse=True, scope="module")
def compiled_once(few_goals):
    """Compile a model once: it takes most of the time of MetaWorld's own code."""
    compiled = functools.lru_cache(maxsize=2)(mujoco.MjModel.from_xml_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mujoco.MjModel, "from_xml_path", lambda path: copy.copy(compiled(path)))
        yield


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
    assert type(theirs.unwrapped) is CLASSES[name] is not type(ours.unwrapped)
    generator = np.random.default_rng(ALL.index(name))
    act = scripted(name, horizon, generator)
    observation, info = ours.reset(seed=0)
    assert same((observation, info), theirs.reset(seed=0))
    successes = 0
    for step in range(horizon):
        action = act(observation, step)
        result, expected = ours.step(action), theirs.step(action)
        assert same(result, expected), step
        assert not np.shares_memory(result[0], ours.unwrapped._last_stable_obs), (
            "the caller may write into it"
        )
        assert result[2:4] == (False, step == horizon - 1), "success does not end the episode"
        observation = result[0]
        successes += result[4]["success"]
        if successes == ENOUGH:
            break
    assert successes or (name, version) in UNSOLVED, (
        "the parts of a reward that are paid for success were not seen"
    )
    for _ in range(2):
        assert same(ours.reset(), theirs.reset())
        # double precision, and out of bounds
        assert_steps_equal(ours, theirs, *generator.uniform(-1.5, 1.5, (40, 4)))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_unusual_actions_give_the_same_or_fail_in_the_same_way():
    ours, theirs = pair("pick-place-v3")
    unusual = {
        "a list": [0.3, -0.2, 0.9, 0.7],
        "out of bounds": np.array([-7.0, 1.0001, np.inf, -np.inf], np.float32),
        "a NaN": np.array([0.1, np.nan, 0.2, 0.3], np.float32),
        "too short": np.zeros(3, np.float32),
    }
    for kind, action in unusual.items():
        assert same(ours.reset(seed=1), theirs.reset(seed=1)), kind
        for _ in range(8):
            assert same(outcome(ours.step, action), outcome(theirs.step, action)), kind
        assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos), kind


def test_a_hand_at_the_edge_of_its_space_stays_there():
    ours, theirs = pair("reach-v3")
    assert same(ours.reset(seed=1), theirs.reset(seed=1))
    for corner in np.stack(np.meshgrid(*[(-1, 1)] * 3), axis=-1).reshape(8, 3):
        assert_steps_equal(ours, theirs, *[np.append(corner, 1).astype(np.float32)] * 60)


def test_observations_are_clipped_to_their_space():
    ours, theirs = pair("reach-v3")
    for env in (ours, theirs):
        env.reset(seed=1)
        space = env.unwrapped.sawyer_observation_space
        space.low[[2, 20]] = 0.3, 0.35
        space.high[[1, 38]] = 0.5, 0.1
    observation, *_ = assert_steps_equal(ours, theirs, *[FORWARD] * 5)
    assert observation[[2, 20, 1, 38]].tolist() == [0.3, 0.35, 0.5, 0.1]


def test_an_unstable_simulation_is_answered_as_metaworld_does():
    ours, theirs = pair("push-v3")
    for env in (ours, theirs):
        env.reset(seed=0)
        env.step(FORWARD)
        env.unwrapped._did_see_sim_exception = True
    assert_steps_equal(ours, theirs, *[FORWARD] * 3)
    assert same(ours.unwrapped.data.qpos, theirs.unwrapped.data.qpos)


def test_a_goal_that_is_hidden_is_hidden():
    ours, theirs = fast_class(REACH)(), REACH()
    for env in (ours, theirs):
        env.set_task(metaworld.ML1("reach-v3", seed=0).train_tasks[0])
    assert same(ours.reset(), theirs.reset())
    observation, *_ = assert_steps_equal(ours, theirs, *[FORWARD] * 5)
    assert not observation[-3:].any()


def test_misuse_is_refused_as_in_metaworld():
    ours, theirs = pair("reach-v3", horizon=2)
    for env in (ours, theirs):
        env.reset(seed=0)
        assert [env.step(FORWARD)[3] for _ in range(2)] == [False, True]
    refusals = [outcome(env.step, FORWARD) for env in (ours, theirs, fast_class(REACH)(), REACH())]
    assert refusals[0] == refusals[1] and refusals[2] == refusals[3]
    assert [kind for kind, _ in refusals[::2]] == ["ValueError", "RuntimeError"]
    assert same(ours.unwrapped.data.mocap_pos, theirs.unwrapped.data.mocap_pos)


@pytest.mark.parametrize("name", slow_unless(METAWORLD_TASKS, ALL), scope="module")
def test_model_without_visuals_is_equal_in_all_that_steps_use(name):
    ours, theirs = fast_class(CLASSES[name])().model, CLASSES[name]().model
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


def test_images_are_metaworlds_own_pixel_for_pixel():
    skip_without_renderer()
    images = []
    for fast in (True, False):
        benchmark = MetaWorld(["door-open-v3"], horizon=5, num_goals=1, fast=fast)
        env = Pixels(benchmark, 84, 2).make_env(0, "eval", 0)
        env.reset(seed=0)
        images.append([env.step(FORWARD)[0] for _ in range(2)])
        env.close()
    assert images[0][0].std() > 20 and not same(*images[0])
    assert same(*images)


def test_env_without_meshes_is_not_rendered():
    env = MetaWorld(["reach"], num_goals=1).make_env(0, "eval", 0)
    for draw in (SimulationRenderer(env, None, (16, 16)), env.unwrapped.render):
        with pytest.raises(ConfigurationError, match="make_rendered_env"):
            draw()


@pytest.mark.filterwarnings("error")
def test_fast_is_on_for_the_compared_versions_unless_turned_off(monkeypatch):
    on, off = MetaWorld(["reach"]), MetaWorld(["reach"], fast=False)
    assert type(on.make_env(0, "train", 0).unwrapped) is fast_class(REACH)
    assert on.spec == off.spec, "a checkpoint of one is continued with the other"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.8.7")
    with pytest.warns(UserWarning, match="metaworld 9.8.7 and mujoco 9.8.7$"):
        unchecked = MetaWorld(["reach"])
    for benchmark in (off, unchecked):
        assert type(benchmark.make_env(0, "train", 0).unwrapped) is REACH


@pytest.mark.parametrize("fault", [1e-16, KeyError("co_freevars")])
def test_fast_is_off_where_steps_differ(fault, monkeypatch, request):
    """In the last bit of a number, or because a method fails on another Python."""
    get_obs = _FastSawyer._get_obs

    def altered(env):
        if isinstance(fault, Exception):
            raise fault
        observation = get_obs(env)
        observation[np.abs(observation).argmin()] += fault
        return observation

    monkeypatch.setattr(_FastSawyer, "_get_obs", altered)
    steps_like_upstream.cache_clear()
    request.addfinalizer(steps_like_upstream.cache_clear)
    with pytest.warns(UserWarning, match=f"NumPy {np.__version__}"):
        assert not MetaWorld(["reach"]).fast


def test_metaworlds_classes_and_modules_stay_as_they_are():
    for kind in CLASSES.values():
        fast_class(kind)
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "metaworld"]
    kinds = [kind for m in modules for kind in vars(m).values() if isinstance(kind, type)]
    found = [one for of in (*modules, *kinds) for one in vars(of).values()]
    found = [getattr(one, "__func__", getattr(one, "fget", one)) for one in found]
    functions = [one for one in found if isinstance(one, types.FunctionType)]
    assert len(functions) > 500
    assert not [f for f in functions if f.__module__.startswith("mtrl_lightning")]
    for name, own in {"np": np, "reward_utils": reward_utils}.items():
        assert {id(vars(m)[name]) for m in modules if name in vars(m)} == {id(own)}


@pytest.mark.filterwarnings("ignore:(divide|invalid|overflow)")
@pytest.mark.parametrize("sigmoid", ["gaussian", "long_tail", "linear", "quadratic", "no such"])
def test_tolerance_is_metaworlds(sigmoid):
    generator = np.random.default_rng(0)
    xs = [0.0, -0.0, 0.05, 0.1, 1, 0.3, 7.0, -2.0, np.inf, np.nan, 1e200]
    xs += [*map(np.float64, xs), np.float32(0.3), np.array([0.02, 0.4])]
    xs += generator.uniform(-1, 1, 50).tolist()
    limits = [(0, 0.05), (0.1, 0.1), (-np.inf, 0.2), (np.float64(0.01), 0.3), (0.2, 0.1)]
    limits += [(np.nan, 1.0)]
    margins = (0.0, 0, 0.3, 2, np.float64(0.37), -0.1, np.nan, np.float32(0.2))
    cases = [(x, bounds, margin) for x in xs for bounds in limits for margin in margins]
    if sigmoid in arithmetic.METAWORLDS_SIGMOIDS:
        # one power in a thousand is no product
        cases += [(x, (0.0, 0.05), 0.37) for x in generator.uniform(0.1, 2, 20_000).tolist()]
    for x, *options in cases:
        found = outcome(arithmetic.tolerance, x, *options, sigmoid)
        assert same(found, outcome(reward_utils.tolerance, x, *options, sigmoid)), (x, options)
    for options in ((), ((0, 0.1), 0.4, "long_tail", 0.2)):
        assert same(arithmetic.tolerance(0.3, *options), reward_utils.tolerance(0.3, *options))


def test_norm_clip_absolute_and_hstack_are_numpys():
    block = np.random.default_rng(0).normal(size=(500, 9))
    strided = [block[:, 0], block[0, ::2], block[0, ::-1], block[:3, :3]]
    others = [block[0].astype(np.float32), np.arange(3), [0.3, 0.4], np.array([np.nan, np.inf])]
    vectors = [row[:n] for row in block for n in (1, 2, 3, 4, 9)]
    numbers = [0.3, -0.3, 1, -0.0, 0.0, 1.0, 5.0, np.nan]
    numbers += [*map(np.float64, numbers), *map(np.float32, numbers)]
    for x in [*vectors, *strided, *others, *numbers]:
        assert same(arithmetic.norm(x), np.linalg.norm(x))
        assert same(arithmetic.absolute(x), np.abs(x))
        for bounds in ((-1, 1), (0.0, 1.0), (np.float64(-1), 1.0)):
            assert same(arithmetic.clip(x, *bounds), np.clip(x, *bounds))
    for x in (block[0], block[:3, :3]):
        for order in (1, 2):
            assert same(arithmetic.norm(x, ord=order), np.linalg.norm(x, ord=order))
    pairs = (block[0], block[1, :3]), [block[:2], block[:2]], (1.0, block[0]), ([1.0, 2.0], [3.0])
    for parts in pairs:
        assert same(arithmetic.hstack(parts), np.hstack(parts))


def scipys(matrix):
    return scipy.spatial.transform.Rotation.from_matrix(matrix).as_quat()


def test_quaternions_are_scipys():
    generator, matrix = np.random.default_rng(0), np.zeros(9)
    turns = [*np.eye(4), *np.array([[1, 1, 1, 1], [1, -1, 1, 1], [1, 1, 0, 0], [1, 0, 0, -1]])]
    turns += list(generator.normal(size=(2000, 4)) * 10.0 ** generator.integers(-9, 1, (2000, 4)))
    for turn in turns:
        mujoco.mju_quat2Mat(matrix, turn / np.linalg.norm(turn))
        rotation = matrix.reshape(3, 3)
        assert same(arithmetic.quaternion(rotation), scipys(rotation))
    for scale in (1.1, 1 + 1e-9):  # no rotation: made one
        assert same(arithmetic.quaternion(rotation * scale), scipys(rotation * scale))
    for wrong in (-np.eye(3), np.zeros((3, 3))):
        refusal = outcome(scipys, wrong)
        assert refusal[0] == "ValueError" and outcome(arithmetic.quaternion, wrong) == refusal
