"""How long one update takes, by program, size and gradient method.

Parts (``--parts``), with batches that are already in memory, and a table for each combination of
--tasks, --rows and --width:

  update     multi-task multi-head SAC as in configs/experiment/mtmhsac.yaml, as a call (direct), in
             Lightning's trainer without our callbacks (trainer), as a plain PyTorch loop (plain),
             in Stable-Baselines3 (sb3); each variant is a process
  gradients  every gradient method, as a multiple of the mean's time, in this process

Shapes: ``T`` tasks, ``B`` rows of all tasks, ``R`` trained tasks, ``n`` rows per task, ``D``
observation, ``A`` action.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer

from benchmarks.baselines import PlainBatch, PlainSAC, make_sb3_sac
from benchmarks.measuring import (
    SB3,
    Pacer,
    Table,
    Variant,
    parser_of,
    positive,
    ratios,
    rows_of,
    run,
    say,
    spread,
    take_turns,
    turns,
)
from benchmarks.whole_runs import PaceCallback
from mtrl_lightning.algorithms import SAC, Algorithm
from mtrl_lightning.algorithms.algorithm import Compile
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
from mtrl_lightning.networks import (
    MultiHead,
)
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.utils.devices import keep_freed_memory

OBSERVATION = 39
"""Size of MetaWorld's observation."""
ACTION = 4
"""Size of its action."""
BATCHES = 8
"""Batches that are used in turn."""
PARTS = ("update", "gradients")
KINDS = ("direct", "trainer", "plain", "sb3")
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
    """``32-true`` or ``bf16-mixed``."""
    compile: str = "none"
    """Option of ``SAC``; ``none`` for no compilation."""
    steps: int = 1
    """Updates of a window."""
    settle: int = 0
    """Updates before the first window."""

    @property
    def spec(self) -> EnvSpec:
        """Tasks that are all trained, with MetaWorld's spaces."""
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


def make_sac(work: Work, seed: int = 1, **options: Any) -> SAC:
    """Return SAC as in ``configs/experiment/mtmhsac.yaml``, with further options."""
    network = partial(MultiHead, width=work.width, depth=work.depth)
    networks = {
        "actor": partial(network, output_bound=1e-3),
        "critic": partial(network, output_bound=3e-3),
    }
    how: Any = None if work.compile == "none" else work.compile
    return SAC(work.spec, compile=how, seed=seed, **networks | options).to(work.device)


def make_batches(work: Work) -> list[TransitionBatch]:
    """Return batches of standard normal numbers."""
    generator = torch.Generator().manual_seed(0)
    B = work.batch_size

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
        batch = batch_of(columns, torch.arange(work.tasks))
        batches.append(move_data_to_device(batch, torch.device(work.device)))
    return batches


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


def plain_of(work: Work) -> Callable[[], Any]:
    """Return the plain loop's update."""
    sizes = (OBSERVATION, ACTION, work.tasks, work.width, work.depth)
    agent = PlainSAC(*sizes, work.device, bf16=work.precision == "bf16-mixed")
    return over([with_one_hot(batch, work.tasks) for batch in make_batches(work)], agent.update)


def sb3_of(work: Work) -> Callable[[], Any]:
    """Return the update of Stable-Baselines3's SAC, which samples its batch each time."""
    model = make_sb3_sac(
        _Spaces(work.tasks),
        work.width,
        work.depth,
        buffer_size=20_000,
        batch_size=work.batch_size,
        device=work.device,
        seed=1,
    )
    model.set_logger(import_optional(*SB3).common.logger.configure(None, []))
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
    "plain": plain_of,
    "sb3": sb3_of,
}


def update_in_windows(kind: str, work: Work) -> None:
    """Make updates until no further window is requested; the function of a variant's process.

    Args:
        kind: ``trainer``, or a name in ``PROGRAMS``.
        work: sizes.
    """
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    if kind not in ("plain", "sb3"):
        keep_freed_memory()  # as a run of ours does
    if kind == "trainer":
        train(work)
        return
    update = PROGRAMS[kind](work)
    pacer = Pacer(work.steps, work.settle)
    while pacer.tick():
        update()


def train(work: Work) -> None:
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
        callbacks=[PaceCallback(work.steps, work.settle)],
    )
    trainer.fit(make_sac(work), itertools.cycle(make_batches(work)), weights_only=True)


# ---- the tables ----


def update_table(work: Work, options: argparse.Namespace) -> Table:
    """Let the variants take turns; return a table."""
    title = (
        f"{work.tasks} tasks, batch {work.batch_size}, {work.depth} x {work.width}, on"
        f" {work.device}"
    )
    say(title)
    variants = []
    for kind in options.variants:  # Stable-Baselines3 has neither precision nor compilation
        for precision in options.precisions if kind != "sb3" else ["32-true"]:
            for how in options.compile if kind in ("direct", "trainer") else ["none"]:
                name = f"{kind} {precision}{'' if how == 'none' else f', compile {how}'}"
                chosen = replace(work, precision=precision, compile=how)
                variants.append(Variant(name, update_in_windows, kind=kind, work=chosen))
    seconds = take_turns(variants, options.rounds, work.steps)
    first = options.precisions[0]
    references = ["sb3 32-true", f"plain {first}", f"direct {first}"]
    rows = rows_of(seconds, references, rate="updates/s")
    for row, variant in zip(rows, variants, strict=True):
        direct = seconds.get(variant.name.replace("trainer", "direct"))
        if variant.name.startswith("trainer") and direct is not None:
            pairs = zip(seconds[variant.name], direct, strict=True)
            row["ms more than direct"] = spread([(a - b) * 1e3 for a, b in pairs])
    return Table(f"{title}: ms per update, windows of {work.steps}", rows)


def gradients_table(work: Work, options: argparse.Namespace) -> Table:
    """Let the gradient methods take turns; return a table with multiples of the mean's time."""
    title = f"gradient methods, {work.tasks} tasks, batch {work.batch_size}, {work.precision}"
    say(title)
    calls = {name: direct_of(work, name) for name in GRADIENTS}
    seconds = turns(calls, max(1, work.steps // 4), options.rounds)
    rows = rows_of(seconds, ["mean"], rate="updates/s")
    for row in rows:
        row["times mean"] = ratios(seconds[row["variant"]], seconds["mean"])
    return Table(f"{title}: ms per update", rows)


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the tables."""
    works = [
        Work(
            tasks=tasks,
            batch_size=rows * tasks,
            width=width,
            depth=options.depth,
            device=options.device,
            threads=options.threads,
            steps=options.updates,
            settle=options.settle,
        )
        for tasks, rows, width in itertools.product(options.tasks, options.rows, options.width)
    ]
    tables = []
    if "update" in options.parts:
        tables += [update_table(work, options) for work in works]
    if "gradients" in options.parts:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        keep_freed_memory()  # as a run does
        for work, precision in itertools.product(works, options.precisions):
            tables.append(gradients_table(replace(work, precision=precision), options))
    return tables


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of("updates", __doc__, device=True, precisions=True)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["update"], help="what is measured")
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help="of the part update")
    text = "values of SAC's option, each a variant"
    add("--compile", nargs="+", choices=["none", *get_args(Compile)], default=["none"], help=text)
    add("--tasks", nargs="+", type=positive, default=[10], help="numbers of tasks")
    add("--rows", nargs="+", type=positive, default=[128], help="per task of a batch")
    add("--width", nargs="+", type=positive, default=[400], help="of the hidden layers")
    add("--depth", type=positive, default=3, help="number of hidden layers")
    add("--updates", type=positive, default=20, help="of a window")
    add("--settle", type=int, default=5, help="updates before the windows")
    run(parser, args, measure)


if __name__ == "__main__":
    main()
