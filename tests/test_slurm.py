import os
import signal
import sys
import types

import psutil
import pytest

from mtrl_lightning.callbacks import InterruptionCallback
from mtrl_lightning.callbacks.signals import requeue, requeue_signal, slurm_job
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import Interrupted
from mtrl_lightning.run.session import Session
from tests.helpers.runs import wait_for

pytestmark = pytest.mark.slow

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "localhost",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
ENDED = 128 + signal.SIGUSR1
ARRAY = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Simulate a SLURM job with a ``scontrol`` that records its arguments and sends SIGTERM."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "bin" / "scontrol"
    calls = tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nkill -TERM $PPID\nsleep 0.2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return types.SimpleNamespace(
        calls=lambda: calls.read_text().splitlines() if calls.exists() else [], program=program
    )


def trained_for(command_line, process, rows):
    metrics = command_line.folder() / "metrics.csv"
    wait_for(
        lambda: (
            (metrics.exists() and metrics.read_text().count("\n") > rows)
            or process.poll() is not None
        )
    )


def interrupt(process, *numbers):
    workers = psutil.Process(process.pid).children(recursive=True)
    for number in numbers:
        os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)
    return output


def filled(rows):
    return [{name: value for name, value in row.items() if value} for row in rows]


def longer(arguments):
    options = [
        "--rollout.warmup_steps=60",
        "--rollout.total_steps=1500",
        "--rollout.num_workers=2",
        "--metrics.every=30",
        "--evaluation.every=750",
    ]
    return lambda subcommand, *extra: arguments(subcommand, *options, *extra)


def test_a_requeued_job_continues_in_its_folder(command_line, slurm, monkeypatch):
    monkeypatch.setattr(command_line, "arguments", longer(command_line.arguments))
    process = command_line.process("fit")
    trained_for(command_line, process, 2)
    output = interrupt(process, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
    assert process.returncode == ENDED, output
    assert (
        slurm.calls() == ["requeue 4711"]
        and "Requeued SLURM job 4711" in output
        and "Traceback" not in output
    )
    folder = command_line.folder()
    assert not list(folder.rglob("hpc_ckpt*")) and not list(folder.rglob("*.unfinished*"))
    steps = load_checkpoint(folder / "checkpoints" / "last.ckpt")["mtrl_lightning"]["counters"][
        "env_steps"
    ]
    assert 60 < steps < 1500
    rows = filled(command_line.rows())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    process = command_line.process("fit")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and slurm.calls() == ["requeue 4711"], output
    assert f"SLURM started job 4711 again: the run continues from {folder}" in output
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert (folder / f"config_from_{steps:012d}.yaml").exists()
    counters = load_checkpoint(folder / "checkpoints" / "last.ckpt")["mtrl_lightning"]["counters"]
    assert counters["env_steps"] == 1500
    assert filled(command_line.rows())[: len(rows)] == rows
    seen = [(row["env_steps"], bool(row["eval/success"])) for row in command_line.rows()]
    assert len(seen) == len(set(seen)) and seen == sorted(seen, key=lambda row: int(row[0]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_twice_after_a_batch_was_checked_is_not_lost(
    command_line, slurm, monkeypatch, number
):
    real = Session.check_signals

    def signalled(session):
        real(session)
        if session.counters.env_steps == 330:
            signal.raise_signal(number)
            signal.raise_signal(number)

    monkeypatch.setattr(Session, "check_signals", signalled)
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    slurm.program.write_text(f"#!/bin/sh\ntouch {slurm.program.parent / 'called'}\n")
    try:
        with pytest.raises(Interrupted) as interrupted:
            command_line("fit")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert interrupted.value.code == 128 + number and steps_of(command_line, 0) == 333
    assert (slurm.program.parent / "called").exists() == (number == signal.SIGUSR1)


def steps_of(command_line, version):
    path = command_line.folder(version=version) / "checkpoints" / "last.ckpt"
    return load_checkpoint(path)["mtrl_lightning"]["counters"]["env_steps"]


def test_only_the_same_command_of_the_same_job_continues(command_line, slurm, monkeypatch):
    short = ["--rollout.warmup_steps=60", "--rollout.total_steps=90", "--evaluation.every=1000"]
    command_line("fit", *short)
    command_line("fit", *short)
    assert not command_line.folder(version=1).exists()
    command_line("fit", *short, "--seed_everything=2")  # a loop over seeds in one job
    assert command_line.folder(version=1).exists() and not command_line.folder(version=2).exists()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    command_line("fit", *short)
    assert command_line.folder(version=2).exists()
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    command_line("fit", *short)
    assert command_line.folder(version=3).exists()
    assert "origin" not in load_checkpoint(
        command_line.folder(version=3) / "checkpoints" / "last.ckpt"
    )


def test_a_command_with_a_checkpoint_continues_from_its_own_last_one(
    command_line, slurm, monkeypatch
):
    short = [
        "--rollout.warmup_steps=60",
        "--rollout.total_steps=90",
        "--checkpoint.keep_best=false",
    ]
    command_line("fit", *short, "--name=first", "--checkpoint.keep_last=1")
    path = command_line.folder("first") / "checkpoints" / "step_000000000090.ckpt"
    more = [
        "fit",
        *short,
        "--checkpoint.keep_last=1",
        "--rollout.total_steps=120",
        f"--ckpt_path={path}",
    ]
    command_line(*more)
    assert not path.exists()  # the same command line can still be started again
    command_line(*more)
    last = load_checkpoint(path.with_name("last.ckpt"))
    assert (
        last["mtrl_lightning"]["counters"]["env_steps"] == 120 and last["origin"]["job"] == "4711"
    )


def test_a_damaged_checkpoint_of_another_run_is_skipped(command_line, slurm):
    broken = command_line.folder(version=7) / "checkpoints" / "last.ckpt"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"nonsense")
    command_line(
        "fit", "--rollout.warmup_steps=60", "--rollout.total_steps=90", "--evaluation.every=1000"
    )
    assert steps_of(command_line, 8) == 90


def test_validate_does_not_requeue(command_line, slurm, monkeypatch):
    command_line(
        "fit", "--rollout.warmup_steps=60", "--rollout.total_steps=90", "--evaluation.every=1000"
    )
    before = set(command_line.folder().rglob("*"))

    def signalled(callback, trainer, algorithm):
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr("mtrl_lightning.callbacks.RolloutCallback.on_validation_start", signalled)
    former = signal.getsignal(signal.SIGUSR1)
    try:
        command_line("validate", "--ckpt_path=last")
    finally:
        signal.signal(signal.SIGUSR1, former)
    stored = command_line.folder() / "validations.jsonl"
    assert slurm.calls() == [] and set(command_line.folder().rglob("*")) == {*before, stored}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "4711"),
        (ARRAY, "4700_3"),
        ({"SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_NTASKS": None}, None),
    ],
)
def test_the_job_id_is_the_one_that_scontrol_expects(slurm, monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert slurm_job() == expected


class FakeTrainer:
    """Provide the cluster environment that Lightning would choose, and nothing else."""

    is_global_zero = True

    def __init__(self, auto_requeue=True):
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        environment = SLURMEnvironment(auto_requeue=auto_requeue)
        self._accelerator_connector = types.SimpleNamespace(cluster_environment=environment)


def test_lightnings_own_switch_turns_requeueing_off(slurm, monkeypatch):
    assert requeue_signal(FakeTrainer()) == signal.SIGUSR1
    assert requeue_signal(FakeTrainer(auto_requeue=False)) is None
    outside = FakeTrainer()
    outside._accelerator_connector.cluster_environment = None
    assert requeue_signal(outside) is None


def test_only_the_requeue_signal_requeues_an_array_task_by_its_own_id(slurm, monkeypatch):
    for name, value in ARRAY.items():
        monkeypatch.setenv(name, value)
    slurm.program.write_text(slurm.program.read_text().replace("kill -TERM $PPID", ""))
    requeue(FakeTrainer(), Interrupted(128 + signal.SIGTERM))
    requeue(FakeTrainer(auto_requeue=False), Interrupted(ENDED))
    assert slurm.calls() == []
    requeue(FakeTrainer(), Interrupted(ENDED))
    assert slurm.calls() == ["requeue 4700_3"]


@pytest.mark.parametrize("failure", ["refused", "missing"])
def test_a_failed_requeue_says_how_to_continue(slurm, monkeypatch, failure):
    if failure == "missing":
        slurm.program.unlink()
    else:
        slurm.program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.warns(UserWarning, match="requeue 4711"):
        requeue(FakeTrainer(), Interrupted(ENDED))


def test_under_slurm_only_a_second_ctrl_c_ends_the_run_at_once(slurm):
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    callback, trainer = InterruptionCallback(), FakeTrainer()
    callback.on_fit_start(trainer, None)
    try:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        with pytest.raises(Interrupted) as interrupted:
            callback.check()
        assert interrupted.value.code == ENDED
        callback.on_exception(trainer, None, interrupted.value)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="130"):
            signal.raise_signal(signal.SIGINT)
        callback.on_exception(trainer, None, RuntimeError("an environment broke"))
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_slurm_the_requeue_signal_is_not_handled(command_line):
    assert "SLURM_JOB_ID" not in os.environ and sys.platform != "win32"
    before = signal.getsignal(signal.SIGUSR1)
    callback = InterruptionCallback()
    trainer = FakeTrainer()
    trainer._accelerator_connector.cluster_environment = None
    callback.on_fit_start(trainer, None)
    try:
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        callback.teardown(trainer, None, "fit")
