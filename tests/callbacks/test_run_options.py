"""Options of a run: at the start and the end, listeners, numbers of ``info``."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from types import ModuleType

import pytest
from lightning.pytorch import Callback

from mtrl_lightning import PPO
from mtrl_lightning.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    MetricsCallback,
    read_metrics,
)
from mtrl_lightning.callbacks.options import _is_same
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.networks import MLP
from tests.helpers.altered_reach import Reporting
from tests.helpers.command_line import SHORT
from tests.helpers.diary import Diary
from tests.helpers.runs import assert_same_end, small

REPORTING = (
    "--data.benchmark=tests.helpers.altered_reach.Reporting",
    "--data.benchmark.init_args.horizon=7",
    "--data.info_keys=[place,steps,odd]",
)
SMALL_PPO = partial(
    PPO,
    actor=partial(MLP, width=16),
    critic=partial(MLP, width=16),
    num_steps=30,
    num_epochs=1,
    num_minibatches=2,
)
START = ("--evaluation.at_start=true", "--checkpoint.at_start=true", "--checkpoint.keep_last=-1")


DELETE = "--replay.delete_at_end=true"


def stop_in(owner, method, run):
    """Send SIGTERM at a method's call; return the callbacks' states that are saved then."""
    original = getattr(owner, method)
    folders = []

    def stopped(self, *args):
        folders.append(self.session.folder)
        if method == "save_at_start":
            original(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)
        self.session.check_signals()

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(owner, method, stopped)
        run()
    assert ended.value.code == 143
    return load_checkpoint(folders[0] / "checkpoints" / "last.ckpt")["callbacks"]


def steps_of(folder):
    """Return the environment steps of the checkpoints."""
    return sorted(int(path.stem.split("_")[1]) for path in folder.glob("checkpoints/step_*.ckpt"))


@pytest.mark.slow
def test_info_and_episodes_are_logged_and_everything_is_continued_exactly(command_line, tmp_path):
    """A run is stopped in its first evaluation, after its first checkpoint, and in mid-episode."""
    diaries = {name: tmp_path / f"{name}.txt" for name in ("whole", "parts")}

    def run(name, *options):
        (tmp_path / "listeners.yaml").write_text(
            f"rollout: {{listeners: [{{class_path: tests.helpers.diary.Diary,"
            f" init_args: {{path: {diaries[name]}}}}}]}}"
        )
        given = (*SHORT, *REPORTING, *START, f"-c={tmp_path / 'listeners.yaml'}", f"--name={name}")
        command_line("fit", *given, *options)

    run("whole")
    stopped = stop_in(EvaluationCallback, "_evaluate", lambda: run("parts"))
    assert (stopped["evaluation"]["env_steps"], stopped["rollout"]["next_call"]) == (-1, None)
    with_last = partial(run, "parts", "--ckpt_path=last")
    stopped = stop_in(CheckpointCallback, "save_at_start", with_last)
    assert stopped["evaluation"]["env_steps"] == 0
    with_last("--rollout.total_steps=120")
    with_last("--rollout.total_steps=180")

    folder = command_line.folder("whole")
    assert_same_end(command_line, "whole", "parts")
    curves = read_metrics(folder)
    assert curves["eval/success"][0][:2] == [0, 63]
    assert steps_of(folder)[:2] == [0, curves["eval/success"][0][1]]

    steps, episodes = curves["rollout/episodes"]
    assert episodes == [step // 21 * 3 for step in steps]
    assert curves["rollout/episodes/goal-1"][1] == [count / 3 for count in episodes]
    assert set(curves["rollout/length_max"][1]) == {7.0}
    for task in ("", "/goal-0", "/goal-1", "/goal-2"):
        assert set(curves[f"rollout/info/steps{task}"][1]) == {4.0}
        assert set(curves[f"eval/info/steps_last{task}"][1]) == {7.0}
    assert set(curves["rollout/info/odd"][1]) == {1.0}
    assert "rollout/info/odd/goal-1" in curves and "rollout/info/odd/goal-0" not in curves
    assert len(set(curves["eval/info/place/goal-2"][1])) > 1
    returns = [curves[f"rollout/return{name}/goal-0"][1] for name in ("_min", "", "_max")]
    for smallest, mean, largest in zip(*returns, strict=True):
        assert smallest < mean < largest
    assert all(0 < seconds < 600 for seconds in curves["time/seconds_per_episode/goal-0"][1])

    whole, parts = (path.read_text().splitlines() for path in diaries.values())
    assert whole[-1] == parts[-1] and whole[-1].startswith(f"{180 // 21 * 3} ")
    assert sum("built" in line for line in whole) == 3
    assert sum("built" in line for line in parts) == 3 * 3, "each process that steps them"


@pytest.mark.slow
def test_train_takes_listeners_and_stores_info_in_the_replay(tmp_path):
    diary = Diary()
    run = small(
        Reporting(2, horizon=7),
        tmp_path,
        rollout={"listeners": [diary]},
        total_steps=280,
        data={"info_keys": ["place", "steps"], "store_info": True},
    )
    assert [line for line in diary.lines if line[0] == "built"] == [
        ("built", 0, 0),
        ("built", 1, 1),
    ]
    ended = [line for line in diary.lines if line[0] == "ended"]
    assert len(ended) == 280 // 14 * 2 and set(ended) == {("ended", e, e, e) for e in (0, 1)}
    checkpoint = load_checkpoint(run.checkpoint)
    fields = [field[0] for field in checkpoint["MultiTaskData"]["replay"]["fields"]]
    assert fields[-2:] == ["place", "steps"]
    assert checkpoint["mtrl_lightning"]["spec"]["info_keys"] == ["place", "steps"]
    assert run.evaluation["eval/info/steps"] == 4.0


def test_environments_are_remade_in_the_middle_of_an_iteration(tmp_path):
    """A callback changes the benchmark between two vector steps, as a curriculum does."""

    class Shorter(Callback):
        is_done = False

        def on_fit_start(self, trainer, pl_module):
            self.session = trainer.datamodule.session
            self.session.after_vector_step.append(self.remake)

        def remake(self, env_steps):
            if env_steps >= 200 and not self.is_done:
                self.session.collector.remake_envs(ToyReach(2, horizon=4))
                self.is_done = True

    run = small(
        ToyReach(2, horizon=7),
        tmp_path,
        algorithm=SMALL_PPO,
        callbacks=[Shorter()],
        total_steps=480,
        metrics={"every": 60},
    )
    curves = read_metrics(run.folder)
    assert curves["rollout/length_min"][1][-1] == 4 and curves["rollout/length_max"][1][0] == 7
    assert curves["fault/dropped_transitions"][1][-1] == 2
    counters = load_checkpoint(run.checkpoint)["mtrl_lightning"]["counters"]
    assert 2 * counters["vector_steps"] == counters["env_steps"] + 2 >= 480


@pytest.mark.slow
def test_the_replay_is_deleted_when_the_run_has_ended_by_itself(command_line, capsys):
    def run(steps, *options):
        command_line("fit", DELETE, f"--rollout.total_steps={steps}", *options)

    folder = command_line.folder()
    stopped = stop_in(MetricsCallback, "log_if_due", lambda: run(330))
    assert stopped["rollout"]["next_call"] == "log_metrics"
    assert [*(folder / "replay").iterdir()], "an interrupted run keeps its replay"
    run(330, "--ckpt_path=last")
    assert not (folder / "replay").exists()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(360, "--ckpt_path=last")
    assert "--replay.restore false" in capsys.readouterr().err
    run(360, "--ckpt_path=last", "--replay.restore=false")
    assert steps_of(folder)[-1] >= 360


def test_a_class_of_two_import_paths_is_one_option_and_no_module_is_asked_for_it(monkeypatch):
    noise = {"class_path": "mtrl_lightning.networks.StateDependentStd"}
    assert _is_same(noise, {"class_path": "mtrl_lightning.networks.exploration.StateDependentStd"})
    assert not _is_same(noise, {"class_path": "mtrl_lightning.networks.StateIndependentStd"})
    asked = []

    def import_when_asked(name):
        asked.append(name)
        raise AttributeError(name)

    lazy = ModuleType("lazy")
    lazy.__getattr__ = import_when_asked
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert not _is_same("lazy.Thing", "lazy.Other")
    assert "Thing" not in asked
