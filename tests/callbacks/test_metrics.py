"""Rows of metrics, their schedule and loggers, and the progress bar."""

import re
from unittest.mock import MagicMock

import lightning
import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import WandbLogger

from mtrl_lightning.callbacks import (
    EnvStepProgressBar,
    MetricsCallback,
    MetricsFile,
    read_metrics,
)
from mtrl_lightning.rollout import StartMidway
from tests.helpers.fitting import QUIET, fit, parts, rows_of


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_rows_are_at_the_steps_of_their_schedules(tmp_path, kind):
    fit(tmp_path, kind=kind)
    rows = rows_of(tmp_path)
    evaluated = [row["env_steps"] for row in rows if "eval/return" in row]
    trained = [row["env_steps"] for row in rows if "train/actor_loss" in row]
    first = 60 if kind == "ppo" else 62  # two environments, after 60 steps of warm-up
    assert evaluated == [first, 120]
    assert trained == ([first, 80, 100, 120] if kind == "sac" else [*range(20, 121, 20)])


def test_rows_are_a_200th_of_the_run_apart_by_default(tmp_path):
    algorithm, data = parts(total_steps=1200)
    options = {**QUIET, "default_root_dir": tmp_path, "max_steps": 10}
    lightning.Trainer(**options, callbacks=[MetricsCallback()]).fit(algorithm, data)
    assert [row["env_steps"] for row in rows_of(tmp_path)] == [62, 66, 72, 78, 80, 80]


def test_rows_of_lightnings_callbacks_have_env_steps(tmp_path):
    fit(tmp_path, LearningRateMonitor(), logger=MetricsFile(tmp_path), log_every_n_steps=5)
    steps, rates = read_metrics(tmp_path)["lr-Adam"]
    assert set(rates) == {3e-4} and steps == [60, *range(68, 120, 10)], "2 env steps each"


def test_another_run_replaces_the_metrics_a_trial_writes_none(tmp_path):
    fit(tmp_path / "trial", fast_dev_run=2)
    assert not (tmp_path / "trial" / "metrics.jsonl").exists()
    fit(tmp_path, kind="ppo", total_steps=40)
    with pytest.warns(UserWarning, match="another run"):
        fit(tmp_path, total_steps=80)
    assert [row["env_steps"] for row in rows_of(tmp_path)] == [62, 62, 80, 80]


@pytest.mark.parametrize(
    ("prefix", "extras", "success"),
    [("", [], "rollout/success"), ("mine-", [StartMidway()], "rollout/success_from_reset")],
)
def test_wandb_shows_metrics_over_env_steps_and_the_best(tmp_path, prefix, extras, success):
    pytest.importorskip("wandb")
    run = MagicMock(id="r1", sweep_id=None, disabled=False)
    logger = WandbLogger(save_dir=tmp_path, experiment=run, prefix=prefix[:-1])
    fit(tmp_path, logger=logger, extras=extras)
    defined = {call.args[0]: call.kwargs for call in run.define_metric.call_args_list}
    assert defined["*"]["step_metric"] == f"{prefix}env_steps"
    best = {name for name, options in defined.items() if "max" in options.get("summary", "")}
    names = {"eval/success", "eval/success/goal-1", "eval/return", "rollout/return", success}
    assert {f"{prefix}{name}" for name in names} <= best
    assert not {f"{prefix}train/actor_loss", f"{prefix}fault/worker_restarts"} & best
    logged = [call.args[0] for call in run.log.call_args_list]
    steps = [row["env_steps"] for row in rows_of(tmp_path)]
    assert [row[f"{prefix}env_steps"] for row in logged if "curves" not in row] == steps


def test_the_bar_counts_env_steps_and_shows_results(tmp_path, capsys):
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True)
    *_, last = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert re.search(r"100%.*120/120 .*env steps/s", last)
    shown = {key: value for row in rows_of(tmp_path) for key, value in row.items()}
    names = {"eval success": "eval/success", "success": "rollout/success"}
    for name, metric in (names | {"return": "rollout/return"}).items():
        assert f" {name}={shown[metric]:.2f}" in last.replace("[", " "), last
    options = {"ckpt_path": "last", "total_steps": 160}
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True, **options)
    assert re.search(r"75%.* 120/160 ", capsys.readouterr().err)
