"""Resuming is exact: a run that ends or is interrupted, and continues, is the uninterrupted run.

Each case trains a run in one go, and again with a stop, through the command line. Their last
checkpoints hold the same values, and ``metrics.jsonl`` the same rows but for times.
"""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

import pytest

from mtrl_lightning.algorithms import PPO, SAC
from mtrl_lightning.callbacks import BestCheckpoint, read_metrics
from mtrl_lightning.rollout import Collector
from tests.helpers.runs import (
    CONNECTORS,
    assert_same_end,
    checkpoint,
    signal_in_call,
)
from tests.helpers.tiers import slow_unless

OPTIONS = [
    "--data.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=60",
    "--evaluation.num_episodes=1",
    "--metrics.every=30",
    "--checkpoint.every_n_env_steps=60",
    "--checkpoint.save_top_k=-1",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--data.benchmark.init_args.horizon=7",  # episodes are under way at each checkpoint
]
REPLAY = ["--data.batch_size=24", "--data.warmup_steps=63"]
SMALL_RINGS = ["--data.capacity=105", "--data.chunk_mebibytes=0.002"]
"""They wrap around."""


def init(**options: Any) -> list[str]:
    return [f"--model.init_args.{name}={value}" for name, value in options.items()]


def part(module: str, name: str) -> str:
    return f"mtrl_lightning.{module}.{name}"


def both(**options: Any) -> list[str]:
    """Return options of the networks of actor and critic."""
    return [
        f"--model.init_args.{network}.init_args.{name}={value}"
        for name, value in options.items()
        for network in ("actor", "critic")
    ]


FILES = {
    "mlp": ("network/mlp", "encoder/identity"),
    "context": ("network/mlp", "encoder/mlp_context"),
    "brc": ("experiment/mt10_brc",),
}
"""Files of ``configs`` of a network where it is not the one of its name."""
SMALL = both(width=8, depth=2)


class Stop(NamedTuple):
    """A signal in a call of a method, counted from 1."""

    owner: type
    method: str
    call: int
    number: signal.Signals = signal.SIGTERM


class Case(NamedTuple):
    """A run; where it stops, or the number of steps at which its first part ends."""

    algorithm: str
    options: list[str]
    network: str = "mlp"
    gradient: str = "mean"
    stops: tuple[Stop, ...] = ()
    half: int = 120
    total: int = 180
    env: str = "env/toy"

    @property
    def configs(self) -> tuple[str, ...]:
        algorithm, gradient = f"algorithm/{self.algorithm}", f"gradient/{self.gradient}"
        network = FILES.get(self.network, (f"network/{self.network}",))
        return ("base", algorithm, *network, self.env, gradient)


def sac(*options: str, **more: Any) -> Case:
    return Case("mtsac", [*SMALL, *REPLAY, *options], **more)


def ppo(*options: str, **more: Any) -> Case:
    size = init(num_steps=15, num_epochs=2, num_minibatches=3)
    return Case("mtppo", [*SMALL, *size, *options], **more)


LOSSES = ",".join(part("auxiliaries", name) for name in ("HiPBMDP", "Reconstruction"))
STANDARDIZE = init(encoder=part("networks", "Standardize"))
EXTRAS = {
    "PolicyReuse": ["success=0.01", "episodes=2", "fraction=0.5"],
    "PauseSolved": ["success=0.01", "episodes=1"],
    "CorrelatedNoise": ["correlation=0.9"],
    "StartMidway": [],
}
WITH_EXTRAS = [
    "--data.envs_per_task=4",
    "--data.benchmark.init_args.horizon=30",
    "--evaluation.every=9000",
    "--metrics.every=60",
    "--checkpoint.every_n_env_steps=9000",
    *init(max_kl="null", num_steps=30),
]
for name, values in EXTRAS.items():
    WITH_EXTRAS.append(f"--data.extras+={part('rollout', name)}")
    WITH_EXTRAS += [f"--data.extras.{value}" for value in values]

CASES = {
    # networks and gradient methods with a state of their own; paco reinitializes some tasks
    "brc": sac("--resets.every=50", network="brc", gradient="famo"),
    "auxiliaries": sac(*init(auxiliaries=f"[{LOSSES}]"), network="context"),
    "paco": sac(*init(**{"critic.init_args.max_loss": 0.5}), network="paco", gradient="gradnorm"),
    "soft modularization": sac(
        *both(embedding_dim=12),
        *init(task_weighting=part("algorithms", "TemperatureWeights")),
        network="soft_modularization",
        gradient="nash_mtl",
    ),
    # numbers of updates, precision, environments and what is between them and the networks
    "bf16, three updates a step": sac(
        *SMALL_RINGS,
        *STANDARDIZE,
        "--data.updates_per_step=3",
        "--data.warmup_updates=7",
        "--trainer.precision=bf16-mixed",
    ),
    "connectors, excluded task": sac(
        *CONNECTORS,
        "--data.envs_per_task=2",
        "--data.exclude_from_training=[goal-1]",
        "--data.benchmark=tests.helpers.altered_reach.Reporting",
        "--data.benchmark.init_args.horizon=7",
        "--data.info_keys=[place,steps,score]",
        "--data.listeners+=tests.helpers.rollout.Diary",
    ),
    "ppo between iterations": ppo(
        *STANDARDIZE, "--trainer.precision=bf16-mixed", "--resets.every=50", half=90
    ),
    # other actions and observations
    "discrete sac": sac("--data.batch_size=25", env="env/classic_discrete"),
    "discrete ppo": ppo(env="env/classic_discrete"),
    "images and state": sac(
        *SMALL_RINGS,
        *init(encoder=part("networks", "MultiInput")),
        f"--data.pixels={part('envs', 'Pixels')}",
        "--data.pixels.init_args.size=16",
        "--data.pixels.init_args.state=[0,1]",
    ),
    # in the middle of the warm-up, an evaluation, a vector step, an update, and an iteration
    "sac interrupted": sac(
        *SMALL_RINGS,
        "--data.num_workers=1",  # it steps during an update
        network="multi_head",
        stops=(
            Stop(Collector, "send", 10),
            Stop(SAC, "training_step", 13),
            Stop(Collector, "send", 13, signal.SIGINT),
        ),
    ),
    "evaluation interrupted": sac(
        "--best.monitor=eval/return",
        stops=(
            Stop(Collector, "run_episodes", 2, signal.SIGINT),
            Stop(BestCheckpoint, "on_validation_end", 1),
        ),
    ),
    "ppo collecting": ppo(*STANDARDIZE, gradient="pcgrad", stops=(Stop(PPO, "act", 26),)),
    "ppo learning": ppo(
        *init(learning_rate=part("algorithms", "LinearRate")),
        gradient="famo",
        stops=(Stop(PPO, "training_step", 15),),
    ),
    "sac extras": sac(
        *[option for option in WITH_EXTRAS if "model" not in option],
        stops=(Stop(SAC, "training_step", 70),),
        total=1440,
    ),
    "ppo extras": ppo(*WITH_EXTRAS, stops=(Stop(PPO, "training_step", 40),), total=2880),
}
TASKS = "{line: tests.helpers.fakes.point_on_a_line, space: tests.helpers.fakes.point_in_space}"
SIZES = [
    f"--data.benchmark={part('envs', 'GymnasiumTasks')}",
    f"--data.benchmark.init_args.tasks={TASKS}",
    *STANDARDIZE,
    *SMALL,
]
CASES["ppo, tasks of different sizes"] = ppo(*SIZES, gradient="pcgrad")
for algorithm in ("mtsac", "mttd3", "distral"):
    CASES[f"{algorithm}, tasks of different sizes"] = Case(
        algorithm, [*SIZES, *REPLAY], gradient="pcgrad"
    )
FAST = ("connectors, excluded task", "ppo learning")


@pytest.mark.parametrize("name", slow_unless(FAST, CASES))
def test_continued_run_is_the_uninterrupted_one(command_line, monkeypatch, name):
    """Train in one go and with the stops; compare the ends."""
    case = CASES[name]

    def fit(name, *more):
        options = [*OPTIONS, *case.options, f"--name={name}", *more]
        command_line("fit", *options, configs=case.configs, small=False)

    steps, resumed = f"--data.total_steps={case.total}", ["--ckpt_path=last"]
    fit("whole", steps)
    if not case.stops:
        fit("parts", f"--data.total_steps={case.half}")
    for number, stop in enumerate(case.stops):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_info:
            signal_in_call(patch, stop.owner, stop.method, stop.call, stop.number)
            fit("parts", steps, *(resumed if number else []))
        assert exit_info.value.code == 128 + stop.number
    stopped = checkpoint(command_line, "parts")
    assert 0 < stopped["mtrl_lightning"]["counters"]["env_steps"] < case.total
    fit("parts", steps, *resumed)
    assert_same_end(command_line, "whole", "parts")
    if name.startswith("ppo"):
        state = stopped["RolloutData"]["buffer"]
        collected = state["per_env"]["valid"].shape[1]
        if name == "ppo collecting":
            assert 0 < collected < 15 and not state["per_env"]["computed"]
        elif case.stops:
            assert state["num_minibatches"] > 0
        else:
            assert collected == 0
    if "extras" in name:
        curves = read_metrics(command_line.folder("whole"))
        for metric in ("rollout/reused", "rollout/stepped"):
            assert max(curves[metric][1]) > min(curves[metric][1]), metric
        assert set(curves["train/exploration/goal-0"][1]) == {0.9}
