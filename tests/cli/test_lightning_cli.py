import json

import pytest
import yaml

from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.networks import MLP, Identity
from mtrl_lightning.policy import load_policy
from tests.helpers.command_line import CONFIGS, SHORT

TASKS = ("goal-0", "goal-1", "goal-2")


@pytest.mark.curves
def test_run_writes_config_metrics_curves_and_checkpoints(command_line, capsys):
    command_line("fit", *SHORT)
    folder, printed = command_line.folder(), capsys.readouterr().out
    files = "config.yaml hparams.yaml metrics.jsonl curves.png checkpoints replay run.lock"
    assert {path.name for path in folder.iterdir()} == {*files.split()}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert printed.count("eval after") == 3 and "eval after 180 env steps" in printed


def test_metrics_are_those_of_the_contract_and_times_add_up(command_line):
    command_line.finished()
    losses = [f"train/{name}_loss" for name in ("critic", "actor", "temperature")]
    learned = [f"train/{name}" for name in ("entropy", "q", "critic_grad_norm", "actor_grad_norm")]
    faults = ("worker_restarts", "dropped_transitions", "skipped_updates")
    activities = ("act", "step", "sample", "update", "evaluate", "checkpoint")
    fractions = [f"time/{name}_fraction" for name in activities]
    spreads = ("std", "min", "max")
    of_episodes = [
        f"rollout/{name}_{spread}" for name in ("return", "length") for spread in spreads
    ]
    of_tasks = [
        *(f"eval/{name}" for name in ("return", "success", "success_last")),
        *(f"rollout/{name}" for name in ("return", "success", "length", "episodes")),
        *of_episodes,
        "time/seconds_per_episode",
    ]
    expected = {
        *(*losses, *learned, *fractions, *of_tasks),
        *(f"{name}/{task}" for name in (*of_tasks, "train/temperature") for task in TASKS),
        *(f"fault/{name}" for name in faults),
        *("eval/success_worst_1", "time/env_steps_per_second", "time/updates_per_second"),
    }
    curves = read_metrics(command_line.folder())
    assert set(curves) == expected
    for row in zip(*(curves[name][1] for name in fractions), strict=True):
        assert 0 < sum(row) <= 1.001 and min(row) >= 0


def test_null_is_the_default_of_a_factory(command_line):
    factories = ("actor", "critic", "encoder", "actor_gradient", "critic_gradient", "value")
    factories += ("task_weighting", "reward_scale", "temperature")
    nulls = [f"--model.init_args.{name}=null" for name in (*factories, "actor_max_grad_norm")]
    command_line("fit", "--data.warmup_steps=60", "--data.total_steps=66", *nulls)
    algorithm = load_policy(command_line.folder()).algorithm
    assert type(algorithm.actor) is MLP and type(algorithm.encoder) is Identity
    config = yaml.safe_load((command_line.folder() / "config.yaml").read_text())
    assert config["model"]["init_args"]["actor_max_grad_norm"] is None


def test_validate_stores_the_checkpoints_results(command_line):
    command_line.finished()
    folder = command_line.folder()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    command_line("validate", "--ckpt_path=last")
    stored = folder / "validations.jsonl"
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path != stored}
    assert after == before and [path.name for path in folder.parent.iterdir()] == ["version_0"]
    command_line("validate", "--ckpt_path=last", "--evaluation.num_episodes=3")
    first, second = map(json.loads, stored.read_text().splitlines())
    assert (first["num_episodes"], second["num_episodes"]) == (2, 3)
    assert first["env_steps"] == 900 and first["protocol"] == {"benchmark": "toy", "horizon": 20}
    returns = [row["eval/return"] for row in command_line.rows() if "eval/return" in row]
    assert first["metrics"]["eval/return"] == pytest.approx(float(returns[-1]))
    intervals = first["success_intervals"]
    assert intervals.keys() == {"eval/success", *(f"eval/success/{task}" for task in TASKS)}
    for name, (low, high) in intervals.items():
        assert low <= first["metrics"][name] <= high


def test_validate_evaluates_some_tasks_and_warns_of_another_protocol(command_line, tmp_path):
    command_line.finished()
    evaluated = [row for row in command_line.rows() if "eval/return" in row]
    file = tmp_path / "results" / "two.json"
    tasks = ["--tasks", "goal-2", "goal-0"]
    command_line("validate", "--ckpt_path=last", *tasks, f"--json={file}")
    results = json.loads(file.read_text())
    assert results["env_steps"] == 900 and results["checkpoint"].endswith(".ckpt")
    for task in ("goal-2", "goal-0"):
        name = f"eval/return/{task}"
        # a batch of fewer rows is rounded otherwise
        assert results["metrics"][name] == pytest.approx(float(evaluated[-1][name]), rel=1e-5)
    assert "eval/return/goal-1" not in results["metrics"]
    with pytest.warns(UserWarning, match="another protocol"):
        command_line("validate", "--ckpt_path=last", "--data.benchmark.init_args.horizon=5")


@pytest.mark.slow
def test_excluded_tasks_are_evaluated_but_not_trained_on(command_line):
    excluded = ["--data.exclude_from_training=[goal-1]", "--data.batch_size=64"]
    command_line("fit", *SHORT, *excluded)
    curves = read_metrics(command_line.folder())
    assert "eval/success/goal-1" in curves and "rollout/return/goal-1" not in curves
    assert "train/temperature/goal-1" not in curves
    assert len(set(curves["train/temperature/goal-0"][1])) > 1


def test_run_is_resumed_by_its_folder(command_line):
    command_line.finished()
    folder = command_line.folder()
    resume = [f"--resume={folder.parent}", "--data.total_steps=930"]
    command_line("fit", *resume, configs=(), small=False)
    last = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert last["mtrl_lightning"]["counters"]["env_steps"] == 930
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["total_steps"] == 930 and config["ckpt_path"] is None


@pytest.mark.slow
def test_wandb_run_is_resumed_and_a_repeated_run_is_new(command_line, monkeypatch):
    wandb = pytest.importorskip("wandb")
    offline = ["--trainer.logger.offline=true", "--name=logged"]
    command_line("fit", *SHORT, *offline, configs=(*CONFIGS, "logger/wandb"))
    wandb.finish()
    folder = command_line.folder("logged")
    plain = {"configs": (), "small": False}
    command_line("fit", f"--resume={folder}", "--data.total_steps=210", **plain)
    wandb.finish()
    command_line("fit", "-c", str(folder / "config.yaml"), **plain)
    ids = [
        {path.name.rpartition("-")[2] for path in each.glob("wandb/offline-run-*")}
        for each in (folder, command_line.folder("logged", 1))
    ]
    assert len(ids[0]) == len(ids[1]) == 1 and ids[0] != ids[1]
