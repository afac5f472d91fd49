"""Policies and algorithms that are rebuilt from their checkpoint alone, and what is refused."""

from __future__ import annotations

import inspect
import os
import random
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from mtrl_lightning.algorithms import SAC, Algorithm, Temperature
from mtrl_lightning.algorithms.description import describe_algorithm
from mtrl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, MetricsCallback
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.cli.lightning_cli import MultiTaskCLI
from mtrl_lightning.data import ReplayData
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import PCGrad
from mtrl_lightning.loading import LoadedPolicy, load_policy
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
from mtrl_lightning.rollout import Evaluator
from mtrl_lightning.saved_spec import describe_spec, rebuild_spec
from mtrl_lightning.spec import EnvSpec, Field
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, train
from tests.helpers.checkpoints import save
from tests.helpers.matrix import IsBuilt
from tests.helpers.runs import checkpoint as checkpoint_of_run
from tests.helpers.runs import trainer_in

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

    @classmethod
    def wide(cls, in_dim, out_dim, spec):
        return cls(in_dim, out_dim, spec, width=32)


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
        "actor": partial(SMALL, conditioning=partial(TaskEncoder, width=5, embedding=OneHot)),
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
    assert rebuilt.description == sac.description and rebuilt.spec == sac.spec
    assert rebuilt.counters.updates == 2
    for mine, theirs in zip(
        rebuilt.configure_optimizers(), sac.configure_optimizers(), strict=True
    ):
        assert type(mine) is type(theirs) and mine.defaults == theirs.defaults
    assert_acts_alike(load_policy(path), sac)


def test_defaults_are_in_the_checkpoint(tmp_path):
    state = load_checkpoint(save(make_sac(actor=partial(MLP, width=8)), tmp_path))["mtrl_lightning"]
    described = state["algorithm"]
    assert described["class_path"] == "mtrl_lightning.algorithms.SAC"
    assert described["init_args"]["tau"] == 0.005
    assert described["init_args"]["actor"] == {
        "class_path": "mtrl_lightning.networks.MLP",
        "init_args": {
            "width": 8,
            "depth": 3,
            "layer_norm": False,
            "residual": False,
            "output_bound": 3e-3,
            "conditioning": None,
        },
    }


PARTS = [("network/moore",), ("network/mlp", "gradient/cagrad")]
"""``tests/matrix/test_toy.py`` rebuilds every network from its description."""


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: parts[-1])
def test_a_configuration_of_the_command_line_is_rebuilt(command_line, monkeypatch, tmp_path, parts):
    made = []

    def stop(cli):
        made.append(cli.model)
        raise IsBuilt

    monkeypatch.setattr(MultiTaskCLI, "before_fit", stop)
    options = ("--data.benchmark.init_args.num_tasks=10", "--data.batch_size=100")
    with pytest.raises(IsBuilt):
        command_line("fit", *options, configs=("base", "env/toy", "algorithm/mtsac", *parts))
    algorithm, observation_ED = made[0], np.full((3, 2), 0.25, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is nothing that cannot be rebuilt
        path = save(algorithm, tmp_path)
    assert SAC.load_from_checkpoint(path).description == algorithm.description
    assert_acts_alike(load_policy(path), algorithm, observation_ED, TASK_E[:3])


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


def test_a_run_composed_in_python_is_loaded(tmp_path):
    data = ReplayData(
        ToyReach(num_tasks=3),
        total_steps=600,
        batch_size=96,
        capacity=30_000,
        warmup_steps=300,
        num_workers=0,
    )
    optimizer = partial(torch.optim.Adam, lr=1e-3)
    options = {"actor": partial(MLP, width=16), "critic": partial(MLP, width=16)}
    model = SAC(data.spec, **options, actor_optimizer=optimizer, critic_optimizer=optimizer)
    callbacks = [
        EvaluationCallback(every=300, num_episodes=1, num_workers=0),
        MetricsCallback(every=300),
        EnvStepCheckpoint(every_n_env_steps=300),
    ]
    trainer = trainer_in(tmp_path, callbacks)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cannot rebuild|.*removed from hparams")
        trainer.fit(model, datamodule=data)
    path = tmp_path / "checkpoints" / "last.ckpt"
    rebuilt = SAC.load_from_checkpoint(path)
    assert changed(rebuilt, copy_of(model)) == set()
    assert (rebuilt.counters.env_steps, rebuilt.spec) == (600, data.spec)
    observation_ED = np.full((3, 2), 0.25, np.float32)
    assert_acts_alike(load_policy(path), model, observation_ED, TASK_E[:3])


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
    torch.save(describe_spec(spec), tmp_path / "spec.pt")
    rebuilt = rebuild_spec(torch.load(tmp_path / "spec.pt", weights_only=True))
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


def test_a_batch_and_single_observations_act_for_tasks_by_number_or_name(policy, sac):
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    names = [f"task-{task}" for task in TASK_E]
    for task in (
        TASK_E,
        TASK_E.tolist(),
        names,
        tuple(names),
        np.array(names),
        torch.tensor(TASK_E),
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


def test_a_mixed_list_of_names_and_numbers_is_taken(policy, sac):
    wanted_EA = sac.act(OBSERVATION_ED[:2], np.array([1, 2]), "exploit")
    assert np.array_equal(policy.act(OBSERVATION_ED[:2], ["task-1", 2]), wanted_EA)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("tsk-1", r"unknown task 'tsk-1': did you mean task-1"),
        (3, r"unknown task 3: give a name, or a number from 0 to 2, of task-0, task-1, task-2"),
        (-1, "unknown task -1"),
        (0.5, "unknown task 0.5"),
        (None, "unknown task None"),
        ([0, 1], "2 tasks are given for 6 observations"),
        ([0, 1, 2, 0, 1, 7], "unknown task 7"),
        ([], "0 tasks are given"),
    ],
)
def test_an_unknown_task_is_refused(policy, task, message):
    with pytest.raises(ConfigurationError, match=message):
        policy.act(OBSERVATION_ED, task)


@pytest.mark.parametrize("shape", [(3,), (6, 3), (2, 6, 4), ()])
def test_an_observation_of_another_shape_is_refused(policy, shape):
    with pytest.raises(ConfigurationError) as caught:
        policy.act(np.zeros(shape), 0)
    assert f"has the shape {shape}" in str(caught.value)
    assert "of the shape (4,), or a batch of them, ('E', 4)" in str(caught.value)


def test_an_observation_that_is_no_array_and_an_unknown_mode_are_refused(policy):
    with pytest.raises(ConfigurationError, match=r"no array of numbers of the shape \(4,\)"):
        policy.act([[1.0, 2.0], [1.0]], 0)
    with pytest.raises(ConfigurationError, match=r"^mode is 'best': give one of"):
        policy.act(OBSERVATION_ED, 0, "best")


def test_explored_actions_continue_the_checkpoints_draws(tmp_path, sac):
    sac.act(OBSERVATION_ED, TASK_E, "explore")
    path = save(sac, tmp_path)
    one, other = load_policy(path), load_policy(path, seed=99)
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "explore")
    for policy in (one, other):
        assert np.array_equal(policy.act(OBSERVATION_ED, TASK_E, "explore"), wanted_EA)


def test_a_loaded_policy_leaves_the_draws_of_its_process_as_they_are(tmp_path, sac):
    path = save(sac, tmp_path)
    torch.rand(1), np.random.rand(), random.random()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    load_policy(path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def test_a_policy_is_in_evaluation_mode_and_any_algorithm_can_be_wrapped(sac):
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
        "lambda": (lambda *sizes: SMALL(*sizes), "actor", "<lambda>"),
        "local function": (local, "actor", "<locals>.local"),
        "nested": (
            partial(SMALL, conditioning=lambda n: OneHot(n)),
            "actor.conditioning",
            "lambda",
        ),
        "positional": (partial(lambda p, *sizes: SMALL(*sizes), 3), "actor", "positional"),
    }


@pytest.mark.parametrize("kind", ["lambda", "local function", "nested", "positional"])
def test_what_has_no_name_is_said_once_and_accepted_at_loading(tmp_path, kind):
    factory, argument, text = unsaved_factories()[kind]
    sac = make_sac(actor=factory, critic=SMALL)
    with pytest.warns(UserWarning) as warned:
        path = save(sac, tmp_path)
        save(sac, tmp_path)
    (message,) = [str(w.message) for w in warned if "cannot rebuild" in str(w.message)]
    assert f"cannot rebuild {argument}, " in message and text in message
    assert "give actor=... to load_policy" in message
    for load in (load_policy, SAC.load_from_checkpoint):
        with pytest.raises(ConfigurationError) as caught:
            load(path)
        assert f"cannot rebuild {argument} (" in str(caught.value)
        assert "give actor=... when you load it" in str(caught.value)
    assert_acts_alike(load_policy(path, actor=factory), sac)
    assert changed(SAC.load_from_checkpoint(path, actor=factory), copy_of(sac)) == set()


def test_a_class_of_a_script_cannot_be_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(Tanh, "__module__", "__main__")
    sac = make_sac(actor=Tanh, critic=SMALL)
    with pytest.warns(UserWarning, match=r"actor, the class __main__\.Tanh"):
        path = save(sac, tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot rebuild actor .*give actor=\.\.\."):
        load_policy(path)
    assert_acts_alike(load_policy(path, actor=Tanh), sac)


def test_a_default_without_a_name_is_the_classes_own(tmp_path):
    sac = make_sac(actor=SMALL, critic=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(sac, tmp_path)
    assert "actor_optimizer" not in sac.description["init_args"]
    (critic, *_) = SAC.load_from_checkpoint(path).configure_optimizers()
    assert critic.defaults["lr"] == 3e-4


class Middle(SAC):
    """Names all of its options."""

    def __init__(self, spec, *, kappa=0.5, tau=0.1, num_critics=3, actor=MLP, critic=MLP):
        super().__init__(spec, tau=tau, num_critics=num_critics, actor=actor, critic=critic)
        self.kappa = kappa


class PassingOn(Middle):
    """Has the options of its base, another default and one option more."""

    def __init__(self, spec, *, omega=2.0, tau=0.2, **options):
        super().__init__(spec, tau=tau, actor=SMALL, **options)
        self.omega = omega


def test_inherited_options_are_described_with_their_defaults(tmp_path):
    algorithm = PassingOn(make_spec(), kappa=0.25, critic=SMALL)
    described = dict(algorithm.description["init_args"])
    critic = described.pop("critic")
    assert critic["init_args"]["width"] == 16
    # no actor, which the class sets itself, and nothing of SAC, which Middle does not pass on
    assert described == {"omega": 2.0, "tau": 0.2, "kappa": 0.25, "num_critics": 3}
    assert algorithm.hparams["actor"] == critic and algorithm.hparams["discount"] == 0.99
    assert "_constructor_calls" not in vars(algorithm)
    rebuilt = PassingOn.load_from_checkpoint(save(algorithm, tmp_path))
    assert rebuilt.kappa == 0.25 and rebuilt.description == algorithm.description


class WithOptions(nn.Module):
    """A part whose options its subclass inherits."""

    def __init__(self, spec, encoder, *, width=8, depth=1):
        super().__init__()


class InheritingOptions(WithOptions):
    def __init__(self, spec, encoder, *, weight=0.5, depth=2, **options):
        super().__init__(spec, encoder, depth=depth, **options)


def test_inherited_options_of_a_part_are_described_with_their_defaults():
    description = describe_algorithm(SAC, {"auxiliaries": [partial(InheritingOptions, weight=1)]})
    (part,) = description["init_args"]["auxiliaries"]
    assert part["init_args"] == {"weight": 1, "width": 8, "depth": 2}


def test_a_wrong_argument_of_a_constructor_is_named():
    for kind in (SAC, PassingOn):
        with pytest.raises(TypeError, match=rf"{kind.__name__}.__init__\(\) got an unexp.*'tua'"):
            kind(make_spec(), tua=0.1)
    assert inspect.signature(PassingOn).parameters["omega"].default == 2.0


class WithTeacher(SAC):
    """Builds another algorithm in its constructor."""

    def __init__(self, spec, *, discount=0.9, temperature=Temperature, **options):
        first = SAC(spec, actor=SMALL, num_critics=3)
        super().__init__(spec, discount=discount, temperature=temperature, **options)
        self.teachers = [first, Subclass(spec, scale=2.0)]


def test_an_algorithm_that_another_builds_is_described_by_its_own_arguments(tmp_path):
    spec = make_spec()
    outer = WithTeacher(spec, actor=SMALL, critic=SMALL, seed=7)
    alone = [SAC(spec, actor=SMALL, num_critics=3), Subclass(spec, scale=2.0)]
    for teacher, other in zip(outer.teachers, alone, strict=True):
        assert teacher.description == other.description
        assert teacher.hparams == other.hparams
    own = {
        name: outer.description["init_args"][name] for name in ("discount", "seed", "num_critics")
    }
    assert own == {"discount": 0.9, "seed": 7, "num_critics": 2}
    rebuilt = SAC.load_from_checkpoint(save(outer.teachers[0], tmp_path))
    assert changed(rebuilt, copy_of(outer.teachers[0])) == set()


def test_an_unknown_override_is_refused_with_near_names(tmp_path, sac):
    path = save(sac, tmp_path)
    with pytest.raises(ConfigurationError, match=r"no argument 'actr'.*did you mean.*actor"):
        load_policy(path, actr=MLP)
    with pytest.raises(ConfigurationError, match="hparams_file"):
        SAC.load_from_checkpoint(path, hparams_file="hparams.yaml")


def test_an_override_of_another_size_is_refused(tmp_path, sac):
    with pytest.raises(ConfigurationError, match="another network"):
        load_policy(save(sac, tmp_path), actor=partial(MLP, width=17))


# ---- trust ----


@pytest.mark.parametrize(
    ("factory", "trust"),
    [
        (Tanh, ["tests"]),
        (partial(Tanh, width=5), "tests"),
        (make_tanh, ["tests.test_loading"]),
        (partial(make_tanh, width=5), ["tests"]),
        (Tanh.wide, ["tests"]),
    ],
)
def test_a_class_of_the_users_own_needs_consent(tmp_path, factory, trust):
    sac = make_sac(actor=factory, critic=SMALL)
    path = save(sac, tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        load_policy(path)
    assert "the checkpoint needs tests.test_loading." in str(caught.value)
    assert "for actor" in str(caught.value) and "trust=['tests']" in str(caught.value)
    with pytest.raises(ConfigurationError, match="consent"):
        load_policy(path, trust=["test", "tests.test_load", "tests.algorithms"])
    assert_acts_alike(load_policy(path, trust=trust), sac)
    assert changed(SAC.load_from_checkpoint(path, trust=trust), copy_of(sac)) == set()
    overridden = load_policy(path, actor=factory)  # is consent too
    wanted_EA = sac.act(OBSERVATION_ED, TASK_E, "exploit")
    assert np.array_equal(overridden.act(OBSERVATION_ED, TASK_E), wanted_EA)


def test_an_algorithm_of_the_users_own(tmp_path):
    options = {"actor": SMALL, "critic": SMALL}
    algorithm = Subclass(make_spec(), scale=2.0, num_critics=1, **options)
    path = save(algorithm, tmp_path)
    rebuilt = Subclass.load_from_checkpoint(path)  # the caller names the class itself
    assert (rebuilt.scale, rebuilt.discount, type(rebuilt)) == (2.0, 0.5, Subclass)
    assert changed(rebuilt, copy_of(algorithm)) == set()
    for load in (load_policy, Algorithm.load_from_checkpoint, SAC.load_from_checkpoint):
        with pytest.raises(
            ConfigurationError, match=r"Subclass for the algorithm.*trust=\['tests'"
        ):
            load(path)
    assert type(SAC.load_from_checkpoint(path, trust=["tests"])) is Subclass
    assert_acts_alike(load_policy(path, trust=["tests"]), algorithm)


def test_an_algorithm_of_another_class_is_refused(tmp_path, sac):
    with pytest.raises(ConfigurationError, match="which is no Subclass"):
        Subclass.load_from_checkpoint(save(sac, tmp_path))


REFUSED = [
    "os.system",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.__import__",
    "intruder.Network",
    "torch.load",
    "torch.hub.load",
    "torch.utils.data.DataLoader",
    "torch.optimistic.Adam",
    "mtrl_lightning.cli.lightning_cli.sys.modules",
    "mtrl_lightning.cli.lightning_cli.main",
    "mtrl_lightning.cli.clear.clear",
    "mtrl_lightning.benchmarks.faulty.Faulty",
    "mtrl_lightning.envs.ToyReach",
    "mtrl_lightning.networks",
    "mtrl_lightning.networks.mlp",
    "mtrl_lightning.networks.language.json",
    "mtrl_lightning.networks.language.json.load",
    "mtrl_lightning.networks.language.Path",
    "mtrl_lightning.networks.language.DESCRIPTIONS",
    "mtrl_lightning.networks.network.he_linear",
    "mtrl_lightning.networks.mlp.torch.load",
    "mtrl_lightning.networks.MLP.__init__",
    "mtrl_lightning.networks.MLP.__init__.__globals__",
    "mtrl_lightning.networks.MLP.load_state_dict",
    "mtrl_lightning.networks.__builtins__.eval",
    "mtrl_lightning.networks.Nothing",
    "mtrl_lightning.networks.nothing.Nothing",
    "mtrl_lightning.networks.OneHot",
    "torch.nn.modules.module.OrderedDict",
    "torch.nn.modules.module.warnings.warn",
    "torch.nn.Linear",
    "torch.nn.functional.relu",
    "torch.optim.Adam",
    "torch.nn.parallel.DataParallel",
    "MLP",
    "",
    ".os.system",
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
    """Return a change of a checkpoint that puts a class into one place of its description."""
    factory = {"class_path": class_path, "init_args": {}}

    def change(state):
        arguments = state["algorithm"]["init_args"]
        if where == "algorithm":
            state["algorithm"]["class_path"] = class_path
        elif where == "nested":
            arguments["actor"]["init_args"]["conditioning"] = factory
        elif where == "list":
            arguments["auxiliaries"] = [factory]
        else:
            arguments[where] = factory

    return change


INTRUDER = "intruder.Network"
PLACES = ["algorithm", "nested", "list", "actor_optimizer", "discount"]
"""Places of a description beside ``actor``, with which all classes are tried."""


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
    with pytest.raises(ConfigurationError, match="TypeError"):
        load_policy(path, trust=["intruder"])
    assert intruder.exists()


@pytest.mark.parametrize(
    "class_path",
    [
        "tests.test_loading.os.system",
        "tests.test_loading.os.makedirs",
        "tests.test_loading.MultiTaskCLI",
        "tests.test_loading.Imported",
    ],
)
def test_trust_ends_at_what_a_trusted_module_imports(tmp_path, sac, class_path):
    path = save(sac, tmp_path, change=place("actor", class_path))
    with pytest.raises(ConfigurationError, match=r"without your consent|and there is none"):
        load_policy(path, trust=["tests"])


def test_an_argument_of_another_version_is_refused(tmp_path, sac):
    def change(state):
        state["algorithm"]["init_args"]["actor"]["init_args"]["hight"] = 3

    with pytest.raises(
        ConfigurationError, match="MLP takes no argument 'hight', which is in actor"
    ):
        load_policy(save(sac, tmp_path, change=change))


def test_a_network_with_frozen_language_needs_no_file(tmp_path):
    """Its table is in the checkpoint; the class of its encoder has keyword arguments alone."""
    spec = make_spec()._replace(task_names=("reach-v3", "push-v3", "door-open-v3"))
    small = partial(SMALL, conditioning=NoConditioning)
    sac = make_sac(spec, actor=small, critic=small, encoder=partial(CARE, width=6))
    assert_acts_alike(load_policy(save(sac, tmp_path)), sac)
