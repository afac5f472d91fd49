"""Train 2N in one go; train N, stop, go on in a new process: the same run, bit for bit."""

import os
import signal

import pytest

from mtrl_lightning.checkpoints import load_checkpoint
from tests.helpers.runs import CONNECTORS, assert_same, assert_same_end, wait_for

MT10 = ("base", "env/metaworld_mt10", "algorithm/mtsac", "network/multi_head", "gradient/mean")
SHORT = [
    # episodes are under way whenever a checkpoint is written
    "--data.benchmark.init_args.horizon=35",
    "--data.batch_size=80",
    "--data.capacity=800",  # the rings wrap around
    "--replay.chunk_mebibytes=0.0477",
    "--evaluation.every=400",
    "--evaluation.num_episodes=1",
    "--rollout.warmup_steps=200",
    "--metrics.every=100",
    "--checkpoint.every=400",
    "--checkpoint.keep_last=-1",
]


def test_mt10_continued_in_mid_episode_with_other_workers_is_the_same_run(command_line):
    def fit(*options, run=command_line):
        return run("fit", *SHORT, *options, configs=MT10)

    fit("--name=whole", "--rollout.total_steps=1600", "--rollout.num_workers=1")
    fit("--name=parts", "--rollout.total_steps=800", "--rollout.num_workers=2")
    saved = load_checkpoint(command_line.folder("parts") / "checkpoints" / "last.ckpt")
    running = saved["callbacks"]["rollout"]["collector"]["running"]
    assert running["length"] == [80 % 35] * 10
    more = ["--ckpt_path=last", "--rollout.total_steps=1600", "--rollout.num_workers=3"]
    process = fit("--name=parts", *more, run=command_line.process)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.slow
def test_a_continued_run_in_bf16_is_the_same_run(command_line):
    options = [
        "--data.benchmark.init_args.tasks=[reach,push,peg-insert-side]",
        "--data.batch_size=96",
        "--data.capacity=480",
    ]
    options += [
        "--trainer.precision=bf16-mixed",
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
    ]

    def run(name, steps, *more):
        command_line(
            "fit",
            *SHORT,
            *options,
            f"--name={name}",
            f"--rollout.total_steps={steps}",
            *more,
            configs=MT10,
        )

    run("whole", 800)
    run("parts", 400)
    run("parts", 800, "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.slow
def test_a_run_interrupted_anywhere_ends_as_if_it_had_not_been(command_line):
    options = [
        "--rollout.total_steps=2400",
        "--data.capacity=1500",
        "--replay.chunk_mebibytes=0.01383",
        "--metrics.every=60",
    ]
    options += ["--evaluation.every=1500", "--checkpoint.every=100000", "--rollout.num_workers=2"]
    command_line("fit", *options, "--name=whole")
    for number, name in ((signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")):
        process = command_line.process("fit", *options, f"--name={name}")
        metrics = command_line.folder(name) / "metrics.csv"
        wait_for(
            lambda: (
                (metrics.exists() and metrics.read_text().count("\n") > 10)  # noqa: B023
                or process.poll() is not None  # noqa: B023
            )
        )
        os.kill(process.pid, number)
        process.communicate(timeout=60)
        path = command_line.folder(name) / "checkpoints" / "last.ckpt"
        assert 300 < load_checkpoint(path)["mtrl_lightning"]["counters"]["env_steps"] < 2400
        command_line("fit", *options, f"--name={name}", "--ckpt_path=last")
        # the extra checkpoint is among those saved, and its rows are in a file of their own
        whole, parts = (
            load_checkpoint(command_line.folder(n) / "checkpoints" / "last.ckpt")
            for n in ("whole", name)
        )
        for checkpoint in (whole, parts):
            del (
                checkpoint["callbacks"]["checkpoint"],
                checkpoint["MultiTaskData"]["replay"]["chunks"],
            )
        assert_same(whole, parts)
        assert command_line.rows("whole") == command_line.rows(name)


@pytest.mark.slow
def test_an_end_off_the_schedules_changes_nothing_but_adds_its_own_rows(command_line):
    options = ["--evaluation.every=400", "--metrics.every=400", "--checkpoint.every=400"]
    command_line("fit", *options, "--name=whole", "--rollout.total_steps=1500")
    command_line("fit", *options, "--name=parts", "--rollout.total_steps=1005")
    command_line("fit", *options, "--name=parts", "--rollout.total_steps=1500", "--ckpt_path=last")
    whole, parts = (
        load_checkpoint(command_line.folder(n) / "checkpoints" / "last.ckpt")
        for n in ("whole", "parts")
    )
    for key in ("state_dict", "optimizer_states", "mtrl_lightning"):
        assert_same(whole[key], parts[key])
    scheduled = [row for row in command_line.rows("parts") if row["env_steps"] != "1005"]
    assert scheduled == command_line.rows("whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--rollout.updates_per_step=0.5"],
        ["--rollout.updates_per_step=3", "--rollout.warmup_updates=7"],
        [
            "--rollout.envs_per_task=2",
            "--data.exclude_from_training=[goal-1]",
            "--data.batch_size=64",
            "--data.benchmark.init_args.horizon=7",  # the checkpoint is in the middle of episodes
            *CONNECTORS,
        ],
    ],
)
def test_other_ratios_and_environments_are_continued_exactly_too(command_line, options):
    command_line("fit", *options, "--name=whole", "--rollout.total_steps=900")
    command_line(
        "fit", *options, "--name=parts", "--rollout.total_steps=600", "--rollout.num_workers=2"
    )
    command_line("fit", *options, "--name=parts", "--rollout.total_steps=900", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")
