"""Every public class refuses the values outside its documented range.

``TABLE`` has for each class a factory of a valid object and bad values by argument.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

import mtrl_lightning
from mtrl_lightning.algorithms import (
    PPO,
    SAC,
    TD3,
    ActorCritic,
    Algorithm,
    BehaviourCloning,
    Categorical,
    Distral,
    FixedTemperature,
    LinearRate,
    ManualWeights,
    MeanReward,
    NormalizeReward,
    PopArt,
    RandomShift,
    ReturnRange,
    Scalar,
    Temperature,
    TemperatureWeights,
    Update,
)
from mtrl_lightning.auxiliaries import (
    Deterministic,
    HiPBMDP,
    LatentDynamics,
    Probabilistic,
    Reconstruction,
    TransitionEnsemble,
)
from mtrl_lightning.callbacks import (
    EnvStepCheckpoint,
    EvaluationCallback,
    MetricsCallback,
    ResetCallback,
    VideoCallback,
)
from mtrl_lightning.data import DemonstrationData, ReplayData, RolloutData
from mtrl_lightning.envs import (
    DMControl,
    DMControlFamily,
    GymnasiumTasks,
    MetaWorld,
    Pixels,
    ToyConflict,
    ToyReach,
    VectorEnv,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import FAMO, CAGrad, FairGrad, GradNorm, NashMTL
from mtrl_lightning.networks import (
    CARE,
    MLP,
    MOORE,
    AppendTask,
    Attention,
    Clusters,
    Embedding,
    Experts,
    FiLM,
    Identity,
    Language,
    MixtureOfEncoders,
    MLPEncoder,
    MultiHead,
    NoConditioning,
    OneHotGate,
    PaCo,
    PixelEncoder,
    PolicyStd,
    Separate,
    SoftModularization,
    Standardize,
    TaskEncoder,
    TopKGate,
)
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.task_axes import UntrainedTasks
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots, RolloutBuffer
from mtrl_lightning.rollout import (
    ActionNoise,
    Collector,
    CorrelatedNoise,
    EndAfterSuccess,
    Evaluator,
    PauseSolved,
    PolicyReuse,
    StartMidway,
)
from mtrl_lightning.schedules import Every, UpdateRatio
from mtrl_lightning.transitions import RolloutConfig
from mtrl_lightning.updates.metrics import DivergenceGuard
from mtrl_lightning.utils.counters import Counters
from tests.helpers.algorithms import (
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
    pixel_spec,
)
from tests.helpers.auxiliaries import STATES, STATES_CONTEXT
from tests.helpers.fakes import Constant
from tests.helpers.networks import Dense
from tests.helpers.specs import spec_of

PACKAGE = Path(mtrl_lightning.__file__).parent
NAN = math.nan
INFINITY = math.inf
SPEC = spec_of(3)
ONE_TASK = spec_of(1)
DIFFERENT_SIZES = spec_of(3, observation_sizes=(4, 3, 2))
STRANGE_TASKS = spec_of(["goal-98", "goal-99"])
IMAGES = pixel_spec()
TINY_IMAGES = spec_of(3, Box(0, 255, (3, 14, 30), np.uint8))
FLOAT_IMAGES = spec_of(3, Box(0, 1, (3, 20, 20), np.float32))


def network(cls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of a small network of 4 inputs and 2 outputs."""
    return partial(cls, 4, 2, SPEC)


def auxiliary(cls: Callable[..., Any], encoder: Any = STATES) -> Callable[..., Any]:
    """Return a factory of an auxiliary loss on an encoder of its own."""

    def build(spec: Any = SPEC, make_encoder: Any = encoder, **options: Any) -> Any:
        return cls(spec, make_encoder(spec), **options)

    return build


def pop_art(**options: Any) -> PopArt:
    return PopArt(SPEC, MLP(4, 1, SPEC, width=8, depth=1), **options)


def update(max_grad_norm: float | None = 1.0) -> SAC:
    return make_sac(actor_max_grad_norm=max_grad_norm)


def vector_env(**options: Any) -> VectorEnv:
    return VectorEnv(ToyReach(), **{"tasks": [0], "num_workers": 0, **options})


def collector(**options: Any) -> Collector:
    return Collector(vector_env(), Constant(), **options)


def evaluator(**options: Any) -> Evaluator:
    return Evaluator(ToyReach(), **{"num_episodes": 1, "num_workers": 0, **options})


def guard(**options: Any) -> DivergenceGuard:
    given = {"on_nonfinite": "stop", "max_skipped": 1, **options}
    return DivergenceGuard(**given, task_names=SPEC.task_names, counters=Counters())


def rollout_buffer(num_steps: int = 4, num_minibatches: int = 2) -> RolloutBuffer:
    return RolloutBuffer(SPEC, SPEC.train_tasks, RolloutConfig(num_steps, 1, num_minibatches))


Row = tuple[Callable[..., Any], dict[str, list[Any]]]
RATES = [0.0, -0.1, 1.1, NAN]
"""Outside of (0, 1]."""
SIZES: dict[str, list[Any]] = {"width": [0, -1], "depth": [0]}
ACTOR_CRITIC: dict[str, list[Any]] = {
    "num_critics": [0],
    "actor_every": [0],
    "target_every": [0],
    "discount": [-0.1, 1.1, NAN, "0.9"],
    "tau": RATES,
    "encoder_tau": RATES,
    "actor_max_grad_norm": [0.0],
    "critic_max_grad_norm": [-1.0],
}
BOUNDED_STD: dict[str, list[Any]] = {"log_std_min": [3.0, NAN], "log_std_max": [-30.0, NAN]}
TABLE: dict[type, Row] = {
    # algorithms
    Algorithm: (
        partial(Algorithm, SPEC),
        {
            "on_nonfinite": ["ignore"],
            "max_skipped_updates": [-1],
            "untrained_tasks": ["other"],
        },
    ),
    ActorCritic: (make_sac, ACTOR_CRITIC),
    SAC: (
        make_sac,
        {
            **BOUNDED_STD,
            "task_weighting": [partial(ManualWeights, weights={"task-9": 1.0})],
            "reward_scale": [partial(ReturnRange, discount=0.9)],
            "temperature": [partial(Temperature, initial=0.0)],
        },
    ),
    TD3: (
        make_td3,
        {
            "exploration_std_min": [-0.1, INFINITY],
            "exploration_std_max": [0.05, INFINITY],
            "target_std": [-0.1, INFINITY],
            "target_clip": [-0.1, INFINITY],
            "task_weighting": [TemperatureWeights],
        },
    ),
    Distral: (
        make_distral,
        {
            "kappa": [-0.1, INFINITY],
            "omega": [0.0, INFINITY],
            "distilled_max_grad_norm": [0.0],
            "conditioning": [Embedding],
            "encoder": [AppendTask, partial(CARE, conditioning=Embedding)],
            "critic": [partial(MLP, conditioning=Embedding)],
        },
    ),
    PPO: (
        make_ppo,
        {
            "num_steps": [0],
            "num_epochs": [0],
            "num_minibatches": [0],
            "discount": [-0.1, 1.1],
            "gae_lambda": [-0.1, 1.1],
            "clip": [0.0],
            "value_clip": [0.0],
            "max_kl": [0.0],
            "entropy_coef": [-0.1],
        },
    ),
    BehaviourCloning: (make_bc, {"loss": ["l1"], **BOUNDED_STD}),
    # learning
    ManualWeights: (
        partial(ManualWeights, spec=SPEC, weights={"task-0": 2.0}),
        {
            "weights": [
                {"task-9": 1.0},
                {"task-0": -1.0},
                {"task-0": NAN},
                dict.fromkeys(SPEC.task_names, 0.0),
            ],
            "spec": [spec_of(3, train_tasks=[1, 2])],
        },
    ),
    Categorical: (Categorical, {"num_bins": [1], "bound": [0.0]}),
    DivergenceGuard: (guard, {"on_nonfinite": ["ignore"], "max_skipped": [-1]}),
    FixedTemperature: (partial(FixedTemperature, SPEC), {"value": [0.0, NAN]}),
    LinearRate: (LinearRate, {"final": [-0.1]}),
    MeanReward: (partial(MeanReward, SPEC), {"max_factor": [0.5]}),
    NormalizeReward: (
        partial(NormalizeReward, SPEC),
        {"discount": [-0.1, 1.1], "clip": [0.0], "epsilon": [0.0]},
    ),
    PopArt: (pop_art, {"step_size": RATES, "min_std": [0.0]}),
    RandomShift: (partial(RandomShift, spec=IMAGES), {"padding": [0], "spec": [SPEC]}),
    ReturnRange: (partial(ReturnRange, SPEC), {"discount": [-0.1, 1.0], "bound": [0.0]}),
    Scalar: (Scalar, {"reduction": ["max"]}),
    Temperature: (partial(Temperature, SPEC), {"initial": [0.0, -1.0, NAN]}),
    Update: (update, {"max_grad_norm": [0.0, -1.0]}),
    # schedules
    Every: (partial(Every, interval=1), {"interval": [0]}),
    UpdateRatio: (partial(UpdateRatio, ratio=1), {"ratio": [0.0, INFINITY], "burst": [-1]}),
    # gradient methods
    CAGrad: (partial(CAGrad, SPEC), {"c": [-0.1], "num_sampled": [0]}),
    FAMO: (partial(FAMO, SPEC), {"lr": [0.0], "decay": [-0.1]}),
    FairGrad: (partial(FairGrad, SPEC), {"alpha": [-0.1, INFINITY, NAN]}),
    GradNorm: (partial(GradNorm, SPEC), {"asymmetry": [-1.0], "lr": [0.0]}),
    NashMTL: (partial(NashMTL, SPEC), {"max_norm": [0.0], "update_every": [0]}),
    # networks
    Experts: (
        partial(Experts, num_experts=2, in_dim=4, out_dim=2, width=8, depth=1),
        {"num_experts": [0], "in_dim": [0], "out_dim": [0], "width": [0], "depth": [-1]},
    ),
    FiLM: (network(FiLM), {**SIZES, "conditioning": [NoConditioning]}),
    HiddenLayers: (partial(HiddenLayers, 4, width=8, depth=1, layer_norm=False), SIZES),
    MLP: (network(MLP), SIZES),
    MOORE: (
        network(MOORE),
        {**SIZES, "num_experts": [0, 401], "conditioning": [NoConditioning]},
    ),
    MultiHead: (network(MultiHead), {"head_width": [-1]}),
    PaCo: (
        network(PaCo),
        {**SIZES, "num_sets": [0], "max_loss": [0.0], "conditioning": [Dense, NoConditioning]},
    ),
    Separate: (network(Separate), SIZES),
    SoftModularization: (
        network(SoftModularization),
        {**SIZES, "num_modules": [0], "embedding_dim": [0], "conditioning": [NoConditioning]},
    ),
    PolicyStd: (
        partial(PolicyStd, SPEC),
        {"initial": [1.0, -3.0, NAN], "minimum": [0.1], "maximum": [-0.1]},
    ),
    # encoders and task conditionings
    Attention: (
        partial(Attention, 3, SPEC),
        {"temperature": [0.0, NAN], "width": [0], "depth": [0]},
    ),
    CARE: (
        partial(CARE, spec=SPEC, conditioning=Embedding),
        {**SIZES, "num_experts": [0], "out_dim": [0], "context_dim": [4], "spec": [IMAGES]},
    ),
    Clusters: (
        partial(Clusters, num_experts=1, words=[["task"]], spec=SPEC),
        {
            "num_experts": [2],
            "words": [[["a"], ["b"]]],
            "descriptions": ["nowhere.json"],
            "spec": [STRANGE_TASKS],
        },
    ),
    Embedding: (partial(Embedding, SPEC), {"dim": [0]}),
    TopKGate: (partial(TopKGate, 3, SPEC), {"num_chosen": [0, 4]}),
    Identity: (partial(Identity, spec=SPEC), {"spec": [IMAGES]}),
    Language: (
        partial(Language, spec=spec_of(["reach-v3"])),
        {"path": ["nowhere.json"], "spec": [STRANGE_TASKS]},
    ),
    MLPEncoder: (partial(MLPEncoder, spec=SPEC), {**SIZES, "out_dim": [0], "spec": [IMAGES]}),
    MixtureOfEncoders: (
        partial(MixtureOfEncoders, spec=SPEC),
        {**SIZES, "num_experts": [0], "out_dim": [0], "spec": [IMAGES]},
    ),
    OneHotGate: (partial(OneHotGate, num_experts=3, spec=SPEC), {"num_experts": [4]}),
    PixelEncoder: (
        partial(PixelEncoder, spec=IMAGES),
        {
            "channels": [0],
            "strides": [(), (2, 0)],
            "out_dim": [0],
            "spec": [SPEC, TINY_IMAGES, FLOAT_IMAGES],
        },
    ),
    Standardize: (
        partial(Standardize, spec=SPEC, per_task=False),
        {
            "num_updates": [0],
            "min_std": [0.0],
            "clip": [1.0],
            "spec": [IMAGES, DIFFERENT_SIZES],
        },
    ),
    UntrainedTasks: (partial(UntrainedTasks, SPEC), {"parameters": ["other"]}),
    TaskEncoder: (partial(TaskEncoder, SPEC), {**SIZES, "out_dim": [0]}),
    # auxiliary losses
    Deterministic: (partial(Deterministic, 4, 2), {"width": [0]}),
    HiPBMDP: (
        auxiliary(HiPBMDP, STATES_CONTEXT),
        {
            "distance_weight": [-0.1],
            "distance_loss": ["cubic"],
            "num_others": [0, 3],
            "spec": [ONE_TASK],
            "make_encoder": [STATES, Identity],
        },
    ),
    LatentDynamics: (
        auxiliary(LatentDynamics),
        {
            "width": [0],
            "reward_from": ["z"],
            "every": [0],
            "after": ["actor"],
            "weight_decay": [-0.1],
            "make_encoder": [Identity],
        },
    ),
    Probabilistic: (
        partial(Probabilistic, 4, 2),
        {"width": [0], "min_std": [0.0, 20.0], "max_std": [1e-5]},
    ),
    Reconstruction: (
        auxiliary(Reconstruction),
        {
            "latent_weight": [-0.1],
            "weight_decay": [-0.1],
            "make_encoder": [Identity, partial(CARE, conditioning=Embedding)],
        },
    ),
    TransitionEnsemble: (partial(TransitionEnsemble, 4, 2), {"size": [0]}),
    # benchmarks and vector environments
    DMControl: (
        partial(DMControl, tasks=["cartpole-swingup"]),
        {
            "tasks": [["cartpole-fly"], []],
            "horizon": [0, 1001],
            "action_repeat": [0, 1001],
            "reward_scale": [0.0, INFINITY],
        },
    ),
    DMControlFamily: (
        partial(DMControlFamily, family="cartpole_pole"),
        {"family": ["cartpole"], "train": [[], [-1.0], [0.5, 0.5]], "task": ["reach-v3"]},
    ),
    GymnasiumTasks: (
        partial(GymnasiumTasks, tasks=["Pendulum-v1"]),
        {"tasks": [[]], "horizon": [0]},
    ),
    MetaWorld: (
        partial(MetaWorld, tasks=["reach"]),
        {
            "tasks": [["reech"], ["reach", "reach"], []],
            "num_goals": [0, 51],
            "horizon": [0],
            "evaluation_horizon": [0],
            "reward_version": ["v3"],
            "goal_seed": [-1],
        },
    ),
    Pixels: (partial(Pixels, ToyReach()), {"size": [0], "frame_stack": [0, 21]}),
    ToyConflict: (ToyConflict, {"num_tasks": [1], "horizon": [0], "reward_spread": [0.0]}),
    ToyReach: (ToyReach, {"num_tasks": [0], "horizon": [0]}),
    VectorEnv: (vector_env, {"tasks": [[], [3]], "split": ["test"], "num_workers": [-1]}),
    # rollout
    ActionNoise: (partial(ActionNoise, std=0.1), {"std": [0.0, INFINITY]}),
    Collector: (collector, {"window": [0]}),
    CorrelatedNoise: (CorrelatedNoise, {"correlation": [-0.1, 1.0]}),
    EndAfterSuccess: (EndAfterSuccess, {"steps": [-1]}),
    Evaluator: (evaluator, {"num_episodes": [0], "envs_per_task": [0], "split": ["test"]}),
    PauseSolved: (PauseSolved, {"success": [-0.1, 1.0], "minimum": RATES, "episodes": [0]}),
    PolicyReuse: (PolicyReuse, {"fraction": [-0.1, 1.0], "success": RATES, "episodes": [0]}),
    StartMidway: (StartMidway, {"fraction": [0.0, 1.1]}),
    # replay and data
    ReplayData: (
        partial(ReplayData, ToyReach()),
        {
            "total_steps": [0],
            "batch_size": [0, 31],
            "capacity": [3],
            "warmup_steps": [0, 1_000_000],
            "warmup_updates": [-1],
            "updates_per_step": [0.0],
            "chunk_mebibytes": [0.0],
            "save_last": [0],
        },
    ),
    RolloutData: (
        partial(RolloutData, ToyReach()),
        {
            "envs_per_task": [0],
            "learner_threads": [0],
            "window": [0],
            "timeout": [0.0],
            "max_restarts": [-1],
            "exclude_from_training": [["reach-9"]],
            "extras": [[PauseSolved(), PauseSolved()]],
        },
    ),
    DemonstrationData: (
        partial(DemonstrationData, ToyReach(), "unused"),
        {"total_steps": [0], "batch_size": [0, 31]},
    ),
    ReplayBuffer: (partial(ReplayBuffer, SPEC, capacity=3), {"capacity": [2]}),
    ReplaySnapshots: (
        partial(ReplaySnapshots, Path("unused")),
        {"chunk_mebibytes": [0.0], "save_last": [0]},
    ),
    RolloutBuffer: (rollout_buffer, {"num_minibatches": [3]}),
    # callbacks
    EnvStepCheckpoint: (EnvStepCheckpoint, {"every_n_env_steps": [0]}),
    EvaluationCallback: (
        EvaluationCallback,
        {
            "every": [0],
            "num_episodes": [0],
            "envs_per_task": [0],
            "timeout": [0.0],
            "max_restarts": [-1],
        },
    ),
    MetricsCallback: (MetricsCallback, {"every": [0]}),
    ResetCallback: (ResetCallback, {"every": [0], "times": [0, 1]}),
    VideoCallback: (
        VideoCallback,
        {
            "every": [0],
            "num_episodes": [0],
            "first_episode": [-1],
            "width": [0],
            "height": [0],
            "fps": [0],
            "num_workers": [-1],
            "timeout": [0.0],
        },
    ),
}
NEEDS = {MetaWorld: "metaworld", DMControl: "dm_control", DMControlFamily: "dm_control"}
NAMED_AS = {"ratio": "updates_per_step", "burst": "warmup_updates"}
"""Options that set an argument of another name, by which errors name it."""
CHECKS = {"at_least", "above", "within", "increasing", "one_of"}
NO_OPTIONS = {"prefix", "hint", "finite", "above_low", "below_high"}
"""Keywords of the checks themselves."""


def rows() -> Iterator[Any]:
    for cls, (_, bad) in TABLE.items():
        for argument, values in bad.items():
            for i, value in enumerate(values):
                yield pytest.param(cls, argument, value, id=f"{cls.__name__}-{argument}-{i}")


def build(cls: type, **options: Any) -> None:
    """Build an object and close it."""
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    with torch.random.fork_rng():
        built = TABLE[cls][0](**options)
    if isinstance(built, Collector):
        built = built.envs
    if isinstance(built, VectorEnv | Evaluator):
        built.close()


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.__name__)
def test_a_valid_object_can_be_built(cls):
    build(cls)


@pytest.mark.parametrize(("cls", "argument", "value"), list(rows()))
def test_a_bad_value_is_refused(cls, argument, value):
    name = NAMED_AS.get(argument, argument) if isinstance(value, int | float) else ""
    with pytest.raises(ConfigurationError, match=name or None):
        build(cls, **{argument: value})


def checked_arguments() -> Iterator[tuple[str, str]]:
    """Return each public class with the arguments that its constructor checks."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in classes:
        for function in node.body:
            if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
                continue
            given = function.args
            parameters = {argument.arg for argument in [*given.args[1:], *given.kwonlyargs]}
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or ast.unparse(call.func) not in CHECKS:
                    continue
                for option in call.keywords:
                    if option.arg not in NO_OPTIONS:
                        found = {n.id for n in ast.walk(option.value) if isinstance(n, ast.Name)}
                        yield from ((node.name, name) for name in found & parameters)


def test_the_table_has_every_argument_that_a_constructor_checks():
    in_table = {
        (base.__name__, argument)
        for cls, (_, bad) in TABLE.items()
        for argument in bad
        for base in cls.__mro__
    }
    checked = set(checked_arguments())
    assert len(checked) > 80
    assert checked - in_table == set()
