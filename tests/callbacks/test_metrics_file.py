import pytest
import yaml

from mtrl_lightning.callbacks import MetricsFile, read_metrics
from tests.helpers.replay import files_of_at_most


def log(file, *steps):
    for step in steps:
        file.log_metrics({"env_steps": step, "a": step / 10}, step=step)


def steps_of(folder):
    return read_metrics(folder)["a"][0]


@pytest.fixture
def file(tmp_path):
    file = MetricsFile(tmp_path)
    log(file, 1, 2, 3)
    return file


def test_later_rows_are_dropped_with_the_next_row(file, tmp_path):
    size = file.size
    log(file, 4)
    resumed = MetricsFile(tmp_path)
    resumed.truncate(size)
    assert steps_of(tmp_path) == [1, 2, 3, 4], "a run that cannot resume changes none"
    log(resumed, 5)
    assert steps_of(tmp_path) == [1, 2, 3, 5]
    assert resumed.size == (tmp_path / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("kept", [0, 2])
def test_a_run_continues_with_the_rows_that_are_left(file, tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:-4]) if kept else path.unlink()
    resumed = MetricsFile(tmp_path)
    with pytest.warns(UserWarning, match="checkpoint"):
        resumed.truncate(file.size)
    log(resumed, 4)
    assert steps_of(tmp_path) == [*range(1, kept + 1), 4]


def test_on_a_full_disk_rows_wait_and_none_is_lost_or_doubled(file, tmp_path):
    # a part of a row fits
    with (
        pytest.warns(UserWarning, match="metrics.jsonl") as caught,
        files_of_at_most(file.size + 5),
    ):
        log(file, 4, 5)
    assert len(caught) == 1
    size = file.size
    log(file, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    resumed = MetricsFile(tmp_path)
    resumed.truncate(size)
    log(resumed, 7)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 7]


def test_hyper_parameters_are_collected_in_one_file(file, tmp_path):
    file.log_hyperparams({"tau": 0.5})
    file.log_hyperparams({"protocol/horizon": 20})
    written = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert written == {"tau": 0.5, "protocol/horizon": 20}
