"""Every network with every gradient method, on real steps.

They are built by the command line from the YAML files.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from mtrl_lightning import gradients
from mtrl_lightning.algorithms.arguments import rebuild
from mtrl_lightning.cli.lightning_cli import MultiTaskCLI
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import Benchmark, MetaWorld, ToyConflict, VectorEnv
from mtrl_lightning.export import ONNX
from mtrl_lightning.export import policy as exporting
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.rollout import Collector
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from tests.helpers.command_line import ROOT, config_args

PRECISIONS = ("32-true", "bf16-mixed")
ROWS = 4
"""Transitions of a task in a batch."""


def both(**options: Any) -> list[str]:
    return [
        f"--model.init_args.{w}.init_args.{k}={v}"
        for k, v in options.items()
        for w in ("actor", "critic")
    ]


def encoder(**options: Any) -> list[str]:
    return [f"--model.init_args.encoder.init_args.{k}={v}" for k, v in options.items()]


SMALL = both(width=8, depth=2)
MIXTURE = [*both(width=8, depth=1), *encoder(width=6, depth=1, out_dim=5)]
OF_NETWORKS = (
    "film",
    "film_scalar",
    "mlp_residual",
    "moore",
    "multi_head",
    "multi_head_mtrl",
    "paco",
    "separate",
    "soft_modularization",
)
OF_ENCODERS = (
    "care",
    "language",
    "mlp_context",
    "shared_task_embedding",
    "standardize",
    "task_embedding",
    "task_encoder",
)
GATES = ("attention", "clusters", "uniform", "top_k", "one_hot")
STACKS: dict[str, tuple[str, ...]] = {
    "brc": ("experiment/mt10_brc",),
    "mlp": ("network/mlp", "encoder/identity"),
    **{name: (f"network/{name}",) for name in OF_NETWORKS},
    **{name: ("network/mlp", f"encoder/{name}") for name in OF_ENCODERS},
    **{f"mixture_{gate}": ("network/mlp", "encoder/mixture") for gate in GATES},
}
"""Every file of ``configs/network`` and ``configs/encoder``: which are given one after another."""
NETWORKS: dict[str, list[str]] = {
    **dict.fromkeys(STACKS, SMALL),
    "mixture_attention": MIXTURE,
    "mixture_uniform": [*MIXTURE, *encoder(assignment="UniformGate")],
    "mixture_clusters": [*MIXTURE, *encoder(assignment="Clusters")],
    "mixture_top_k": [*MIXTURE, *encoder(assignment="TopKGate")],
    "care": [*both(width=8, depth=1), *encoder(width=6, depth=1, out_dim=5)],
    "mixture_one_hot": [*MIXTURE, *encoder(assignment="OneHotGate", num_experts=4)],
    "mlp_context": [*SMALL, *encoder(width=6, out_dim=5)],
    "multi_head_mtrl": both(width=8, head_width=6),
    "soft_modularization": [
        *both(width=8, embedding_dim=12),
        "--model.init_args.task_weighting=mtrl_lightning.algorithms.TemperatureWeights",
    ],
}
"""Options that make each of them small."""
LEFT_OUT = {
    "encoder/mlp": "encoder/mlp_context is this encoder with a context",
    "encoder/pixels": "the tasks of the matrix have states: tests/auxiliaries/test_updates.py",
    "encoder/pixels_context": "the same",
    "encoder/pixels_small": "the same",
    "encoder/multi_input": "the same: tests/test_images_and_vectors.py",
    "network/soft_modularization_mt50": "the same network with other sizes",
}
"""Files that are in no stack, and why."""
CROSSED = [name for name in NETWORKS if name != "mlp_context"]
"""The stacks that every gradient method is tried with; the one left out is for auxiliaries, and
crossed with them in ``tests/auxiliaries``."""
GRADIENTS = (
    "aligned_mtl",
    "cagrad",
    "cagrad_fast",
    "fairgrad",
    "famo",
    "gradnorm",
    "mean",
    "nash_mtl",
    "pcgrad",
)
NEEDS_SHARED = tuple(name for name in GRADIENTS if name not in ("famo", "mean"))
OPERATIONS_OF_OTHERS = (
    "brc",
    "film_scalar",
    "mixture_attention",
    "mixture_uniform",
    "mixture_one_hot",
    "mlp",
    "mlp_context",
    "multi_head",
    "shared_task_embedding",
    "task_embedding",
    "task_encoder",
)
"""Stacks without an operation that no other stack has: ONNX translates operations one by one."""
BENCHMARKS: dict[str, Benchmark] = {
    "toy": ToyConflict(num_tasks=4, horizon=5),
    "metaworld": MetaWorld(
        ["reach", "push", "drawer-close", "window-open"], horizon=5, num_goals=1
    ),
}
"""Four tasks each, so that one expert a task fits both."""
ENV_OPTIONS = {
    "toy": [
        *config_args("env/toy_conflict"),
        "--data.benchmark.init_args.num_tasks=4",
    ],
    "metaworld": config_args("env/metaworld_custom"),
}


class IsBuilt(Exception):  # noqa: N818
    """Raised where training would start."""


class Built(NamedTuple):
    """What the command line built."""

    cli: MultiTaskCLI
    model: Any


class Learned(NamedTuple):
    """The metrics of updates, and how far each number of the parameters moved."""

    metrics: dict[str, float]
    step_P: torch.Tensor


def build(command_line, monkeypatch, env, network, *extra, algorithm="mtsac") -> Built:
    """Let the command line build everything up to the point where it would train."""
    built: list[Built] = []

    def stop(cli: MultiTaskCLI) -> None:
        built.append(Built(cli, cli.model))
        raise IsBuilt

    monkeypatch.setattr(MultiTaskCLI, "before_fit", stop)
    with pytest.raises(IsBuilt):
        command_line(
            "fit",
            *config_args(*STACKS[network]),
            *ENV_OPTIONS[env],
            *NETWORKS[network],
            *extra,
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--data.benchmark.init_args.horizon=5",
            configs=("base", f"algorithm/{algorithm}"),
            small=False,
        )
    return built[0]


def in_precision(built: Built, precision: str) -> Built:
    """Let the command line build everything anew with another precision: parsing takes longest."""
    cli = built.cli
    cli.config.fit.trainer.precision = precision
    cli.instantiate_classes()
    return Built(cli, cli.model)


def with_gradient(built: Built, gradient: str) -> Built:
    """Build the algorithm again with the gradient method of a file."""
    path = ROOT / "configs" / "gradient" / f"{gradient}.yaml"
    named = yaml.safe_load(path.read_text())["model"]["init_args"]
    methods = {}
    for side, method in named.items():
        kind = getattr(gradients, method["class_path"].rpartition(".")[2])
        methods[side] = partial(kind, **method.get("init_args", {}))
    model = built.model
    rebuilt = rebuild(model.hyper_parameters, model.spec, type(model), overrides=methods)
    return Built(built.cli, rebuilt)


@cache
def batches(env: str) -> tuple[EnvSpec, list[TransitionBatch], list[Transitions]]:
    """Return two batches of real transitions, and the vector steps that they are from."""
    benchmark = BENCHMARKS[env]
    envs = VectorEnv(benchmark, list(range(4)), num_workers=0)
    collector = Collector(envs, UniformPolicy(benchmark.spec))
    buffer = ReplayBuffer(benchmark.spec, 160)
    steps = []
    for _ in range(12):
        transitions, _ = collector.step("random")
        buffer.add(transitions)
        steps.append(transitions)
    envs.close()
    return benchmark.spec, [buffer.sample(4 * ROWS) for _ in range(2)], steps


def update(built: Built, env: str) -> dict[str, float]:
    """Make two updates as the trainer would; return the metrics."""
    spec, given, steps = batches(env)
    model = built.model
    assert model.spec.task_names == spec.task_names
    for transitions in steps:
        model.transforms.observe(transitions)
    model.transforms.begin_learning(np.ones(4))
    optimizers = model.configure_optimizers()
    model.optimizers = lambda use_pl_optimizer=True: optimizers
    for i, batch in enumerate(given):
        with built.cli.trainer.precision_plugin.train_step_context():
            model.training_step(batch, i)
    return model.drain_metrics()


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def check_learns(model: Any, parts: tuple[str, ...], make_updates: Any) -> Learned:
    """Make updates; check that numbers stay finite and each part learns; return what changed."""
    before = parameters_of(model)
    metrics = make_updates()
    after = parameters_of(model)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert all(torch.isfinite(value).all() for value in after.values())
    moved = {name for name, value in after.items() if not torch.equal(before[name], value)}
    for part in parts:
        assert any(name.startswith(part) for name in moved), part
    step_P = torch.cat([(value - before[name]).flatten() for name, value in after.items()])
    return Learned(metrics, step_P)


def check_update(built: Built, env: str, gradient: str) -> torch.Tensor:
    """Update what was built; return how far each number of the networks moved."""
    parts = ("actor.", "critic.", "temperature.")[: 3 if hasattr(built.model, "temperature") else 2]
    learned = check_learns(built.model, parts, lambda: update(built, env))
    assert gradient not in STATISTIC or f"train/critic_{STATISTIC[gradient]}" in learned.metrics
    return learned.step_P


def check_precisions(steps: list[torch.Tensor]) -> None:
    """Check that updates in both precisions are different, and agree closely."""
    assert not torch.equal(*steps)
    assert torch.nn.functional.cosine_similarity(*steps, dim=0) > 0.6


STATISTIC = dict.fromkeys((*NEEDS_SHARED, "famo"), "weight_max")


def parameters_with_gradient(module, prefix=""):
    return {
        prefix + name
        for name, p in module.named_parameters()
        if p.grad is not None and p.grad.any()
    }


def trained(module, prefix=""):
    return {prefix + name for name, p in module.named_parameters() if p.requires_grad}


def check_exports(model, folder, format=ONNX):
    """Compare the actions of the exported policy, whose weights are large enough to matter."""
    generator = torch.Generator().manual_seed(0)
    for module in model.acting_modules().values():
        for parameter in module.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim else 1.0
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    policy = LoadedPolicy(model)
    observation_ED, task_E = exporting.observations_of(model.spec, 40)
    assert policy.act(observation_ED, task_E).std(0).max() > 0.005
    if format == ONNX:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    _, difference = exporting.export_policy(policy, format, folder, num_observations=40)
    assert difference <= exporting.TOLERANCE
