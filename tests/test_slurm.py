"""A SLURM job that is requeued, through the command line; see also callbacks/test_signals.py."""

import os
import signal

import psutil
import pytest

from mtrl_lightning.checkpoints import load_checkpoint
from tests.callbacks.test_signals import ENDED, JOB
from tests.helpers.fitting import rows_of
from tests.helpers.processes import exit_codes, fork
from tests.helpers.runs import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Simulate a SLURM job with a ``scontrol`` that records its arguments and sends SIGTERM."""
    program, file = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {file}\nkill -TERM $PPID\nsleep 0.2\n')
    program.chmod(0o755)
    for name, value in {**JOB, "PATH": f"{program.parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    return lambda: file.read_text().splitlines()


def test_a_requeued_job_continues_in_its_folder(command_line, calls):
    options = [
        "--data.warmup_steps=60",
        "--data.total_steps=900",
        "--data.num_workers=2",
        "--metrics.every=30",
        "--evaluation.every=450",
    ]
    (process,) = fork(lambda _: command_line("fit", *options), 1)
    runs = command_line.folder().parent

    def has_trained():
        files = list(runs.glob("*/metrics.jsonl"))
        return process.exitcode is not None or (files and len(rows_of(files[0].parent)) > 2)

    wait_for(has_trained)
    workers = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
    assert exit_codes([process]) == [ENDED] and calls() == ["requeue 4711"]
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)
    (folder,) = runs.iterdir()
    assert not list(folder.rglob("hpc_ckpt*"))
    rows = rows_of(folder)

    assert exit_codes(fork(lambda _: command_line("fit", *options), 1)) == [0]
    assert calls() == ["requeue 4711"]
    assert list(runs.iterdir()) == [folder]
    last = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert last["mtrl_lightning"]["counters"]["env_steps"] == 900
    assert rows_of(folder)[: len(rows)] == rows
    seen = [(row["env_steps"], "eval/success" in row) for row in rows_of(folder)]
    assert seen == sorted(set(seen)), "no row is lost or written twice"
