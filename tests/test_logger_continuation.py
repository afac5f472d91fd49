import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from mtrl_lightning.callbacks import EnvStepWandbLogger, MetricsCallback
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.callbacks.csv_logger import MetricsCSV
from mtrl_lightning.callbacks.wandb_logger import _rewind_offline, _wandb_records
from tests.callbacks.test_loggers import wandb_records
from tests.conftest import ROOT

wandb = pytest.importorskip("wandb")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
KEEP = "--checkpoint.keep_last=-1"


@pytest.fixture
def fit(command_line, monkeypatch, tmp_path):
    """Train with every logger there is, each time as a session of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    read = [
        yaml.safe_load((ROOT / "configs" / "logger" / f"{name}.yaml").read_text())
        for name in ("wandb", "tensorboard")
    ]
    loggers = [logger for config in read for logger in config["trainer"]["logger"]]
    config = tmp_path / "loggers.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))

    def fit(*args, process=False):
        if process:
            return command_line.process("fit", "-c", str(config), *args)
        command_line("fit", "-c", str(config), *args)
        return end()

    def end():
        wandb.finish()
        wandb.teardown()  # W&B's own process writes its file when it ends

    end()  # a run that another test has left open would be gone on with
    yield fit
    end()


def wandb_files(folder):
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def wandb_points(folder):
    """Return the points of all sessions together, as ``(env_steps, name, value)``, and the runs' ids."""
    from wandb.proto import wandb_internal_pb2

    points, ids = [], set()
    for path in wandb_files(folder):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                assert record.run.resume  # else `wandb sync` may replace the earlier sessions
            row = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            points += [
                (row["env_steps"], k, float(v))
                for k, v in row.items()
                if k[0] != "_" and k != "env_steps"
            ]
    return sorted(points), ids


def csv_points(folder):
    rows = MetricsCSV(str(folder)).rows()
    return sorted(
        (int(row["env_steps"]), k, v) for row in rows for k, v in row.items() if k != "env_steps"
    )


def tensorboard_points(folder):
    events = event_accumulator.EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0}
    )
    events.Reload()
    return sorted(
        (event.step, tag, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    )


def check_wandb(folder, expected):
    points, ids = wandb_points(folder)
    assert len(ids) == 1
    assert points == expected
    for path in wandb_files(folder):  # else `wandb sync` stops
        assert [end for end, _ in _wandb_records(path.read_bytes())][-1] == path.stat().st_size


def check_loggers(folder, last):
    expected = csv_points(folder)
    assert max(step for step, _, _ in expected) == last
    assert len({(step, name) for step, name, _ in expected}) == len(expected)
    check_wandb(folder, expected)
    points = [point for point in tensorboard_points(folder) if point[1] != "env_steps"]
    assert [point[:2] for point in points] == [point[:2] for point in expected]
    for point, other in zip(points, expected, strict=True):
        assert point[2] == pytest.approx(other[2], rel=1e-5, abs=1e-30)


def test_every_logger_has_every_point_once_after_continuing_from_the_last_and_from_an_older_checkpoint(
    fit, command_line
):
    folder = command_line.folder()
    fit(KEEP)
    check_loggers(folder, 900)
    first = csv_points(folder)
    fit(KEEP, "--ckpt_path=last", "--rollout.total_steps=1200")
    check_loggers(folder, 1200)
    # the last rows of another branch: off its grid, and of other values
    older = folder / "checkpoints" / "step_000000000600.ckpt"
    fit(
        KEEP,
        f"--ckpt_path={older}",
        "--rollout.total_steps=1050",
        "--model.init_args.actor_max_grad_norm=0.1",
    )
    check_loggers(folder, 1050)
    assert csv_points(folder)[:20] == first[:20]
    assert len(wandb_files(folder)) == 3


def test_points_that_w_and_b_has_synced_stay_and_are_not_repeated(fit, command_line):
    folder = command_line.folder()
    fit(KEEP)
    (path,) = wandb_files(folder)
    before, points = path.read_bytes(), wandb_points(folder)[0]
    path.with_suffix(".wandb.synced").touch()
    older = folder / "checkpoints" / "step_000000000600.ckpt"
    with pytest.warns(UserWarning, match="W&B has points up to env step 900 from before"):
        fit(f"--ckpt_path={older}", "--rollout.total_steps=1200")
    assert path.read_bytes() == before
    later = [point for point in csv_points(folder) if point[0] > 900]
    assert wandb_points(folder)[0] == sorted([*points, *later]) and later


def test_points_that_w_and_b_lacks_come_from_the_metrics(fit, command_line):
    folder = command_line.folder()
    fit()
    (path,) = wandb_files(folder)
    ends = [end for end, data in _wandb_records(path.read_bytes()) if b"train/q" in data]
    os.truncate(path, ends[-1] - 50)  # as a kill of W&B's own process leaves it
    assert (
        0
        < len({step for step, _, _ in wandb_points(folder)[0]})
        < len({step for step, _, _ in csv_points(folder)})
    )
    command_line("fit", "--ckpt_path=last", "--rollout.total_steps=1050")  # without W&B
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["callbacks"]["metrics"]["wandb_id"]
    fit("--ckpt_path=last", "--rollout.total_steps=1200")
    check_wandb(folder, csv_points(folder))


def test_every_logger_has_every_point_once_after_a_kill(fit, command_line):
    folder = command_line.folder()
    process = fit(
        "--rollout.total_steps=100000000",
        "--metrics.every=30",
        "--evaluation.every=90",
        KEEP,
        process=True,
    )
    last, end = folder / "checkpoints" / "last.ckpt", time.monotonic() + 60

    def rows():
        path = folder / "metrics.csv"
        lines = path.read_text().splitlines() if path.exists() else []
        return len(lines) - 1

    while not (last.exists() and rows() > 15):
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    counters = load_checkpoint(last)["mtrl_lightning"]["counters"]
    steps = counters["env_steps"] + 300
    options = [f"--rollout.total_steps={steps}", "--metrics.every=30", "--evaluation.every=90"]
    fit(f"--ckpt_path={last}", *options)
    check_loggers(folder, steps)


def logged(starting_step, rows, env_steps, *live):
    """Return what an online run that goes on at ``env_steps`` is sent, as ``(step, env_steps)``."""
    sent = []
    run = SimpleNamespace(starting_step=starting_step, offline=False)
    run.log = lambda row, step: sent.append((step, row["env_steps"]))
    logger = EnvStepWandbLogger(experiment=run)
    logger.go_on([{"env_steps": float(step)} for step in rows], env_steps)
    for step in live:
        logger.log_metrics({"env_steps": step}, step=step)
    return sent


def test_an_online_run_is_sent_what_the_server_lacks():
    assert logged(0, [], 0, 0, 3, 3) == [(0, 0), (3, 3), (3, 3)]
    assert logged(5, [2, 4, 6, 6], 6, 8) == [(6, 6), (6, 6), (8, 8)]
    assert logged(7, [2, 4, 6], 6, 8) == [(8, 8)]
    assert logged(7, [2, 4, 6], 6, 6, 8) == [
        (7, 6),
        (8, 8),
    ]  # an evaluation at the checkpoint's step, made up for
    assert logged(5, [2, 4, 6], 6, 6, 8) == [(6, 6), (7, 6), (8, 8)]
    with pytest.warns(
        UserWarning, match="points up to env step 9 from before, later than the checkpoint's 6"
    ):
        assert logged(10, [2, 4, 6], 6, 6, 8, 9, 12) == [(12, 12)]


def test_an_offline_file_that_names_no_run_is_deleted(tmp_path):
    path = tmp_path / "offline-run-1-a" / "run-a.wandb"
    path.parent.mkdir()
    path.write_bytes(b":W&B\xe1\xbe\0")
    assert _rewind_offline(path, 10) == -1
    assert not path.exists()


def test_what_tensorboard_holds_is_written_before_a_checkpoint(tmp_path):
    logger = TensorBoardLogger(
        str(tmp_path), name="", version="tensorboard", default_hp_metric=False
    )
    logger.log_metrics({"a": 0.5}, step=3)
    MetricsCallback().on_save_checkpoint(SimpleNamespace(loggers=[logger]), None, {})
    assert tensorboard_points(tmp_path) == [(3, "a", 0.5)]
