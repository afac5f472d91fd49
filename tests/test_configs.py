from pathlib import Path

import pytest
import torch
import yaml

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.cli import MultiTaskCLI
from tests.conftest import CONFIGS, ROOT

FILES = sorted(
    path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    for path in ROOT.glob("configs/**/*.yaml")
)
SUITES = [name for name in FILES if name.startswith("env/metaworld")]
EXPERIMENTS = [name for name in FILES if name.startswith("experiment/")]
LOGGERS = [name for name in FILES if name.startswith("logger/")]
TINY = [
    "--trainer.enable_progress_bar=false",
    "--evaluation.num_episodes=1",
    "--data.benchmark.init_args.horizon=5",
    "--data.benchmark.init_args.num_goals=2",
    "--model.init_args.actor.init_args.width=8",
    "--model.init_args.critic.init_args.width=8",
    "--trainer.accelerator=cpu",
]


def load(name):
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())


PLUS = ("ars", "moore", "mtmhsac", "mtsac", "paco", "soft_modularization", "wide")
MTRL = (
    "aligned_mtl",
    "cagrad",
    "care",
    "famo",
    "film",
    "mtsac",
    "multi_head",
    "nash_mtl",
    "pcgrad",
    "separate",
    "soft_modularization",
)
TASKS = (10, 50)


def test_every_file_is_known():
    experiments = [
        f"experiment/mt{tasks}_{name}"
        for tasks in TASKS
        for name in (*PLUS, *(f"mtrl_{n}" for n in MTRL))
    ]
    assert sorted(experiments) == sorted(EXPERIMENTS)
    assert [name for name in FILES if name not in EXPERIMENTS] == [
        "algorithm/mtsac",
        "base",
        "env/gymnasium",
        "env/metaworld_custom",
        "env/metaworld_mt1",
        "env/metaworld_mt10",
        "env/metaworld_mt25",
        "env/metaworld_mt50",
        "env/toy",
        "env/toy_conflict",
        "gradient/aligned_mtl",
        "gradient/cagrad",
        "gradient/cagrad_fast",
        "gradient/famo",
        "gradient/gradnorm",
        "gradient/mean",
        "gradient/nash_mtl",
        "gradient/pcgrad",
        "logger/csv",
        "logger/tensorboard",
        "logger/wandb",
        "network/brc",
        "network/care",
        "network/film",
        "network/film_scalar",
        "network/language",
        "network/mixture_attention",
        "network/mixture_cluster",
        "network/mixture_ensemble",
        "network/mixture_gate",
        "network/mixture_identity",
        "network/mlp",
        "network/mlp_residual",
        "network/moore",
        "network/multi_head",
        "network/multi_head_mtrl",
        "network/paco",
        "network/separate",
        "network/soft_modularization",
        "network/task_embedding",
        "network/task_encoder",
        "quickstart",
        "toy_conflict",
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_is_and_is_short(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert (
        name.startswith(("experiment/", "quickstart", "toy_conflict"))
        or len(text.splitlines()) <= 25
    )


@pytest.mark.parametrize("suite", SUITES)
def test_every_metaworld_file_makes_a_run_of_its_tasks(command_line, monkeypatch, suite):
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line(
        "fit", configs=("base", suite, "algorithm/mtsac", "network/multi_head"), small=False
    )
    tasks = {"env/metaworld_mt1": 1, "env/metaworld_custom": 4}.get(suite) or int(
        suite.rpartition("_mt")[2]
    )
    assert seen[0].num_tasks == tasks and seen[0].horizon == 500


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(command_line, monkeypatch, name):
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line("fit", configs=[name], small=False)
    assert seen[0].num_tasks == parts_of(name)[0]


@pytest.mark.parametrize("name", ["quickstart", "experiment/mt10_mtmhsac"])
def test_complete_files_train_and_their_checkpoint_alone_rebuilds_the_model(command_line, name):
    envs = {"quickstart": 18}.get(name, 10)
    steps = (f"--rollout.warmup_steps={envs}", f"--rollout.total_steps={3 * envs}")
    command_line("fit", *TINY, *steps, configs=[name], small=False)
    run = Path(name).name
    path = command_line.folder(run) / "checkpoints" / "last.ckpt"
    rebuilt = SAC.load_from_checkpoint(path)
    assert rebuilt.counters.env_steps == 3 * envs
    saved = load_checkpoint(path)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in rebuilt.state_dict().items())


SIZES = {  # of the papers: MT10 and MT50
    "soft_modularization": {
        "SoftModularization": (
            {"depth": 2, "num_modules": 2},
            {"depth": 4, "num_modules": 4},
            {"width": 256, "embedding_dim": 400},
        )
    },
    "paco": {"PaCo": ({"num_sets": 5}, {"num_sets": 20}, {"width": 400, "depth": 3})},
    "moore": {"MOORE": ({"num_experts": 4}, {"num_experts": 6}, {"width": 400, "depth": 3})},
    "wide": {"MultiHead": ({}, {}, {"width": 4096, "depth": 3})},
    "ars": {"MultiHead": ({}, {}, {"width": 400, "depth": 3})},
    "mtmhsac": {"MultiHead": ({}, {}, {"width": 400, "depth": 3})},
    "mtsac": {"MLP": ({}, {}, {"width": 400, "depth": 3})},
    "multi_head": {"MultiHead": ({}, {}, {"width": 400, "depth": 4, "head_width": 400})},
    "film": {"FiLM": ({}, {}, {"width": 400, "depth": 3, "scalar": True})},
    "separate": {"Separate": ({}, {}, {"width": 400, "depth": 3})},
    "care": {"MLP": ({}, {}, {"width": 400, "depth": 3})},
}
METHODS = {
    "pcgrad": "PCGrad",
    "cagrad": "CAGrad",
    "famo": "FAMO",
    "nash_mtl": "NashMTL",
    "aligned_mtl": "AlignedMTL",
}

NUMBERS = {
    "cagrad": lambda tasks: {"c": {10: 0.9, 50: 0.5}[tasks]},
    "famo": lambda tasks: {"lr": 0.025, "decay": {10: 0.001, 50: 0.01}[tasks]},
    "nash_mtl": lambda tasks: {"max_norm": 1.0},
}


def parts_of(name):
    """Return the number of tasks, whether it is mtrl's protocol, and the method."""
    tasks, method = name[len("experiment/mt") :].split("_", 1)
    return int(tasks), method.startswith("mtrl_"), method.removeprefix("mtrl_")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_the_published_protocol(name):
    config, (tasks, is_mtrl, method) = load(name), parts_of(name)
    assert config["name"] == name.removeprefix("experiment/")
    assert f"-c configs/{name}.yaml" in (ROOT / "configs" / f"{name}.yaml").read_text()
    assert config["data"]["benchmark"]["init_args"] == {
        "tasks": f"MT{tasks}",
        "reward_version": "v1" if is_mtrl else "v2",
        "horizon": 150 if is_mtrl else 500,
        "num_goals": 50,
    }
    data, rollout, sac = config["data"], config["rollout"], config["model"]["init_args"]
    if is_mtrl:
        assert data["batch_size"] == {10: 1280, 50: 1300}[tasks] and data["capacity"] == 1_000_000
        assert rollout["warmup_steps"] == 1_500 * tasks and rollout["warmup_updates"] == 1_500
        assert config["evaluation"] == {"every": 10_000 * tasks, "num_episodes": 10}
    else:
        assert data["batch_size"] == 128 * tasks and data["capacity"] == 100_000 * tasks
        assert rollout["warmup_steps"] == 4_000 * tasks and "warmup_updates" not in rollout
        assert config["evaluation"] == {"every": 20_000 * tasks, "num_episodes": 50}
    assert rollout["total_steps"] == 2_000_000 * tasks
    assert rollout["updates_per_step"] == 1 and rollout["envs_per_task"] == 1
    assert (sac["discount"], sac["tau"], sac["num_critics"]) == (0.99, 0.005, 2)
    assert {sac["actor_max_grad_norm"], sac["critic_max_grad_norm"]} == {None if is_mtrl else 1.0}
    assert (sac["log_std_min"], sac["log_std_max"]) == (-10 if method == "moore" else -20, 2)
    assert sac["temperature"]["init_args"] == {
        "initial": 1.0,
        "per_task": method not in ("pcgrad", "cagrad", "famo", "nash_mtl"),
    }
    for optimizer in ("actor", "critic", "temperature"):
        init = sac[f"{optimizer}_optimizer"]["init_args"]
        assert (init["lr"], init.get("eps")) == (3e-4, None if is_mtrl else 1e-5)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_have_the_published_network_and_method(name):
    sac, (tasks, _, method) = load(name)["model"]["init_args"], parts_of(name)
    ((cls, (on_mt10, on_mt50, always)),) = SIZES["mtsac" if method in METHODS else method].items()
    for network, bound in (("actor", 1e-3), ("critic", 3e-3)):
        assert sac[network]["class_path"] == f"mtrl_lightning.networks.{cls}"
        given = dict(sac[network]["init_args"])
        assert given.pop("layer_norm", False) == (method == "ars" and network == "critic")
        assert ("conditioning" in given) == (method in ("care", "film"))
        given.pop("conditioning", None)
        assert given == {**always, **(on_mt10 if tasks == 10 else on_mt50), "output_bound": bound}
        wanted, gradient = METHODS.get(method, "Mean"), sac[f"{network}_gradient"]
        assert gradient["class_path"] == f"mtrl_lightning.gradients.{wanted}"
        assert gradient.get("init_args") == NUMBERS.get(method, lambda tasks: None)(tasks)
    assert ("task_weighting" in sac) == (method == "soft_modularization")
    assert ("encoder" in sac) == (method == "care") and ("reward_scale" in sac) == (method == "ars")
    if method == "care":
        assert sac["encoder"]["init_args"] == {"num_experts": {10: 6, 50: 10}[tasks]}
    resets = {10: {"every": 4_000_000, "times": 4}, 50: {"every": 14_000_000, "times": 6}}
    assert load(name).get("resets") == (resets[tasks] if method == "ars" else None)


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_leaves_metrics_csv_in_the_run_folder(command_line, logger):
    offline = ["--trainer.logger.init_args.offline=true"] if logger.endswith("wandb") else []
    command_line("fit", *offline, configs=(*CONFIGS, logger))
    assert "eval/success" in read_metrics(command_line.folder())
    assert not [p.name for p in command_line.root.iterdir() if p.name != "run"]
