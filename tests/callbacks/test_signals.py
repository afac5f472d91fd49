"""Signals that end a run at once, and jobs that are started again.

``tests/matrix/test_continuation.py`` has the signals that end a run where it can be saved.
"""

import os
import signal
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import Interrupted
from mtrl_lightning.utils.requeue import requeue, requeue_signal, slurm_job
from tests.helpers.fitting import fit

JOB = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost"},
    **dict.fromkeys(["SLURM_NTASKS", "SLURM_NNODES"], "1"),
    **dict.fromkeys(["SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"], "0"),
}
ENDED = 128 + signal.SIGUSR1


@pytest.fixture(autouse=True)
def handlers():
    """Check that the handlers are those before the run."""
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in handled]
    yield
    assert [signal.getsignal(number) for number in handled] == before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_run_at_once_and_unsaved(tmp_path, capfd, second):
    def send(env_steps):
        if env_steps == 80:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(second)

    callback = Callback()
    callback.on_train_start = lambda trainer, _: data_of(trainer).after_step.append(send)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, callback)
    assert type(ended.value) is SystemExit and ended.value.code == 128 + second
    assert "unsaved" in capfd.readouterr().err
    last = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert last["mtrl_lightning"]["counters"]["env_steps"] == 62


def simulate_slurm(tmp_path, monkeypatch, then=""):
    """Simulate a SLURM job; return its ``scontrol``, and the arguments that it was called with."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    program, calls = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    program.parent.mkdir()
    calls.touch()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{then}')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return SimpleNamespace(program=program, calls=lambda: calls.read_text().splitlines())


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return simulate_slurm(tmp_path, monkeypatch)


def trainer_of(auto_requeue=True, loggers=()):
    connector = SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=auto_requeue))
    return SimpleNamespace(is_global_zero=True, loggers=loggers, _accelerator_connector=connector)


def test_only_the_requeue_signal_requeues_an_array_task(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4700")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue(trainer_of(), Interrupted(128 + signal.SIGTERM))
    requeue(trainer_of(), RuntimeError("an environment broke"))
    requeue(trainer_of(auto_requeue=False), Interrupted(ENDED))
    assert slurm.calls() == [] and requeue_signal(trainer_of(auto_requeue=False)) is None
    requeue(trainer_of(), Interrupted(ENDED))
    assert slurm.calls() == ["requeue 4700_3"]
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert slurm_job() is None


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_failed_requeue_is_a_warning(slurm, is_missing):
    slurm.program.unlink() if is_missing else slurm.program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.warns(UserWarning, match="requeue 4711"):
        requeue(trainer_of(), Interrupted(ENDED))


@pytest.mark.parametrize(
    ("sweep", "number", "expected"),
    [
        ("s1", signal.SIGTERM, ["preempting", 143]),
        ("s1", signal.SIGINT, [130]),
        (None, signal.SIGTERM, []),
    ],
)
def test_a_preempted_run_of_a_sweep_is_marked(sweep, number, expected):
    pytest.importorskip("wandb")
    calls = []
    run = SimpleNamespace(
        disabled=False,
        sweep_id=sweep,
        mark_preempting=lambda: calls.append("preempting"),
        finish=lambda exit_code: calls.append(exit_code),
    )
    requeue(trainer_of(loggers=[WandbLogger(experiment=run)]), Interrupted(128 + number))
    assert calls == expected
