"""Rows of metrics, their schedule, and their loggers."""

import shutil

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import WandbLogger

from mtrl_lightning.callbacks import MetricsCallback, MetricsFile, read_metrics
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.rollout import StartMidway
from tests.helpers.fitting import fit, parts, rows_of


class StopAt(Callback):
    """End a run after a number of environment steps."""

    def __init__(self, env_steps):
        self.env_steps = env_steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= data_of(trainer).counters.env_steps >= self.env_steps


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_a_resumed_run_logs_the_rows_of_an_uninterrupted_one(tmp_path, kind):
    fit(tmp_path / "whole", kind=kind)
    whole = rows_of(tmp_path / "whole")
    evaluated = [row["env_steps"] for row in whole if "eval/return" in row]
    trained = [row["env_steps"] for row in whole if "train/actor_loss" in row]
    first = 60 if kind == "ppo" else 62  # two environments, after 60 steps of warm-up
    assert evaluated == [first, 120]
    assert trained == [first, 80, 100, 120] if kind == "sac" else [*range(20, 121, 20)]
    checkpoint = next((tmp_path / "whole" / "checkpoints").glob("env_steps=*80.ckpt"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    fit(
        tmp_path / "resumed",
        kind=kind,
        ckpt_path=tmp_path / "resumed" / "checkpoints" / checkpoint.name,
    )
    assert rows_of(tmp_path / "resumed") == whole


def test_run_that_stops_early_logs_its_end_and_extends_exactly(tmp_path):
    fit(tmp_path / "whole")
    fit(tmp_path / "parts", StopAt(90))
    rows = rows_of(tmp_path / "parts")
    assert [row["env_steps"] for row in rows] == [62, 62, 80, 90, 90]
    fit(tmp_path / "parts", ckpt_path="last")
    later = [row for row in rows_of(tmp_path / "parts") if row["env_steps"] > 90]
    assert later == [row for row in rows_of(tmp_path / "whole") if row["env_steps"] > 90]


def test_by_default_there_are_two_hundred_rows():
    class Trainer:
        fast_dev_run = False
        loggers = ()

        def __init__(self, data):
            self.datamodule = data

    for total_steps, interval in ((2_000_000, 10_000), (30_000, 150), (100, 2)):
        data = parts(total_steps=total_steps)[1]
        data._folder = "runs"
        callback = MetricsCallback()
        trainer = Trainer(data)
        callback.setup(trainer, None, "fit")
        assert callback._every.interval == interval
        assert [type(logger) for logger in trainer.loggers] == [MetricsFile]


def test_rows_of_lightnings_callbacks_have_env_steps(tmp_path):
    fit(tmp_path, LearningRateMonitor(), logger=MetricsFile(tmp_path), log_every_n_steps=5)
    steps, rates = read_metrics(tmp_path)["lr-Adam"]
    assert set(rates) == {3e-4} and steps == [60, *range(68, 120, 10)], "2 env steps each"


def test_a_trial_writes_nothing(tmp_path):
    fit(tmp_path, fast_dev_run=2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_another_run_in_the_folder_replaces_the_metrics(tmp_path):
    fit(tmp_path, kind="ppo", total_steps=40)
    with pytest.warns(UserWarning, match="another run"):
        fit(tmp_path, total_steps=80)
    assert [row["env_steps"] for row in rows_of(tmp_path)] == [62, 62, 80, 80]


class FakeRun:
    """A W&B run that keeps what it receives."""

    config = type("Config", (), {"update": lambda self, params, **_: None})()
    id = "r1"
    sweep_id = None
    disabled = False

    def __init__(self, x_axis="env_steps"):
        self.rows, self.best, self.x_axis = [], [], x_axis

    def define_metric(self, name, step_metric="", summary="", **_):
        assert name in (self.x_axis, "trainer/global_step") or step_metric == self.x_axis
        if "max" in summary:
            self.best.append(name)

    def log(self, row):
        self.rows.append(row)


def test_wandb_shows_metrics_over_env_steps_and_the_best(tmp_path):
    pytest.importorskip("wandb")
    run = FakeRun()
    fit(tmp_path, logger=WandbLogger(save_dir=tmp_path, experiment=run))
    assert {"eval/success", "eval/success/goal-1", "eval/return", "rollout/return"} <= {*run.best}
    assert "train/actor_loss" not in run.best


def test_wandb_shows_the_best_success_of_episodes_from_a_reset(tmp_path):
    pytest.importorskip("wandb")
    run = FakeRun()
    fit(tmp_path, logger=WandbLogger(save_dir=tmp_path, experiment=run), extras=[StartMidway()])
    assert "rollout/success_from_reset" in run.best and "rollout/success" not in run.best
    logged = [row["env_steps"] for row in run.rows if "curves" not in row]
    assert logged == [row["env_steps"] for row in rows_of(tmp_path)]
    drawn = [row["env_steps"] for row in run.rows if "curves" in row]
    assert drawn in ([62, 120], [])


def test_wandb_shows_metrics_with_a_prefix_over_env_steps(tmp_path):
    pytest.importorskip("wandb")
    run = FakeRun("mine-env_steps")
    fit(tmp_path, logger=WandbLogger(save_dir=tmp_path, experiment=run, prefix="mine"))
    assert "mine-eval/success" in run.best
    assert [row["mine-env_steps"] for row in run.rows][-1] == rows_of(tmp_path)[-1]["env_steps"]
