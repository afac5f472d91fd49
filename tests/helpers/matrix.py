"""Every network, built by the command line from the YAML files, and a batch of real steps."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest

from mtrl_lightning.cli.lightning_cli import MultiTaskCLI
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import ToyConflict, VectorEnv
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.rollout import Collector
from mtrl_lightning.transitions import TransitionBatch, Transitions
from tests.helpers.command_line import ROOT, config_args

LEFT_OUT = (
    "mlp_context",  # for auxiliaries, and crossed with them in tests/auxiliaries
    *("pixels", "pixels_context", "pixels_small", "multi_input"),  # the tasks have states
    "soft_modularization_mt50",  # the same network with other sizes
)
"""Files that are not crossed with every gradient method."""


def files(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


def both(**options: Any) -> list[str]:
    return [
        f"--model.init_args.{w}.init_args.{k}={v}"
        for k, v in options.items()
        for w in ("actor", "critic")
    ]


def encoder(**options: Any) -> list[str]:
    return [f"--model.init_args.encoder.init_args.{k}={v}" for k, v in options.items()]


GRADIENTS = files("gradient")
GATES = {
    "attention": [],
    "uniform": encoder(assignment="UniformGate"),
    "clusters": encoder(assignment="Clusters"),
    "top_k": encoder(assignment="TopKGate"),
    "one_hot": encoder(assignment="OneHotGate", num_experts=4),
}
STACKS: dict[str, tuple[str, ...]] = {
    **{name: ("network/mlp", f"encoder/{name}") for name in files("encoder")},
    **{f"mixture_{gate}": ("network/mlp", "encoder/mixture") for gate in GATES},
    **{name: (f"network/{name}",) for name in files("network")},
    "mlp": ("network/mlp", "encoder/identity"),
    "brc": ("experiment/mt10_brc",),
}
"""The files of ``configs`` for each network or encoder, which are given one after another."""
MIXTURE = [*both(width=8, depth=1), *encoder(width=6, depth=1, out_dim=5)]
NETWORKS: dict[str, list[str]] = {
    **dict.fromkeys(STACKS, both(width=8, depth=2)),
    **{f"mixture_{gate}": [*MIXTURE, *options] for gate, options in GATES.items()},
    "care": MIXTURE,
    "mlp_context": [*both(width=8, depth=2), *encoder(width=6, out_dim=5)],
    "multi_head_mtrl": both(width=8, head_width=6),
    "soft_modularization": [
        *both(width=8, embedding_dim=12),
        "--model.init_args.task_weighting=mtrl_lightning.algorithms.TemperatureWeights",
    ],
}
"""Options that make each of them small."""
CROSSED = [name for name in STACKS if name not in (*LEFT_OUT, "mixture", "identity")]
BENCHMARK = ToyConflict(num_tasks=4, horizon=5)


class IsBuilt(Exception):  # noqa: N818
    """Raised where training would start."""


class Built(NamedTuple):
    """What the command line built."""

    cli: MultiTaskCLI
    model: Any


def build(command_line, monkeypatch, network, *extra) -> Built:
    """Let the command line build everything up to the point where it would train."""
    built: list[Built] = []

    def stop(cli: MultiTaskCLI) -> None:
        built.append(Built(cli, cli.model))
        raise IsBuilt

    monkeypatch.setattr(MultiTaskCLI, "before_fit", stop)
    with pytest.raises(IsBuilt):
        command_line(
            "fit",
            *config_args(*STACKS[network], "env/toy_conflict"),
            *NETWORKS[network],
            *extra,
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--data.benchmark.init_args.num_tasks=4",
            "--data.benchmark.init_args.horizon=5",
            configs=("base", "algorithm/mtsac"),
            small=False,
        )
    return built[0]


def in_precision(built: Built, precision: str) -> Built:
    """Let the command line build everything anew with another precision: parsing takes longest."""
    cli = built.cli
    cli.config.fit.trainer.precision = precision
    cli.instantiate_classes()
    return Built(cli, cli.model)


@cache
def batches() -> tuple[list[TransitionBatch], list[Transitions]]:
    """Return two batches of real transitions, and the vector steps that they are from."""
    envs = VectorEnv(BENCHMARK, list(range(4)), num_workers=0)
    collector = Collector(envs, UniformPolicy(BENCHMARK.spec))
    buffer = ReplayBuffer(BENCHMARK.spec, 160)
    steps = []
    for _ in range(12):
        transitions, _ = collector.step("random")
        buffer.add(transitions)
        steps.append(transitions)
    envs.close()
    return [buffer.sample(16) for _ in range(2)], steps
