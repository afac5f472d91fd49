from pathlib import Path

import pytest
import torch
import yaml

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.cli import MultiTaskCLI
from tests.conftest import CONFIGS, ROOT

FILES = sorted(path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml"))
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


def test_every_file_is_known():
    assert FILES == [
        "algorithm/mtsac",
        "base",
        "env/metaworld_custom",
        "env/metaworld_mt1",
        "env/metaworld_mt10",
        "env/metaworld_mt25",
        "env/metaworld_mt50",
        "env/toy",
        "experiment/mt10_mtmhsac",
        "experiment/mt10_mtsac",
        "experiment/mt50_mtmhsac",
        "gradient/mean",
        "logger/csv",
        "logger/tensorboard",
        "logger/wandb",
        "network/mlp",
        "network/multi_head",
        "quickstart",
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_is_and_is_short(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert name.startswith(("experiment/", "quickstart")) or len(text.splitlines()) <= 25


@pytest.mark.parametrize("suite", SUITES)
def test_every_metaworld_file_makes_a_run_of_its_tasks(command_line, monkeypatch, suite):
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line("fit", configs=("base", suite, "algorithm/mtsac", "network/multi_head"), small=False)
    tasks = {"env/metaworld_mt1": 1, "env/metaworld_custom": 4}.get(suite) or int(suite.rpartition("_mt")[2])
    assert seen[0].num_tasks == tasks and seen[0].horizon == 500


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(command_line, monkeypatch, name):
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line("fit", configs=[name], small=False)
    assert seen[0].num_tasks == int(name[len("experiment/mt") :].split("_")[0])


@pytest.mark.parametrize("name", ["quickstart", "experiment/mt10_mtmhsac"])
def test_complete_files_train_and_their_checkpoint_alone_rebuilds_the_model(command_line, name):
    envs = {"quickstart": 18}.get(name, 10)
    steps = (f"--rollout.warmup_steps={envs}", f"--rollout.total_steps={3 * envs}")
    command_line("fit", *TINY, *steps, configs=[name], small=False)
    run = Path(name).name
    path = command_line.folder(run) / "checkpoints" / "last.ckpt"
    rebuilt = SAC.load_from_checkpoint(path, spec=command_line.spec(run), weights_only=True)
    assert rebuilt.counters.env_steps == 3 * envs
    saved = load_checkpoint(path)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in rebuilt.state_dict().items())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_the_published_protocol(name):
    config = load(name)
    tasks = int(name[len("experiment/mt") :].split("_")[0])
    assert config["data"]["benchmark"]["init_args"] == {
        "tasks": f"MT{tasks}",
        "reward_version": "v2",
        "horizon": 500,
        "num_goals": 50,
    }
    assert config["data"]["batch_size"] == 128 * tasks and config["data"]["capacity"] == 100_000 * tasks
    rollout = config["rollout"]
    assert rollout["total_steps"] == 2_000_000 * tasks and rollout["warmup_steps"] == 4_000 * tasks
    assert rollout["updates_per_step"] == 1 and rollout["envs_per_task"] == 1
    assert config["evaluation"]["num_episodes"] == 50
    sac = config["model"]["init_args"]
    assert (sac["discount"], sac["tau"], sac["num_critics"]) == (0.99, 0.005, 2)
    assert (sac["actor_max_grad_norm"], sac["critic_max_grad_norm"]) == (1.0, 1.0)
    assert (sac["log_std_min"], sac["log_std_max"]) == (-20, 2)
    assert sac["temperature"]["init_args"] == {"initial": 1.0, "per_task": True}
    for optimizer in ("actor", "critic", "temperature"):
        init = sac[f"{optimizer}_optimizer"]["init_args"]
        assert (init["lr"], init["eps"]) == (3e-4, 1e-5)
    for network, bound in (("actor", 1e-3), ("critic", 3e-3)):
        assert sac[network]["init_args"] == {"width": 400, "depth": 3, "output_bound": bound}
        expected = "MLP" if name.endswith("mtsac") and "mh" not in name else "MultiHead"
        assert sac[network]["class_path"] == f"mtrl_lightning.networks.{expected}"


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_leaves_metrics_csv_in_the_run_folder(command_line, logger):
    offline = ["--trainer.logger.init_args.offline=true"] if logger.endswith("wandb") else []
    command_line("fit", *offline, configs=(*CONFIGS, logger))
    assert "eval/success" in read_metrics(command_line.folder())
    assert not [p.name for p in command_line.root.iterdir() if p.name != "run"]
