"""Policies and algorithms that are rebuilt from a checkpoint, and what a checkpoint may name."""

import os
import random
import sys
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from mtrl_lightning.algorithms import SAC, Algorithm, Temperature
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import PCGrad
from mtrl_lightning.networks import (
    CARE,
    MLP,
    AppendTask,
    Embedding,
    MultiHead,
    NoConditioning,
    OneHot,
    Standardize,
    TaskEncoder,
)
from mtrl_lightning.policy import load_policy
from mtrl_lightning.spec import EnvSpec, Field
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, save, train

OBSERVATION_ED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TASK_E = np.array([0, 1, 2, 2, 1, 0])
SMALL = partial(MLP, width=16, depth=1, output_bound=0.3)
NETWORKS = {"actor": SMALL, "critic": SMALL}


class Own(MLP):
    """A network that is not of the package."""


Imported = type("Imported", (Own,), {"__module__": "elsewhere"})
"""As a class that this module imports from another one."""


class Subclass(SAC):
    """Passes options on, and sets one itself."""

    def __init__(self, spec, *, scale=1.0, **options):
        super().__init__(spec, discount=0.5, **options)
        self.scale = scale


@pytest.fixture
def sac():
    return make_sac(**NETWORKS)


@pytest.fixture
def policy(sac, tmp_path):
    return load_policy(save(sac, tmp_path))


def assert_rebuilt(rebuilt, algorithm):
    assert type(rebuilt) is type(algorithm) and rebuilt.spec == algorithm.spec
    assert changed(rebuilt, copy_of(algorithm)) == set()
    assert rebuilt.counters == algorithm.counters


def assert_acts_alike(policy, algorithm):
    for mode in ("exploit", "explore", "random"):
        wanted_EA = algorithm.act(OBSERVATION_ED, TASK_E, mode)
        assert np.array_equal(policy.act(OBSERVATION_ED, TASK_E, mode), wanted_EA), mode


FACTORIES = {
    "defaults": {},
    "classes and numbers": {
        "actor": MultiHead,
        "encoder": Standardize,
        "actor_gradient": PCGrad,
        "temperature": partial(Temperature, initial=0.1),
        "num_critics": 3,
        "log_std_min": -3.0,
        "seed": 7,
        "discount": np.float64(0.5),
    },
    "nested": {
        "actor": partial(
            partial(SMALL, depth=2), conditioning=partial(TaskEncoder, width=5, embedding=OneHot)
        ),
        "encoder": partial(AppendTask, conditioning=partial(Embedding, dim=3, unit_norm=True)),
        "actor_optimizer": partial(torch.optim.AdamW, lr=1e-2, betas=(0.5, 0.9)),
        "critic_optimizer": torch.optim.SGD,
    },
    # its language's table is in the checkpoint
    "language": {
        **dict.fromkeys(NETWORKS, partial(SMALL, conditioning=NoConditioning)),
        "encoder": partial(CARE, width=6),
    },
}


@pytest.mark.parametrize("options", FACTORIES.values(), ids=FACTORIES)
def test_algorithm_is_rebuilt_from_its_checkpoint(tmp_path, options):
    spec = make_spec()._replace(task_names=("reach-v3", "push-v3", "door-open-v3"))
    sac = train(make_sac(spec, **{**NETWORKS, **options}), 2)
    path = save(sac, tmp_path)
    rebuilt = SAC.load_from_checkpoint(path)
    assert_rebuilt(rebuilt, sac)
    for mine, theirs in zip(
        rebuilt.configure_optimizers(), sac.configure_optimizers(), strict=True
    ):
        assert type(mine) is type(theirs) and mine.defaults == theirs.defaults
    assert_acts_alike(load_policy(path), sac)


BOXES = [
    Box(-np.inf, np.inf, (4,), np.float64),
    Box(0, 255, (3, 8, 8), np.uint8),
    Box(np.array([-1.0, -np.inf, 0.1], np.float32), np.array([1.0, 2.0, np.inf], np.float32)),
    Box(np.array([[0, 1], [2, 3]], np.int64), 9, dtype=np.int64),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_saved_spec_is_the_same(tmp_path, box):
    spec = make_spec(3, train_tasks=(0, 2))._replace(
        observation_space=box,
        info_fields=(Field("distance"), Field("goal", (3,), "float64")),
        protocol={"benchmark": "dummy", "reward": 2.5, "horizon": np.int64(10)},
    )
    torch.save(spec.to_dict(), tmp_path / "spec.pt")
    rebuilt = EnvSpec.from_dict(torch.load(tmp_path / "spec.pt", weights_only=True))
    assert rebuilt == spec and type(rebuilt) is EnvSpec
    found = rebuilt.observation_space
    assert found.dtype == box.dtype and found.shape == box.shape
    assert np.array_equal(found.low, box.low) and np.array_equal(found.high, box.high)
    assert isinstance(rebuilt.info_fields[1], Field) and rebuilt.info_fields[1].num_bytes == 24


def test_policy_acts_for_tasks_by_number_or_name(policy, sac):
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    names = [f"task-{task}" for task in TASK_E]
    for task in (TASK_E, names, np.array(names), torch.tensor(TASK_E), [0, "task-1", *names[2:]]):
        found_EA = policy.act(OBSERVATION_ED, task)
        assert found_EA.dtype == np.float32 and np.array_equal(found_EA, wanted_EA)
    wanted_1A = sac.act(OBSERVATION_ED[2:3], TASK_E[2:3], "exploit")
    for one in (2, "task-2", [2], np.int64(2), torch.tensor(2)):
        found_A = policy.act(OBSERVATION_ED[2].tolist(), one)
        assert found_A.shape == (2,) and np.array_equal(found_A, wanted_1A[0])
    wanted_EA = sac.act(OBSERVATION_ED, np.full(6, 2), "exploit")
    assert np.array_equal(policy.act(OBSERVATION_ED, "task-2"), wanted_EA)


@pytest.mark.parametrize(
    ("observation", "task", "mode"),
    [
        *((OBSERVATION_ED, task, "exploit") for task in ("tsk-1", 3, -1, 0.5, None, [0, 1])),
        *((np.zeros(shape), 0, "exploit") for shape in ((3,), (6, 3), (2, 6, 4))),
        ([[1.0, 2.0], [1.0]], 0, "exploit"),
        (OBSERVATION_ED, 0, "best"),
    ],
)
def test_what_a_policy_cannot_act_on_is_refused(policy, observation, task, mode):
    with pytest.raises(ConfigurationError):
        policy.act(observation, task, mode)


def test_loaded_policy_continues_the_checkpoints_draws_only(tmp_path, sac):
    sac.act(OBSERVATION_ED, TASK_E, "explore")
    path = save(sac, tmp_path)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    policies = load_policy(path), load_policy(path, seed=99)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "explore")
    for policy in policies:
        assert np.array_equal(policy.act(OBSERVATION_ED, TASK_E, "explore"), wanted_EA)


UNSAVED = {
    "lambda": {"actor": lambda *sizes: SMALL(*sizes)},
    "nested": {"actor": partial(SMALL, conditioning=lambda n: OneHot(n))},
    "positional": {"actor": partial(lambda p, *sizes: SMALL(*sizes), 3)},
    "module": {"scale": nn.Linear(1, 1)},
}


@pytest.mark.parametrize("options", UNSAVED.values(), ids=UNSAVED)
def test_argument_without_import_path_is_given_on_loading(tmp_path, options):
    algorithm = Subclass(make_spec(), **{**NETWORKS, **options})
    path = save(algorithm, tmp_path)
    (argument,) = options
    for load in (partial(load_policy, trust=["tests"]), Subclass.load_from_checkpoint):
        with pytest.raises(ConfigurationError, match=argument):
            load(path)
    assert_rebuilt(Subclass.load_from_checkpoint(path, **options), algorithm)
    assert_acts_alike(load_policy(path, trust=["tests"], **options), algorithm)


def test_class_of_the_users_own_needs_consent(tmp_path):
    sac = make_sac(actor=Own, critic=SMALL)
    path = save(sac, tmp_path)
    for others in ((), ["test", "tests.test_load", "tests.algorithms"]):
        with pytest.raises(ConfigurationError, match="trust"):
            load_policy(path, trust=others)
    assert_rebuilt(SAC.load_from_checkpoint(path, trust=["tests"]), sac)
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    for options in ({"trust": ["tests.test_policy"]}, {"actor": Own}):
        policy = load_policy(path, **options)
        assert np.array_equal(policy.act(OBSERVATION_ED, TASK_E), wanted_EA)


def test_algorithm_of_the_users_own_needs_consent(tmp_path, sac):
    with pytest.raises(ConfigurationError, match="Subclass"):
        Subclass.load_from_checkpoint(save(sac, tmp_path))
    algorithm = Subclass(make_spec(), scale=2.0, num_critics=1, **NETWORKS)
    path = save(algorithm, tmp_path)
    for load in (load_policy, Algorithm.load_from_checkpoint, SAC.load_from_checkpoint):
        with pytest.raises(ConfigurationError, match="trust"):
            load(path)
    # the caller names the class itself, or trusts it
    for kind, options in ((Subclass, {}), (SAC, {"trust": ["tests"]})):
        rebuilt = kind.load_from_checkpoint(path, **options)
        assert_rebuilt(rebuilt, algorithm)
        assert (rebuilt.scale, rebuilt.discount) == (2.0, 0.5)


INTRUDER = "intruder.Network"
REFUSED = [
    "os.system",
    "builtins.eval",
    INTRUDER,
    "torch.load",
    "torch.nn.modules.module.warnings.warn",
    "torch.nn.functional.relu",
    "mtrl_lightning.cli.lightning_cli.main",
    "mtrl_lightning.envs.ToyReach",
    "mtrl_lightning.networks",
    "mtrl_lightning.networks.language.json.load",
    "mtrl_lightning.networks.network.he_linear",
    "mtrl_lightning.networks.MLP.__init__.__globals__",
    "mtrl_lightning.networks.__builtins__.eval",
    "MLP",
    "",
    "os..system",
    "__main__.Network",
]
TRUSTED = ["tests.test_policy.os.system", "tests.test_policy.Imported"]
"""Names that a trusted module imports from others."""


@pytest.fixture
def intruder(tmp_path, monkeypatch):
    """A module that says when it is imported."""
    (tmp_path / "intruder.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "intruder.py.imported"
    sys.modules.pop("intruder", None)


def place(where, class_path):
    """Return a change of a checkpoint that puts a class into one place of its arguments."""
    factory = {"class_path": class_path, "init_args": {}}

    def change(checkpoint):
        arguments = checkpoint["hyper_parameters"]
        arguments |= {
            "algorithm": {"_class_path": class_path},
            "nested": {
                "actor": {
                    "class_path": "mtrl_lightning.networks.MLP",
                    "init_args": {"conditioning": factory},
                }
            },
            "list": {"auxiliaries": [factory]},
        }.get(where, {where: factory})

    return change


@pytest.mark.parametrize(
    ("where", "class_path"),
    [
        *(("actor", path) for path in (*REFUSED, *TRUSTED)),
        *((where, INTRUDER) for where in ("algorithm", "nested", "list", "actor_optimizer")),
    ],
)
def test_class_that_does_not_belong_there_is_not_imported(
    tmp_path, sac, intruder, monkeypatch, where, class_path
):
    path = save(sac, tmp_path, change=place(where, class_path))
    called = []
    monkeypatch.setattr(Algorithm, "__init__", lambda self, *args: called.append(args))
    monkeypatch.setattr(os, "system", lambda *args: called.append(args))
    imported = set(sys.modules)
    with pytest.raises(ConfigurationError):
        load_policy(path, trust=["tests"] if class_path in TRUSTED else ())
    assert called == [] and not intruder.exists()
    new = {name for name in set(sys.modules) - imported if not name.startswith("torch.")}
    assert new == set()


def test_intruder_is_imported_where_it_is_trusted(tmp_path, sac, intruder):
    """The test above would see an import."""
    path = save(sac, tmp_path, change=place("actor", INTRUDER))
    with pytest.raises(ConfigurationError):
        load_policy(path, trust=["intruder"])
    assert intruder.exists()
