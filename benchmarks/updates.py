"""How long one update takes, by program, size, gradient method and encoder.

Parts (``--parts``), all with batches that are there already:

  update         multi-task multi-head SAC as in configs/experiment/mtmhsac.yaml, as a call
                 (direct), in Lightning's trainer without our callbacks (trainer), as a plain
                 PyTorch loop (plain), in Stable-Baselines3 (sb3)
  sizes          SAC with the quickstart's networks, a minibatch of PPO
  growth         more tasks, wider networks, larger batches
  gradients      every gradient method, as a multiple of the mean's time
  encoders       SAC from images: encoders, precisions, memory formats
  pixel_methods  the methods that train an encoder, as multiples of SAC's time

In the first three parts each variant is a process; in the others they share this one.

Shapes: ``T`` tasks, ``B`` rows of all tasks, ``R`` trained tasks, ``n`` rows per task, ``D``
observation, ``A`` action, ``E`` environments.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.measuring import (
    NEVER,
    Pacer,
    Variant,
    alternate,
    call_of,
    parse,
    parser_of,
    positive,
    program,
    ratios,
    require,
    rows_of,
    say,
    spread,
    take_turns,
    timed,
)
from benchmarks.plain_sac import PlainBatch, PlainSAC, Sizes
from mtrl_lightning.algorithms import PPO, SAC, Algorithm, RandomShift
from mtrl_lightning.auxiliaries import HiPBMDP, LatentDynamics, Reconstruction
from mtrl_lightning.errors import import_optional
from mtrl_lightning.gradients import (
    FAMO,
    AlignedMTL,
    CAGrad,
    FairGrad,
    GradientMethod,
    GradNorm,
    Mean,
    NashMTL,
    PCGrad,
)
from mtrl_lightning.learning.compiling import check_compile
from mtrl_lightning.networks import (
    MLP,
    Embedding,
    MultiHead,
    NoConditioning,
    PixelEncoder,
    TaskEncoder,
)
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch, Transitions

OBSERVATION = 39
"""Size of MetaWorld's observation."""
ACTION = 4
"""Size of its action."""
BATCHES = 8
"""Batches that are used in turn."""
PARTS = ("update", "sizes", "growth", "gradients", "encoders", "pixel_methods")
KINDS = ("direct", "trainer", "plain", "sb3")
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "quickstart": (
        "direct",
        {"tasks": 3, "batch_size": 192, "width": 256, "depth": 2, "layer_norm": True},
    ),
    "minibatch": (
        "ppo",
        {"tasks": 10, "batch_size": 1250, "width": 256, "depth": 3, "layer_norm": True},
    ),
}
"""Variant and work of the tables of the part ``sizes``."""
GROWN = ("direct", "plain")
"""Variants of the part ``growth``."""
GROWTH = {"tasks": (1, 10, 25, 50), "width": (400, 1024, 2048), "batch": (320, 1280, 5120)}
"""Values of the part ``growth``."""
GRADIENTS: dict[str, Callable[[EnvSpec], GradientMethod]] = {
    "mean": Mean,
    "famo": FAMO,
    "gradnorm": GradNorm,
    "pcgrad": PCGrad,
    "cagrad": CAGrad,
    "cagrad_fast": partial(CAGrad, num_sampled=4),
    "nash_mtl": NashMTL,
    "aligned_mtl": AlignedMTL,
    "fairgrad": FairGrad,
}
"""As in ``configs/gradient``."""
PIXEL_TASKS = 4
"""Tasks of the updates from images."""
RECORDED = 20
"""Vector steps of random images, which are used in turn."""
STRIDES = {"pixels": (2, 1, 1, 1), "pixels_small": (2, 2, 1, 1)}
"""Of the convolutions in ``configs/encoder``."""
PIXEL_METHODS: dict[str, dict[str, Any]] = {
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
    """An encoder of ``configs/encoder`` and the size of its images."""

    name: str
    size: int
    """Pixels of an image's side."""

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Return the encoder that ``NAME:SIZE`` on the command line names."""
        name, _, size = text.partition(":")
        if name not in STRIDES or not size.isdecimal():
            known = " or ".join(STRIDES)
            raise argparse.ArgumentTypeError(f"{text}: takes NAME:SIZE, where NAME is {known}")
        return cls(name, int(size))

    def __str__(self) -> str:
        return f"{self.name}, {self.size} x {self.size}"


ENCODINGS = [Encoding("pixels", 84), Encoding("pixels_small", 64), Encoding("pixels_small", 48)]


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("updates", __doc__, device=True, precisions=True, threads=True)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["update"], help="(default %(default)s)")
    text = "of the part update (default all)"
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help=text)
    text = "values of SAC's option, each a variant (default %(default)s)"
    choices = ["none", "default", "cudagraphs"]
    add("--compile", nargs="+", choices=choices, default=["none"], help=text)
    add("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="(default all)")
    add("--growth", nargs="+", choices=list(GROWTH), default=list(GROWTH), help="(default all)")
    text = "gradient methods beside the mean (default all)"
    add("--gradients", nargs="+", choices=list(GRADIENTS), default=list(GRADIENTS), help=text)
    text = "of update and growth the first, of gradients a table each (default %(default)s)"
    add("--tasks", nargs="+", type=positive, default=[10, 50], help=text)
    add("--rows", type=positive, default=128, help="per task of a batch (default %(default)s)")
    add("--width", type=positive, default=400, help="of the hidden layers (default %(default)s)")
    add("--depth", type=positive, default=3, help="number of them (default %(default)s)")
    text = "of a window; fewer where one takes longer (default %(default)s)"
    add("--updates", type=positive, default=20, help=text)
    add("--settle", type=int, default=5, help="updates before the windows (default %(default)s)")
    text = f"of the parts from images (default {' '.join(f'{n}:{s}' for n, s in ENCODINGS)})"
    add(
        "--encoders",
        nargs="+",
        type=Encoding.parse,
        default=ENCODINGS,
        metavar="NAME:SIZE",
        help=text,
    )
    text = "per task of a batch of images (default %(default)s)"
    add("--pixel_rows", type=positive, default=32, help=text)
    text = "of the hidden layers behind an encoder (default %(default)s)"
    add("--pixel_width", type=positive, default=256, help=text)
    return parse(parser, args, _check)


def _check(options: argparse.Namespace) -> None:
    for how in options.compile:
        check_compile(how, torch.device(options.device))
    if "update" in options.parts and "sb3" in options.variants:
        without = "leave it out with --variants direct trainer plain"
        require("stable_baselines3", without)


# ---- the work of an update ----


@dataclass
class Work:
    """What is updated, and how."""

    tasks: int
    batch_size: int
    """Rows of all tasks."""
    width: int
    depth: int
    device: str = "cpu"
    threads: int | None = None
    """PyTorch's; None for its own choice."""
    precision: str = "32-true"
    """One of ``measuring.PRECISIONS``."""
    compile: str = "none"
    """Option of ``SAC``."""
    steps: int = 1
    """Updates of a window."""
    settle: int = 0
    """Updates before the first window."""
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
    def autocast(self) -> torch.autocast:
        """Lightning's, for this precision."""
        kind = torch.device(self.device).type
        return torch.autocast(
            kind, torch.bfloat16, enabled=self.precision == "bf16-mixed", cache_enabled=False
        )


def work_of(options: argparse.Namespace) -> Work:
    """Return the work of the part ``update``."""
    return Work(
        tasks=options.tasks[0],
        batch_size=options.rows * options.tasks[0],
        width=options.width,
        depth=options.depth,
        device=options.device,
        threads=options.threads,
        steps=options.updates,
        settle=options.settle,
    )


def cost_of(work: Work) -> float:
    """Return the multiplications of a network's pass, roughly proportional to its time."""
    first = OBSERVATION + work.tasks
    return work.batch_size * work.width * (first + work.width * (work.depth - 1))


def grown(base: Work, name: str, value: int) -> Work:
    """Return the base with one size changed, fewer updates per window where one takes longer."""
    changes: dict[str, dict[str, Any]] = {
        "tasks": {"tasks": value, "batch_size": base.batch_size // base.tasks * value},
        "width": {"width": value},
        "batch": {"batch_size": max(1, value // base.tasks) * base.tasks},
    }
    work = replace(base, **changes[name])
    share = min(1.0, cost_of(base) / cost_of(work))
    return replace(work, steps=max(2, round(base.steps * share)))


def make_sac(work: Work, seed: int = 1, **options: Any) -> SAC:
    """Return SAC as in ``configs/experiment/mtmhsac.yaml``, with further options."""
    network = partial(MultiHead, width=work.width, depth=work.depth)
    actor = partial(network, output_bound=1e-3)
    critic = partial(network, output_bound=3e-3, layer_norm=work.layer_norm)
    how: Any = work.compile
    sac = SAC(work.spec, actor=actor, critic=critic, compile=how, seed=seed, **options)
    return sac.to(work.device)


def make_ppo(work: Work) -> PPO:
    """Return PPO as in ``configs/experiment/mt10_mtppo.yaml``."""
    network = partial(MLP, width=work.width, depth=work.depth)
    critic = partial(network, layer_norm=work.layer_norm)
    how: Any = work.compile
    ppo = PPO(work.spec, actor=network, critic=critic, max_kl=None, compile=how, seed=1)
    return ppo.to(work.device)


def make_batches(work: Work) -> list[TransitionBatch]:
    """Return batches of standard normal numbers."""
    generator = torch.Generator().manual_seed(0)
    B = work.batch_size
    task_R = torch.arange(work.tasks)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batches = []
    for _ in range(BATCHES):
        columns = {
            "observation": normal(B, OBSERVATION),
            "action": normal(B, ACTION).tanh(),
            "reward": normal(B),
            "next_observation": normal(B, OBSERVATION),
            "terminated": normal(B) > 3,
        }
        batches.append(on_device(batch_of(columns, task_R), work.device))
    return batches


def on_device(batch: TransitionBatch, device: str) -> TransitionBatch:
    """Return a batch of the typed columns on a device."""
    return TransitionBatch(*(column.to(device) for column in batch[:-1]))  # type: ignore[arg-type]


def make_minibatches(work: Work) -> list[TransitionBatch]:
    """Return batches with the columns that PPO adds to its rollouts, in standard normal numbers."""
    minibatches = []
    for batch in make_batches(work):
        # noise of standard deviation 1 around a policy's mean of about 0
        sample_RnA = torch.randn_like(batch.action_RnA)
        log_prob_Rn = torch.distributions.Normal(0.0, 1.0).log_prob(sample_RnA).sum(-1)
        columns = {name: torch.randn_like(log_prob_Rn) for name in ("advantage", "value", "target")}
        columns |= {"unclipped_action": sample_RnA, "log_prob": log_prob_Rn}
        minibatches.append(batch._replace(extra=columns))
    return minibatches


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


# ---- the programs, each an update without arguments ----


def over(batches: Sequence[Any], update: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return an update that takes the batches in turn."""
    source = itertools.cycle(batches)
    return lambda: update(next(source))


def direct_of(work: Work, gradient: str = "mean") -> Callable[[], Any]:
    """Return the update of ``SAC.training_step``, with a gradient method for actor and critics."""
    method = GRADIENTS[gradient]
    sac = make_sac(work, actor_gradient=method, critic_gradient=method)
    return over(make_batches(work), direct_update(work, sac))


def ppo_of(work: Work) -> Callable[[], Any]:
    """Return the update of ``PPO.training_step``."""
    return over(make_minibatches(work), direct_update(work, make_ppo(work)))


def plain_of(work: Work) -> Callable[[], Any]:
    """Return the plain loop's update."""
    sizes = Sizes(OBSERVATION, ACTION, work.tasks, work.batch_size, work.width, work.depth)
    agent = PlainSAC(sizes, work.device, bf16=work.precision == "bf16-mixed")
    return over([with_one_hot(batch, work.tasks) for batch in make_batches(work)], agent.update)


def sb3_of(work: Work) -> Callable[[], Any]:
    """Return the update of Stable-Baselines3's SAC, which samples its batch each time."""
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
    generator = np.random.default_rng(0)
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = generator.standard_normal(array.shape)
    buffer.full = True
    return lambda: model.train(gradient_steps=1, batch_size=work.batch_size)


class _Spaces(gym.Env):
    """Spaces as MetaWorld's with the one-hot; nothing is stepped."""

    def __init__(self, num_tasks: int) -> None:
        self.observation_space = Box(-np.inf, np.inf, (OBSERVATION + num_tasks,), np.float64)
        self.action_space = Box(-1.0, 1.0, (ACTION,), np.float32)


PROGRAMS: dict[str, Callable[[Work], Callable[[], Any]]] = {
    "direct": direct_of,
    "ppo": ppo_of,
    "plain": plain_of,
    "sb3": sb3_of,
}


def update_in_windows(kind: str, work: dict[str, Any]) -> None:
    """Make updates until no further window is requested; the function of a variant's process.

    Args:
        kind: ``trainer``, or a name in ``PROGRAMS``.
        work: options of ``Work``.
    """
    given = Work(**work)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    if kind not in ("plain", "sb3"):
        keep_freed_memory()  # as a run of ours does
    if kind == "trainer":
        train(given)
        return
    update = PROGRAMS[kind](given)
    pacer = Pacer(given.steps, given.settle)
    while pacer.tick():
        update()


def train(work: Work) -> None:
    """Let Lightning's trainer make the updates, without any of our callbacks."""
    from benchmarks.whole_runs import PaceCallback

    trainer = Trainer(
        accelerator="gpu" if work.device == "cuda" else "cpu",
        devices=1,
        precision=work.precision,  # type: ignore[arg-type]
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PaceCallback(work.steps, work.settle)],
    )
    loader = DataLoader(_Batches(make_batches(work)), batch_size=None)
    trainer.fit(make_sac(work), loader, weights_only=True)


class _Batches(IterableDataset[TransitionBatch]):
    def __init__(self, batches: list[TransitionBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return NEVER

    def __iter__(self) -> Iterator[TransitionBatch]:
        return itertools.cycle(self._batches)


# ---- images ----


def pixel_spec(size: int) -> EnvSpec:
    """Return tasks with stacks of 3 frames, as ``Pixels`` has them, and six actions."""
    return EnvSpec(
        task_names=tuple(f"task-{i}" for i in range(PIXEL_TASKS)),
        observation_space=Box(0, 255, (3, 3, size, size), np.uint8),
        action_space=Box(-1.0, 1.0, (6,), np.float32),
        horizon=1_000,
        has_success=False,
        train_tasks=tuple(range(PIXEL_TASKS)),
        protocol={},
        frame_stack=3,
    )


def pixel_steps(spec: EnvSpec) -> Iterator[Transitions]:
    """Yield vector steps without an end, with images of random bytes that are used in turn."""
    generator = np.random.default_rng(0)
    tasks = spec.num_tasks
    _, *frame = spec.observation_space.shape
    frames = generator.integers(0, 256, (RECORDED, tasks, *frame), np.uint8)
    task_E = np.arange(tasks)
    none_E = np.zeros(tasks, np.bool_)
    action_dim = spec.action_space.shape[0]
    for step in itertools.count():
        window = np.stack([frames[(step + back) % RECORDED] for back in range(4)], axis=1)
        yield Transitions(
            observation_ED=window[:, :-1],
            action_EA=generator.uniform(-1, 1, (tasks, action_dim)).astype(np.float32),
            reward_E=generator.standard_normal(tasks),
            next_observation_ED=window[:, 1:],
            terminated_E=none_E,
            truncated_E=none_E,
            task_E=task_E,
            env_E=task_E,
        )


def pixel_replay(spec: EnvSpec, capacity: int, **options: Any) -> ReplayBuffer:
    """Return a full replay of random images; ``options`` are those of ``ReplayBuffer``."""
    buffer = ReplayBuffer(spec, capacity, **options)
    for step in itertools.islice(pixel_steps(spec), capacity // PIXEL_TASKS):
        buffer.add(step)
    return buffer


def pixel_work(options: argparse.Namespace, precision: str) -> Work:
    """Return the work of an update from images."""
    return Work(
        tasks=PIXEL_TASKS,
        batch_size=options.pixel_rows * PIXEL_TASKS,
        width=options.pixel_width,
        depth=2,
        device=options.device,
        precision=precision,
    )


def pixel_batch(size: int, options: argparse.Namespace) -> TransitionBatch:
    """Return a batch of images on the device, as a replay gives it."""
    buffer = pixel_replay(pixel_spec(size), RECORDED * PIXEL_TASKS)
    return on_device(buffer.sample(options.pixel_rows * PIXEL_TASKS), options.device)


def pixel_sac(
    work: Work, encoding: Encoding, channels_last: bool = False, method: str = "sac"
) -> SAC:
    """Return SAC with an encoder of images.

    Args:
        work: width, depth, device and ``compile`` of the algorithm.
        encoding: the encoder.
        channels_last: whether a pixel's channels lie together in memory.
        method: a name in ``PIXEL_METHODS``.
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
        **PIXEL_METHODS[method],
    )
    return sac.to(work.device)


# ---- parts whose variants are processes ----


def variants_of(
    work: Work, kinds: Sequence[str], options: argparse.Namespace, folder: Path
) -> list[Variant]:
    """Return the variants of a table, not started yet.

    Stable-Baselines3 has no options for precision and compilation.
    """
    variants = []
    for kind in kinds:
        for precision in options.precisions if kind != "sb3" else ["32-true"]:
            for how in options.compile if kind in ("direct", "ppo", "trainer") else ["none"]:
                name = f"{kind} {precision}{'' if how == 'none' else f', compile {how}'}"
                given = asdict(replace(work, precision=precision, compile=how))
                command = call_of(update_in_windows, {"kind": kind, "work": given})
                variants.append(Variant(name, command, folder))
    return variants


def compare(
    title: str, work: Work, kinds: Sequence[str], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Let the variants take turns; return a table."""
    say(title)
    variants = variants_of(work, kinds, options, folder)
    windows = take_turns(variants, options.rounds)
    seconds = {name: [value / work.steps for value in values] for name, values in windows.items()}
    first = options.precisions[0]
    rows = rows_of(seconds, ["sb3 32-true", f"plain {first}", f"direct {first}", f"ppo {first}"])
    for row, variant in zip(rows, variants, strict=True):
        row["updates/s"] = spread([1 / value for value in seconds[variant.name]])
        direct = seconds.get(variant.name.replace("trainer", "direct"))
        if variant.name.startswith("trainer") and direct is not None:
            pairs = zip(seconds[variant.name], direct, strict=True)
            row["ms more than direct"] = spread([(a - b) * 1e3 for a, b in pairs])
        row["MiB"] = variant.memory_mib
        row["s until ready"] = variant.ready_seconds
    sizes = {
        name: getattr(work, name) for name in ("tasks", "batch_size", "width", "depth", "steps")
    }
    title = (
        f"{title}: ms per update of {work.tasks} tasks, batch {work.batch_size}, {work.depth} x"
        f" {work.width}, on {work.device}, windows of {work.steps} updates"
    )
    return {"title": title, "sizes": sizes, "rows": rows}


def tables_of_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the tables of the parts ``update``, ``sizes`` and ``growth``."""
    base = work_of(options)
    tables = []
    with tempfile.TemporaryDirectory(prefix="updates-") as path:
        folder = Path(path)
        if "update" in options.parts:
            tables.append(compare("update", base, options.variants, options, folder))
        for name in options.sizes if "sizes" in options.parts else []:
            kind, changes = SIZES[name]
            tables.append(compare(name, replace(base, **changes), [kind], options, folder))
        for name in options.growth if "growth" in options.parts else []:
            for value in GROWTH[name]:
                work = grown(base, name, value)
                tables.append(compare(f"{name} {value}", work, GROWN, options, folder))
    return tables


# ---- parts whose variants share this process ----


def turns(
    calls: Mapping[str, Callable[[], Any]], times: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each call, in turn, after one round that is not counted."""
    measures = {name: timed(call, times) for name, call in calls.items()}
    alternate(measures, 1)  # memory is touched, code is loaded
    return alternate(measures, options.rounds)


def multiples(
    seconds: Mapping[str, Sequence[float]], reference: str, column: str
) -> list[dict[str, Any]]:
    """Return a row per variant with its time as a multiple of the reference's."""
    rows = rows_of(seconds)
    return [row | {column: ratios(seconds[row["variant"]], seconds[reference])} for row in rows]


def gradient_table(tasks: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the gradient methods take turns; return a table."""
    title = f"gradient methods, {tasks} tasks, batch {options.rows * tasks}, {precision}"
    say(title)
    sizes = {"tasks": tasks, "batch_size": options.rows * tasks}
    work = replace(work_of(options), **sizes, precision=precision)
    names = dict.fromkeys(["mean", *options.gradients])
    calls = {name: direct_of(work, name) for name in names}
    times = max(1, options.updates // 4)
    rows = multiples(turns(calls, times, options), "mean", "times the mean")
    return {"title": f"{title}: ms per update", **sizes, "rows": rows}


def encoder_table(encoding: Encoding, options: argparse.Namespace) -> dict[str, Any]:
    """Let precisions and memory formats of an encoder take turns; return a table."""
    say(str(encoding))
    batch = pixel_batch(encoding.size, options)
    calls = {}
    for precision, channels_last in itertools.product(options.precisions, (False, True)):
        work = pixel_work(options, precision)
        update = direct_update(work, pixel_sac(work, encoding, channels_last))
        calls[f"{precision}{', channels_last' if channels_last else ''}"] = partial(update, batch)
    seconds = turns(calls, pixel_updates(options), options)
    rows = rows_of(seconds, [next(iter(calls))])
    for row in rows:
        row["updates/s"] = spread([1 / value for value in seconds[row["variant"]]])
    return {"title": f"{encoding}: ms per update of SAC, batch {work.batch_size}", "rows": rows}


def pixel_updates(options: argparse.Namespace) -> int:
    """Return the updates of a round: an even number, since every second includes the actor."""
    return max(2, options.updates // 5 // 2 * 2)


def method_table(encoding: Encoding, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the methods that train an encoder take turns; return a table."""
    say(f"methods, {encoding}, {precision}")
    batch = pixel_batch(encoding.size, options)
    work = pixel_work(options, precision)
    calls = {}
    for method in PIXEL_METHODS:
        sac = pixel_sac(work, encoding, method=method)
        calls[method] = partial(direct_update(work, sac), batch)
    seconds = turns(calls, pixel_updates(options), options)
    rows = multiples(seconds, "sac", "times sac")
    return {"title": f"{encoding}, {precision}: ms per update", "rows": rows}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables."""
    tables = tables_of_processes(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does
    if "gradients" in options.parts:
        for tasks, precision in itertools.product(options.tasks, options.precisions):
            tables.append(gradient_table(tasks, precision, options))
    if "encoders" in options.parts:
        tables += [encoder_table(encoding, options) for encoding in options.encoders]
    if "pixel_methods" in options.parts:
        for encoding, precision in itertools.product(options.encoders, options.precisions):
            tables.append(method_table(encoding, precision, options))
    return {"tables": tables}


main = program("updates", options_of, measure)

if __name__ == "__main__":
    sys.exit(main())
