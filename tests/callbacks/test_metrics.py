"""Rows of metrics, their schedule, and their loggers."""

import shutil

import lightning
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import WandbLogger

from mtrl_lightning.callbacks import MetricsCallback, MetricsFile, read_metrics
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.rollout import StartMidway
from tests.helpers.fitting import QUIET, fit, parts, rows_of


class StopAt(Callback):
    """End a run after a number of environment steps."""

    def __init__(self, env_steps):
        self.env_steps = env_steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= data_of(trainer).counters.env_steps >= self.env_steps


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_resumed_and_extended_runs_log_the_same_rows(tmp_path, kind):
    whole_run, resumed, extended = (tmp_path / name for name in ("whole", "resumed", "extended"))
    fit(whole_run, kind=kind)
    whole = rows_of(whole_run)
    evaluated = [row["env_steps"] for row in whole if "eval/return" in row]
    trained = [row["env_steps"] for row in whole if "train/actor_loss" in row]
    first = 60 if kind == "ppo" else 62  # two environments, after 60 steps of warm-up
    assert evaluated == [first, 120]
    assert trained == [first, 80, 100, 120] if kind == "sac" else [*range(20, 121, 20)]
    checkpoint = next((whole_run / "checkpoints").glob("env_steps=*80.ckpt"))
    shutil.copytree(whole_run, resumed)
    fit(resumed, kind=kind, ckpt_path=resumed / "checkpoints" / checkpoint.name)
    assert rows_of(resumed) == whole
    if kind == "sac":
        fit(extended, StopAt(90))
        assert [row["env_steps"] for row in rows_of(extended)] == [62, 62, 80, 90, 90]
        fit(extended, ckpt_path="last")
        later, wanted = (
            [r for r in rows if r["env_steps"] > 90] for rows in (rows_of(extended), whole)
        )
        assert later == wanted


def test_rows_are_a_200th_of_the_run_apart_by_default(tmp_path):
    algorithm, data = parts(total_steps=1200)
    options = {**QUIET, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(**options, callbacks=[MetricsCallback(), StopAt(80)])
    trainer.fit(algorithm, data)
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


class FakeRun:
    """A W&B run that keeps what it receives."""

    config = type("Config", (), {"update": lambda self, params, **_: None})()
    id = "r1"
    sweep_id = None
    disabled = False

    def __init__(self, x_axis):
        self.rows, self.best, self.x_axis = [], set(), x_axis

    def define_metric(self, name, step_metric="", summary="", **_):
        assert name in (self.x_axis, "trainer/global_step") or step_metric == self.x_axis
        if "max" in summary:
            self.best.add(name)

    def log(self, row):
        self.rows.append(row)


@pytest.mark.parametrize(
    ("prefix", "extras", "success"),
    [("", [], "rollout/success"), ("mine", [StartMidway()], "rollout/success_from_reset")],
)
def test_wandb_shows_metrics_over_env_steps_and_the_best(tmp_path, prefix, extras, success):
    pytest.importorskip("wandb")
    start = f"{prefix}-" if prefix else ""
    run = FakeRun(f"{start}env_steps")
    logger = WandbLogger(save_dir=tmp_path, experiment=run, prefix=prefix)
    fit(tmp_path, logger=logger, extras=extras)
    names = ("eval/success", "eval/success/goal-1", "eval/return", "rollout/return", success)
    assert {f"{start}{name}" for name in names} <= run.best
    others = {"train/actor_loss", "rollout/success", "rollout/success_from_reset"} - {success}
    assert not {f"{start}{name}" for name in others} & run.best
    logged = [row[run.x_axis] for row in run.rows if "curves" not in row]
    assert logged == [row["env_steps"] for row in rows_of(tmp_path)]
