"""Signals to the processes of a run; ``tests/matrix/test_continuation.py`` shows what follows."""

import os
import signal

import psutil
import pytest

from tests.callbacks.test_signals import ENDED, JOB
from tests.helpers.fitting import rows_of
from tests.helpers.processes import exit_codes, fork
from tests.helpers.runs import checkpoint, wait_for

pytestmark = pytest.mark.slow


def test_ctrl_c_leaves_a_checkpoint_and_no_worker(command_line):
    """A terminal's Ctrl-C reaches the first evaluation's starting workers, too."""
    options = ["--data.total_steps=1000000", "--evaluation.num_workers=3"]
    process = command_line.process("fit", *options)

    def workers():
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if "envs.vector.worker" in str(child.cmdline())]

    wait_for(lambda: process.poll() is not None or workers())
    started = workers()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "resume with mtrl-lightning fit --resume" in output and "Traceback" not in output
    wait_for(lambda: not any(worker.is_running() for worker in started), 10)
    saved = checkpoint(command_line)
    assert saved["mtrl_lightning"]["counters"]["updates"] > 0
    assert all(saved["ReplayData"]["collector"]["windows"]["per_env"]["episodes"])


def test_ctrl_c_during_imports_ends_the_program_at_once(command_line):
    process = command_line.process("fit", "--data.total_steps=1000000")
    files = psutil.Process(process.pid).memory_maps
    wait_for(
        lambda: process.poll() is not None or any("libtorch_cpu" in file.path for file in files())
    )
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.strip() == "Interrupted"
    assert not command_line.folder().exists()


def test_a_requeued_slurm_job_continues_in_its_folder(command_line, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    calls = tmp_path / "calls"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    for name, value in {**JOB, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    options = ["--data.warmup_steps=60", "--data.total_steps=900", "--metrics.every=30"]
    runs = command_line.folder().parent
    (process,) = fork(lambda _: command_line("fit", *options), 1)
    wait_for(lambda: process.exitcode is not None or any(runs.glob("*/checkpoints/last.ckpt")))
    os.kill(process.pid, signal.SIGUSR1)
    assert (exit_codes([process]), calls.read_text()) == ([ENDED], "requeue 4711\n")
    (folder,) = runs.iterdir()
    rows = rows_of(folder)
    assert exit_codes(fork(lambda _: command_line("fit", *options), 1)) == [0]
    assert list(runs.iterdir()) == [folder] and rows_of(folder)[: len(rows)] == rows
    steps = [row["env_steps"] for row in rows_of(folder)]
    assert steps == sorted(steps) and 60 < rows[-1]["env_steps"] < steps[-1] == 900
