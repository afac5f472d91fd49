"""What ``on_policy`` compares ours with, each a process that runs in windows (``pacing.py``).

``python -m benchmarks.on_policy_peers OPTIONS`` is one of them; ``OPTIONS`` is JSON. A window is
one iteration: collection and updates, or the products of its updates alone.

Shapes: ``B`` minibatch, ``I`` inputs and ``O`` outputs of a layer.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from benchmarks.pacing import Pacer, synchronize
from benchmarks.updaters import ACTION, OBSERVATION
from benchmarks.upstream import make_sb3, names_of, one_hot_makers, sb3_vector
from mtrl_lightning.counters import Stopwatch
from mtrl_lightning.errors import import_optional
from mtrl_lightning.resources import keep_freed_memory

SHARED = ["stable_baselines3", "metaworld", "benchmarks.on_policy_peers"]
"""Imported once for all processes of ``SubprocVecEnv``: a hundred imports fill the memory."""


@dataclass
class OnPolicyJob:
    """What is trained, and how."""

    tasks: list[str]
    """A set such as ``MT10``, or names."""
    copies: int
    """Of each task's environment."""
    horizon: int
    """Steps of an episode."""
    num_steps: int
    """Steps of each environment in an iteration."""
    num_epochs: int
    num_minibatches: int
    """Of an epoch."""
    width: int
    depth: int
    device: str
    """``cpu`` or ``cuda``."""
    threads: int | None
    """PyTorch's; None for its own choice."""
    settle: int
    """Iterations before the first window."""
    descriptor: int = -1
    """Of the open file that the windows' seconds are written to."""

    @property
    def num_tasks(self) -> int:
        """Tasks."""
        return len(names_of(self.tasks))

    @property
    def env_steps(self) -> int:
        """Environment steps of an iteration."""
        return self.num_tasks * self.copies * self.num_steps

    @property
    def batch_size(self) -> int:
        """Rows of a minibatch."""
        return self.env_steps // self.num_minibatches

    @property
    def updates(self) -> int:
        """Updates of an iteration."""
        return self.num_epochs * self.num_minibatches


def train_sb3(job: OnPolicyJob, vector: Any, environments: str) -> None:
    """Train Stable-Baselines3's PPO: its MLP policy, with the task's one-hot in the observation.

    Args:
        job: what is trained.
        vector: ``dummy`` or ``subproc``.
        environments: ``metaworld`` for MetaWorld's own, ``ours`` for this package's.
    """
    sb3 = import_optional("stable_baselines3", '"mtrl_lightning[bench]"')
    if vector == "subproc" and "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.get_context("forkserver").set_forkserver_preload(SHARED)
    if environments == "ours":
        makers = one_hot_makers(job.tasks, job.copies, job.horizon, fast=True)
        envs = sb3_vector(makers, vector)
    else:
        envs = make_sb3(job.tasks, vector, copies=job.copies, horizon=job.horizon)
    watch = Stopwatch()
    pacer = Pacer(1, job.settle, job.descriptor, watch.drain)

    class Pace(sb3.common.callbacks.BaseCallback):  # type: ignore[name-defined]
        def _on_rollout_start(self) -> None:
            if self.num_timesteps > 0:
                synchronize()
                watch.stop("update")
            if not pacer.tick():
                sys.exit(0)
            watch.start("collect")

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            watch.stop("collect")
            watch.start("update")

    layers = [job.width] * job.depth
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        n_steps=job.num_steps,
        batch_size=job.batch_size,
        n_epochs=job.num_epochs,
        gamma=0.99,
        gae_lambda=0.95,
        device=job.device,
        seed=1,
        policy_kwargs={
            "net_arch": {"pi": layers, "vf": layers},
            "activation_fn": torch.nn.ReLU,
        },
    )
    model.learn(total_timesteps=10**12, callback=Pace())


def run_products(job: OnPolicyJob) -> None:
    """Multiply what the layers of an iteration's updates have to multiply, and nothing else.

    For every layer of actor and critic: the outputs, the gradient of the weights, and, but for the
    first layer, the gradient of the inputs.
    """
    keep_freed_memory()  # as a run of ours does
    layers = layers_of(job)
    pacer = Pacer(1, job.settle, job.descriptor)
    while pacer.tick():
        for _ in range(job.updates):
            for layer in layers:
                products_of(*layer)


def layers_of(job: OnPolicyJob) -> list[tuple[Tensor, Tensor, Tensor, bool]]:
    """Return the layers of actor and critic.

    Returns:
        inputs, weights, gradient of the outputs, and whether the inputs need a gradient.
    """
    draw = partial(torch.randn, device=job.device)
    B = job.batch_size
    layers = []
    for num_outputs in (ACTION, 1):  # a row uses its own task's output of the critic alone
        sizes = [OBSERVATION + job.num_tasks, *[job.width] * job.depth, num_outputs]
        for place, (I, O) in enumerate(itertools.pairwise(sizes)):  # noqa: E741
            layers.append((draw(B, I), draw(O, I), draw(B, O), place > 0))
    return layers


def products_of(
    x_BI: Tensor, weight_OI: Tensor, gradient_BO: Tensor, needs_input_gradient: bool
) -> None:
    """Make a layer's products, forward and backward."""
    torch.mm(x_BI, weight_OI.t())
    torch.mm(gradient_BO.t(), x_BI)
    if needs_input_gradient:
        torch.mm(gradient_BO, weight_OI)


def main() -> None:
    """Run one of them until no further window is asked for."""
    options = json.loads(sys.argv[1])
    run = {"sb3": train_sb3, "products": run_products}[options.pop("kind")]
    more = {name: options.pop(name) for name in ("vector", "environments") if name in options}
    gym.logger.min_level = gym.logger.ERROR
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    run(OnPolicyJob(**options), **more)  # type: ignore[operator]


if __name__ == "__main__":
    main()
