"""Train 2N in one go; train N, stop, go on in a new process: the same run, bit for bit."""

import signal
from functools import partial

import pytest

from mtrl_lightning.algorithms import PPO, SAC
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.checkpoints import data_key
from mtrl_lightning.rollout import Collector
from tests.helpers.runs import (
    CONNECTORS,
    assert_continues_exactly,
    assert_same,
    assert_same_end,
    checkpoint,
    signal_in_call,
)

METAWORLD = ("base", "env/metaworld_mt10", "algorithm/mtsac", "network/multi_head", "gradient/mean")
TOY = ("base", "env/toy", *METAWORLD[2:])
SHORT = [
    # episodes are under way whenever a checkpoint is written
    "--data.benchmark.init_args.horizon=35",
    "--data.batch_size=90",
    "--data.capacity=195",  # the rings wrap around
    "--data.chunk_mebibytes=0.0119",
    "--evaluation.every=150",
    "--evaluation.num_episodes=1",
    "--data.warmup_steps=100",
    "--metrics.every=50",
    "--checkpoint.every_n_env_steps=150",
    "--checkpoint.save_top_k=-1",
]


def test_metaworld_resumes_in_mid_episode_with_other_workers(command_line):
    tasks = "--data.benchmark.init_args.tasks=[reach,push,peg-insert-side]"

    def fit(*options, run=command_line):
        return run("fit", *SHORT, tasks, *options, configs=METAWORLD)

    fit("--name=whole", "--data.total_steps=300")
    fit("--name=parts", "--data.total_steps=150", "--data.num_workers=2")
    saved = checkpoint(command_line, "parts")
    running = saved["ReplayData"]["collector"]["running"]["per_env"]
    assert running["length"] == [50 % 35] * 3
    more = ["--ckpt_path=last", "--data.total_steps=300"]
    process = fit("--name=parts", *more, run=command_line.process)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.slow
def test_a_continued_run_in_bf16_is_the_same_run(command_line):
    options = [
        "--data.batch_size=96",
        "--data.capacity=240",
        "--data.chunk_mebibytes=0.00125",
        "--trainer.precision=bf16-mixed",
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
    ]

    run = partial(command_line, "fit", *SHORT, *options, configs=TOY)
    assert_continues_exactly(command_line, run, 150, 300)


@pytest.mark.slow
def test_a_run_interrupted_anywhere_ends_as_if_it_had_not_been(command_line, monkeypatch):
    options = [
        "--data.warmup_steps=60",
        "--data.total_steps=360",
        "--data.capacity=210",
        "--data.chunk_mebibytes=0.00645",
        "--metrics.every=60",
        "--evaluation.every=300",
        "--checkpoint.every_n_env_steps=100000",
    ]
    command_line("fit", *options, "--name=whole")
    options += ["--data.num_workers=1", "--name=parts"]
    # the worker steps during an update; both calls are between two rows of the metrics
    for owner, method, number, steps, more in (
        (SAC, "training_step", signal.SIGTERM, 159, []),
        (Collector, "send", signal.SIGINT, 258, ["--ckpt_path=last"]),
    ):
        with monkeypatch.context() as patch:
            signal_in_call(patch, owner, method, 33, number)
            with pytest.raises(SystemExit) as exit_info:
                command_line("fit", *options, *more)
        assert exit_info.value.code == 128 + number
        saved = checkpoint(command_line, "parts")
        assert saved["mtrl_lightning"]["counters"]["env_steps"] == steps
    command_line("fit", *options, "--ckpt_path=last")
    # the extra checkpoints are among those saved, and their rows are in files of their own
    whole, parts = (checkpoint(command_line, name) for name in ("whole", "parts"))
    for end in (whole, parts):
        del end["callbacks"], end["epoch"], end["loops"]
        del end["ReplayData"]["replay"]["all_ranks"], end["ReplayData"]["replay"]["root"]
    assert_same(whole, parts)
    assert command_line.rows("whole") == command_line.rows("parts")


EXTRAS = {
    "reuse": (30, "PolicyReuse", "success=0.01", "episodes=2", "fraction=0.5"),
    "pausing": (60, "PauseSolved", "success=0.01", "episodes=1"),
    "noise": (30, "CorrelatedNoise", "correlation=0.9"),
}
"""Horizon, class and arguments."""
LOGGED = {
    "reuse": "rollout/reused",
    "pausing": "rollout/stepped",
    "noise": "train/exploration/goal-0",
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("algorithm", "kind"), [("mtsac", SAC), ("mtppo", PPO)])
def test_extras_of_the_rollout_continue(command_line, monkeypatch, algorithm, kind, extra):
    """The interruption is in the middle of episodes, and of an epoch of PPO."""
    horizon, name, *values = EXTRAS[extra]
    options = [f"--data.extras+=mtrl_lightning.rollout.{name}"]
    options += [f"--data.extras.{value}" for value in values]
    options += ["--data.extras+=mtrl_lightning.rollout.StartMidway", "--data.envs_per_task=4"]
    options += [f"--data.benchmark.init_args.horizon={horizon}", "--data.total_steps=2880"]
    options += ["--metrics.every=60", "--evaluation.every=9000", "--evaluation.num_episodes=1"]
    options += ["--checkpoint.every_n_env_steps=9000", "--trainer.enable_progress_bar=false"]
    if kind is PPO:
        options += ["--model.init_args.num_steps=30", "--model.init_args.num_minibatches=4"]
        options += ["--model.init_args.max_kl=null"]
    else:
        options += ["--data.warmup_steps=60", "--data.batch_size=12"]
    configs = ("base", "env/toy", f"algorithm/{algorithm}", *TOY[3:])

    def run(name, *more):
        command_line("fit", *options, f"--name={name}", *more, configs=configs, small=False)
        return checkpoint(command_line, name)

    whole = run("whole")
    with monkeypatch.context() as patch:
        signal_in_call(patch, kind, "training_step", 70, signal.SIGTERM)
        with pytest.raises(SystemExit):
            run("parts")
    parts = run("parts", "--ckpt_path=last")
    for one in (whole, parts):  # they list the interruption's files
        del one["callbacks"], one["epoch"], one["loops"]
        one[data_key(one)].pop("replay", None)
    assert_same(whole, parts)
    assert command_line.rows("whole") == command_line.rows("parts")
    logged = read_metrics(command_line.folder("whole"))[LOGGED[extra]][1]
    assert max(logged) > min(logged) if extra != "noise" else set(logged) == {0.9}


@pytest.mark.slow
def test_end_off_the_schedules_only_adds_its_rows(command_line):
    options = ["--evaluation.every=200", "--metrics.every=200", "--data.warmup_steps=150"]
    options.append("--checkpoint.every_n_env_steps=200")
    command_line("fit", *options, "--name=whole", "--data.total_steps=450")
    command_line("fit", *options, "--name=parts", "--data.total_steps=345")
    command_line("fit", *options, "--name=parts", "--data.total_steps=450", "--ckpt_path=last")
    whole, parts = (checkpoint(command_line, name) for name in ("whole", "parts"))
    for key in ("state_dict", "optimizer_states", "mtrl_lightning"):
        assert_same(whole[key], parts[key])
    scheduled = [row for row in command_line.rows("parts") if int(row["env_steps"]) != 345]
    assert scheduled == command_line.rows("whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--data.updates_per_step=3", "--data.warmup_updates=7"],
        [
            "--data.envs_per_task=2",
            "--data.exclude_from_training=[goal-1]",
            "--data.batch_size=64",
            "--data.benchmark.init_args.horizon=7",  # the checkpoint is in the middle of episodes
            *CONNECTORS,
        ],
    ],
)
def test_other_ratios_and_environments_are_continued_exactly_too(command_line, options):
    every = ["--evaluation.every=60", "--metrics.every=60", "--checkpoint.every_n_env_steps=60"]
    run = partial(command_line, "fit", *options, *every, "--data.warmup_steps=120")
    assert_continues_exactly(command_line, run, 180, 300, "--data.num_workers=1")
