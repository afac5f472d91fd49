import csv
import io
import os
import resource
import warnings
import zlib
from pathlib import Path

import pytest

from mtrl_lightning.callbacks import MetricsCSV, read_metrics
from tests.helpers.command_line import SHORT

HEADER = b"a,env_steps,step\r\n"
ROWS = [b"0.1,1,1\r\n", b"0.2,2,2\r\n", b"0.3,3,3\r\n"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(HEADER + b"".join(ROWS))
    return path


def log(logger, step, **metrics):
    logger.log_metrics({"env_steps": step, **metrics}, step=step)


@pytest.mark.parametrize(
    ("tail", "dropped"),
    [
        (b"0.4,4,4", 1),  # killed before the line's end
        (b"0.4,4,4\r", 1),
        (b"0.4,4\r\n", 1),
        (b"0.4,4,4,4\r\n", 1),
        (b"x,4,4\r\n", 1),
        (b"0.4,-4,4\r\n", 1),
        (b"0.4,,4\r\n", 1),
        (b"\0\0\0\xff\r\n0.4,", 2),
    ],
)
def test_damaged_lines_are_dropped_and_counted(file, tail, dropped):
    file.write_bytes(HEADER + b"".join(ROWS) + tail)
    logger = MetricsCSV(str(file.parent))
    with pytest.warns(UserWarning, match=f"{dropped}"):
        logger.resume_from(2)
    assert file.read_bytes() == HEADER + b"".join(ROWS[:2])
    log(logger, 5, a=0.5)
    assert read_metrics(file.parent) == {"a": ([1, 2, 5], [0.1, 0.2, 0.5])}


def test_a_whole_file_is_kept_without_a_warning(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MetricsCSV(str(file.parent)).resume_from(3)
    assert file.read_bytes() == HEADER + b"".join(ROWS)


def test_an_empty_file_starts_with_the_next_row(file):
    file.write_bytes(b"")
    logger = MetricsCSV(str(file.parent))
    logger.resume_from(3)
    assert file.read_bytes() == b""
    log(logger, 4, a=0.4)
    assert file.read_bytes() == HEADER + b"0.4,4,4\r\n"


def test_rows_are_given_without_empty_cells(file):
    logger = MetricsCSV(str(file.parent))
    log(logger, 4, b=float("nan"))
    rows = logger.rows()
    assert rows[:3] == [{"a": step / 10, "env_steps": float(step)} for step in (1, 2, 3)]
    assert set(rows[3]) == {"b", "env_steps"} and rows[3]["b"] != rows[3]["b"]


def test_a_row_without_env_steps_gets_those_of_the_run(file):
    logger = MetricsCSV(str(file.parent))
    logger.count_env_steps = lambda: 40
    logger.log_metrics({"lr": 0.5}, step=7)
    log(logger, 50, a=0.5)
    assert logger.rows()[3:] == [{"env_steps": 40, "lr": 0.5}, {"env_steps": 50, "a": 0.5}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MetricsCSV(str(file.parent)).resume_from(45)
    assert read_metrics(file.parent)["lr"] == ([40], [0.5])


def open_for_appending(monkeypatch, kind):
    """Wrap every stream that appends to ``metrics.csv`` in ``kind``; return the wrapped ones."""
    real, wrapped = Path.open, []

    def opened(self, mode="r", *args, **kwargs):
        stream = real(self, mode, *args, **kwargs)
        if "a" not in mode:
            return stream
        wrapped.append(kind(stream))
        return wrapped[-1]

    monkeypatch.setattr(Path, "open", opened)
    return wrapped


class Stream:
    """Count what is written."""

    def __init__(self, stream):
        self._stream, self.writes = stream, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, data):
        self.writes.append(data)
        return self._stream.write(data)


class BrokenStream(Stream):
    """Write a row, report a failure, and refuse to truncate the file."""

    def write(self, data):
        self._stream.write(data)
        raise OSError(5, "Input/output error")

    def truncate(self, size):
        raise OSError(5, "Input/output error")


def test_a_row_is_appended_in_one_write(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    streams = open_for_appending(monkeypatch, Stream)
    log(logger, 4, a=0.4)
    log(logger, 5, a=0.5)
    assert [stream.writes for stream in streams] == [[b"0.4,4,4\r\n"], [b"0.5,5,5\r\n"]]
    # no buffer, which could split it
    assert all(isinstance(stream._stream, io.FileIO) for stream in streams)
    assert file.read_bytes().endswith(b"0.4,4,4\r\n0.5,5,5\r\n")


def test_new_columns_replace_the_file_whole(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    before, replace = file.read_bytes(), os.replace

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log(logger, 4, b=7.0)
    assert file.read_bytes() == before

    def checked(source, target):
        assert file.read_bytes() == before
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    again = MetricsCSV(str(file.parent))
    log(again, 4, b=7.0)
    assert (
        file.read_bytes()
        == b"a,b,env_steps,step\r\n0.1,,1,1\r\n0.2,,2,2\r\n0.3,,3,3\r\n,7.0,4,4\r\n"
    )


def test_a_failed_replacement_waits_and_leaves_nothing_behind(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    before, replace = file.read_bytes(), os.replace

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"metrics\.csv"):
        log(logger, 4, b=7.0)
    assert file.read_bytes() == before and os.listdir(file.parent) == ["metrics.csv"]
    monkeypatch.setattr(os, "replace", replace)
    log(logger, 5, a=0.5)
    assert read_metrics(file.parent) == {
        "a": ([1, 2, 3, 5], [0.1, 0.2, 0.3, 0.5]),
        "b": ([4], [7.0]),
    }


def test_on_a_full_disk_training_continues_and_no_row_is_lost_or_doubled(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert soft == resource.RLIM_INFINITY
    path = tmp_path / "metrics.csv"
    logger = MetricsCSV(str(tmp_path))
    log(logger, 1, a=0.1)
    for outage in (0, 10):
        before = path.read_bytes()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # a part of the row fits
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
            try:
                for step in (outage + 2, outage + 3):
                    log(logger, step, a=step / 10)
                    assert path.read_bytes() == before
                logger.finalize("failed")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (message,) = (str(w.message) for w in caught if "cannot be written" in str(w.message))
        assert str(path) in message
        log(logger, outage + 4, a=(outage + 4) / 10)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["env_steps"]) for row in rows] == [1, 2, 3, 4, 12, 13, 14]
    assert [float(row["a"]) for row in rows] == [0.1, 0.2, 0.3, 0.4, 1.2, 1.3, 1.4]


def test_a_part_of_a_row_that_could_not_be_truncated_at_once_is_truncated_later(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    before = file.read_bytes()
    streams = open_for_appending(monkeypatch, BrokenStream)
    with pytest.warns(UserWarning, match="cannot be written"):
        log(logger, 4, a=0.4)
    monkeypatch.undo()
    assert len(streams) == 1 and file.read_bytes() == before + b"0.4,4,4\r\n"
    assert len(logger.rows()) == 3
    log(logger, 5, a=0.5)
    assert file.read_bytes() == before + b"0.4,4,4\r\n0.5,5,5\r\n"


@pytest.mark.parametrize(
    "content", [b"env_steps,a\rb,c\r\n1,2,3\r\n", b"env_ste0s,a\r\n1,2\r\n2,3\r\n", b"a,a\r\n"]
)
def test_a_file_whose_first_line_is_damaged_is_set_aside_whole(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    logger = MetricsCSV(str(tmp_path))
    with pytest.warns(UserWarning, match=r"metrics\.damaged\.csv"):
        logger.resume_from(10)
    assert (tmp_path / "metrics.damaged.csv").read_bytes() == content
    logger.log_metrics({"env_steps": 12, "a": 3.0}, step=12)
    assert logger.rows() == [{"env_steps": 12.0, "a": 3.0}]


def resume(file, env_steps, fingerprint):
    """Return the warnings of a run that continues from a checkpoint."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MetricsCSV(str(file.parent)).resume_from(env_steps, fingerprint)
    return [str(warning.message) for warning in caught]


def test_the_fingerprint_is_the_number_of_rows_the_last_step_and_a_checksum(file, tmp_path):
    fingerprint = MetricsCSV(str(file.parent)).fingerprint()
    cells = [[("a", f"0.{i}"), ("env_steps", f"{i}"), ("step", f"{i}")] for i in (1, 2, 3)]
    expected = zlib.crc32("".join(repr(row) for row in cells).encode())
    assert fingerprint == {"rows": 3, "env_steps": 3, "crc32": expected}
    (tmp_path / "new").mkdir()
    assert MetricsCSV(str(tmp_path / "new")).fingerprint() == {
        "rows": 0,
        "env_steps": -1,
        "crc32": 0,
    }


def test_the_fingerprint_needs_no_look_at_the_file_and_is_that_of_its_rows(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    logger.resume_from(2)
    for step in (5, 6):
        log(logger, step, a=step / 10, b=float("nan"))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
            fingerprint = logger.fingerprint()
        assert fingerprint == MetricsCSV(str(file.parent)).fingerprint()
    assert (fingerprint["rows"], fingerprint["env_steps"]) == (4, 6)


def test_rows_that_the_file_loses_during_the_run_are_reported(file):
    logger = MetricsCSV(str(file.parent))
    logger.resume_from(3)
    file.write_bytes(HEADER + ROWS[0])
    log(logger, 4, a=0.4)
    (text,) = resume(file, 4, logger.fingerprint())
    assert f"{file} has lost rows: it had 4 rows up to step 4 at the checkpoint" in text


def test_later_rows_and_new_columns_do_not_change_what_the_checkpoint_noted(file):
    logger = MetricsCSV(str(file.parent))
    fingerprint = logger.fingerprint()
    log(logger, 4, b=7.0)
    assert resume(file, 3, fingerprint) == []
    assert file.read_bytes() == b"a,b,env_steps,step\r\n0.1,,1,1\r\n0.2,,2,2\r\n0.3,,3,3\r\n"


def test_a_row_of_the_checkpoints_own_step_that_was_logged_after_it_is_dropped(file):
    logger = MetricsCSV(str(file.parent))
    fingerprint = logger.fingerprint()
    log(logger, 3, a=0.4)
    assert resume(file, 3, fingerprint) == []
    assert file.read_bytes() == HEADER + b"".join(ROWS)


def test_a_lost_file_is_reported_and_the_run_continues_with_a_new_one(file):
    fingerprint = MetricsCSV(str(file.parent)).fingerprint()
    file.unlink()
    (text,) = resume(file, 3, fingerprint)
    assert text.startswith(f"{file} is missing: it had 3 rows up to step 3 at the checkpoint.")
    assert "Training is not affected" in text
    logger = MetricsCSV(str(file.parent))
    log(logger, 4, a=0.4)
    assert file.read_bytes() == HEADER + b"0.4,4,4\r\n"


def test_a_file_that_has_lost_rows_is_reported(file):
    fingerprint = MetricsCSV(str(file.parent)).fingerprint()
    file.write_bytes(HEADER + ROWS[0] + ROWS[1])
    (text,) = resume(file, 3, fingerprint)
    assert f"{file} has lost rows: it had 3 rows up to step 3 at the checkpoint" in text
    assert "has 2 of them up to step 2" in text
    assert file.read_bytes() == HEADER + ROWS[0] + ROWS[1]


@pytest.mark.parametrize("changed", [b"0.7,2,2\r\n", b"0.2,1,2\r\n"])
def test_a_changed_value_is_reported_and_kept(file, changed):
    fingerprint = MetricsCSV(str(file.parent)).fingerprint()
    content = HEADER + ROWS[0] + changed + ROWS[2]
    file.write_bytes(content)
    (text,) = resume(file, 3, fingerprint)
    assert f"{file} was changed: its 3 rows up to step 3 are not the 3 rows" in text
    assert file.read_bytes() == content


def test_the_fingerprint_counts_rows_that_a_full_disk_keeps_in_memory(file, monkeypatch):
    logger = MetricsCSV(str(file.parent))
    open_for_appending(monkeypatch, BrokenStream)
    with pytest.warns(UserWarning, match="cannot be written"):
        log(logger, 4, a=0.4)
    waiting = logger.fingerprint()
    assert (waiting["rows"], waiting["env_steps"]) == (4, 4)
    monkeypatch.undo()
    log(logger, 5, a=0.5)
    assert resume(file, 4, waiting) == []
    assert file.read_bytes() == HEADER + b"".join(ROWS) + b"0.4,4,4\r\n"


def metrics_warnings(caught):
    return [str(w.message) for w in caught if "metrics.csv" in str(w.message)]


@pytest.mark.slow
def test_a_run_that_continues_without_its_metrics_warns_and_trains_on(command_line):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        command_line.finished(*SHORT)
        command_line("fit", *SHORT, "--ckpt_path=last", "--rollout.total_steps=210")
        assert metrics_warnings(caught) == []
        path = command_line.folder() / "metrics.csv"
        path.unlink()
        command_line("fit", *SHORT, "--ckpt_path=last", "--rollout.total_steps=240")
    (text,) = metrics_warnings(caught)
    assert f"{path} is missing: it had" in text and "up to step 210" in text
    assert {row["env_steps"] for row in command_line.rows()} == {"240"}
