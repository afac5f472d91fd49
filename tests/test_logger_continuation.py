import csv
import itertools
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
from mtrl_lightning.callbacks.loggers.csv_logger import MetricsCSV
from tests.helpers.command_line import CONFIGS, ROOT, SHORT
from tests.helpers.wandb_files import read_offline_runs, records

pytestmark = pytest.mark.slow

wandb = pytest.importorskip("wandb")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
KEEP = "--checkpoint.keep_last=-1"


@pytest.fixture
def fit(command_line, monkeypatch, tmp_path):
    """Train with every logger, each time as a session of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    read = [
        yaml.safe_load((ROOT / "configs" / "logger" / f"{name}.yaml").read_text())
        for name in ("wandb", "tensorboard")
    ]
    loggers = [logger for config in read for logger in config["trainer"]["logger+"]]
    csv_logger = {"save_dir": ".", "name": "lightning"}
    loggers.append({"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": csv_logger})
    config = tmp_path / "loggers.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))

    def fit(*args, process=False, configs=None):
        if process:
            return command_line.process("fit", "-c", str(config), *SHORT, *args)
        if configs:
            command_line("fit", *SHORT, *args, configs=configs)
        else:
            command_line("fit", "-c", str(config), *SHORT, *args)
        return end()

    def end():
        wandb.finish()
        wandb.teardown()  # W&B's own process writes its file when it ends

    end()  # Lightning would continue a run that another test has left open
    yield fit
    end()


def wandb_files(folder):
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def wandb_points(folder):
    """Return the points of all sessions as ``(env_steps, name, value)``, and the runs' ids."""
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # W&B writes the last block after `finish` returns
    points = []
    ids = set()
    wandb_steps = [-1]
    for path in wandb_files(folder):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                assert record.run.resume  # else `wandb sync` may replace the earlier sessions
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if row:
                wandb_steps.append(row["_step"])
            points += [
                (row["env_steps"], name, float(value))
                for name, value in row.items()
                if not name.startswith(("_", "curves/")) and name != "env_steps"
            ]
    # W&B joins the sessions of a run by its own step, which must never repeat or decrease
    assert all(a < b for a, b in itertools.pairwise(wandb_steps))
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


def without_times(points):
    return [point for point in points if not point[1].startswith("time/")]


def csv_logger_points(folder):
    """Return the points of Lightning's CSVLogger, which has a file for each session."""
    points = []
    for path in sorted(folder.glob("lightning/version_*/metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                assert float(row.pop("env_steps")) == step
                points += [(step, name, float(value)) for name, value in row.items() if value]
    return sorted(points)


def check_csv_and_tensorboard(folder, last):
    """Check that each point is logged once; return those of ``metrics.csv``."""
    expected = csv_points(folder)
    assert max(step for step, _, _ in expected) == last
    assert len({(step, name) for step, name, _ in expected}) == len(expected)
    points = [point for point in tensorboard_points(folder) if point[1] != "env_steps"]
    assert [point[:2] for point in points] == [point[:2] for point in expected]
    for point, other in zip(points, expected, strict=True):
        assert point[2] == pytest.approx(other[2], rel=1e-5, abs=1e-30)
    return expected


def test_every_logger_has_every_point_once_after_continuing_from_the_last_checkpoint(
    fit, command_line
):
    folder = command_line.folder()
    fit()
    check_wandb(folder, check_csv_and_tensorboard(folder, 180))
    fit("--ckpt_path=last", "--rollout.total_steps=240")
    check_wandb(folder, check_csv_and_tensorboard(folder, 240))
    assert len(wandb_files(folder)) == 2
    assert csv_logger_points(folder) == csv_points(folder)
    assert len(list(folder.glob("lightning/version_*"))) == 2


def test_points_later_than_an_older_checkpoint_stay_in_w_and_b_and_are_not_repeated(
    fit, command_line
):
    folder = command_line.folder()
    fit(KEEP)
    (path,) = wandb_files(folder)
    file, first = path.read_bytes(), csv_points(folder)
    older = folder / "checkpoints" / "step_000000000120.ckpt"
    # the same options: the points that stay are those of this run
    with pytest.warns(UserWarning, match="step 180"):
        fit(KEEP, f"--ckpt_path={older}", "--overwrite_metrics", "--rollout.total_steps=240")
    expected = check_csv_and_tensorboard(folder, 240)
    assert path.read_bytes() == file
    points, ids = wandb_points(folder)
    assert len(ids) == 1
    assert without_times(points) == without_times(expected)
    # other options, until an env step that W&B has already: all of its points stay
    with pytest.warns(UserWarning, match="121 to 240"):
        fit(
            KEEP,
            f"--ckpt_path={older}",
            "--overwrite_metrics",
            "--rollout.total_steps=210",
            "--model.init_args.actor_max_grad_norm=0.1",
        )
    assert check_csv_and_tensorboard(folder, 210)[:20] == first[:20]
    assert wandb_points(folder)[0] == points


def test_a_given_id_starts_a_w_and_b_run_that_has_all_points(fit, command_line):
    folder = command_line.folder()
    fit(KEEP)
    older = folder / "checkpoints" / "step_000000000120.ckpt"
    branch = ["--trainer.logger.id=branch", "--model.init_args.actor_max_grad_norm=0.1"]
    fit(
        KEEP,
        f"--ckpt_path={older}",
        "--overwrite_metrics",
        *branch,
        configs=(*CONFIGS, "logger/wandb"),
    )
    for path in wandb_files(folder):
        if path.name != "run-branch.wandb":
            path.unlink()
    check_wandb(folder, csv_points(folder))
    first_id = load_checkpoint(older)["callbacks"]["metrics"]["wandb_id"]
    continues = {"wandb_id": first_id, "env_steps": 120}
    assert read_offline_runs(folder)["branch"].config["continues"] == continues


def test_points_of_a_session_without_w_and_b_are_added(fit, command_line):
    folder = command_line.folder()
    fit()
    command_line("fit", *SHORT, "--ckpt_path=last", "--rollout.total_steps=210")  # without W&B
    last = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert last["callbacks"]["metrics"]["wandb_id"]
    fit("--ckpt_path=last", "--rollout.total_steps=240")
    check_wandb(folder, csv_points(folder))


def test_every_logger_has_every_point_after_a_kill(fit, command_line):
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
    steps = counters["env_steps"] + 90
    options = [f"--rollout.total_steps={steps}", "--metrics.every=30", "--evaluation.every=90"]
    with pytest.warns(UserWarning, match="offline"):
        fit(f"--ckpt_path={last}", *options)
    expected = check_csv_and_tensorboard(folder, steps)
    points, ids = wandb_points(folder)
    assert len(ids) == 1
    # what the kill may have lost is logged a second time
    points = [point for point in points if point[0] <= steps]
    assert {*without_times(points)} == {*without_times(expected)}


class FakeRun:
    """Record the rows that an online run receives, as ``(W&B's step, env_steps)``."""

    id = "fake"
    offline = disabled = False

    def __init__(self, starting_step):
        self.starting_step = starting_step
        self.received = []

    def log(self, row, step, commit):
        assert commit
        self.received.append((step, row["env_steps"]))


def logged(folder, starting_step, rows, env_steps, *live, offline=False, killed=False):
    """Return what a run receives that continues from a checkpoint at ``env_steps``."""
    run = FakeRun(starting_step)
    run.offline = offline
    logger = EnvStepWandbLogger(experiment=run, save_dir=str(folder))
    logger.resume_from([{"env_steps": float(step)} for step in rows], env_steps)
    for step in live:
        logger.log_metrics({"env_steps": step}, step=step)
    if not killed:
        logger.finalize("success")
    return run.received


@pytest.mark.parametrize(
    ("starting_step", "rows", "env_steps", "live", "received"),
    [
        (0, [], 0, [0, 3, 3], [(0, 0), (3, 3), (4, 3)]),
        (5, [2, 4, 6, 6], 6, [8], [(6, 6), (7, 6), (8, 8)]),
        (7, [2, 4, 6], 6, [8], [(8, 8)]),
        # an evaluation at the checkpoint's own step
        (7, [2, 4, 6], 6, [6, 8], [(7, 6), (8, 8)]),
        (5, [2, 4, 6], 6, [6, 8], [(6, 6), (7, 6), (8, 8)]),
    ],
)
def test_an_online_run_receives_what_the_server_lacks(
    tmp_path, starting_step, rows, env_steps, live, received
):
    assert logged(tmp_path, starting_step, rows, env_steps, *live) == received


def test_an_online_run_does_not_repeat_what_the_server_has(tmp_path):
    with pytest.warns(UserWarning, match="7 to 9"):
        assert logged(tmp_path, 10, [2, 4, 6], 6, 6, 8, 9, 12) == [(12, 12)]


def test_an_online_run_adds_points_that_its_killed_process_did_not_send(tmp_path):
    assert logged(tmp_path, 0, [], 0, 2, 4, 6) == [(2, 2), (4, 4), (6, 6)]
    # a new step of W&B, because the process may still have sent the former one
    assert logged(tmp_path, 5, [2, 4, 6], 6, 8) == [(7, 6), (8, 8)]


def test_the_note_says_what_an_offline_run_has(tmp_path):
    received = [(2, 2), (4, 4), (5, 4)]
    assert logged(tmp_path, 0, [], 0, 2, 4, 4, offline=True) == received
    note = json.loads((tmp_path / "wandb_logged_fake.json").read_text())
    assert note == {"env_steps": 4, "written_env_steps": 4, "wandb_step": 5}
    assert logged(tmp_path, 0, [2, 4, 4], 4, 5, 6, offline=True) == [(6, 5), (7, 6)]


def test_a_torn_note_is_left_out(tmp_path):
    (tmp_path / "wandb_logged_fake.json").write_text("{")
    with pytest.warns(UserWarning, match=r"wandb_logged_fake\.json"):
        assert logged(tmp_path, 0, [2, 4], 4, offline=True) == [(2, 2), (4, 4)]


def test_only_what_a_killed_offline_run_may_have_lost_is_logged_a_second_time(
    tmp_path, monkeypatch
):
    clock = itertools.count(0, 25)  # seconds between two rows
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    logged(tmp_path, 0, [], 0, 2, 4, 6, 8, 10, offline=True, killed=True)
    with pytest.warns(UserWarning, match="5 to 10"):
        received = logged(tmp_path, 0, [2, 4, 6, 8], 8, 10, offline=True)
    assert received == [(11, 6), (12, 8), (13, 10)]


def test_a_note_that_cannot_be_written_stops_no_training(tmp_path):
    with pytest.warns(UserWarning, match=r"wandb_logged_fake\.json"):
        assert logged(tmp_path / "missing", 0, [], 0, 2, 4) == [(2, 2), (4, 4)]


def test_an_online_branch_names_the_run_that_it_continues(tmp_path):
    used = []
    run = FakeRun(0)
    run.config = {}
    run.use_artifact = used.append
    logger = EnvStepWandbLogger(experiment=run, save_dir=str(tmp_path), log_artifacts=True)
    run.config = SimpleNamespace(update=lambda values, allow_val_change: used.append(values))
    for wandb_id, env_steps in ((None, 6), ("fake", 6), ("other", 0)):
        logger.continue_from(wandb_id, env_steps)
    assert used == []
    logger.continue_from("other", 6)
    assert used == [{"continues": {"wandb_id": "other", "env_steps": 6}}, "other-policy:latest"]

    def missing(name):
        raise ValueError("there is none")

    run.use_artifact = missing
    with pytest.warns(UserWarning, match="continues"):
        logger.continue_from("other", 6)


def test_what_tensorboard_holds_is_written_before_a_checkpoint(tmp_path):
    logger = TensorBoardLogger(
        str(tmp_path), name="", version="tensorboard", default_hp_metric=False
    )
    logger.log_metrics({"a": 0.5}, step=3)
    callback = MetricsCallback()
    callback.session = SimpleNamespace(loggers=[logger])
    callback.on_save_checkpoint(None, None, {})
    assert tensorboard_points(tmp_path) == [(3, "a", 0.5)]
