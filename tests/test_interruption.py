import os
import signal

import psutil
import pytest

from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.rollout import Collector
from tests.helpers.runs import ENDLESS, checkpoint, signal_in_call, wait_for


def test_interrupted_run_leaves_a_checkpoint_and_no_worker(command_line):
    process = command_line.process("fit", *ENDLESS)
    metrics = command_line.folder() / "metrics.jsonl"
    wait_for(
        lambda: (
            (metrics.exists() and metrics.read_text().count("\n") > 1) or process.poll() is not None
        )
    )
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "continue with mtrl-lightning fit --resume" in output and "Traceback" not in output
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)
    path = command_line.folder() / "checkpoints" / "last.ckpt"
    saved = load_checkpoint(path)
    counters = saved["mtrl_lightning"]["counters"]
    assert counters["updates"] > 0
    assert all(saved["ReplayData"]["collector"]["windows"]["per_env"]["episodes"])
    steps = counters["env_steps"]
    command_line("fit", f"--ckpt_path={path}", f"--data.total_steps={steps + 30}")
    assert load_checkpoint(path)["mtrl_lightning"]["counters"]["env_steps"] == steps + 30


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_interrupted_evaluation_is_made_up_for(command_line, monkeypatch):
    options = ["--data.warmup_steps=150", "--evaluation.every=150"]
    with monkeypatch.context() as patch:
        # the second evaluation, whose first step sees the signal
        signal_in_call(patch, Collector, "run_episodes", 2, signal.SIGINT)
        with pytest.raises(SystemExit) as exit_info:
            command_line("fit", *options)
    assert exit_info.value.code == 130
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 300
    evaluated = [int(row["env_steps"]) for row in command_line.rows() if "eval/success" in row]
    assert evaluated == [153]
    command_line("fit", *options, "--ckpt_path=last", "--data.total_steps=330")
    evaluated = [int(row["env_steps"]) for row in command_line.rows() if "eval/success" in row]
    assert evaluated == [153, 300, 330]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_starting_workers_too(command_line):
    # a terminal signals the whole process group, here while the first evaluation's workers start
    process = command_line.process(
        "fit", "--data.total_steps=1000000", "--evaluation.num_workers=3"
    )
    metrics = command_line.folder() / "metrics.jsonl"

    def starting():
        children = [
            c
            for c in psutil.Process(process.pid).children(recursive=True)
            if "envs.vector.worker" in str(c.cmdline())
        ]
        return children or process.poll() is not None

    wait_for(starting)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "continue with mtrl-lightning fit --resume" in output and "Traceback" not in output
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["updates"] > 0
    assert not metrics.exists() or metrics.read_text()


@pytest.mark.slow
def test_an_interrupted_warm_up_goes_on(command_line, monkeypatch):
    with monkeypatch.context() as patch:
        signal_in_call(patch, Collector, "send", 20, signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_info:
            command_line("fit")
    assert exit_info.value.code == 143
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (60, 0)
    options = ["--data.warmup_steps=90", "--data.total_steps=120"]
    command_line("fit", "--ckpt_path=last", *options)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (120, 10)
