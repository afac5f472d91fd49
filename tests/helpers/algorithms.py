"""Small tasks, batches and networks for the algorithms' tests."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box
from torch.optim import Optimizer

from mtrl_lightning import networks
from mtrl_lightning.algorithms import PPO, SAC, TD3, Algorithm, BehaviourCloning, Distral
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.networks import ENCODERS, EXPERTS, NETWORKS
from tests.helpers.specs import spec_of

Trained = TypeVar("Trained", bound=Algorithm)

NAMES = ("reach-v3", "push-v3", "door-open-v3")
"""Some conditionings read descriptions of the tasks, which there are for these."""
EMBEDDING = partial(networks.Embedding, dim=4)
MIXTURE = partial(networks.MixtureOfEncoders, **EXPERTS)
ENCODER = partial(networks.MLPEncoder, width=6, out_dim=5)
TASK_INPUTS: dict[str, dict[str, Any]] = {
    "append task": {
        "encoder": partial(networks.AppendTask, conditioning=EMBEDDING),
        "conditioning": networks.NoConditioning,
    },
    "mlp encoder": {"encoder": ENCODER},
    "context": {
        "encoder": partial(ENCODER, context=EMBEDDING),
        "conditioning": networks.NoConditioning,
    },
    "standardize": {"encoder": partial(networks.Standardize, per_task=True)},
    "language": {"conditioning": networks.Language},
    "task encoder": {"conditioning": partial(networks.TaskEncoder, width=6, depth=1, out_dim=5)},
    **{name: {"encoder": make} for name, make in ENCODERS.items()},
}
STACKS: dict[str, dict[str, Any]] = {
    **{
        name: {"actor": make, "critic": make}
        for name, make in NETWORKS.items()
        if name not in ("multi-head of one output", "one per task")
    },
    **{
        name: {"actor": NETWORKS["mlp"], "critic": NETWORKS["mlp"], **options}
        for name, options in TASK_INPUTS.items()
    },
}
"""Networks, encoders and task conditionings, for the three tasks of ``NAMES``."""
HEADS = partial(networks.MultiHead, width=16, depth=2, output_bound=0.3, layer_norm=True)
FULL: dict[str, Any] = {
    "actor": HEADS,
    "critic": HEADS,
    "conditioning": EMBEDDING,
    "encoder": ENCODER,
}
OBSERVATION_ED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TASK_E = np.array([0, 1, 2, 2, 1, 0])


def make_spec(
    num_tasks: int = 3,
    obs_dim: int = 4,
    action_dim: int = 2,
    train_tasks: Sequence[int] | None = None,
) -> EnvSpec:
    space = Box(-np.inf, np.inf, (obs_dim,), np.float32)
    return spec_of(num_tasks, space, action_dim=action_dim, train_tasks=train_tasks)


def pixel_spec(num_tasks: int = 3, side: int = 17, num_frames: int = 2) -> EnvSpec:
    """Return tasks whose observations are stacked images."""
    space = Box(0, 255, (num_frames, 3, side, side + 2), np.uint8)
    return make_spec(num_tasks)._replace(observation_space=space)


def make_batch(spec: EnvSpec, rows: int = 5, seed: int = 0) -> TransitionBatch:
    """Random transitions, ``rows`` of each trained task."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(spec.train_tasks), rows)
    A = spec.action_space.shape[0]
    space = spec.observation_space

    def observations() -> torch.Tensor:
        size = (*shape, *space.shape)
        if space.dtype == np.uint8:
            return torch.randint(256, size, generator=generator, dtype=torch.uint8)
        return torch.randn(size, generator=generator)

    return TransitionBatch(
        observation_RnD=observations(),
        action_RnA=2 * torch.rand(*shape, A, generator=generator) - 1,
        reward_Rn=torch.randn(shape, generator=generator),
        next_observation_RnD=observations(),
        terminated_Rn=torch.rand(shape, generator=generator) < 0.2,
        task_Rn=torch.tensor(spec.train_tasks)[:, None].expand(shape),
    )


small = partial(networks.MLP, width=16, depth=2, output_bound=0.3)


def make(kind: type[Trained], spec: EnvSpec | None = None, **options: Any) -> Trained:
    """Return an algorithm with small networks."""
    names = ("actor",) if kind is BehaviourCloning else ("actor", "critic")
    return kind(spec or make_spec(), **{**dict.fromkeys(names, small), **options})


make_sac = partial(make, SAC)
make_td3 = partial(make, TD3)
make_distral = partial(make, Distral)
make_ppo = partial(make, PPO)
make_bc = partial(make, BehaviourCloning)


def attach(algorithm: Algorithm) -> list[Optimizer]:
    """Give an algorithm its optimizers without a trainer."""
    optimizers = algorithm.configure_optimizers()
    algorithm.optimizers = lambda use_pl_optimizer=True: optimizers
    return optimizers


def learning_batch(algorithm: Algorithm, seed: int = 0) -> TransitionBatch:
    """Random transitions with the columns that an on-policy algorithm computes."""
    batch = make_batch(algorithm.spec, seed=seed)
    if algorithm.kind != "on-policy":
        return batch
    generator = torch.Generator().manual_seed(seed)
    names = ("log_prob", "advantage", "value", "target")
    shape = batch.reward_Rn.shape
    extra = {name: torch.randn(shape, generator=generator) for name in names}
    extra |= {"weight": torch.ones(shape), "unclipped_action": batch.action_RnA}
    return batch._replace(extra=extra)


def train(algorithm: Trained, num_updates: int, first: int = 0) -> Trained:
    """Make updates on the batches ``first``, ``first + 1``, ..."""
    if not callable(algorithm.__dict__.get("optimizers")):
        attach(algorithm)
    for i in range(first, first + num_updates):
        algorithm.training_step(learning_batch(algorithm, seed=i), i)
    return algorithm


def copy_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def changed(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Names of the weights that are no longer what they were."""
    return {
        name for name, value in module.state_dict().items() if not torch.equal(value, before[name])
    }


def checkpoint_of(sac, optimizers=()):
    """What Lightning would write, as far as the algorithm has a hand in it."""
    checkpoint = {
        "state_dict": sac.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
    }
    sac.on_save_checkpoint(checkpoint)
    return checkpoint


def save(algorithm, tmp_path, optimizers=(), change=None):
    """Write what a trainer would, as far as an algorithm reads it."""
    checkpoint = checkpoint_of(algorithm, optimizers)
    if change is not None:
        change(checkpoint)
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"
