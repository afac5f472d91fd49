"""Updates from images: random images, the encoders, and the methods that train them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box

from benchmarks.updaters import Work
from mtrl_lightning.algorithms import SAC, RandomShift
from mtrl_lightning.auxiliaries import HiPBMDP, LatentDynamics, Reconstruction
from mtrl_lightning.networks import MLP, Embedding, NoConditioning, PixelEncoder, TaskEncoder
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch, Transitions

NUM_TASKS = 4
"""Tasks of the updates from images."""
RECORDED = 20
"""Vector steps of random images, which are used in turn."""
STRIDES = {"pixels": (2, 1, 1, 1), "pixels_small": (2, 2, 1, 1)}
"""Of the convolutions in ``configs/encoder``."""
METHODS: dict[str, dict[str, Any]] = {
    "sac": {},
    "drq": {"transforms": [RandomShift]},
    "sac_ae": {"auxiliaries": [Reconstruction]},
    "deepmdp": {"auxiliaries": [LatentDynamics]},
    "hipbmdp": {"auxiliaries": [HiPBMDP], "conditioning": NoConditioning},
}
"""Options of ``SAC``, as in ``configs/algorithm``."""
CONTEXT = partial(TaskEncoder, width=100, depth=1, out_dim=50, embedding=partial(Embedding, dim=50))
"""Of HiP-BMDP's encoder, as in ``configs/encoder/pixels_context.yaml``."""


class Encoding(NamedTuple):
    """An encoder of ``configs/encoder`` and the images that it is given."""

    name: str
    size: int
    """Pixels of an image's side."""

    def __str__(self) -> str:
        return f"{self.name}, {self.size} x {self.size}"


def pixel_spec(size: int) -> EnvSpec:
    """Return tasks with stacks of 3 frames, as ``Pixels`` has them, and six actions."""
    return EnvSpec(
        task_names=tuple(f"task-{i}" for i in range(NUM_TASKS)),
        observation_space=Box(0, 255, (3, 3, size, size), np.uint8),
        action_space=Box(-1.0, 1.0, (6,), np.float32),
        horizon=1_000,
        has_success=False,
        train_tasks=tuple(range(NUM_TASKS)),
        protocol={},
        frame_stack=3,
    )


def pixel_steps(spec: EnvSpec) -> Iterator[Transitions]:
    """Yield vector steps without an end, with images of random bytes that are used in turn."""
    draws = np.random.default_rng(0)
    tasks = spec.num_tasks
    _, *frame = spec.observation_space.shape
    frames = draws.integers(0, 256, (RECORDED, tasks, *frame), np.uint8)
    task_E = np.arange(tasks)
    none_E = np.zeros(tasks, np.bool_)
    for step in itertools.count():
        places = [(step + back) % RECORDED for back in range(4)]
        window = np.stack([frames[place] for place in places], axis=1)
        yield Transitions(
            observation_ED=window[:, :-1],
            action_EA=draws.uniform(-1, 1, (tasks, spec.action_space.shape[0])).astype(np.float32),
            reward_E=draws.standard_normal(tasks),
            next_observation_ED=window[:, 1:],
            terminated_E=none_E,
            truncated_E=none_E,
            task_E=task_E,
            env_E=task_E,
        )


def pixel_replay(spec: EnvSpec, capacity: int, **options: Any) -> ReplayBuffer:
    """Return a full replay of random images; ``options`` are those of ``ReplayBuffer``."""
    buffer = ReplayBuffer(spec, capacity, **options)
    for step in itertools.islice(pixel_steps(spec), capacity // NUM_TASKS):
        buffer.add(step)
    return buffer


def pixel_sac(
    work: Work, encoding: Encoding, channels_last: bool = False, method: str = "sac"
) -> SAC:
    """Return SAC with an encoder of images.

    Args:
        work: width, depth, device and ``compile`` of the algorithm.
        encoding: the encoder.
        channels_last: whether a pixel's channels lie together in memory.
        method: a name in ``METHODS``.
    """
    encoder = partial(
        PixelEncoder,
        strides=STRIDES[encoding.name],
        channels_last=channels_last,
        context=CONTEXT if method == "hipbmdp" else None,
    )
    network = partial(MLP, width=work.width, depth=work.depth)
    how: Any = work.compile
    sac = SAC(
        pixel_spec(encoding.size),
        encoder=encoder,
        actor=network,
        critic=network,
        actor_every=2,
        target_every=2,
        compile=how,
        seed=1,
        **METHODS[method],
    )
    return sac.to(work.device)


def encode(work: Work, sac: SAC, batch: TransitionBatch) -> None:
    """Encode observations as for acting."""
    with torch.no_grad(), work.autocast:
        sac.encoder(batch.observation_RnD, batch.task_Rn)
