import json

import pytest
import yaml

from mtrl_lightning.callbacks import evaluation, read_metrics
from mtrl_lightning.networks import MLP, Identity
from mtrl_lightning.policy import load_policy
from tests.helpers.command_line import CONFIGS, SHORT

TASKS = ("goal-0", "goal-1", "goal-2")


def test_times_add_up_and_every_part_has_its_metrics(command_line):
    command_line.finished()
    curves = read_metrics(command_line.folder())
    activities = ("act", "step", "sample", "update", "evaluate", "checkpoint")
    fractions = [curves[f"time/{name}_fraction"][1] for name in activities]
    for row in zip(*fractions, strict=True):
        assert 0 < sum(row) <= 1.001 and min(row) >= 0
    of_tasks = ["rollout/success", "rollout/episodes", "train/temperature"]
    of_tasks += ["rollout/return_std", "rollout/length_max", "time/seconds_per_episode"]
    others = ["fault/skipped_updates", "train/q", "train/critic_grad_norm", "train/actor_loss"]
    expected = {*others, *(f"{name}/{task}" for name in of_tasks for task in TASKS)}
    expected |= {"eval/success_worst_1", "time/env_steps_per_second", "time/updates_per_second"}
    assert expected <= curves.keys()


def test_null_is_the_default_of_a_factory(command_line):
    factories = ("actor", "critic", "encoder", "actor_gradient", "critic_gradient", "value")
    factories += ("task_weighting", "reward_scale", "temperature")
    nulls = [f"--model.init_args.{name}=null" for name in (*factories, "actor_max_grad_norm")]
    command_line("fit", "--data.warmup_steps=60", "--data.total_steps=66", *nulls)
    algorithm = load_policy(command_line.folder()).algorithm
    assert type(algorithm.actor) is MLP and type(algorithm.encoder) is Identity
    config = yaml.safe_load((command_line.folder() / "config.yaml").read_text())
    assert config["model"]["init_args"]["actor_max_grad_norm"] is None


def test_validate_stores_the_results_of_a_checkpoint(command_line, tmp_path, monkeypatch):
    command_line.finished()
    folder = command_line.folder()
    file = tmp_path / "results" / "two.json"
    stored = folder / "validations.jsonl"

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path != stored}

    before = times()
    command_line("validate", "--ckpt_path=last")
    assert times() == before and [path.name for path in folder.parent.iterdir()] == ["version_0"]
    two = ["--tasks", "goal-2", "goal-0", f"--json={file}"]
    command_line("validate", "--ckpt_path=last", *two)
    first, second = map(json.loads, stored.read_text().splitlines())
    assert json.loads(file.read_text()) == second
    assert first["env_steps"] == 900 and first["protocol"] == {"benchmark": "toy", "horizon": 20}
    evaluated = [row for row in command_line.rows() if "eval/return" in row][-1]
    assert first["metrics"]["eval/return"] == pytest.approx(float(evaluated["eval/return"]))
    for name in ("eval/return/goal-2", "eval/return/goal-0"):
        # a batch of fewer rows is rounded otherwise
        assert second["metrics"][name] == pytest.approx(float(evaluated[name]), rel=1e-5)
    assert "eval/return/goal-1" not in second["metrics"]
    intervals = first["success_intervals"]
    assert intervals.keys() == {"eval/success", *(f"eval/success/{task}" for task in TASKS)}
    for name, (low, high) in intervals.items():
        assert low <= first["metrics"][name] <= high
    monkeypatch.setattr(evaluation, "num_goals", lambda benchmark: 5)  # each is visited once
    command_line("test", "--ckpt_path=last")
    command_line("validate", "--ckpt_path=last", "--evaluation.num_episodes=5")
    *_, tested, five = map(json.loads, stored.read_text().splitlines())
    assert tested["metrics"] == five["metrics"] != first["metrics"]
    other = ["--data.benchmark.init_args.horizon=5", "--evaluation.num_episodes=3"]
    with pytest.warns(UserWarning, match="another protocol"):
        command_line("validate", "--ckpt_path=last", *other)
    assert json.loads(stored.read_text().splitlines()[-1])["num_episodes"] == 3


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
