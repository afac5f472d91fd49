"""The programs that ``updating`` compares, each a process that updates in windows (``pacing.py``).

``python -m benchmarks.updaters OPTIONS`` is one of them; ``OPTIONS`` is JSON.
Batches are drawn once and used in turn, so that only the update is measured.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.pace_callback import PaceCallback
from benchmarks.pacing import Pacer
from benchmarks.plain_sac import PlainBatch, PlainSAC, Sizes
from mtrl_lightning.algorithms import PPO, SAC, Algorithm
from mtrl_lightning.errors import import_optional
from mtrl_lightning.networks import MLP, MultiHead
from mtrl_lightning.products import input_gradient, linear, weight_gradient
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch

OBSERVATION = 39
"""Size of MetaWorld's observation."""
ACTION = 4
"""Size of its action."""
BATCHES = 8
"""Batches that are used in turn."""


@dataclass
class Work:
    """What is updated, and how."""

    tasks: int
    batch_size: int
    """Over all tasks."""
    width: int
    depth: int
    precision: str
    """``32-true`` or ``bf16-mixed``."""
    compile: str
    """Option of ``SAC``."""
    device: str
    """``cpu`` or ``cuda``."""
    threads: int | None
    """PyTorch's; None for its own choice."""
    steps: int
    """Updates of a window."""
    settle: int
    """Updates before the first window."""
    descriptor: int = -1
    """Of the open file that the windows' seconds are written to."""
    layer_norm: bool = False
    """Whether the critics have LayerNorm."""

    @property
    def spec(self) -> EnvSpec:
        """Tasks with MetaWorld's spaces."""
        return EnvSpec(
            task_names=tuple(f"task-{i}" for i in range(self.tasks)),
            observation_space=Box(-np.inf, np.inf, (OBSERVATION,), np.float64),
            action_space=Box(-1.0, 1.0, (ACTION,), np.float32),
            horizon=500,
            has_success=True,
            train_tasks=tuple(range(self.tasks)),
            protocol={},
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of matrix products, in this precision."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float32

    @property
    def autocast(self) -> torch.autocast:
        """Lightning's, for this precision."""
        kind = torch.device(self.device).type
        return torch.autocast(
            kind, torch.bfloat16, enabled=self.precision == "bf16-mixed", cache_enabled=False
        )


def make_sac(work: Work, seed: int = 1, **options: Any) -> SAC:
    """Return SAC as in ``configs/experiment/mtmhsac.yaml``, with further options."""
    network = partial(MultiHead, width=work.width, depth=work.depth)
    actor = partial(network, output_bound=1e-3)
    critic = partial(network, output_bound=3e-3, layer_norm=work.layer_norm)
    how: Any = work.compile
    return SAC(work.spec, actor=actor, critic=critic, compile=how, seed=seed, **options).to(
        work.device
    )


def make_ppo(work: Work) -> PPO:
    """Return PPO as in ``configs/experiment/mt10_mtppo.yaml``."""
    network = partial(MLP, width=work.width, depth=work.depth)
    critic = partial(network, layer_norm=work.layer_norm)
    how: Any = work.compile
    ppo = PPO(work.spec, actor=network, critic=critic, max_kl=None, compile=how, seed=1)
    return ppo.to(work.device)


def make_minibatches(work: Work) -> list[TransitionBatch]:
    """Return batches with what PPO has collected and computed, in standard normal numbers."""
    found = []
    for batch in make_batches(work):
        # noise of standard deviation 1 around a policy's mean of about 0
        sample_RnA = torch.randn_like(batch.action_RnA)
        log_prob_Rn = torch.distributions.Normal(0.0, 1.0).log_prob(sample_RnA).sum(-1)
        columns = {name: torch.randn_like(log_prob_Rn) for name in ("advantage", "value", "target")}
        columns |= {"unclipped_action": sample_RnA, "log_prob": log_prob_Rn}
        found.append(batch._replace(extra=columns))
    return found


def make_batches(work: Work) -> list[TransitionBatch]:
    """Return batches of standard normal numbers."""
    generator = torch.Generator().manual_seed(0)
    B = work.batch_size
    task_R = torch.arange(work.tasks)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batches = [
        batch_of(
            {
                "observation": draw(B, OBSERVATION),
                "action": draw(B, ACTION).tanh(),
                "reward": draw(B),
                "next_observation": draw(B, OBSERVATION),
                "terminated": draw(B) > 3,
            },
            task_R,
        )
        for _ in range(BATCHES)
    ]
    return [_on_device(batch, work.device) for batch in batches]


def _on_device(batch: TransitionBatch, device: str) -> TransitionBatch:
    return TransitionBatch(*(column.to(device) for column in batch[:-1]))  # type: ignore[arg-type]


def with_one_hot(batch: TransitionBatch, num_tasks: int) -> PlainBatch:
    """Return the batch as the plain loop takes it."""
    code_RnT = torch.nn.functional.one_hot(batch.task_Rn, num_tasks).float()
    columns = batch._replace(
        observation_RnD=torch.cat([batch.observation_RnD, code_RnT], -1),
        next_observation_RnD=torch.cat([batch.next_observation_RnD, code_RnT], -1),
    )
    return PlainBatch(*(column.flatten(0, 1) for column in columns[:-1]))  # type: ignore[arg-type]


def direct_update(work: Work, algorithm: Algorithm) -> Callable[[TransitionBatch], None]:
    """Return ``training_step`` without a trainer, in the precision that a trainer would set."""
    optimizers = algorithm.configure_optimizers()
    setattr(algorithm, "optimizers", lambda use_pl_optimizer=True: optimizers)  # noqa: B010

    def update(batch: TransitionBatch) -> None:
        with work.autocast:
            algorithm.training_step(batch, 0)

    return update


def run_direct(work: Work) -> None:
    """Call ``SAC.training_step``."""
    update = direct_update(work, make_sac(work))
    batches = itertools.cycle(make_batches(work))
    _run(work, lambda: update(next(batches)))


def run_ppo(work: Work) -> None:
    """Call ``PPO.training_step``."""
    update = direct_update(work, make_ppo(work))
    batches = itertools.cycle(make_minibatches(work))
    _run(work, lambda: update(next(batches)))


def run_plain(work: Work) -> None:
    """Call the plain loop's update."""
    sizes = Sizes(OBSERVATION, ACTION, work.tasks, work.batch_size, work.width, work.depth)
    agent = PlainSAC(sizes, work.device, bf16=work.precision == "bf16-mixed")
    batches = itertools.cycle([with_one_hot(batch, work.tasks) for batch in make_batches(work)])
    _run(work, lambda: agent.update(next(batches)))


def run_sb3(work: Work) -> None:
    """Call the update of Stable-Baselines3's SAC, which draws its batch each time."""
    sb3 = import_optional("stable_baselines3", '"mtrl_lightning[bench]"')
    network = {
        "net_arch": [work.width] * work.depth,
        "n_critics": 2,
        "optimizer_kwargs": {"eps": 1e-5},
    }
    model = sb3.SAC(
        "MlpPolicy",
        _Spaces(work.tasks),
        learning_rate=3e-4,
        buffer_size=20_000,
        batch_size=work.batch_size,
        tau=0.005,
        gamma=0.99,
        device=work.device,
        seed=1,
        policy_kwargs=network,
    )
    model.set_logger(sb3.common.logger.configure(None, []))
    buffer = model.replay_buffer
    draws = np.random.default_rng(0)
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = draws.standard_normal(array.shape)
    buffer.full = True
    _run(work, lambda: model.train(gradient_steps=1, batch_size=work.batch_size))


class Products(NamedTuple):
    """How often a network's hidden layers are multiplied in an update."""

    in_dim: int
    """Inputs of the first layer."""
    dtype: torch.dtype
    outputs: int
    """Products that give a layer's outputs."""
    inputs: int
    """Products that give the gradient of the inputs of all layers but the first."""
    first_inputs: int
    """The same of the first layer."""
    weights: int
    """Products that give the gradient of the weights."""


def products_of_sac(work: Work) -> list[Products]:
    """Return the products of actor and critics.

    Forward: the policy now and next, two critics, their targets, and the critics that the policy
    asks. Backward to the inputs: the critics, the policy, and the smaller of the critics that it
    asked, which also needs the gradient of the actions. Backward to the weights: the critics and
    the policy.
    """
    in_dim = OBSERVATION + work.tasks
    return [
        Products(in_dim, work.dtype, outputs=2, inputs=1, first_inputs=0, weights=1),
        Products(in_dim + ACTION, work.dtype, outputs=6, inputs=3, first_inputs=1, weights=2),
    ]


def products_of_ppo(work: Work) -> list[Products]:
    """Return the products of the actor, which is always computed in float32, and the critic."""
    once = {"outputs": 1, "inputs": 1, "first_inputs": 0, "weights": 1}
    in_dim = OBSERVATION + work.tasks
    return [Products(in_dim, dtype, **once) for dtype in (torch.float32, work.dtype)]


def run_products(networks: Callable[[Work], list[Products]], work: Work) -> None:
    """Multiply what the hidden layers of an update have to multiply, and nothing else."""
    made = [
        (
            products,
            _drawn(work, products.in_dim, products.dtype),
            _drawn(work, work.width, products.dtype),
        )
        for products in networks(work)
    ]

    def update() -> None:
        for products, (x_BI, weight_HI), (x_BH, weight_HH) in made:
            for place in range(work.depth):
                is_first = place == 0
                input_B, weight_H = (x_BI, weight_HI) if is_first else (x_BH, weight_HH)
                for _ in range(products.outputs):
                    linear(input_B, weight_H)
                for _ in range(products.first_inputs if is_first else products.inputs):
                    input_gradient(x_BH, weight_H)
                for _ in range(products.weights):
                    weight_gradient(x_BH, input_B)

    _run(work, update)


def _drawn(work: Work, in_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the weight of a hidden layer; inputs stand for gradients as well."""
    input_BI = torch.randn(work.batch_size, in_dim, device=work.device)
    weight_HI = torch.randn(work.width, in_dim, device=work.device)
    return input_BI.to(dtype), weight_HI.to(dtype)


def run_trainer(work: Work) -> None:
    """Let Lightning's trainer make the updates, without any of our callbacks."""
    trainer = Trainer(
        accelerator="gpu" if work.device == "cuda" else "cpu",
        devices=1,
        precision=work.precision,  # type: ignore[arg-type]
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PaceCallback(work.steps, work.settle, work.descriptor)],
    )
    loader = DataLoader(_Batches(make_batches(work)), batch_size=None)
    trainer.fit(make_sac(work), loader, weights_only=True)


def _run(work: Work, update: Callable[[], Any]) -> None:
    pacer = Pacer(work.steps, work.settle, work.descriptor)
    while pacer.tick():
        update()


class _Batches(IterableDataset[TransitionBatch]):
    def __init__(self, batches: list[TransitionBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Iterator[TransitionBatch]:
        return itertools.cycle(self._batches)


class _Spaces(gym.Env):
    """Spaces as MetaWorld's with the one-hot; nothing is stepped."""

    def __init__(self, num_tasks: int) -> None:
        self.observation_space = Box(-np.inf, np.inf, (OBSERVATION + num_tasks,), np.float64)
        self.action_space = Box(-1.0, 1.0, (ACTION,), np.float32)


RUN: dict[str, Callable[[Work], None]] = {
    "direct": run_direct,
    "ppo": run_ppo,
    "trainer": run_trainer,
    "plain": run_plain,
    "sb3": run_sb3,
    "products": partial(run_products, products_of_sac),
    "ppo_products": partial(run_products, products_of_ppo),
}


def options_of(work: Work, kind: str) -> dict[str, Any]:
    """Return what the process of a kind takes."""
    return {"kind": kind, **asdict(work)}


def main() -> None:
    """Make updates until no further window is asked for."""
    options = json.loads(sys.argv[1])
    run = RUN[options.pop("kind")]
    work = Work(**options)
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    if run not in (run_plain, run_sb3):
        keep_freed_memory()  # as a run of ours does
    run(work)


if __name__ == "__main__":
    main()
