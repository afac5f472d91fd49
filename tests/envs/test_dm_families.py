"""HiP-BMDP families: values, models, bodies that move differently, and evaluation modes."""

import numpy as np
import pytest

pytest.importorskip("dm_control")

import mujoco

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.envs import DMControl, DMControlFamily
from mtrl_lightning.envs.benchmarks.benchmark import only_split
from mtrl_lightning.envs.benchmarks.dm_families import FAMILIES
from mtrl_lightning.envs.simulator import arrays_of

NUMBERS = {
    "train": (4, 5, 8, 9),
    "eval_base": (4, 5, 8, 9),
    "eval_interpolation": (6, 7),
    "eval_extrapolation": (3, 10),
}
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


def values_of(benchmark, split):
    names = [benchmark.task_names[task] for task in benchmark.split_tasks(split)]
    return [float(name.rsplit("-", 1)[1]) for name in names]


def rollout(env, num_steps=12):
    actions = np.random.default_rng(3).uniform(-1, 1, (num_steps, *env.action_space.shape))
    return np.array([env.reset(seed=0)[0], *(env.step(action)[0] for action in actions)])


@pytest.fixture
def without_models(monkeypatch):
    """Let benchmarks be made without a simulation."""
    monkeypatch.setattr(DMControlFamily, "_make_spec", lambda self: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_values_are_those_of_the_papers_models(without_models, family):
    benchmark = DMControlFamily(family)
    assert benchmark.splits == tuple(NUMBERS)
    for split, numbers in NUMBERS.items():
        expected = [model_value(family, k) for k in numbers]
        assert values_of(benchmark, split) == pytest.approx(expected, abs=1e-12)
    assert len(benchmark.task_names) == 8, "those of eval_base are the trained ones"


def edited(family, value):
    """What a model with this value has: an array, kind and name of an element, its numbers."""
    # a capsule from a to b lies in the middle, with half their distance as its size
    tip = (value - 0.03 + value + 0.001) / 2
    return {
        "cheetah_torso": [
            ("geom_size", "GEOM", "torso", [0.046, value, 0]),
            ("geom_pos", "GEOM", "head", [0.6, 0, 0.1]),
            ("body_pos", "BODY", "fthigh", [0.5, 0, 0]),
        ],
        "walker_friction": [("geom_friction", "GEOM", ..., [value, 0.1, 0.1])],
        "walker_foot": [
            ("geom_size", "GEOM", "left_foot", [0.05, value, 0]),
            ("geom_size", "GEOM", "right_foot", [0.05, 0.1, 0]),
        ],
        "cartpole_pole": [
            ("body_mass", "BODY", "pole_1", value),
            ("body_mass", "BODY", "cart", 1.0),
        ],
        "cartpole_cart": [
            ("body_mass", "BODY", "pole_1", 0.1),
            ("body_mass", "BODY", "cart", value),
        ],
        "finger_spinner": [
            ("geom_size", "GEOM", "cap1", [0.04, value, 0]),
            ("geom_size", "GEOM", "cap2", [0.04, value, 0]),
            ("site_pos", "SITE", "tip", [0, 0, value + 0.04]),
        ],
        "finger_length": [
            ("geom_pos", "GEOM", "distal", [0, 0, -value / 2]),
            ("geom_size", "GEOM", "distal", [0.028, value / 2, 0]),
            ("geom_pos", "GEOM", "fingertip", [0, 0, -tip]),
            ("geom_size", "GEOM", "fingertip", [0.03, 0.031 / 2, 0]),
            ("site_pos", "SITE", "touchtop", [0.01, 0, -(value + 0.01)]),
            ("site_pos", "SITE", "touchbottom", [-0.01, 0, -(value + 0.01)]),
        ],
    }[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_their_value_and_bodies_move_accordingly(family):
    """Models, observations, and the suite's own model."""
    values = [model_value(family, k) for k in (4, 10)]
    stock = model_value(family, SCALES[family][2])
    values += {stock} - set(values)
    benchmark = DMControlFamily(family, values[:1], None, [], values[1:], horizon=60)
    envs = [benchmark.make_env(task, "eval_base", 0) for task in range(len(values))]
    for env, value in zip(envs, values, strict=True):
        for array, kind, name, numbers in edited(family, value):
            row = name
            if name is not ...:
                row = mujoco.mj_name2id(env.model, getattr(mujoco.mjtObj, f"mjOBJ_{kind}"), name)
                assert row >= 0
            found = getattr(env.model, array)[row]
            wanted = np.broadcast_to(numbers, found.shape)
            np.testing.assert_allclose(found, wanted, atol=1e-12, err_msg=array)
        if family == "cheetah_torso":
            assert env.model.body_mass.sum() == pytest.approx(14)
    first, second = (rollout(env) for env in envs[:2])
    assert np.isfinite(first).all() and np.abs(first - second).max() > 1e-3

    ours = envs[values.index(stock)]
    theirs = DMControl([FAMILIES[family].task], horizon=60).make_env(0, "eval", 0)
    found = dict(arrays_of(ours.model))
    for name, array in arrays_of(theirs.model):
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(rollout(ours), rollout(theirs), rtol=1e-5, atol=1e-6)


def test_the_splits_have_tasks_of_their_own():
    benchmark = DMControlFamily("cartpole_pole", [0.2, 0.6], [0.6, 0.7], [0.3], [0.9], horizon=60)
    spec = benchmark.spec
    values = (0.2, 0.6, 0.7, 0.3, 0.9)
    assert spec.task_names == tuple(f"cartpole-swingup-pole-{value}" for value in values)
    assert (spec.train_tasks, spec.max_return) == ((0, 1), 60)
    tasks = [benchmark.split_tasks(split) for split in benchmark.splits]
    assert tasks == [(0, 1), (1, 2), (3,), (4,)]
    assert only_split(benchmark, "eval_base").splits == ("train", "eval_base")
    assert benchmark.splits == tuple(NUMBERS)
    assert spec.protocol["varied"] == "mass of the pole, in kg (0.1 in the suite)"


def test_given_trained_values_decide_the_default_splits(without_models):
    benchmark = DMControlFamily("cartpole_cart", train=[2, 5], task="cartpole-balance")
    assert benchmark.task_names[0] == "cartpole-balance-cart-2.0"
    assert {split: values_of(benchmark, split) for split in benchmark.splits} == {
        "train": [2.0, 5.0],
        "eval_base": [2.0, 5.0],
        "eval_interpolation": [3.5, 4.0],
        "eval_extrapolation": [5.5],
    }
    assert DMControlFamily("walker_foot", [0.1], None, [], []).splits == ("train", "eval_base")


CONFIGS = ("base", "env/hipbmdp", "algorithm/mtsac", "network/multi_head", "gradient/mean")
SHORT = (
    "--data.benchmark.init_args.train=[0.25,0.5]",
    "--data.benchmark.init_args.eval_interpolation=[0.35]",
    "--data.benchmark.init_args.eval_extrapolation=[0.2]",
    "--data.benchmark.init_args.horizon=24",
    "--data.batch_size=16",
    "--data.warmup_steps=20",
    "--evaluation.every=50",
    "--evaluation.num_episodes=1",
    "--metrics.every=50",
    "--checkpoint.every_n_env_steps=50",
)
TASKS = {"eval_base": (0.25, 0.5), "eval_interpolation": (0.35,), "eval_extrapolation": (0.2,)}


@pytest.mark.slow
def test_family_is_evaluated_in_three_modes(command_line, capsys):
    command_line("fit", *SHORT, "--data.total_steps=100", configs=CONFIGS)
    curves = read_metrics(command_line.folder())
    for split, values in TASKS.items():
        names = [f"cartpole-swingup-pole-{value}" for value in values]
        found = {name.rsplit("/", 1)[1] for name in curves if name.startswith(f"{split}/return/")}
        assert found == set(names)
        steps, average = curves[f"{split}/return"]
        assert steps == [50, 100]
        per_task = np.array([curves[f"{split}/return/{name}"][1] for name in names])
        assert average == pytest.approx(per_task.mean(0))
        assert curves[f"{split}/score"][1] == pytest.approx([value / 24 for value in average])
    assert not any(name.startswith("eval/") for name in curves)
    capsys.readouterr()
    validate = ["validate", str(command_line.folder()), "--trainer.accelerator=cpu"]
    main([*validate, "--split=eval_interpolation"])
    printed = capsys.readouterr().out
    assert "eval_interpolation after" in printed and "eval_base" not in printed
    with pytest.raises(SystemExit, match="2"):
        main([*validate, "--split=interpolation"])
