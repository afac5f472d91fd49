"""The folder of a run: its lock, its checkpoints, and what a run that cannot start leaves."""

import os
import subprocess
import zipfile

import pytest

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import check_idle, find_run, newest_checkpoint, open_run, run_lock
from mtrl_lightning.training import checkpoint_to_continue, restart_version


def test_folder_is_locked_once_and_free_afterwards(tmp_path):
    with run_lock(tmp_path):
        for refused in (run_lock(tmp_path).__enter__, lambda: check_idle(tmp_path)):
            with pytest.raises(ConfigurationError, match="another process"):
                refused()
    check_idle(tmp_path)
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    check_idle(tmp_path)


def test_started_processes_do_not_inherit_the_lock(tmp_path):
    with run_lock(tmp_path):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with child:  # it ends when its input does
        check_idle(tmp_path)
        assert child.poll() is None


def write_checkpoint(folder, name, seconds=0):
    path = folder / "checkpoints" / f"{name}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", bytes(range(256)) * 10)
    os.utime(path, (seconds, seconds))
    return path


def test_newest_checkpoint_goes_back_from_damaged_files(tmp_path):
    for steps in (1, 2, 3):
        newest = write_checkpoint(tmp_path, f"env_steps=00000{steps}", steps)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.symlink_to(newest.name)
    assert newest_checkpoint(tmp_path) == last
    content = bytearray(newest.read_bytes())
    content[200] ^= 1
    newest.write_bytes(content)
    os.utime(newest, (3, 3))
    with pytest.warns(UserWarning, match="damaged"):
        assert newest_checkpoint(tmp_path).stem == "env_steps=000002"
    for path in tmp_path.glob("checkpoints/env_steps=*"):
        path.write_bytes(b"")
    with pytest.raises(ConfigurationError):
        newest_checkpoint(tmp_path)


def test_a_name_stands_for_the_version_trained_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seconds, version in ((1, "version_2"), (2, "version_10"), (3, "version_job-7-ab")):
        folder = tmp_path / "runs" / "try" / version
        checkpoint = write_checkpoint(folder, "last")
        os.utime(checkpoint.parent, (seconds, seconds))
    (tmp_path / "runs" / "try" / "version_11").mkdir()  # has no checkpoint
    for given in ("try", "runs/try", folder, checkpoint):
        assert find_run(given).samefile(folder)
    with pytest.raises(ConfigurationError, match="nowhere"):
        find_run("nowhere")


def test_run_that_cannot_start_leaves_only_what_was_there(tmp_path):
    root = str(tmp_path / "new")
    with pytest.raises(ZeroDivisionError), open_run(root, "group/run", None, None) as folder:
        (folder / "config.yaml").touch()
        raise ZeroDivisionError
    assert not folder.parent.exists()
    with open_run(root, "run", None, None):
        pass
    with pytest.raises(ZeroDivisionError), open_run(root, "run", None, None) as folder:
        (folder / "metrics.jsonl").touch()
        raise ZeroDivisionError
    assert folder.name == "version_1" and folder.exists(), "it has started"


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({"WANDB_SWEEP_ID": "s"}, "WANDB_RUN_ID"),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "a"}, "SLURM_JOB_ID"),
        ({}, "TORCHELASTIC_RUN_ID"),
    ],
)
def test_scheduler_that_starts_a_run_again_continues_it(
    tmp_path, monkeypatch, environment, identity
):
    assert restart_version(["fit"]) is None
    for name, value in (environment | {identity: "1"}).items():
        monkeypatch.setenv(name, value)
    version = restart_version(["fit"])
    assert checkpoint_to_continue(str(tmp_path), "run", version, None) is None
    with open_run(str(tmp_path), "run", version, None) as folder:
        written = write_checkpoint(folder, "last")
    found = checkpoint_to_continue(str(tmp_path), "run", restart_version(["fit"]), None)
    assert found.samefile(written)
    monkeypatch.setenv(identity, "2")
    assert restart_version(["fit"]) != version
