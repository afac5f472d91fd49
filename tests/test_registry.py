"""Every public class: a minimal instance, its state through a file, and values it refuses.

``TABLE`` has for each class a factory of a valid object and bad values by argument.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import DiscretizeAction, RescaleAction

from mtrl_lightning import (
    algorithms,
    auxiliaries,
    callbacks,
    data,
    envs,
    gradients,
    networks,
    replay,
    rollout,
)
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks, check_spec
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.network import UntrainedTasks
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
from tests.helpers.altered_reach import Halves
from tests.helpers.fakes import Constant, Line
from tests.helpers.networks import STATES, STATES_CONTEXT
from tests.helpers.specs import discrete_spec, packed_spec, spec_of

NAN, INF = math.nan, math.inf
SPEC = spec_of(3)
IMAGES = pixel_spec()
STRANGE = spec_of(["goal-98", "goal-99"])
WORDS = {"num_experts": 1, "words": [["task"]]}


def image_spec(dtype, *shape):
    return spec_of(3, Box(0, 255 if dtype == np.uint8 else 1, shape, dtype))


def network(cls):
    """Return a factory of a small network of 4 inputs and 2 outputs."""
    return partial(cls, 4, 2, SPEC)


def auxiliary(cls, encoder=STATES):
    """Return a factory of an auxiliary loss on an encoder of its own."""

    def build(spec=SPEC, make_encoder=encoder, **options):
        return cls(spec, make_encoder(spec), **options)

    return build


def scale(cls):
    return lambda **options: cls(SPEC, networks.MLP(4, 1, SPEC, width=8, depth=1), **options)


def vector_env(**options):
    return envs.VectorEnv(envs.ToyReach(), **{"tasks": [0], "num_workers": 0, **options})


def checked_spec(**changed):
    return check_spec(SPEC._replace(**changed))


def checked_extras(spec=SPEC, window=20, envs_per_task=2):
    for name in ("StartMidway", "EndAfterSuccess", "PauseSolved", "PolicyReuse"):
        getattr(rollout, name)().check(spec, window, envs_per_task)


class Unbounded(Line):
    action_space = Box(-INF, INF, (1,), np.float32)


def evaluator(**options):
    return rollout.Evaluator(envs.ToyReach(), **{"num_episodes": 1, "num_workers": 0, **options})


def guard(**options):
    given = {"on_nonfinite": "stop", "max_skipped": 1, **options}
    return DivergenceGuard(**given, task_names=SPEC.task_names, counters=Counters())


def rollout_buffer(num_steps=4, num_minibatches=2):
    return replay.RolloutBuffer(
        SPEC, SPEC.train_tasks, RolloutConfig(num_steps, 1, num_minibatches)
    )


RATES = [0.0, 1.1, NAN]
"""Outside of (0, 1]."""
SIZES = {"width": [0], "depth": [0]}
STD = {"log_std_min": [2.0, 3.0, NAN], "log_std_max": [-30.0]}
LOOP = {"num_episodes": [0], "timeout": [0.0]}
# fmt: off
TABLE = {
    # algorithms
    algorithms.Algorithm: (partial(algorithms.Algorithm, SPEC), {
        "on_nonfinite": ["ignore"], "max_skipped_updates": [-1], "untrained_tasks": ["other"]}),
    algorithms.ActorCritic: (make_sac, {
        "num_critics": [0], "actor_every": [0], "target_every": [0], "tau": RATES,
        "discount": [-0.1, 1.1, NAN, "0.9"], "encoder_tau": RATES, "actor_max_grad_norm": [0.0],
        "critic_max_grad_norm": [-1.0]}),
    algorithms.SAC: (make_sac, {
        **STD, "task_weighting": [partial(algorithms.ManualWeights, weights={"task-9": 1.0})],
        "reward_scale": [partial(algorithms.ReturnRange, discount=0.9)],
        "temperature": [partial(algorithms.Temperature, initial=0.0)]}),
    algorithms.TD3: (make_td3, {
        "exploration_std_min": [-0.1, INF], "exploration_std_max": [0.05, INF],
        "target_std": [-0.1, INF], "target_clip": [-0.1], "spec": [discrete_spec((2, 3))],
        "task_weighting": [algorithms.TemperatureWeights]}),
    algorithms.Distral: (make_distral, {
        "kappa": [-0.1, INF], "omega": [0.0, INF], "distilled_max_grad_norm": [0.0],
        "encoder": [networks.AppendTask, partial(networks.CARE, conditioning=networks.Embedding)]}),
    algorithms.PPO: (make_ppo, {
        "num_steps": [0], "num_epochs": [0], "num_minibatches": [0], "discount": [-0.1, 1.1],
        "gae_lambda": [-0.1, 1.1], "clip": [0.0], "max_kl": [0.0],
        "entropy_coef": [-0.1]}),
    algorithms.BehaviourCloning: (make_bc, {"loss": ["l1"], **STD}),
    # updates
    algorithms.ManualWeights: (partial(algorithms.ManualWeights, spec=SPEC,
        weights={"task-0": 2.0}), {
        "weights": [{"task-9": 1.0}, {"task-0": -1.0}, {"task-0": NAN},
                    dict.fromkeys(SPEC.task_names, 0.0)],
        "spec": [spec_of(3, train_tasks=[1, 2])]}),
    algorithms.EqualWeights: (partial(algorithms.EqualWeights, SPEC), {}),
    algorithms.TemperatureWeights: (partial(make_sac, task_weighting=algorithms.TemperatureWeights),
        {"temperature": [algorithms.FixedTemperature,
        partial(algorithms.Temperature, per_task=False)]}),
    algorithms.Categorical: (algorithms.Categorical, {"num_bins": [1], "bound": [0.0]}),
    discrete_spec: (partial(make_sac, discrete_spec((2, 3))), {"value": [algorithms.Categorical]}),
    algorithms.Scalar: (algorithms.Scalar, {"reduction": ["max"]}),
    DivergenceGuard: (guard, {"on_nonfinite": ["ignore"], "max_skipped": [-1]}),
    algorithms.Temperature: (partial(algorithms.Temperature, SPEC), {"initial": [0.0, NAN]}),
    algorithms.FixedTemperature: (partial(algorithms.FixedTemperature, SPEC), {"value": [0.0,
        NAN]}),
    algorithms.LinearRate: (algorithms.LinearRate, {"final": [-0.1]}),
    algorithms.RewardScale: (partial(algorithms.RewardScale, SPEC), {}),
    algorithms.MeanReward: (partial(algorithms.MeanReward, SPEC), {"max_factor": [0.5]}),
    algorithms.NormalizeReward: (partial(algorithms.NormalizeReward, SPEC), {
        "discount": [-0.1, 1.1], "clip": [0.0], "epsilon": [0.0]}),
    algorithms.ReturnRange: (partial(algorithms.ReturnRange, SPEC), {"discount": [-0.1, 1.0],
        "bound": [0.0]}),
    algorithms.ReturnScale: (scale(algorithms.ReturnScale), {}),
    algorithms.PopArt: (scale(algorithms.PopArt), {"step_size": RATES, "min_std": [0.0]}),
    algorithms.RandomShift: (partial(algorithms.RandomShift, spec=IMAGES), {"padding": [0],
        "spec": [SPEC]}),
    algorithms.Update: (lambda max_grad_norm=1.0: make_sac(actor_max_grad_norm=max_grad_norm), {
        "max_grad_norm": [0.0]}),
    Every: (partial(Every, interval=1), {"interval": [0]}),
    UpdateRatio: (partial(UpdateRatio, ratio=1), {"ratio": [0.0, INF], "burst": [-1]}),
    # gradient methods
    gradients.AlignedMTL: (partial(gradients.AlignedMTL, SPEC), {}),
    gradients.Mean: (partial(gradients.Mean, SPEC), {}),
    gradients.PCGrad: (partial(gradients.PCGrad, SPEC), {}),
    gradients.CAGrad: (partial(gradients.CAGrad, SPEC), {"c": [-0.1], "num_sampled": [0]}),
    gradients.FAMO: (partial(gradients.FAMO, SPEC), {"lr": [0.0], "decay": [-0.1]}),
    gradients.FairGrad: (partial(gradients.FairGrad, SPEC), {"alpha": [-0.1, INF, NAN]}),
    gradients.GradNorm: (partial(gradients.GradNorm, SPEC), {"asymmetry": [-1.0], "lr": [0.0]}),
    gradients.NashMTL: (partial(gradients.NashMTL, SPEC), {"max_norm": [0.0], "update_every": [0]}),
    # networks
    networks.Ensemble: (partial(networks.Ensemble, partial(networks.MLP, 4, 2, SPEC), 2), {}),
    networks.Experts: (partial(networks.Experts, num_experts=2, in_dim=4, out_dim=2, width=8,
        depth=1), {
        "num_experts": [0], "in_dim": [0], "out_dim": [0], "width": [0], "depth": [-1]}),
    networks.FiLM: (network(networks.FiLM), {**SIZES, "conditioning": [networks.NoConditioning]}),
    HiddenLayers: (partial(HiddenLayers, 4, width=8, depth=1, layer_norm=False), SIZES),
    networks.MLP: (network(networks.MLP), SIZES),
    networks.MOORE: (network(networks.MOORE), {
        **SIZES, "num_experts": [0, 401], "conditioning": [networks.NoConditioning]}),
    networks.MultiHead: (network(networks.MultiHead), {"head_width": [-1]}),
    networks.OneForAll: (partial(network(networks.OneForAll), make=networks.MLP), {}),
    networks.OnePerTask: (partial(network(networks.OnePerTask), make=networks.MLP), {}),
    networks.PaCo: (network(networks.PaCo), {
        **SIZES, "num_sets": [0], "max_loss": [0.0], "conditioning": [networks.Embedding,
        networks.NoConditioning]}),
    networks.Projection: (partial(networks.Projection, 4, 2), {}),
    networks.ProjectedNetwork: (lambda: networks.ProjectedNetwork(networks.Projection(7, 4),
        networks.MLP(4, 2, SPEC)), {}),
    networks.Separate: (network(networks.Separate), SIZES),
    networks.SoftModularization: (network(networks.SoftModularization), {
        **SIZES, "num_modules": [0], "embedding_dim": [0],
        "conditioning": [networks.NoConditioning]}),
    networks.PolicyStd: (partial(networks.PolicyStd, SPEC), {
        "initial": [1.0, -3.0, NAN], "minimum": [0.1], "maximum": [-0.1]}),
    networks.StateDependentStd: (partial(networks.StateDependentStd, SPEC), {}),
    networks.StateIndependentStd: (partial(networks.StateIndependentStd, SPEC), {}),
    # encoders and task conditionings
    networks.AppendTask: (partial(networks.AppendTask, SPEC), {}),
    networks.Attention: (partial(networks.Attention, 3, SPEC), {
        "temperature": [0.0, NAN], "width": [0], "depth": [0]}),
    networks.CARE: (partial(networks.CARE, spec=SPEC, conditioning=networks.Embedding), {
        **SIZES, "num_experts": [0], "out_dim": [0], "spec": [IMAGES]}),
    networks.Clusters: (partial(networks.Clusters, spec=SPEC, **WORDS), {
        "num_experts": [2], "words": [[["a"], ["b"]]], "descriptions": ["nowhere.json"],
        "spec": [STRANGE]}),
    networks.Embedding: (partial(networks.Embedding, SPEC), {"dim": [0]}),
    networks.Identity: (partial(networks.Identity, spec=SPEC), {"spec": [IMAGES]}),
    networks.Language: (partial(networks.Language, spec=spec_of(["reach-v3"])), {
        "path": ["nowhere.json"], "spec": [STRANGE]}),
    networks.MLPEncoder: (partial(networks.MLPEncoder, spec=SPEC), {**SIZES, "out_dim": [0],
        "spec": [IMAGES]}),
    networks.MixtureOfEncoders: (partial(networks.MixtureOfEncoders, spec=SPEC), {
        **SIZES, "num_experts": [0], "out_dim": [0], "spec": [IMAGES]}),
    networks.NoConditioning: (partial(networks.NoConditioning, SPEC), {}),
    networks.OneHot: (partial(networks.OneHot, SPEC), {}),
    networks.OneHotGate: (partial(networks.OneHotGate, num_experts=3, spec=SPEC), {
        "num_experts": [4]}),
    networks.MultiInput: (partial(networks.MultiInput, spec=packed_spec()), {
        "channels": [0], "strides": [(0,)], "out_dim": [0], "num_updates": [0],
        "spec": [SPEC, IMAGES]}),
    networks.PixelEncoder: (partial(networks.PixelEncoder, spec=IMAGES), {
        "channels": [0], "strides": [(), (2, 0)], "out_dim": [0],
        "spec": [SPEC, image_spec(np.uint8, 3, 14, 30), image_spec(np.float32, 3, 20, 20)]}),
    networks.Standardize: (partial(networks.Standardize, spec=SPEC, per_task=False), {
        "num_updates": [0], "min_std": [0.0], "clip": [1.0],
        "spec": [IMAGES, spec_of(3, observation_sizes=(4, 3, 2))]}),
    networks.TaskEncoder: (partial(networks.TaskEncoder, SPEC), {**SIZES, "out_dim": [0]}),
    networks.TopKGate: (partial(networks.TopKGate, 3, SPEC), {"num_chosen": [0, 4]}),
    networks.UniformGate: (partial(networks.UniformGate, 3, SPEC), {}),
    UntrainedTasks: (partial(UntrainedTasks, SPEC), {"parameters": ["other"]}),
    # auxiliary losses
    auxiliaries.Deterministic: (partial(auxiliaries.Deterministic, 4, 2), {"width": [0]}),
    auxiliaries.HiPBMDP: (auxiliary(auxiliaries.HiPBMDP, STATES_CONTEXT), {
        "distance_weight": [-0.1], "distance_loss": ["cubic"],
        "spec": [spec_of(1)], "make_encoder": [STATES, networks.Identity]}),
    auxiliaries.LatentDynamics: (auxiliary(auxiliaries.LatentDynamics), {
        "width": [0], "reward_from": ["z"], "every": [0], "after": ["actor"],
        "weight_decay": [-0.1], "make_encoder": [networks.Identity]}),
    auxiliaries.Probabilistic: (partial(auxiliaries.Probabilistic, 4, 2), {
        "width": [0]}),
    auxiliaries.Reconstruction: (auxiliary(auxiliaries.Reconstruction), {
        "latent_weight": [-0.1], "weight_decay": [-0.1],
        "make_encoder": [networks.Identity, partial(networks.CARE,
        conditioning=networks.Embedding)]}),
    auxiliaries.TransitionEnsemble: (partial(auxiliaries.TransitionEnsemble, 4, 2), {"size": [0]}),
    # benchmarks and vector environments
    envs.DMControl: (partial(envs.DMControl, tasks=["cartpole-swingup"]), {
        "tasks": [["cartpole-fly"], []], "horizon": [0, 1001], "action_repeat": [0, 1001],
        "reward_scale": [0.0, INF]}),
    envs.DMControlFamily: (partial(envs.DMControlFamily, family="cartpole_pole"), {
        "family": ["cartpole"], "train": [[], [-1.0], [0.5, 0.5]], "task": ["reach-v3"],
        "eval_interpolation": [[0.4, 0.9]], "eval_extrapolation": [[0.2, 0.35]]}),
    envs.GymnasiumTasks: (partial(envs.GymnasiumTasks, tasks=["Pendulum-v1"], horizon=3), {
        "tasks": [[], 3, *({"a": made} for made in (3, "Nowhere-v0", dict, Unbounded))],
        "horizon": [0]}),
    checked_spec: (checked_spec, {
        "observation_space": [Discrete(3)], "action_space": [Discrete(3), Box(-2.0, 2.0, (2,))],
        "action_choices": [(3,)], "train_tasks": [(1, 0)], "max_return": [0.0],
        "frame_stack": [3], "observation_sizes": [(9, 2, 2)], "task_names": [("a", "b", "a")],
        "info_keys": [("a", "a_last")]}),
    OnlyTasks: (partial(OnlyTasks, Halves(2), tasks=["goal-1"]), {"tasks": [["goal-0"]]}),
    envs.WithWrappers: (partial(envs.WithWrappers, envs.ToyReach(), wrappers=[]), {
        "wrappers": [[wrapper] for wrapper in (
            "nowhere.Wrapper", "gymnasium.wrappers.NormalizeObservation",
            partial(RescaleAction, min_action=-2, max_action=2),
            partial(DiscretizeAction, bins=3))]}),
    envs.MetaWorld: (partial(envs.MetaWorld, tasks=["reach"]), {
        "tasks": [["reech"], ["reach", "reach"], []], "num_goals": [0, 51], "horizon": [0],
        "evaluation_horizon": [0], "reward_version": ["v3"], "goal_seed": [-1]}),
    envs.Pixels: (partial(envs.Pixels, envs.ToyReach()), {"size": [0], "frame_stack": [0, 21]}),
    envs.ToyConflict: (envs.ToyConflict, {"num_tasks": [1], "horizon": [0],
        "reward_spread": [0.0]}),
    envs.ToyReach: (envs.ToyReach, {"num_tasks": [0], "horizon": [0]}),
    envs.VectorEnv: (vector_env, {"tasks": [[], [3]], "split": ["test"], "num_workers": [-1]}),
    # rollout
    rollout.ActionNoise: (partial(rollout.ActionNoise, std=0.1), {"std": [0.0, INF]}),
    rollout.Collector: (lambda **options: rollout.Collector(vector_env(), Constant(), **options),
        {"window": [0]}),
    rollout.CorrelatedNoise: (rollout.CorrelatedNoise, {"correlation": [-0.1, 1.0]}),
    rollout.EndAfterSuccess: (rollout.EndAfterSuccess, {"steps": [-1]}),
    rollout.Evaluator: (evaluator, {"num_episodes": [0], "envs_per_task": [0], "split": ["test"]}),
    rollout.PauseSolved: (rollout.PauseSolved, {"success": [-0.1, 1.0], "minimum": RATES,
        "episodes": [0]}),
    rollout.PolicyReuse: (rollout.PolicyReuse, {"fraction": [-0.1, 1.0], "success": RATES,
        "episodes": [0]}),
    rollout.StartMidway: (rollout.StartMidway, {"fraction": [0.0, 1.1]}),
    checked_extras: (checked_extras, {"window": [19], "envs_per_task": [1], "spec": [
        SPEC._replace(has_success=False), SPEC._replace(has_success=False, max_return=9.0),
        spec_of(3, observation_sizes=(4, 3, 2))]}),
    # replay and data
    data.ReplayData: (partial(data.ReplayData, envs.ToyReach()), {
        "total_steps": [0], "batch_size": [0, 31], "capacity": [3],
        "warmup_steps": [0, 1_000_000], "warmup_updates": [-1], "updates_per_step": [0.0],
        "chunk_mebibytes": [0.0], "save_last": [0]}),
    data.RolloutData: (partial(data.RolloutData, envs.ToyReach()), {
        "envs_per_task": [0], "learner_threads": [0], "window": [0], "timeout": [0.0],
        "max_restarts": [-1], "extras": [[rollout.PauseSolved(), rollout.PauseSolved()]],
        "exclude_from_training": [["reach-9"], envs.ToyReach().spec.task_names],
        "store_info": [True]}),
    data.DemonstrationData: (partial(data.DemonstrationData, envs.ToyReach(), "unused"), {
        "total_steps": [0], "batch_size": [0, 31]}),
    replay.ReplayBuffer: (partial(replay.ReplayBuffer, SPEC, capacity=3), {"capacity": [2]}),
    replay.ReplaySnapshots: (partial(replay.ReplaySnapshots, Path("unused")), {
        "chunk_mebibytes": [0.0], "save_last": [0]}),
    replay.RolloutBuffer: (rollout_buffer, {"num_minibatches": [3]}),
    # callbacks
    callbacks.EnvStepCheckpoint: (callbacks.EnvStepCheckpoint, {"every_n_env_steps": [0]}),
    callbacks.EvaluationCallback: (callbacks.EvaluationCallback, {
        **LOOP, "every": [0], "envs_per_task": [0], "max_restarts": [-1]}),
    callbacks.MetricsCallback: (callbacks.MetricsCallback, {"every": [0]}),
    callbacks.ResetCallback: (callbacks.ResetCallback, {"every": [0], "times": [0, 1]}),
    callbacks.VideoCallback: (callbacks.VideoCallback, {
        **LOOP, "every": [0], "first_episode": [-1], "width": [0], "height": [0], "fps": [0],
        "num_workers": [-1]}),
}
# fmt: on
NEEDS = {
    envs.MetaWorld: "metaworld",
    envs.DMControl: "dm_control",
    envs.DMControlFamily: "dm_control",
}
NAMED_AS = {"ratio": "updates_per_step", "burst": "warmup_updates"}
"""Options that set an argument of another name, by which errors name it."""
BAD = [
    pytest.param(cls, argument, value, id=f"{cls.__name__}-{argument}-{i}")
    for cls, (_, bad) in TABLE.items()
    for argument, values in bad.items()
    for i, value in enumerate(values)
]


def build(cls, seed=0, **options):
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TABLE[cls][0](**options)


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.__name__)
def test_instance_is_built_and_its_state_is_loaded(cls, tmp_path):
    built = build(cls)
    if isinstance(built, torch.nn.Module):
        other = build(cls, seed=1)
        torch.save(built.state_dict(), tmp_path / "state")
        other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        tensors = {k: v for k, v in built.state_dict().items() if isinstance(v, torch.Tensor)}
        found = other.state_dict()
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
    built = getattr(built, "envs", built)
    if isinstance(built, envs.VectorEnv | rollout.Evaluator):
        built.close()


@pytest.mark.parametrize(("cls", "argument", "value"), BAD)
def test_bad_value_is_refused_by_its_name(cls, argument, value):
    name = NAMED_AS.get(argument, argument) if isinstance(value, int | float) else ""
    with pytest.raises(ConfigurationError, match=name or None):
        build(cls, **{argument: value})


def test_every_public_class_is_registered():
    protocols = {networks.ActionDistribution, networks.HasTaskAxes}
    public = {
        getattr(room, name)
        for room in (algorithms, auxiliaries, gradients, networks)
        for name in room.__all__
    }
    values = {found for found in public if not isinstance(found, type) or issubclass(found, tuple)}
    others = public - values - protocols - TABLE.keys()
    assert all(base.__subclasses__() for base in others), others
