"""Policies and algorithms that are rebuilt from their checkpoint alone, and what is refused."""

from __future__ import annotations

import os
import random
import sys
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from lightning.pytorch.cli import LightningCLI
from torch import nn

from mtrl_lightning.algorithms import SAC, Algorithm, Temperature
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.data import TaskData
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import PCGrad
from mtrl_lightning.networks import (
    CARE,
    MLP,
    AppendTask,
    Embedding,
    MultiHead,
    Network,
    NoConditioning,
    OneHot,
    Standardize,
    TaskEncoder,
)
from mtrl_lightning.policy import LoadedPolicy, load_policy
from mtrl_lightning.rollout import Evaluator
from mtrl_lightning.spec import EnvSpec, Field
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, train
from tests.helpers.checkpoints import save
from tests.helpers.matrix import IsBuilt
from tests.helpers.runs import checkpoint as checkpoint_of_run

OBSERVATION_ED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TASK_E = np.array([0, 1, 2, 2, 1, 0])
SMALL = partial(MLP, width=16, depth=1, output_bound=0.3)


class Tanh(Network):
    """A network that is not of the package."""

    def __init__(self, in_dim, out_dim, spec, *, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_dim, width), nn.Tanh(), nn.Linear(width, out_dim))

    def forward(self, x_BD, task_B):
        return self.layers(x_BD)


def make_tanh(in_dim, out_dim, spec, *, width=8):
    return Tanh(in_dim, out_dim, spec, width=width)


Imported = type("Imported", (Tanh,), {"__module__": "elsewhere"})
"""As a class that this module imports from another one."""


class Subclass(SAC):
    """Passes options on, and sets one itself."""

    def __init__(self, spec, *, scale=1.0, **options):
        super().__init__(spec, discount=0.5, **options)
        self.scale = scale


def assert_acts_alike(policy, algorithm, observation_ED=OBSERVATION_ED, task_E=TASK_E):
    for mode in ("exploit", "explore", "random"):
        wanted_EA = algorithm.act(observation_ED, task_E, mode)
        found_EA = policy.act(observation_ED, task_E, mode)
        assert torch.equal(torch.from_numpy(found_EA), torch.from_numpy(wanted_EA)), mode


FACTORIES = {
    "defaults": {},
    "class": {"actor": MultiHead},
    "partial": {"actor": SMALL, "critic": SMALL, "temperature": partial(Temperature, initial=0.1)},
    "nested": {
        "actor": partial(
            partial(SMALL, depth=2), conditioning=partial(TaskEncoder, width=5, embedding=OneHot)
        ),
        "critic": SMALL,
        "encoder": partial(AppendTask, conditioning=partial(Embedding, dim=3, unit_norm=True)),
    },
    "nested defaults": {"actor": partial(SMALL, conditioning=TaskEncoder), "encoder": Standardize},
    "optimizers": {
        "actor_optimizer": partial(torch.optim.AdamW, lr=1e-2, betas=(0.5, 0.9)),
        "critic_optimizer": torch.optim.SGD,
    },
    "gradients": {"actor_gradient": PCGrad, "critic_gradient": PCGrad},
    "numbers": {"num_critics": 3, "log_std_min": -3.0, "seed": 7, "discount": np.float64(0.5)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", FACTORIES.values(), ids=FACTORIES)
def test_an_algorithm_composed_in_python_is_rebuilt(tmp_path, options):
    sac = train(make_sac(**{"actor": SMALL, "critic": SMALL, **options}), 2)
    path = save(sac, tmp_path)
    rebuilt = SAC.load_from_checkpoint(path)
    assert changed(rebuilt, copy_of(sac)) == set()
    assert rebuilt.spec == sac.spec
    assert rebuilt.counters.updates == 2
    for mine, theirs in zip(
        rebuilt.configure_optimizers(), sac.configure_optimizers(), strict=True
    ):
        assert type(mine) is type(theirs) and mine.defaults == theirs.defaults
    assert_acts_alike(load_policy(path), sac)


def test_a_checkpoint_has_the_given_arguments_as_plain_values(tmp_path):
    optimizer = partial(torch.optim.AdamW, betas=(0.5, np.float64(0.9)))
    actor = partial(MLP, width=8, conditioning=OneHot)
    sac = SAC(make_spec(), actor=actor, actor_optimizer=optimizer, transforms=[], num_critics=3)
    assert load_checkpoint(save(sac, tmp_path))["hyper_parameters"] == {
        "_class_path": "mtrl_lightning.algorithms.SAC",
        "actor": {
            "class_path": "mtrl_lightning.networks.MLP",
            "init_args": {
                "width": 8,
                "conditioning": {"class_path": "mtrl_lightning.networks.OneHot"},
            },
        },
        "actor_optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"betas": [0.5, 0.9]},
        },
        "transforms": [],
        "num_critics": 3,
    }


@pytest.mark.slow
def test_lightning_cli_takes_the_algorithm_of_a_checkpoint(tmp_path):
    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")

        def before_validate(self):
            raise IsBuilt(self.model)

    sac = SAC(ToyReach().spec, actor=SMALL, critic=SMALL, tau=0.25)
    args = [f"--ckpt_path={save(sac, tmp_path)}", "--data=ReplayData", "--data.total_steps=9"]
    args += ["--model=SAC", "--data.benchmark=mtrl_lightning.envs.ToyReach"]
    with pytest.raises(IsBuilt) as built:
        CLI(
            Algorithm,
            TaskData,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=["validate", *args],
        )
    (model,) = built.value.args
    assert model.tau == 0.25
    assert [p.shape for p in model.parameters()] == [p.shape for p in sac.parameters()]


def test_a_run_of_the_command_line_is_loaded(command_line):
    command_line.finished()
    path = command_line.folder() / "checkpoints" / "last.ckpt"
    policy, rebuilt = load_policy(path), SAC.load_from_checkpoint(path)
    saved = checkpoint_of_run(command_line)
    assert changed(rebuilt, saved["state_dict"]) == set()
    assert (policy.env_steps, policy.task_names) == (900, ("goal-0", "goal-1", "goal-2"))
    assert policy.spec == ToyReach().spec
    assert rebuilt.counters.env_steps == 900
    success_T = Evaluator(ToyReach(), num_episodes=2, num_workers=0).evaluate(policy).success_T
    again_T = Evaluator(ToyReach(), num_episodes=2, num_workers=0).evaluate(rebuilt).success_T
    assert np.array_equal(success_T, again_T)


BOXES = [
    Box(-np.inf, np.inf, (4,), np.float64),
    Box(-1.0, 1.0, (2, 3), np.float32),
    Box(0, 255, (3, 8, 8), np.uint8),
    Box(np.array([-1.0, -np.inf, 0.1], np.float32), np.array([1.0, 2.0, np.inf], np.float32)),
    Box(np.array([[0, 1], [2, 3]], np.int64), 9, dtype=np.int64),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_spec_is_the_same_after_it_was_saved(tmp_path, box):
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


@pytest.fixture
def sac():
    return make_sac(actor=SMALL, critic=SMALL)


@pytest.fixture
def policy(sac, tmp_path):
    return load_policy(save(sac, tmp_path))


def test_observations_act_for_tasks_by_number_or_name(policy, sac):
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    names = [f"task-{task}" for task in TASK_E]
    for task in (
        TASK_E,
        TASK_E.tolist(),
        names,
        tuple(names),
        np.array(names),
        torch.tensor(TASK_E),
        [0, "task-1", 2, "task-2", 1, 0],
    ):
        found_EA = policy.act(OBSERVATION_ED, task)
        assert found_EA.dtype == np.float32 and np.array_equal(found_EA, wanted_EA)
    for row, (observation_D, task) in enumerate(zip(OBSERVATION_ED, TASK_E, strict=True)):
        alone_1A = sac.act(observation_D[None], TASK_E[row : row + 1], "exploit")
        for one in (task, int(task), f"task-{task}", [task], torch.tensor(task)):
            found_A = policy.act(observation_D.tolist(), one)
            assert found_A.shape == (2,) and np.array_equal(found_A, alone_1A[0])
    for one in (2, "task-2", ["task-2"]):
        wanted_EA = sac.act(OBSERVATION_ED, np.full(6, 2), "exploit")
        assert np.array_equal(policy.act(OBSERVATION_ED, one), wanted_EA)


@pytest.mark.parametrize(
    ("observation", "task", "mode"),
    [
        *((OBSERVATION_ED, task, "exploit") for task in ("tsk-1", 3, -1, 0.5, None, [0, 1], [])),
        (OBSERVATION_ED, [0, 1, 2, 0, 1, 7], "exploit"),
        *((np.zeros(shape), 0, "exploit") for shape in ((3,), (6, 3), (2, 6, 4), ())),
        ([[1.0, 2.0], [1.0]], 0, "exploit"),
        (OBSERVATION_ED, 0, "best"),
    ],
)
def test_what_a_policy_cannot_act_on_is_refused(policy, observation, task, mode):
    with pytest.raises(ConfigurationError):
        policy.act(observation, task, mode)


def test_explored_actions_continue_the_checkpoints_draws(tmp_path, sac):
    sac.act(OBSERVATION_ED, TASK_E, "explore")
    path = save(sac, tmp_path)
    one, other = load_policy(path), load_policy(path, seed=99)
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "explore")
    for policy in (one, other):
        assert np.array_equal(policy.act(OBSERVATION_ED, TASK_E, "explore"), wanted_EA)


def test_loading_a_policy_leaves_global_generators_alone(tmp_path, sac):
    path = save(sac, tmp_path)
    torch.rand(1), np.random.rand(), random.random()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    load_policy(path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def test_wrapped_algorithm_is_in_evaluation_mode(sac):
    sac.train()
    assert np.array_equal(
        LoadedPolicy(sac).act(OBSERVATION_ED, TASK_E), sac.act(OBSERVATION_ED, TASK_E, "exploit")
    )
    assert not sac.training


# ---- what cannot be saved ----


def unsaved_factories():
    def local(in_dim, out_dim, spec):
        return SMALL(in_dim, out_dim, spec)

    return {
        "lambda": (lambda *sizes: SMALL(*sizes), "actor"),
        "local function": (local, "actor"),
        "nested": (partial(SMALL, conditioning=lambda n: OneHot(n)), r"actor\.conditioning"),
        "positional": (partial(lambda p, *sizes: SMALL(*sizes), 3), "actor"),
    }


@pytest.mark.parametrize("kind", ["lambda", "local function", "nested", "positional"])
def test_what_has_no_import_path_is_given_when_it_is_loaded(tmp_path, kind):
    factory, argument = unsaved_factories()[kind]
    sac = make_sac(actor=factory, critic=SMALL)
    path = save(sac, tmp_path)
    for load in (load_policy, SAC.load_from_checkpoint):
        with pytest.raises(ConfigurationError, match=rf"{argument},.* give actor=\.\.\."):
            load(path)
    assert_acts_alike(load_policy(path, actor=factory), sac)
    assert changed(SAC.load_from_checkpoint(path, actor=factory), copy_of(sac)) == set()


def test_a_class_of_a_script_cannot_be_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(Tanh, "__module__", "__main__")
    sac = make_sac(actor=Tanh, critic=SMALL)
    path = save(sac, tmp_path)
    with pytest.raises(ConfigurationError, match="actor"):
        load_policy(path, trust=["__main__"])
    assert_acts_alike(load_policy(path, actor=Tanh), sac)


def test_an_argument_that_is_a_module_is_given_when_it_is_loaded(tmp_path):
    algorithm = Subclass(make_spec(), actor=SMALL, critic=SMALL, scale=nn.Linear(1, 1))
    path = save(algorithm, tmp_path)
    with pytest.raises(ConfigurationError, match="scale"):
        Subclass.load_from_checkpoint(path)
    rebuilt = Subclass.load_from_checkpoint(path, scale=nn.Linear(1, 1))
    assert changed(rebuilt, copy_of(algorithm)) == set()


class WithTeacher(SAC):
    """Builds another algorithm in its constructor."""

    def __init__(self, spec, *, discount=0.9, temperature=Temperature, **options):
        first = SAC(spec, actor=SMALL, num_critics=3)
        super().__init__(spec, discount=discount, temperature=temperature, **options)
        self.teachers = [first, Subclass(spec, scale=2.0)]


def test_an_algorithm_that_another_builds_has_its_own_arguments(tmp_path):
    spec = make_spec()
    outer = WithTeacher(spec, actor=SMALL, critic=SMALL, seed=7)
    alone = [SAC(spec, actor=SMALL, num_critics=3), Subclass(spec, scale=2.0)]
    for teacher, other in zip(outer.teachers, alone, strict=True):
        assert teacher.hyper_parameters == other.hyper_parameters
    assert outer.hyper_parameters.keys() == {"_class_path", "actor", "critic", "seed"}
    rebuilt = SAC.load_from_checkpoint(save(outer.teachers[0], tmp_path))
    assert changed(rebuilt, copy_of(outer.teachers[0])) == set()


# ---- trust ----


@pytest.mark.parametrize(
    ("factory", "trust"),
    [
        (Tanh, ["tests"]),
        (partial(make_tanh, width=5), ["tests.test_policy"]),
    ],
)
def test_a_class_of_the_users_own_needs_consent(tmp_path, factory, trust):
    sac = make_sac(actor=factory, critic=SMALL)
    path = save(sac, tmp_path)
    for of_others in ((), ["test", "tests.test_load", "tests.algorithms"]):
        with pytest.raises(ConfigurationError, match=r"trust=\['tests'"):
            load_policy(path, trust=of_others)
    assert_acts_alike(load_policy(path, trust=trust), sac)
    assert changed(SAC.load_from_checkpoint(path, trust=trust), copy_of(sac)) == set()
    overridden = load_policy(path, actor=factory)  # is consent too
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    assert np.array_equal(overridden.act(OBSERVATION_ED, TASK_E), wanted_EA)


def test_an_algorithm_of_the_users_own(tmp_path, sac):
    with pytest.raises(ConfigurationError, match="Subclass"):
        Subclass.load_from_checkpoint(save(sac, tmp_path))
    options = {"actor": SMALL, "critic": SMALL}
    algorithm = Subclass(make_spec(), scale=2.0, num_critics=1, **options)
    path = save(algorithm, tmp_path)
    rebuilt = Subclass.load_from_checkpoint(path)  # the caller names the class itself
    assert (rebuilt.scale, rebuilt.discount, type(rebuilt)) == (2.0, 0.5, Subclass)
    assert changed(rebuilt, copy_of(algorithm)) == set()
    for load in (load_policy, Algorithm.load_from_checkpoint, SAC.load_from_checkpoint):
        with pytest.raises(ConfigurationError, match=r"trust=\['tests'"):
            load(path)
    assert type(SAC.load_from_checkpoint(path, trust=["tests"])) is Subclass
    assert_acts_alike(load_policy(path, trust=["tests"]), algorithm)


REFUSED = [
    "os.system",
    "builtins.eval",
    "intruder.Network",
    "torch.load",
    "torch.optimistic.Adam",
    "torch.nn.modules.module.warnings.warn",
    "torch.nn.functional.relu",
    "mtrl_lightning.cli.lightning_cli.sys.modules",
    "mtrl_lightning.cli.lightning_cli.main",
    "mtrl_lightning.envs.ToyReach",
    "mtrl_lightning.networks",
    "mtrl_lightning.networks.language.json.load",
    "mtrl_lightning.networks.language.DESCRIPTIONS",
    "mtrl_lightning.networks.network.he_linear",
    "mtrl_lightning.networks.MLP.__init__.__globals__",
    "mtrl_lightning.networks.__builtins__.eval",
    "mtrl_lightning.networks.nothing.Nothing",
    "MLP",
    "",
    "os..system",
    "mtrl_lightning.networks.MLP()",
    "__main__.Network",
]


@pytest.fixture
def intruder(tmp_path, monkeypatch):
    """A module that says when it is imported."""
    folder = tmp_path / "path"
    folder.mkdir()
    code = "import os\nopen(os.environ['INTRUDED'], 'w').close()\nclass Network: pass\n"
    (folder / "intruder.py").write_text(code)
    monkeypatch.setenv("INTRUDED", str(tmp_path / "intruded"))
    monkeypatch.syspath_prepend(folder)
    yield tmp_path / "intruded"
    sys.modules.pop("intruder", None)


def place(where, class_path):
    """Return a change of a checkpoint that puts a class into one place of its arguments."""
    factory = {"class_path": class_path, "init_args": {}}

    def change(checkpoint):
        arguments = checkpoint["hyper_parameters"]
        if where == "algorithm":
            arguments["_class_path"] = class_path
        elif where == "nested":
            arguments["actor"]["init_args"]["conditioning"] = factory
        elif where == "list":
            arguments["auxiliaries"] = [factory]
        else:
            arguments[where] = factory

    return change


INTRUDER = "intruder.Network"
PLACES = ["algorithm", "nested", "list", "actor_optimizer", "discount"]
"""Places beside ``actor``, with which all classes are tried."""


@pytest.mark.parametrize(
    ("where", "class_path"),
    [*(("actor", path) for path in REFUSED), *((where, INTRUDER) for where in PLACES)],
)
def test_a_class_that_does_not_belong_there_is_refused(
    tmp_path, sac, intruder, monkeypatch, where, class_path
):
    path = save(sac, tmp_path, change=place(where, class_path))
    called = []
    monkeypatch.setattr(Algorithm, "__init__", lambda self, *args: called.append(args))
    monkeypatch.setattr(os, "system", lambda *args: called.append(args))
    imported = set(sys.modules)
    with pytest.raises(ConfigurationError):
        load_policy(path)
    assert called == [] and not intruder.exists()
    new = {name for name in set(sys.modules) - imported if not name.startswith("torch.")}
    assert new == set()


def test_the_intruder_is_loaded_where_it_is_trusted(tmp_path, sac, intruder):
    """The test above would see an import."""
    path = save(sac, tmp_path, change=place("actor", INTRUDER))
    with pytest.raises(ConfigurationError):
        load_policy(path, trust=["intruder"])
    assert intruder.exists()


@pytest.mark.parametrize(
    "class_path",
    ["tests.test_policy.os.system", "tests.test_policy.Algorithm", "tests.test_policy.Imported"],
)
def test_trust_ends_at_what_a_trusted_module_imports(tmp_path, sac, class_path):
    path = save(sac, tmp_path, change=place("actor", class_path))
    with pytest.raises(ConfigurationError):
        load_policy(path, trust=["tests"])


def test_an_argument_of_another_version_is_refused(tmp_path, sac):
    def change(checkpoint):
        checkpoint["hyper_parameters"]["actor"]["init_args"]["hight"] = 3

    with pytest.raises(ConfigurationError, match="hight"):
        load_policy(save(sac, tmp_path, change=change))


def test_a_network_with_frozen_language_needs_no_file(tmp_path):
    """Its table is in the checkpoint; the class of its encoder has keyword arguments alone."""
    spec = make_spec()._replace(task_names=("reach-v3", "push-v3", "door-open-v3"))
    small = partial(SMALL, conditioning=NoConditioning)
    sac = make_sac(spec, actor=small, critic=small, encoder=partial(CARE, width=6))
    assert_acts_alike(load_policy(save(sac, tmp_path)), sac)
