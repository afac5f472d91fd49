"""Signals that end a run at once, and jobs that are started again.

``tests/matrix/test_continuation.py`` has the signals that end a run where it can be saved.
"""

import signal
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock, call

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


def interrupted(folder, *signals):
    """Train until signals come after 80 steps; return the exception and the saved steps."""

    def send(env_steps):
        for number in signals if env_steps == 80 else ():
            signal.raise_signal(number)

    callback = Callback()
    callback.on_train_start = lambda trainer, _: data_of(trainer).after_step.append(send)
    with pytest.raises(SystemExit) as ended:
        fit(folder, callback)
    last = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    return ended.value, last["mtrl_lightning"]["counters"]["env_steps"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_run_at_once_and_unsaved(tmp_path, second):
    ended, saved = interrupted(tmp_path, signal.SIGTERM, second)
    assert type(ended) is SystemExit and (ended.code, saved) == (128 + second, 62)


@pytest.fixture
def slurm(monkeypatch):
    """Simulate a SLURM job, and return the mock of ``scontrol``."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    program = Mock(return_value=0)
    monkeypatch.setattr(subprocess, "call", program)
    return program


def test_slurms_signal_saves_the_run_and_requeues_the_job(tmp_path, slurm):
    """``tests/test_runs.py`` has what the job does when it starts again."""
    # once a job is requeued, SLURM ends it
    slurm.side_effect = lambda line: signal.raise_signal(signal.SIGTERM)
    ended, saved = interrupted(tmp_path, signal.SIGUSR1, signal.SIGUSR1)
    assert (ended.code, saved) == (ENDED, 80)
    slurm.assert_called_once_with(["scontrol", "requeue", "4711"])
    assert not list(tmp_path.rglob("hpc_ckpt*"))


def trainer_of(auto_requeue=True, loggers=()):
    connector = SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=auto_requeue))
    return SimpleNamespace(is_global_zero=True, loggers=loggers, _accelerator_connector=connector)


def test_only_the_requeue_signal_requeues_an_array_task(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4700")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue(trainer_of(), Interrupted(128 + signal.SIGTERM))
    requeue(trainer_of(), RuntimeError("an environment broke"))
    requeue(trainer_of(auto_requeue=False), Interrupted(ENDED))
    assert not slurm.called and requeue_signal(trainer_of(auto_requeue=False)) is None
    requeue(trainer_of(), Interrupted(ENDED))
    slurm.assert_called_once_with(["scontrol", "requeue", "4700_3"])
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert slurm_job() is None


@pytest.mark.parametrize("result", [FileNotFoundError("scontrol"), [3]], ids=str)
def test_a_failed_requeue_is_a_warning(slurm, result):
    slurm.side_effect = result
    with pytest.warns(UserWarning, match="requeue 4711"):
        requeue(trainer_of(), Interrupted(ENDED))


@pytest.mark.parametrize(
    ("sweep", "number", "expected"),
    [
        ("s1", signal.SIGTERM, [call.mark_preempting(), call.finish(exit_code=143)]),
        ("s1", signal.SIGINT, [call.finish(exit_code=130)]),
        (None, signal.SIGTERM, []),
    ],
)
def test_a_preempted_run_of_a_sweep_is_marked(sweep, number, expected):
    pytest.importorskip("wandb")
    run = Mock(disabled=False, sweep_id=sweep)
    requeue(trainer_of(loggers=[WandbLogger(experiment=run)]), Interrupted(128 + number))
    assert run.method_calls == expected
