"""``train`` and ``evaluate`` are the command line's; runs that start from a trained policy."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from mtrl_lightning import SAC, ConfigurationError, ToyReach, evaluate, load_policy, train
from mtrl_lightning.networks import MLP, MultiHead
from tests.helpers.command_line import SHORT, rows_of
from tests.helpers.runs import assert_same, assert_same_end, checkpoint, small


@pytest.mark.curves
def test_run_has_its_folder_last_evaluation_and_policy(tmp_path):
    run = small(ToyReach(2), tmp_path, total_steps=300)
    assert run.folder == tmp_path / "run" / "version_0"
    assert run.checkpoint.is_file() and (run.folder / "curves.png").is_file()
    last = [row for row in rows_of(run.folder) if "eval/success" in row][-1]
    assert (run.evaluation["eval/return"], last["env_steps"]) == (last["eval/return"], 300)
    assert run.evaluate(2, num_workers=0) == run.evaluation, "the same episodes and networks"


@pytest.mark.slow
def test_command_line_and_train_make_the_same_run(command_line, tmp_path):
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
        data={"batch_size": 96, "capacity": 30_000, "warmup_steps": 60},
        total_steps=180,
        evaluation={"every": 60},
        metrics={"every": 30},
        checkpoint={"every_n_env_steps": 60},
    )
    assert command_line.rows("called") == command_line.rows("typed")
    ends = [checkpoint(command_line, name)["state_dict"] for name in ("typed", "called")]
    assert_same(*ends)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SAC(ToyReach(2).spec), {}),
        ("SAK", {}),
        (SAC, {"ckpt_path": "last"}),
        (SAC, {"init_from": "nowhere"}),
    ],
)
def test_mistakes_are_refused_and_leave_no_folder(tmp_path, algorithm, options):
    with pytest.raises(ConfigurationError):
        train(ToyReach(2), algorithm, total_steps=300, root=str(tmp_path / "runs"), **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_ids_names_and_single_objects_are_accepted(tmp_path):
    run = small(
        "Pendulum-v1",
        tmp_path,
        algorithm="SAC",
        total_steps=3e2,
        evaluation={"num_episodes": 1},
        data={"warmup_steps": 280},
        loggers=CSVLogger(str(tmp_path), name="other"),
        callbacks=LearningRateMonitor(),
    )
    assert run.benchmark.spec.task_names == ("Pendulum-v1",) and type(run.algorithm) is SAC
    assert (tmp_path / "other" / "version_0" / "metrics.csv").exists()
    loaded = load_policy(run.folder)
    observation = [1.0, 0.0, 0.0]
    assert loaded.act(observation, 0) == pytest.approx(run.policy.act(observation, "Pendulum-v1"))
    expected = evaluate(loaded, run.benchmark, 1, num_workers=0)
    for given in (run, run.checkpoint, str(run.folder)):
        assert evaluate(given, "Pendulum-v1", 1, num_workers=0) == expected


class OnlyTraining(ToyReach):
    splits = ("train",)


def test_benchmark_without_a_split_to_evaluate_trains(tmp_path):
    run = small(OnlyTraining(2), tmp_path, total_steps=100)
    assert run.evaluation == {} and run.checkpoint.is_file()
    assert not (run.folder / "checkpoints" / "best.ckpt").exists()


@pytest.mark.slow
def test_train_starts_from_a_policy_of_other_tasks(tmp_path):
    network = partial(MultiHead, width=16, depth=1)
    fixed = partial(
        SAC, actor=network, critic=network, actor_optimizer=partial(torch.optim.Adam, lr=0.0)
    )
    source = small(ToyReach(3), tmp_path, algorithm=fixed, name="source", total_steps=300)
    options = {"algorithm": fixed, "init_from": source.folder, "total_steps": 120, "seed": 2}
    run = small(ToyReach(2), tmp_path, name="next", **options)
    observation_ED = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    for task in ("goal-0", "goal-1"):
        expected = source.policy.act(observation_ED, task)
        np.testing.assert_allclose(run.policy.act(observation_ED, task), expected, atol=1e-6)


@pytest.mark.slow
def test_metaworld_run_starts_from_other_tasks_and_resumes(command_line):
    fit = partial(
        command_line,
        "fit",
        "--data.benchmark=mtrl_lightning.envs.MetaWorld",
        "--data.benchmark.init_args.horizon=23",
        *(f"--{section}.every=150" for section in ("evaluation", "metrics")),
        "--checkpoint.every_n_env_steps=150",
        configs=("base", "env/toy", "algorithm/mtsac", "network/multi_head", "gradient/mean"),
    )
    three = "--data.benchmark.init_args.tasks=[reach,push,box-close]"
    fit(three, "--name=source", "--data.total_steps=330")
    source = command_line.folder("source")
    start = ["--data.benchmark.init_args.tasks=[box-close,drawer-open]", f"--init_from={source}"]
    start += ["--init_new_tasks=mean", "--data.warmup_steps=40"]
    fit(*start, "--name=whole", "--data.total_steps=300")
    fit(*start, "--name=parts", "--data.total_steps=150")
    shutil.rmtree(source)  # it is no longer needed
    parts = command_line.folder("parts")
    command_line("fit", f"--resume={parts}", "--data.total_steps=300", configs=(), small=False)
    assert_same_end(command_line, "whole", "parts")
