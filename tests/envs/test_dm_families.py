"""HiP-BMDP families: values, models, and bodies that move differently."""

import numpy as np
import pytest

pytest.importorskip("dm_control")

from mtrl_lightning.envs import DMControl, DMControlFamily
from mtrl_lightning.envs.benchmarks.benchmark import only_split
from mtrl_lightning.envs.benchmarks.dm_families import FAMILIES
from mtrl_lightning.envs.simulator import arrays_of
from mtrl_lightning.errors import ConfigurationError

TRAINED = (4, 5, 8, 9)
INTERPOLATED = (6, 7)
EXTRAPOLATED = (3, 10)
"""Numbers ``k`` of mtenv's models."""
SCALES = {
    "cheetah_torso": (0.5, 0.1, 1),
    "walker_friction": (0.7, 0.1, 1),
    "walker_foot": (0.08, 0.01, 3),
    "cartpole_pole": (0.1, 0.05, 1),
    "cartpole_cart": (1.0, 0.5, 1),
    "finger_spinner": (0.05, 0.01, 5),
    "finger_length": (0.10, 0.015, 5),
}
"""The value of model ``k`` is ``first + step (k - 1)``; which ``k`` is the suite's own."""


def model_value(family, k):
    first, step, _ = SCALES[family]
    return first + step * (k - 1)


def of(family, *values, **options):
    """Return a benchmark whose tasks are these values, the first of which is trained on."""
    trained, *others = values
    return DMControlFamily(family, [trained], None, [], others, horizon=60, **options)


def named(model, kind, name):
    import mujoco

    return mujoco.mj_name2id(model, getattr(mujoco.mjtObj, f"mjOBJ_{kind}"), name)


def rollout(env, num_steps=12, seed=3):
    """Return the observations under random actions, and the environment's last reward."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (num_steps, *env.action_space.shape))
    observations = [env.reset(seed=0)[0], *(env.step(action)[0] for action in actions)]
    return np.array(observations)


@pytest.fixture
def without_models(monkeypatch):
    """Let benchmarks be made without a simulation."""
    monkeypatch.setattr(DMControlFamily, "_make_spec", lambda self: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_values_are_those_of_the_papers_models(without_models, family):
    assert set(FAMILIES) == set(SCALES)
    benchmark = DMControlFamily(family)
    assert benchmark.splits == ("train", "eval_base", "eval_interpolation", "eval_extrapolation")
    for split, numbers in zip(
        benchmark.splits, (TRAINED, TRAINED, INTERPOLATED, EXTRAPOLATED), strict=True
    ):
        names = [benchmark.task_names[task] for task in benchmark.split_tasks(split)]
        values = [float(name.rsplit("-", 1)[1]) for name in names]
        assert values == pytest.approx([model_value(family, k) for k in numbers], abs=1e-12)
    assert len(benchmark.task_names) == 8, "those of eval_base are the trained ones"


def check_torso(model, value):
    torso = named(model, "GEOM", "torso")
    np.testing.assert_allclose(model.geom_size[torso, :2], [0.046, value])
    assert model.body_mass.sum() == pytest.approx(14)
    np.testing.assert_allclose(model.geom_pos[named(model, "GEOM", "head")], [0.6, 0, 0.1])
    np.testing.assert_allclose(model.body_pos[named(model, "BODY", "fthigh")], [0.5, 0, 0])


def check_friction(model, value):
    np.testing.assert_allclose(model.geom_friction, [[value, 0.1, 0.1]] * model.ngeom)
    assert named(model, "GEOM", "floor") >= 0


def check_foot(model, value):
    feet = [model.geom_size[named(model, "GEOM", f"{side}_foot")] for side in ("left", "right")]
    np.testing.assert_allclose(feet, [[0.05, value, 0], [0.05, 0.1, 0]])


def check_pole(model, value):
    masses = [model.body_mass[named(model, "BODY", name)] for name in ("pole_1", "cart")]
    np.testing.assert_allclose(masses, [value, 1.0])


def check_cart(model, value):
    masses = [model.body_mass[named(model, "BODY", name)] for name in ("pole_1", "cart")]
    np.testing.assert_allclose(masses, [0.1, value])


def check_spinner(model, value):
    for name in ("cap1", "cap2"):
        np.testing.assert_allclose(
            model.geom_size[named(model, "GEOM", name)], [0.04, value, 0], atol=1e-12
        )
    np.testing.assert_allclose(model.site_pos[named(model, "SITE", "tip")], [0, 0, value + 0.04])


def check_length(model, value):
    """A capsule from a to b lies in the middle, with half their distance as its size."""
    distal = named(model, "GEOM", "distal")
    np.testing.assert_allclose(model.geom_pos[distal], [0, 0, -value / 2], atol=1e-12)
    assert model.geom_size[distal, 1] == pytest.approx(value / 2)
    fingertip = named(model, "GEOM", "fingertip")
    middle = -((value - 0.03) + (value + 0.001)) / 2
    np.testing.assert_allclose(model.geom_pos[fingertip], [0, 0, middle], atol=1e-12)
    assert model.geom_size[fingertip, 1] == pytest.approx(0.031 / 2)
    for name, x in (("touchtop", 0.01), ("touchbottom", -0.01)):
        site = model.site_pos[named(model, "SITE", name)]
        np.testing.assert_allclose(site, [x, 0, -(value + 0.01)], atol=1e-12)


CHECKS = {
    "cheetah_torso": check_torso,
    "walker_friction": check_friction,
    "walker_foot": check_foot,
    "cartpole_pole": check_pole,
    "cartpole_cart": check_cart,
    "finger_spinner": check_spinner,
    "finger_length": check_length,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_their_value_and_bodies_move_accordingly(family):
    """Models, observations, the suite's own model, and the state in the middle of an episode."""
    values = [model_value(family, k) for k in (TRAINED[0], EXTRAPOLATED[1])]
    stock = model_value(family, SCALES[family][2])
    benchmark = of(family, *values, *({stock} - set(values)))
    envs = [benchmark.make_env(task, "eval_base", 0) for task in range(benchmark.spec.num_tasks)]
    for env, value in zip(envs, values, strict=False):
        CHECKS[family](env.model, value)
    first, second = (rollout(env) for env in envs[:2])
    assert np.isfinite(first).all() and np.abs(first - second).max() > 1e-3
    assert np.array_equal(rollout(envs[0]), first), "only the value differs"

    place = [*values, stock].index(stock)
    theirs = DMControl([FAMILIES[family].task], horizon=60).make_env(0, "eval", 0)
    edited = dict(arrays_of(envs[place].model))
    for name, array in arrays_of(theirs.model):
        np.testing.assert_allclose(edited[name], array, rtol=1e-12, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(rollout(envs[place]), rollout(theirs), rtol=1e-5, atol=1e-6)


def test_the_splits_have_tasks_of_their_own():
    benchmark = DMControlFamily("cartpole_pole", [0.2, 0.6], [0.6, 0.7], [0.3], [0.9], horizon=60)
    spec = benchmark.spec
    values = (0.2, 0.6, 0.7, 0.3, 0.9)
    assert spec.task_names == tuple(f"cartpole-swingup-pole-{value}" for value in values)
    assert (spec.train_tasks, spec.max_return) == ((0, 1), 60)
    tasks = [benchmark.split_tasks(split) for split in benchmark.splits]
    assert tasks == [(0, 1), (1, 2), (3,), (4,)]
    assert only_split(benchmark, "eval_base").splits == ("train", "eval_base")
    assert benchmark.splits[2:] == ("eval_interpolation", "eval_extrapolation")
    assert spec.protocol["varied"] == "mass of the pole, in kg (0.1 in the suite)"
    assert of("walker_foot", 0.1, task="walker-run").splits == ("train", "eval_base")


def test_trained_values_are_evaluated_by_default(without_models):
    benchmark = DMControlFamily("cartpole_cart", train=[2, 5])
    values = {
        split: [benchmark.task_names[task] for task in benchmark.split_tasks(split)]
        for split in benchmark.splits[1:]
    }
    assert values == {
        "eval_base": ["cartpole-swingup-cart-2.0", "cartpole-swingup-cart-5.0"],
        "eval_interpolation": ["cartpole-swingup-cart-3.5", "cartpole-swingup-cart-4.0"],
        "eval_extrapolation": ["cartpole-swingup-cart-5.5"],
    }


@pytest.mark.parametrize(
    ("split", "values"),
    [
        ("eval_interpolation", [0.3, 0.9]),
        ("eval_extrapolation", [0.2, 0.4]),
        ("eval_extrapolation", [0.5]),
    ],
)
def test_values_of_the_wrong_split_are_refused(without_models, split, values):
    with pytest.raises(ConfigurationError, match=split):
        DMControlFamily("cartpole_pole", [0.25, 0.5], **{split: values})
