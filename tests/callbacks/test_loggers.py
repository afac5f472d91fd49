import subprocess
import sys
import textwrap
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from jsonargparse import dict_to_namespace

from mtrl_lightning.callbacks import EnvStepWandbLogger, read_metrics
from mtrl_lightning.callbacks.loggers.wandb_logger import EMPTY_NOTE
from mtrl_lightning.callbacks.options import _flat
from mtrl_lightning.cli.lightning_cli import MultiTaskCLI
from tests.helpers.command_line import CONFIGS, SHORT
from tests.helpers.wandb_files import read_offline_runs


@pytest.mark.curves
def test_tensorboard_has_the_metrics_over_env_steps(command_line):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command_line("fit", *SHORT, configs=(*CONFIGS, "logger/tensorboard"))
    events = EventAccumulator(str(command_line.folder() / "tensorboard"))
    events.Reload()
    steps, values = read_metrics(command_line.folder())["eval/return"]
    logged = events.Scalars("eval/return")
    assert [event.step for event in logged] == steps
    assert all(abs(event.value - value) < 1e-4 for event, value in zip(logged, values, strict=True))
    folder = command_line.folder()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    logged = yaml.safe_load((folder / "tensorboard" / "hparams.yaml").read_text())
    assert dict(_flat(saved)).items() <= dict(_flat(logged)).items()
    table = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"seed_everything" in table and b"rollout.total_steps" in table
    images = events.Images("curves")
    drawn = [event.step for event in images]
    assert drawn[-1] == steps[-1] and len(set(drawn)) == len(drawn) and set(drawn) <= set(steps)
    assert images[-1].encoded_image_string == (folder / "curves.png").read_bytes()
    (shown,) = events.Tensors("config/text_summary")
    text = textwrap.dedent(shown.tensor_proto.string_val[0].decode())
    assert saved["rollout"].items() <= yaml.safe_load(text)["rollout"].items()


@pytest.mark.slow
@pytest.mark.curves
def test_rows_of_lightnings_callbacks_have_env_steps(command_line, capsys):
    monitors = [
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks+=DeviceStatsMonitor",
        "--trainer.callbacks.cpu_stats=true",
        "--trainer.log_every_n_steps=5",
        *SHORT,
    ]
    command_line("fit", *monitors)
    curves = read_metrics(command_line.folder())
    steps, rates = curves["lr-Adam"]
    assert set(rates) == {3e-4} and len(steps) >= 5
    # at the start, and then at every 5th update of one for each vector step of 3 environments
    assert steps[0] == 0 and all(60 <= step <= 180 for step in steps[1:])
    assert set(np.diff(steps[1:])) == {3 * 5}
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in curves
    assert (command_line.folder() / "curves.png").exists()
    assert "damaged" not in capsys.readouterr().err
    before = command_line.rows()
    command_line("fit", *monitors, "--ckpt_path=last", "--rollout.total_steps=240")
    assert "damaged" not in capsys.readouterr().err
    assert [row["lr-Adam"] for row in command_line.rows()][: len(before)] == [
        row["lr-Adam"] for row in before
    ]


def test_wandb_gets_the_env_steps_of_the_run_too(monkeypatch):
    logged = []
    run = SimpleNamespace(log=lambda row, **options: logged.append((row, options)))
    logger = EnvStepWandbLogger.__new__(EnvStepWandbLogger)
    logger._prefix = ""
    logger._note = dict(EMPTY_NOTE)
    logger._unwritten = deque()
    logger._save_note = lambda: None
    logger.count_env_steps = lambda: 40
    monkeypatch.setattr(EnvStepWandbLogger, "experiment", run)
    logger.log_metrics({"lr": 0.5}, step=7)
    logger.log_metrics({"env_steps": 50, "a": 1.0}, step=50)
    assert [(row, options["step"]) for row, options in logged] == [
        ({"env_steps": 40, "lr": 0.5}, 40),
        ({"env_steps": 50, "a": 1.0}, 50),
    ]


def test_a_logger_that_writes_no_folder_is_left_as_it_is(tmp_path):
    command_line = MultiTaskCLI.__new__(MultiTaskCLI)
    command_line._location = SimpleNamespace(folder=tmp_path)
    options = {"project": "p"}
    logger = dict_to_namespace({"class_path": "own.OnlineLogger", "init_args": options})
    command_line._place_logger(logger, "run")
    assert logger.init_args.as_dict() == options
    logger.init_args.save_dir = "."
    command_line._place_logger(logger, "run")
    assert logger.init_args.as_dict() == {**options, "save_dir": str(tmp_path)}


VIDEO = [
    "--trainer.callbacks+=VideoCallback",
    "--trainer.callbacks.every=3",
    "--trainer.callbacks.tasks=[goal-1]",
    "--trainer.callbacks.num_workers=0",
    "--trainer.callbacks.width=32",
    "--trainer.callbacks.height=32",
]


@pytest.mark.slow
@pytest.mark.curves
def test_wandb_offline_has_every_point_once_and_continues_the_same_run(command_line, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for extra in ([], ["--ckpt_path=last", "--rollout.total_steps=240"]):
        args = [
            *SHORT,
            "--trainer.logger.init_args.offline=true",
            "--trainer.logger.init_args.log_artifacts=true",
            "--metrics.system=true",
            *VIDEO,
            *extra,
        ]
        command_line("fit", *args, configs=(*CONFIGS, "logger/wandb"))
        wandb.finish()
        wandb.teardown()  # W&B's own process writes its file when it ends
    ((run_id, (rows, config, artifacts)),) = read_offline_runs(command_line.folder()).items()
    # each session ends with them; W&B knows a file that has not changed
    assert artifacts == 2 * [f"{run_id}-policy", f"{run_id}-config"]
    assert "continues" not in config  # it is the same W&B run
    sessions = sorted(command_line.folder().glob("wandb/offline-run-*"))
    line = [sys.executable, "-m", "wandb", "sync", "--dry-run", *map(str, sessions)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "Would sync 2 run(s)" in done.stdout + done.stderr
    assert config["protocol/benchmark"] == "toy"
    saved = (command_line.folder() / "config_from_000000000180.yaml").read_text()
    of_the_run = dict(_flat(yaml.safe_load(saved)))
    assert len(of_the_run) > 100 and of_the_run["seed_everything"] == 1
    assert of_the_run.items() <= dict(_flat(config)).items()
    for name in ("eval/success", "train/q", "system/memory_gib", "system/cpu_percent"):
        assert [row["env_steps"] for row in rows if name in row] == read_metrics(
            command_line.folder()
        )[name][0]
    drawn = [row for row in rows if "curves/path" in row]
    drawn_at = [row["env_steps"] for row in drawn]
    evaluated = read_metrics(command_line.folder())["eval/success"][0]
    assert drawn_at == evaluated
    stored = f"wandb/offline-run-*/files/{drawn[-1]['curves/path']}"
    (file,) = command_line.folder().glob(stored)
    assert file.read_bytes() == (command_line.folder() / "curves.png").read_bytes()
    videos = [row for row in rows if "videos/goal-1/path" in row]
    assert [row["env_steps"] for row in videos] == [180, 240]
    for row in videos:
        stored = f"wandb/offline-run-*/files/{row['videos/goal-1/path']}"
        (file,) = command_line.folder().glob(stored)
        step = command_line.folder() / "videos" / f"step_{row['env_steps']:012d}"
        assert file.read_bytes() == (step / "goal-1.mp4").read_bytes()
