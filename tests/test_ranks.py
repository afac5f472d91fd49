"""Runs of several processes through the command line.

Lightning and ``torchrun`` start them, or they are forks of the test's process with the environment
that those give them.
"""

import os
import signal
from functools import cache, partial

import psutil
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import Trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mtrl_lightning.ranks.strategy import RanksStrategy
from tests.helpers.command_line import (
    CONFIGS,
    SHORT,
    SMALL,
    CommandLine,
    leave_out_curves,
    without_replay,
)
from tests.helpers.processes import exit_codes, fork, wait_until_gone
from tests.helpers.runs import assert_same, checkpoint, end_of, wait_for

pytestmark = pytest.mark.slow

TWO = ["--trainer.devices=2", "--data.envs_per_task=2"]
OF_SAC = [
    *(*SMALL, *SHORT, *TWO),
    "--data.capacity=120",  # the rings wrap around
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
    "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
]
OF_PPO = [
    *without_replay([*SMALL, *SHORT, *TWO]),
    "--model.init_args.num_steps=10",
    "--model.init_args.num_minibatches=2",
]
ON_POLICY = ("base", "env/toy", "algorithm/mtppo", "network/mlp", "gradient/mean")
RUNS = {"sac": (CONFIGS, OF_SAC), "ppo": (ON_POLICY, OF_PPO)}
INTERRUPTS = "tests.helpers.interrupts"
TERMINATED = 128 + signal.SIGTERM


def forked(run):
    """Return the exit codes of the two processes of a run."""
    port = str(find_free_network_port())

    def be(rank):
        place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        run()

    return exit_codes(fork(be, 2))


def starting(command_line, kind, *options):
    """Return a function that runs this kind of run in the process that calls it."""
    configs, of_kind = RUNS[kind]
    return partial(command_line, "fit", *of_kind, *options, configs=configs, small=False)


def resuming(command_line, path, *options):
    return partial(command_line, "fit", f"--resume={path}", *options, configs=(), small=False)


def callback(name, **options):
    """Return an option with one of the callbacks that interrupt a run."""
    return f"--trainer.callbacks=[{{class_path: {INTERRUPTS}.{name}, init_args: {options}}}]"


def signal_option(number, rank, env_steps, after_step=False):
    given = {"number": int(number), "rank": rank, "env_steps": env_steps}
    return callback("Signal", **given, after_step=after_step)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the command line of a run that ends by itself."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_out_curves(monkeypatch)

        @cache
        def run(kind):
            made = CommandLine(tmp_path_factory.mktemp(kind), monkeypatch)
            assert forked(starting(made, kind)) == [0, 0]
            return made

        yield run


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_interrupted_run_ends_as_the_uninterrupted_one(command_line, uninterrupted, kind):
    """The signal comes in the middle of episodes, and of an iteration of PPO."""
    terminate = signal_option(signal.SIGTERM, 1, 66, True)
    if kind == "sac":  # Lightning starts the second process
        process = command_line.process("fit", *OF_SAC, terminate, small=False)
        children = psutil.Process(process.pid).children
        wait_for(lambda: process.poll() is not None or children())
        pids = [child.pid for child in children()]
        output, _ = process.communicate(timeout=300)
        assert process.returncode == TERMINATED and pids, output
        wait_until_gone(pids)
    else:
        assert forked(starting(command_line, kind, terminate)) == [TERMINATED] * 2
    folder = command_line.folder()
    resaved = folder / "checkpoints" / "resaved.ckpt"
    resave = callback("Resave", path=str(resaved))
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="2 processes"):
        resuming(command_line, folder, resave, "--trainer.devices=1")()
    kill = signal_option(signal.SIGKILL, rank=0 if kind == "sac" else 1, env_steps=121)
    codes = forked(resuming(command_line, resaved, kill, "--trainer.devices=2"))
    assert sorted(codes) == [-signal.SIGKILL, 1], "the other process ends by itself"
    assert forked(resuming(command_line, folder, "--trainer.callbacks=null")) == [0, 0]
    whole, end = uninterrupted(kind), end_of(command_line)
    assert_same(end_of(whole), end)
    # one process evaluates with batches of another size, and rounds differently
    expected = [pytest.approx(row, rel=1e-6, nan_ok=True) for row in whole.rows()]
    assert command_line.rows() == expected
    per_rank = end["mtrl_lightning"]["generators"]["per_rank"]
    draws = [per_rank[rank]["act"]["state"] for rank in range(2)]
    assert not torch.equal(*draws), "ranks explore differently"


def test_torchrun_restarts_from_the_newest_checkpoint(command_line, uninterrupted):
    run = starting(command_line, "sac", signal_option(signal.SIGKILL, 1, 100))
    options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    launch = LaunchConfig(1, 1, 2, run_id="torchrun", max_restarts=1, **options)
    elastic_launch(launch, lambda: run())()
    (folder,) = (command_line.root / "run").iterdir()
    folder.rename(command_line.folder())
    whole = uninterrupted("sac")
    assert command_line.rows() == whole.rows()
    ends = [checkpoint(one) for one in (whole, command_line)]
    for key in ("state_dict", "optimizer_states", "mtrl_lightning"):
        assert_same(*(end[key] for end in ends))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_stop_that_one_process_asks_for_ends_both_together(command_line, hook):
    stopping = callback("StopOnRankOne", hook=hook)
    assert forked(starting(command_line, "sac", stopping)) == [0, 0]
    assert 100 <= checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] < 150


@pytest.mark.parametrize("option", ["--data.batch_size=99", "--data.envs_per_task=3"])
def test_what_processes_cannot_divide_is_refused(command_line, option):
    assert forked(starting(command_line, "sac", option)) == [2, 1]
    assert not command_line.folder().exists()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_several_processes_have_the_strategy_of_the_package(strategy):
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert type(trainer.strategy) is RanksStrategy
