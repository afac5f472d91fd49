"""Runs from Python equal the command line's: one call, or composed by hand in any order."""

from __future__ import annotations

import csv
import math
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FlattenObservation, FrameStackObservation, TransformReward
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from mtrl_lightning import (
    SAC,
    Benchmark,
    ConfigurationError,
    GymnasiumTasks,
    MultiTaskData,
    ToyReach,
    evaluate,
    load_policy,
    train,
)
from mtrl_lightning.algorithms import NormalizeObservation, NormalizeReward
from mtrl_lightning.callbacks import (
    CheckpointCallback,
    CurvesCallback,
    EvaluationCallback,
    InterruptionCallback,
    MetricsCallback,
    ReplayCallback,
    ResetCallback,
    RolloutCallback,
)
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.networks import MLP
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.rollout import ActionNoise, TransformedPolicy
from mtrl_lightning.runs import new_run_folder
from tests.helpers.command_line import SHORT
from tests.helpers.fakes import Scale
from tests.helpers.runs import SMALL_SAC, small, trainer_in


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.curves
def test_a_run_has_its_folder_its_last_evaluation_and_a_policy(tmp_path):
    run = small(ToyReach(2), tmp_path, total_steps=300)
    assert run.folder == tmp_path / "run" / "version_0"
    assert run.checkpoint.is_file()
    assert (run.folder / "curves.png").is_file()
    last = [row for row in rows_of(run.folder) if row.get("eval/success")][-1]
    assert run.evaluation["eval/return"] == float(last["eval/return"])
    assert int(last["env_steps"]) == 300
    again = run.evaluate(2, num_workers=0)
    assert again == run.evaluation, "the same test episodes and the same networks"
    action = run.policy.act(np.zeros((3, 2), np.float32), np.array([0, 1, 1]), "exploit")
    assert action.shape == (3, 2) and np.abs(action).max() <= 1


@pytest.mark.slow
def test_what_is_not_given_is_derived_and_printed(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run = small(ToyReach(3), tmp_path, total_steps=300, data={"batch_size": 100})
    text = caplog.text
    assert "data.batch_size 99" in text, "rounded to equal shares"
    names = ("data.capacity", "rollout.warmup_steps", "evaluation.every", "checkpoint.every")
    for option in names:
        assert f"{option} " in text
    assert load_checkpoint(run.checkpoint)["mtrl_lightning"]["counters"]["env_steps"] == 300


@pytest.mark.slow
@pytest.mark.parametrize(("num_tasks", "batch_size"), [(1, 1), (2, 7), (3, 1000), (5, 3)])
def test_any_number_of_tasks_works_with_any_batch(tmp_path, num_tasks, batch_size):
    run = small(ToyReach(num_tasks), tmp_path, total_steps=60, data={"batch_size": batch_size})
    assert 0 <= run.evaluation["eval/success"] <= 1


@pytest.mark.slow
def test_the_command_line_and_train_make_the_same_run(command_line, tmp_path):
    command_line("fit", *SHORT, "--seed_everything=3", "--name=typed")
    adam = partial(torch.optim.Adam, lr=3e-4, eps=1e-5, fused=True)
    algorithm = partial(
        SAC,
        actor=partial(MLP, width=16, depth=3, output_bound=1e-3),
        critic=partial(MLP, width=16, depth=3, output_bound=3e-3),
        actor_optimizer=adam,
        critic_optimizer=adam,
        temperature_optimizer=adam,
    )
    small(
        ToyReach(3, horizon=20),
        tmp_path,
        algorithm=algorithm,
        name="called",
        seed=3,
        data={"batch_size": 96, "capacity": 30_000},
        total_steps=180,
        rollout={"warmup_steps": 60},
        evaluation={"every": 60},
        metrics={"every": 30},
        checkpoint={"every": 60},
    )
    assert command_line.rows("called") == command_line.rows("typed")
    one, other = (
        load_checkpoint(command_line.folder(name) / "checkpoints" / "last.ckpt")["state_dict"]
        for name in ("typed", "called")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


class NothingUnderWay(Callback):
    """Notes whether a step was under way while environments were evaluated."""

    def __init__(self):
        self.seen = []

    def note(self, session):
        self.seen.append(not session.collector.is_step_pending)


def composed(root, order):
    """Compose a run by hand, with its callbacks in the order that a seed gives."""
    data = MultiTaskData(ToyReach(3), batch_size=96, capacity=900)
    folder = new_run_folder(str(root), f"order_{order}")
    callbacks = [
        RolloutCallback(total_steps=180, warmup_steps=60, num_workers=0),
        EvaluationCallback(every=60, num_episodes=2, num_workers=0),
        MetricsCallback(every=30),
        ResetCallback(every=90),
        CurvesCallback(),
        ReplayCallback(),
        CheckpointCallback(every=60),
        InterruptionCallback(),
    ]
    watching = NothingUnderWay()
    evaluation = callbacks[1]
    evaluate = evaluation._evaluate

    def noting():
        watching.note(evaluation.session)
        evaluate()

    evaluation._evaluate = noting
    random.Random(order).shuffle(callbacks)
    trainer_in(folder, callbacks).fit(SMALL_SAC(data.spec), datamodule=data)
    return folder, watching.seen


@pytest.mark.slow
@pytest.mark.curves
def test_the_order_of_the_callbacks_is_without_effect(tmp_path):
    folders = []
    for order in range(3):
        folder, seen = composed(tmp_path, order)
        assert len(seen) == 3 and all(seen), "no step is under way during an evaluation"
        folders.append(folder)
    first = rows_of(folders[0])
    assert len(first) > 5
    assert all(rows_of(folder) == first for folder in folders[1:])
    states = [
        load_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"] for folder in folders
    ]
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def test_a_run_continues_exactly(tmp_path):
    options = {
        "data": {"batch_size": 96, "capacity": 900},
        "rollout": {"warmup_steps": 60},
        "evaluation": {"every": 60},
        "metrics": {"every": 30},
        "checkpoint": {"every": 60},
    }
    small(ToyReach(3), tmp_path, name="whole", total_steps=240, **options)
    small(ToyReach(3), tmp_path, name="parts", total_steps=150, **options)
    run = small(ToyReach(3), tmp_path, name="parts", total_steps=240, ckpt_path="last", **options)
    assert run.folder == tmp_path / "parts" / "version_0"
    one, other = (
        load_checkpoint(tmp_path / name / "version_0" / "checkpoints" / "last.ckpt")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(value, other["state_dict"][n]) for n, value in one["state_dict"].items())
    assert one["callbacks"]["rollout"] == other["callbacks"]["rollout"]


@pytest.mark.parametrize(
    ("benchmark", "algorithm", "options"),
    [
        (ToyReach(2), SAC(ToyReach(2).spec), {}),
        (ToyReach(2), "SAK", {}),
        (ToyReach(2), None, {}),
        (["Pendulum-v1"], SAC, {}),
        (ToyReach(2), SAC, {"total_steps": 3}),
        (ToyReach(2), SAC, {"total_steps": math.inf}),
        (ToyReach(2), SAC, {"rolout": {"window": 3}}),
        (ToyReach(2), SAC, {"rollout": {"warmup_steps": 900}}),
        (ToyReach(2), SAC, {"rollout": {"total_steps": 60}}),
        (ToyReach(2), SAC, {"rollout": {"listeners": 3}}),
        (ToyReach(2), SAC, {"data": {"seed": 2}}),
        (ToyReach(2), SAC, {"data": {"batch_size": 1.5}}),
        (ToyReach(2), SAC, {"data": {"exclude_from_training": ["goal-9"]}}),
        (ToyReach(2), SAC, {"checkpoint": {"best_metric": "eval/sucess"}}),
        (ToyReach(2), SAC, {"ckpt_path": "last"}),
        (ToyReach(2), SAC, {"trainer": {"max_steps": 5}}),
        (ToyReach(2), SAC, {"trainer": {"precision": "64-true"}}),
        (ToyReach(2), SAC, {"callbacks": [ModelCheckpoint(monitor="eval/return")]}),
        (ToyReach(2), SAC, {"name": "../x"}),
        (ToyReach(2), SAC, {"seed": -1}),
    ],
)
def test_mistakes_are_refused_and_leave_no_folder(tmp_path, benchmark, algorithm, options):
    with pytest.raises(ConfigurationError):
        train(benchmark, algorithm, **{"total_steps": 300, "root": str(tmp_path)} | options)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_what_has_one_meaning_works(tmp_path):
    run = small(
        "Pendulum-v1",
        tmp_path,
        algorithm="SAC",
        total_steps=3e2,
        evaluation={"num_episodes": 1},
        rollout={"warmup_steps": 280},
        loggers=CSVLogger(str(tmp_path), name="other"),
        callbacks=LearningRateMonitor(),
        seed=np.int64(3),
    )
    assert run.benchmark.spec.task_names == ("Pendulum-v1",)
    assert type(run.algorithm) is SAC
    assert (tmp_path / "other" / "version_0" / "metrics.csv").exists()
    observation = [1.0, 0.0, 0.0]
    action = run.policy.act(observation, 0)
    assert action.shape == (1,)
    assert action == run.policy.act(observation, "Pendulum-v1")
    loaded = load_policy(run.folder)
    assert loaded.env_steps == run.algorithm.counters.env_steps
    assert loaded.act(observation, "Pendulum-v1") == pytest.approx(action)
    expected = evaluate(loaded, run.benchmark, 1, num_workers=0)
    for given in (run, run.checkpoint, str(run.folder)):
        assert evaluate(given, run.benchmark, 1, num_workers=0) == expected
    assert evaluate(run, "Pendulum-v1", 1, num_workers=0) == expected


@pytest.mark.slow
def test_a_runs_folder_stands_for_its_best_checkpoint(tmp_path):
    run = small(ToyReach(1), tmp_path, total_steps=200)
    best = run.folder / "checkpoints" / "best.ckpt"
    assert load_policy(run.folder).env_steps == load_policy(best).env_steps
    best.unlink()
    assert load_policy(run.folder).env_steps == 200


@pytest.mark.slow
def test_an_evaluation_steps_environments_no_more_than_training_does(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        small(ToyReach(3, horizon=50), tmp_path, total_steps=630, evaluation={"num_episodes": 4})
    assert "evaluation.every 600" in caplog.text, "4 episodes of 50 steps of 3 tasks"


def test_a_replay_on_disk_is_in_the_runs_folder(tmp_path, monkeypatch):
    folders = []
    make = tempfile.TemporaryFile

    def noting(*args, dir=None, **kwargs):
        folders.append(dir)
        return make(*args, dir=dir, **kwargs)

    monkeypatch.setattr("mtrl_lightning.replay.storage.tempfile.TemporaryFile", noting)
    run = small(ToyReach(2), tmp_path, total_steps=100, data={"memory_map": True})
    assert folders.count(run.folder) >= 5, "one file per field of a transition"
    assert all(run.folder in (folder, folder.parent) for folder in folders)


def test_training_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("the process' memory settings were changed")

    monkeypatch.setattr("mtrl_lightning.resources.ctypes", SimpleNamespace(CDLL=refuse))
    threads = torch.get_num_threads()
    filters = list(warnings.filters)
    small(ToyReach(2), tmp_path, total_steps=100)
    assert torch.get_num_threads() == threads
    assert warnings.filters == filters


@pytest.mark.slow
def test_a_run_with_derived_options_can_be_prolonged(tmp_path):
    small(ToyReach(2), tmp_path, total_steps=120)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = small(ToyReach(2), tmp_path, total_steps=240, ckpt_path="last")
    assert "with other options" not in str([str(warning.message) for warning in caught])
    other = {"algorithm": partial(SMALL_SAC, discount=0.9), "ckpt_path": "last"}
    with pytest.raises(ConfigurationError, match="above 240"):
        small(ToyReach(2), tmp_path, total_steps=240, **other)
    assert load_checkpoint(run.checkpoint)["mtrl_lightning"]["counters"]["env_steps"] == 240
    with pytest.warns(UserWarning, match="discount 0"):
        small(ToyReach(2), tmp_path, total_steps=260, **other)


class Watching(Callback):
    """Notes Lightning's hooks of a validation, and saves a checkpoint of its own at the first."""

    def __init__(self):
        self.hooks = []
        self.returns = []

    def on_validation_start(self, trainer, pl_module):
        self.hooks.append("start")

    def on_validation_epoch_start(self, trainer, pl_module):
        self.hooks.append("epoch_start")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.hooks.append("epoch_end")

    def on_validation_end(self, trainer, pl_module):
        self.hooks.append("end")
        self.returns.append(float(trainer.callback_metrics["eval/return"]))
        if len(self.returns) == 1:
            folder = Path(trainer.default_root_dir)
            trainer.save_checkpoint(folder / "checkpoints" / "mine.ckpt")


def test_lightnings_callbacks_see_the_evaluations(tmp_path):
    watch = EarlyStopping("eval/return", patience=1, mode="min")
    watching = Watching()
    options = {
        "total_steps": 9000,
        "rollout": {"warmup_steps": 30},
        "evaluation": {"every": 30},
    }
    run = small(ToyReach(1), tmp_path, callbacks=[watching, watch], **options)
    assert watching.hooks == ["start", "epoch_start", "epoch_end", "end"] * len(watching.returns)
    logged = [float(row["eval/return"]) for row in rows_of(run.folder) if row.get("eval/return")]
    assert watching.returns == pytest.approx(logged)
    # a checkpoint that a callback saves lists the replay's files, and they stay
    mine = load_checkpoint(run.folder / "checkpoints" / "mine.ckpt")
    replay = mine["MultiTaskData"]["replay"]
    assert sum(replay["added"]) == mine["mtrl_lightning"]["counters"]["env_steps"]
    ReplaySnapshots(run.folder / "replay").verify(replay)
    values = [float(row["eval/return"]) for row in rows_of(run.folder) if row.get("eval/return")]
    assert watch.stopped_epoch == 0 and len(values) < 300, "it ended before its time"
    assert values[-1] >= min(values)


class OnlyTraining(ToyReach):
    splits = ("train",)


def test_a_benchmark_without_a_split_to_evaluate_trains(tmp_path):
    run = small(OnlyTraining(2), tmp_path, total_steps=100)
    assert run.evaluation == {} and run.checkpoint.is_file()
    assert not (run.folder / "checkpoints" / "best.ckpt").exists()


def parts_of_a_run():
    return [
        RolloutCallback(total_steps=120, warmup_steps=30, num_workers=0),
        EvaluationCallback(every=60, num_episodes=1, num_workers=0),
        MetricsCallback(every=60),
        ReplayCallback(),
        CheckpointCallback(every=60),
    ]


def test_a_second_trainer_with_the_same_objects_has_a_session_of_its_own(tmp_path):
    data = MultiTaskData(ToyReach(3), batch_size=12, capacity=900)
    model = SMALL_SAC(data.spec)
    evaluation = EvaluationCallback(num_episodes=1, num_workers=0)
    first = trainer_in(tmp_path / "first", [evaluation])
    assert first.validate(model, datamodule=data, verbose=False) == [
        pytest.approx(evaluation.session.results)
    ]
    assert "eval/return/goal-2" in evaluation.session.results
    assert not (tmp_path / "first" / "metrics.csv").exists() and first.loggers
    trainer_in(tmp_path / "second", parts_of_a_run()).fit(model, datamodule=data)
    assert (tmp_path / "second" / "checkpoints" / "last.ckpt").is_file()
    assert not (tmp_path / "first" / "checkpoints").exists()
    held = len(data.buffer)
    again = parts_of_a_run()
    again[0] = RolloutCallback(total_steps=240, warmup_steps=30, num_workers=0)
    trainer_in(tmp_path / "second", again).fit(model, datamodule=data)
    assert len(data.buffer) == held + 120, "the replay of the first fit is still there"


def test_a_task_is_described_without_addresses():
    tasks = GymnasiumTasks({"a": {"id": "Pendulum-v1", "kwargs": {"g": 5.0}}})
    assert isinstance(tasks, Benchmark)
    described = GymnasiumTasks({"a": partial(make_pendulum, object())}).spec.protocol
    assert "0x" not in str(described) and "builtins.object" in str(described)


def make_pendulum(unused):
    return gym.make("Pendulum-v1")


@pytest.mark.slow
def test_connectors_change_what_is_acted_on_and_sent_and_not_what_is_stored(tmp_path):
    class Keep(Callback):
        def on_train_end(self, trainer, pl_module):
            self.buffer = trainer.datamodule.buffer

    kept = Keep()
    transforms = [Scale(0.5), ActionNoise(1e-3)]
    run = small(
        ToyReach(2, horizon=7),
        tmp_path,
        algorithm=partial(
            SMALL_SAC, transforms=[NormalizeObservation], reward_scale=NormalizeReward
        ),
        callbacks=[kept],
        total_steps=140,
        evaluation={"every": 140},
        data={"wrappers": [partial(FrameStackObservation, stack_size=3), FlattenObservation]},
        rollout={"action_transforms": transforms},
    )
    normalize = run.algorithm.transforms[1]
    rows_T = normalize.moments.count_T.tolist()
    assert rows_T == [70, 70]
    for task in range(2):
        rows = kept.buffer.storage.take(torch.full((70,), task), torch.arange(70))
        observation_ND = rows["observation"].double()
        wanted = (observation_ND.mean(0), observation_ND.var(0, correction=0))
        torch.testing.assert_close(normalize.moments.mean_TD[task], wanted[0])
        torch.testing.assert_close(normalize.moments.variance_TD[task], wanted[1])
        # the point moves by 0.2 times the action that was sent
        moved_N2 = rows["next_observation"][:, 4:] - rows["observation"][:, 4:]
        is_free_N2 = rows["next_observation"][:, 4:].abs() < 1
        sent_N2 = 0.5 * rows["action"]
        error_N2 = (moved_N2 / 0.2 - sent_N2)[is_free_N2]
        assert 1e-4 < error_N2.abs().max() < 1e-2 and rows["action"].abs().max() > 0.6

    noise = ActionNoise(1e-3)
    noise.seed(int(np.random.SeedSequence(1, spawn_key=(1, 0)).generate_state(1)[0]))
    for _ in range(70):
        noise.transform(np.zeros((2, 2)), np.arange(2), is_training=True)
    assert noise.state_dict() == transforms[1].state_dict(), "seeded by the run, not evaluations"

    before = normalize.moments.state_dict()
    assert run.evaluate(2, num_workers=0) == run.evaluation, "in the wrappers, with scaled actions"
    assert run.evaluation != evaluate(run.policy, run.benchmark, 2, num_workers=0)
    policy = load_policy(run.checkpoint)
    sent = TransformedPolicy(policy, transforms)
    assert evaluate(sent, run.benchmark, 2, num_workers=0) == run.evaluation
    loaded = policy._algorithm.transforms[1].moments.state_dict()
    for name, value in before.items():
        assert torch.equal(value, normalize.moments.state_dict()[name]), "frozen in evaluations"
        assert torch.equal(value, loaded[name])
    assert policy.spec.protocol["wrappers"] == run.benchmark.pipeline
    with_reward = [*run.benchmark.wrappers, partial(TransformReward, func=abs)]
    for wrappers, message in (
        (None, "the observation of 'goal-0' has 6 numbers there and 2 here"),
        (with_reward, r"another protocol: wrappers .*Flatten.* there and .*TransformReward"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            small(ToyReach(2, horizon=7), tmp_path, ckpt_path="last", data={"wrappers": wrappers})


@pytest.mark.slow
def test_changed_action_transforms_are_a_warning_in_a_continued_run(tmp_path):
    def continued(total_steps, transforms, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = small(
                ToyReach(2, horizon=5),
                tmp_path,
                total_steps=total_steps,
                evaluation={"num_episodes": 1},
                rollout={"action_transforms": transforms},
                **options,
            )
        texts = [str(warning.message) for warning in caught]
        return run, [text for text in texts if "other options than its checkpoint's" in text]

    run, texts = continued(48, [Scale(0.5)])
    assert texts == []
    _, texts = continued(60, [Scale(0.5)], ckpt_path=str(run.folder))
    assert texts == []
    _, (text,) = continued(72, [Scale(0.25)], ckpt_path=str(run.folder))
    scale = "[{'class_path': 'tests.helpers.fakes.Scale', 'init_args': {'factor': 0.5}}]"
    assert f"rollout.action_transforms {scale} there and" in text and "0.25" in text
