"""Several processes make the updates of one with all their rows, and one run."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache, partial

import psutil
import pytest
import torch
from lightning.pytorch import Trainer

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.checkpoints import data_key, load_checkpoint
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.networks import PaCo
from mtrl_lightning.ranks.strategy import RanksStrategy
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.transitions import transition_fields
from mtrl_lightning.updates.reward_scale import Moments
from tests.helpers.command_line import CONFIGS, ROOT, SHORT, SMALL, CommandLine
from tests.helpers.ranks.cases import CASES, ITERATIONS, float64, moments_of_parts, result_of
from tests.helpers.replay import newest
from tests.helpers.runs import assert_same, checkpoint, end_of, wait_for

pytestmark = pytest.mark.slow

TOLERANCE = {"sac nash_mtl": 1e-8}
"""Largest relative deviation; Nash-MTL's solver stops where rounding decides."""
OF_FOUR = ("sac pcgrad", "sac famo", "multi_head mean", "ppo")
LIMIT = 300
"""Seconds that a run may take on busy cores; ten on free ones."""
SOON = 30
"""Seconds in which all processes of a run end when one of them is killed."""


@pytest.fixture
def double():
    with float64():
        yield


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function from the number of ranks to what each of them has written."""

    @cache
    def run(size):
        folder = tmp_path_factory.mktemp("ranks")
        names = {2: list(CASES), 4: OF_FOUR}[size]
        command = [sys.executable, "-m", "tests.helpers.ranks", str(size), str(folder), *names]
        subprocess.run(command, cwd=ROOT, check=True)
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]

    return run


@pytest.fixture
def probe(ranks):
    return lambda name: [of_rank[name] for of_rank in ranks(2)]


# ---- updates ----


@pytest.mark.parametrize(
    ("size", "name"), [*((2, name) for name in CASES), *((4, name) for name in OF_FOUR)]
)
def test_ranks_update_as_one_process_with_the_joined_batch(ranks, double, size, name):
    results = [of_rank[name] for of_rank in ranks(size)]
    for key, value in result_of(name).items():
        value = value.double()
        is_number = ~value.isnan()
        scale = value[is_number].abs().max().clamp(min=1e-3) if is_number.any() else 1.0
        for result in results:
            found = result[key].double()
            assert torch.equal(found.isnan(), ~is_number), key
            assert torch.equal(found[is_number], results[0][key].double()[is_number]), key
            error = (found - value)[is_number].abs() / scale
            assert (error < TOLERANCE.get(name, 1e-12)).all(), key


def test_cases_repair_skip_and_stop_early(double, monkeypatch, probe):
    """Otherwise they would show nothing."""
    assert [int(result["skipped"]) for result in probe("skipped step")] == [1, 1]
    is_repaired, minibatches = [], []
    after_step, training_step = PaCo.after_step, PPO.training_step

    def note_repair(network, *given):
        before = network.composition.weight.clone()
        after_step(network, *given)
        is_repaired.append(not torch.equal(network.composition.weight, before))

    def note_minibatch(ppo, *given):
        minibatches.append(given)
        training_step(ppo, *given)

    monkeypatch.setattr(PaCo, "after_step", note_repair)
    monkeypatch.setattr(PPO, "training_step", note_minibatch)
    assert result_of("paco repairs")["actor.composition.weight"].isfinite().all()
    assert any(is_repaired) and not all(is_repaired)
    assert result_of("ppo standardize pcgrad")["num_iterations"] == ITERATIONS
    assert ITERATIONS <= len(minibatches) < ITERATIONS * 2 * 3, "2 epochs of 3 minibatches"


# ---- exchanges ----


def test_exception_on_one_rank_is_raised_on_all(probe):
    full = "OSError: the disk is full"
    assert probe("fails on 0") == [full, full]
    assert probe("fails on 1") == ["OSError: rank 1: the disk is full", full]
    assert probe("fails nowhere") == ["", ""]
    first, second = probe("fails unexpectedly")
    assert first.startswith("RuntimeError: rank 1") and second == "TypeError: a bug"
    assert [text[:7] for text in probe("warned")] == ["rank 0:", "rank 1:"]
    for error in probe("drifted"):
        assert error.startswith("DriftError") and "encoder.mean_D" in error


def test_moments_of_unequal_parts_are_those_of_their_union(probe, double):
    joined = Moments(2)
    parts = [moments_of_parts(rank) for rank in range(2)]
    assert [int(part["count"].sum()) for part in parts] == [7, 3]
    rows = torch.randn(10, generator=torch.Generator().manual_seed(0)).numpy()
    joined.add(rows, torch.tensor([0] * 5 + [1] * 2 + [0] * 3).numpy())
    for found in probe("moments"):
        for name, value in joined.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=1e-14)


def test_small_exchanges(probe):
    assert probe("missing gradients") == [[2.0, 2.0, None]] * 2, "a missing one counts as zero"
    assert probe("largest") == [[1, 0]] * 2
    assert probe("total") == [3, 3]
    one, other = probe("seed")
    assert one == 5 and other != 5


# ---- runs of the command line, whose second process Lightning starts ----

TWO = ["--trainer.devices=2", "--data.envs_per_task=2"]
OF_SAC = [
    *(*SMALL, *SHORT, *TWO),
    "--data.capacity=120",  # the rings wrap around
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
    "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
]
OF_REPLAY = ("--data.batch_size", "--data.capacity", "--data.warmup_steps")
OF_PPO = [
    *(option for option in (*SMALL, *SHORT, *TWO) if not option.startswith(OF_REPLAY)),
    "--model.init_args.num_steps=10",
    "--model.init_args.num_minibatches=2",
]
ON_POLICY = ("base", "env/toy", "algorithm/mtppo", "network/mlp", "gradient/mean")
RUNS = {"sac": (CONFIGS, OF_SAC), "ppo": (ON_POLICY, OF_PPO)}
SIGNALS = "tests.helpers.ranks.signals"


def start(command_line, kind, *options):
    configs, of_kind = RUNS[kind]
    return command_line.process("fit", *of_kind, *options, configs=configs, small=False)


def resume(command_line, path, *options):
    return command_line.process("fit", f"--resume={path}", *options, configs=(), small=False)


def finish(process, code=0, limit=LIMIT):
    """Wait for a run, whose processes all end."""
    output, _ = process.communicate(timeout=limit)
    assert process.returncode == code or (code is None and process.returncode), output
    wait_for(lambda: not any(map(partial(is_of_session, process.pid), psutil.process_iter())), 5)
    return output


def is_of_session(session, process):
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False


def signal_option(number, rank, env_steps, after_step=False):
    place = f"env_steps: {env_steps}, after_step: {str(after_step).lower()}"
    options = f"{{number: {int(number)}, rank: {rank}, {place}}}"
    return f"--trainer.callbacks=[{{class_path: {SIGNALS}.Signal, init_args: {options}}}]"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the command line of a run that ends by itself."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        @cache
        def run(kind):
            made = CommandLine(tmp_path_factory.mktemp(kind), monkeypatch)
            finish(start(made, kind))
            return made

        yield run


def test_run_whose_processes_are_killed_ends_as_uninterrupted(command_line, uninterrupted):
    for rank, env_steps in ((0, 61), (1, 121)):
        option = signal_option(signal.SIGKILL, rank, env_steps)
        process = (
            resume(command_line, command_line.folder(), option)
            if rank
            else start(command_line, "ppo", option)
        )
        while process.stdout.readline() not in ("sent\n", ""):
            pass
        finish(process, None, SOON)
    finish(resume(command_line, command_line.folder(), "--trainer.callbacks=null"))
    whole, end = uninterrupted("ppo"), end_of(command_line)
    assert_same(end_of(whole), end)
    assert whole.rows() == command_line.rows()
    per_rank = end["mtrl_lightning"]["generators"]["per_rank"]
    draws = [per_rank[rank]["act"]["state"] for rank in range(2)]
    assert not torch.equal(*draws), "ranks explore differently"


def test_torchrun_restarts_from_the_newest_checkpoint(command_line, uninterrupted):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["fit", *OF_SAC, signal_option(signal.SIGKILL, 1, 100)]
    arguments = command_line.arguments(*options, small=False)
    command = [*launcher, "--max-restarts=1", "cli.py", *arguments]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=LIMIT)
    (folder,) = (command_line.root / "run").iterdir()
    folder.rename(command_line.folder())
    whole = uninterrupted("sac")
    assert command_line.rows() == whole.rows()
    ends = [checkpoint(one) for one in (whole, command_line)]
    for key in ("state_dict", "optimizer_states", "mtrl_lightning"):
        assert_same(*(end[key] for end in ends))


def test_stop_that_one_process_asks_for_ends_both_together(command_line):
    stopping = f"--trainer.callbacks=[{SIGNALS}.StopOnRankOne]"
    finish(start(command_line, "sac", stopping))
    assert 100 <= checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] < 150


def test_one_process_continues_as_two_and_two_as_one(command_line):
    """Each environment is in the middle of its episode of 20 steps."""
    options = [*SHORT, "--data.envs_per_task=2", "--evaluation.every=1000"]
    command_line("fit", *options, "--data.total_steps=90")
    more = ["--ckpt_path=last", "--trainer.devices=2", "--data.total_steps=132"]
    finish(command_line.process("fit", *options, *more))
    two = checkpoint(command_line)
    running = two["ReplayData"]["collector"]["running"]["per_env"]
    assert running["length"] == [132 // 6 % 20] * 6
    with pytest.warns(UserWarning, match="2 processes"):
        command_line("fit", *options, "--ckpt_path=last", "--data.total_steps=240")
    one = checkpoint(command_line)
    assert one["mtrl_lightning"]["counters"]["env_steps"] == 240
    data = one["ReplayData"]
    assert data["collector"]["running"]["per_env"]["length"] == [240 // 6 % 20] * 6
    assert data["collector"]["windows"]["per_env"]["counts"] == [2] * 6
    assert data["replay"]["per_env"]["added"] == [40] * 6


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_state_of_two_processes_passes_through_one_unchanged(command_line, kind):
    """The run is interrupted in the middle of episodes, and of an iteration of PPO."""
    code = 128 + signal.SIGTERM
    finish(start(command_line, kind, signal_option(signal.SIGTERM, 1, 66, True)), code)
    folder = command_line.folder() / "checkpoints"
    path = folder / "last.ckpt"
    saved = [without_replay_files(command_line, path)]
    for size in (1, 2):
        resaved = folder / f"{size}.ckpt"
        callback = f"{{class_path: {SIGNALS}.Resave, init_args: {{path: {resaved}}}}}"
        options = [f"--trainer.callbacks=[{callback}]", f"--trainer.devices={size}"]
        finish(resume(command_line, path, *options), code)
        path = resaved
        saved.append(without_replay_files(command_line, path))
    for one in saved[1:]:
        assert_same(saved[0], one)


def without_replay_files(command_line, path):
    """Return a checkpoint's state, with transitions instead of files, and totals of metrics."""
    content = load_checkpoint(path)
    metrics = content["mtrl_lightning"].pop("metrics")["all_ranks"]["sums"]
    content["totals"] = {
        name: (sum(one[2] for one in metrics if one[1] == name), sum(one[3] for one in metrics))
        for _, name, *_ in metrics
    }
    del content["callbacks"], content["loops"], content["mtrl_lightning"]["num_processes"]
    data = content[data_key(content)]
    data["buffer"].pop("num_processes", None)
    if "replay" in data:
        manifest = data["replay"]
        storage = RingStorage(transition_fields(ToyReach().spec), 6, manifest["capacity"])
        ReplaySnapshots(command_line.folder() / "replay").load(manifest, storage)
        data["replay"] = [newest(storage, env) for env in range(6)]
    return content


def test_what_processes_cannot_divide_is_refused(command_line):
    assert "96" in finish(start(command_line, "sac", "--data.batch_size=99"), 2)
    assert not command_line.folder().exists()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_several_processes_have_the_strategy_of_the_package(strategy):
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert type(trainer.strategy) is RanksStrategy
