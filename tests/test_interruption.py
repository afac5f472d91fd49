"""Signals to the processes of a run; ``tests/matrix/test_continuation.py`` shows what follows."""

import os
import signal

import psutil
import pytest

from tests.helpers.runs import ENDLESS, checkpoint, wait_for

pytestmark = pytest.mark.slow


def children(process):
    return psutil.Process(process.pid).children(recursive=True)


def has_trained(command_line, process):
    metrics = command_line.folder() / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") > 1


def is_starting_workers(command_line, process):
    return any("envs.vector.worker" in str(child.cmdline()) for child in children(process))


@pytest.mark.parametrize(
    ("send", "number", "options", "is_time"),
    [
        (os.kill, signal.SIGTERM, ENDLESS, has_trained),
        # a terminal's Ctrl-C reaches the first evaluation's starting workers, too
        (
            os.killpg,
            signal.SIGINT,
            ["--data.total_steps=1000000", "--evaluation.num_workers=3"],
            is_starting_workers,
        ),
    ],
)
def test_interrupted_run_leaves_a_checkpoint_and_no_worker(
    command_line, send, number, options, is_time
):
    process = command_line.process("fit", *options)
    wait_for(lambda: process.poll() is not None or is_time(command_line, process))
    workers = children(process)
    assert workers
    send(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert "resume with mtrl-lightning fit --resume" in output and "Traceback" not in output
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)
    saved = checkpoint(command_line)
    assert saved["mtrl_lightning"]["counters"]["updates"] > 0
    assert all(saved["ReplayData"]["collector"]["windows"]["per_env"]["episodes"])


def test_ctrl_c_during_imports_ends_the_program_at_once(command_line):
    process = command_line.process("fit", *ENDLESS)
    files = psutil.Process(process.pid).memory_maps
    wait_for(
        lambda: process.poll() is not None or any("libtorch_cpu" in file.path for file in files())
    )
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.strip() == "Interrupted"
    assert not command_line.folder().exists()
