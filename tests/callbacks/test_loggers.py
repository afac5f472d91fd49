import json
import struct

import yaml

from mtrl_lightning.callbacks import MetricsCSV, read_metrics
from mtrl_lightning.callbacks.options import _flat
from tests.conftest import CONFIGS


def test_csv_appends_drops_later_rows_and_adds_columns(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    for step in (1, 2, 3):
        logger.log_metrics({"env_steps": step, "a": step / 10}, step=step)
        logger.save()
    again = MetricsCSV(str(tmp_path))
    again.resume_from(2)
    again.log_metrics({"env_steps": 5, "b": 7.0}, step=5)
    again.save()
    assert read_metrics(tmp_path) == {"a": ([1, 2], [0.1, 0.2]), "b": ([5], [7.0])}


def test_tensorboard_has_the_metrics_over_env_steps(command_line):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command_line("fit", configs=(*CONFIGS, "logger/tensorboard"))
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


def wandb_records(path):
    """Yield the records of an offline file: LevelDB's log format behind a header of 7 bytes."""
    data = path.read_bytes()
    block = 32768
    position = 7
    record = b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # the rest of a block is padding
            position += block - position % block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if kind == 0:
            position += block - position % block
            continue
        if position + 7 + length > len(data):  # killed while it was written
            return
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_history(folder):
    from wandb.proto import wandb_internal_pb2

    rows = []
    config = {}
    run_ids = set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            if kind == "run":
                run_ids.add(record.run.run_id)
            updates = (
                record.run.config.update
                if kind == "run"
                else record.config.update
                if kind == "config"
                else ()
            )
            config |= {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in updates}
    return rows, config, run_ids


VIDEO = [
    "--trainer.callbacks+=VideoCallback",
    "--trainer.callbacks.every=3",
    "--trainer.callbacks.tasks=[goal-1]",
    "--trainer.callbacks.num_workers=0",
    "--trainer.callbacks.width=32",
    "--trainer.callbacks.height=32",
]


def test_wandb_offline_has_every_point_once_and_continues_the_same_run(command_line, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    for extra in ([], ["--ckpt_path=last", "--rollout.total_steps=1200"]):
        args = ["--trainer.logger.init_args.offline=true", *VIDEO, *extra]
        process = command_line.process("fit", *args, configs=(*CONFIGS, "logger/wandb"))
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    rows, config, run_ids = wandb_history(command_line.folder())
    assert len(run_ids) == 1
    assert config["protocol/benchmark"] == "toy"
    saved = (command_line.folder() / "config_from_000000000900.yaml").read_text()
    of_the_run = dict(_flat(yaml.safe_load(saved)))
    assert len(of_the_run) > 100 and of_the_run["seed_everything"] == 1
    assert of_the_run.items() <= dict(_flat(config)).items()
    for name in ("eval/success", "train/q"):
        assert [row["env_steps"] for row in rows if name in row] == read_metrics(
            command_line.folder()
        )[name][0]
    videos = [row for row in rows if "videos/goal-1/path" in row]
    assert [row["env_steps"] for row in videos] == [900, 1200]
    for row in videos:
        stored = f"wandb/offline-run-*/files/{row['videos/goal-1/path']}"
        (file,) = command_line.folder().glob(stored)
        step = command_line.folder() / "videos" / f"step_{row['env_steps']:012d}"
        assert file.read_bytes() == (step / "goal-1.mp4").read_bytes()
