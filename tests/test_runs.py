import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from mtrl_lightning import runs
from mtrl_lightning.__main__ import main
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.launch.folder import locate_run
from mtrl_lightning.runs import check_idle, run_lock
from tests.helpers.runs import ENDLESS, wait_for


def test_a_folder_is_locked_once_and_free_afterwards(tmp_path):
    with run_lock(tmp_path):
        expected = f"pid {os.getpid()} on host {socket.gethostname()}"
        for refused in (run_lock(tmp_path).__enter__, lambda: check_idle(tmp_path)):
            with pytest.raises(ConfigurationError, match=expected):
                refused()
        assert (tmp_path / "run.lock").read_text() == expected
    assert not list(tmp_path.iterdir())
    check_idle(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_error_frees_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    with run_lock(tmp_path):
        pass


def test_a_file_left_by_a_killed_process_locks_nothing(tmp_path):
    (tmp_path / "run.lock").write_text(
        "pid 1234567 on host a-rather-long-name-of-some-other-machine.example"
    )
    check_idle(tmp_path)
    with run_lock(tmp_path):
        assert (
            tmp_path / "run.lock"
        ).read_text() == f"pid {os.getpid()} on host {socket.gethostname()}"


def test_a_file_deleted_under_its_holder_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    real = runs.fcntl.flock
    calls = []

    def flock(descriptor, operation):
        real(descriptor, operation)
        if not calls:
            path.unlink()
        calls.append(descriptor)

    monkeypatch.setattr(runs.fcntl, "flock", flock)
    with run_lock(tmp_path):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(ConfigurationError):
            check_idle(tmp_path)


@pytest.mark.parametrize("missing", ["module", "lock", "file"])
def test_without_locks_nothing_is_locked_and_nothing_fails(tmp_path, monkeypatch, missing):
    def fails(*args):
        raise OSError("no locks here")

    if missing == "module":
        monkeypatch.setattr(runs, "fcntl", None)
    elif missing == "lock":
        monkeypatch.setattr(runs.fcntl, "flock", fails)
    else:
        monkeypatch.setattr(runs.os, "open", fails)
    with run_lock(tmp_path), run_lock(tmp_path):
        check_idle(tmp_path)


def test_a_link_in_the_locks_place_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("keep")
    (tmp_path / "run.lock").symlink_to(tmp_path / "target")
    with run_lock(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "keep"


def test_started_processes_do_not_inherit_the_lock(tmp_path):
    with run_lock(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
        )
    try:
        assert child.poll() is None
        check_idle(tmp_path)
    finally:
        child.communicate(b"\n")


@pytest.mark.slow
def test_a_run_in_training_is_refused_until_its_process_is_killed(
    command_line, capsys, monkeypatch
):
    options = [option for option in ENDLESS if not option.startswith("--checkpoint")]
    process = command_line.process("fit", *options, "--checkpoint.every=300")
    last = command_line.folder() / "checkpoints" / "last.ckpt"
    wait_for(lambda: last.exists() or process.poll() is not None)
    workers = psutil.Process(process.pid).children(recursive=True)
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as exit_info:
        patched.setattr(
            "mtrl_lightning.cli.lightning_cli.MultiTaskCLI.instantiate_classes",
            lambda cli: pytest.fail("built"),
        )
        command_line("fit", "--ckpt_path=last")
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert (
        f"another process (pid {process.pid} on host {socket.gethostname()}) is training in"
        in error
    )
    for args in (
        ["clear", str(command_line.folder())],
        ["clear", str(command_line.folder()), "--yes"],
    ):
        monkeypatch.setattr(sys, "argv", ["cli.py", *args])
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert exit_info.value.code == 2 and f"pid {process.pid}" in capsys.readouterr().err
    assert last.exists()
    for worker in workers:
        worker.suspend()  # so that they outlive the main process for as long as this takes
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(workers) >= 2 and all(worker.is_running() for worker in workers)
        steps = load_checkpoint(last)["mtrl_lightning"]["counters"]["env_steps"]
        command_line("fit", "--ckpt_path=last", f"--rollout.total_steps={steps + 30}")
        assert load_checkpoint(last)["mtrl_lightning"]["counters"]["env_steps"] == steps + 30
        assert not (command_line.folder() / "run.lock").exists()
    finally:
        for worker in workers:
            worker.resume()


def fail_to_start(root, name, *files):
    """Start a run that fails when these files are in its folder; return the folder."""
    location = locate_run(str(root), name)
    with pytest.raises(ZeroDivisionError), location.hold():
        for file in files:
            path = location.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        raise ZeroDivisionError
    return location.folder


def test_a_run_that_cannot_start_leaves_nothing_but_what_was_there(tmp_path):
    fail_to_start(tmp_path / "new", "group/run", "config.yaml", "hparams.yaml")
    assert not any(tmp_path.iterdir())
    (tmp_path / "run" / "version_3").mkdir(parents=True)
    folder = fail_to_start(tmp_path, "run", "config.yaml")
    assert folder.name == "version_4"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_3"]


@pytest.mark.parametrize("file", ["metrics.csv", "checkpoints/last.ckpt", "replay/rows.npy"])
def test_a_run_that_has_started_keeps_its_folder(tmp_path, file):
    folder = fail_to_start(tmp_path, "run", "config.yaml", file)
    assert (folder / "config.yaml").is_file() and (folder / file).is_file()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "", "."])
def test_a_name_that_leads_out_of_the_root_folder_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match="folder"):
        locate_run(str(tmp_path / "runs"), name)
    assert not any(tmp_path.iterdir())
