"""Several processes make the updates of one with all their rows, and one run."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mtrl_lightning.algorithms import PPO, SAC
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import own_part
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.launch.folder import find_restart_id
from mtrl_lightning.learning.normalization import RunningMoments
from mtrl_lightning.networks import PaCo
from mtrl_lightning.ranks.strategy import RanksStrategy, processes_for
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.rollout import Collector
from mtrl_lightning.run.checkpoint_file import load_newest_whole, reshard
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.runs import best_checkpoint
from mtrl_lightning.schema import transition_fields
from tests.helpers.command_line import ROOT
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.fakes import Constant
from tests.helpers.ranks.cases import CASES, ITERATIONS, float64, moments_of_parts, result_of
from tests.helpers.ranks.launch import free_port
from tests.helpers.ranks.runs import BOTH, CONTINUED, DEMONSTRATIONS, RUNS, STILL
from tests.helpers.runs import assert_same

TOLERANCE = {"sac nash_mtl": 1e-8}
"""Largest relative deviation; Nash-MTL's solver stops where rounding decides."""
OF_FOUR = ("sac pcgrad", "sac famo", "multi_head mean", "ppo")
LIMIT = 1500
"""Seconds that processes may take on busy cores; half a minute on free ones."""


@pytest.fixture
def double() -> Iterator[None]:
    with float64():
        yield


class Ranks:
    """Processes that make the updates of some cases together, started at once.

    Args:
        size: number of processes.
        folder: where they write what they find.
        names: of the cases.
        with_torchrun: whether ``torchrun`` starts them, one on each of as many nodes; else they
            are copies of one process.
    """

    def __init__(self, size, folder, *names, with_torchrun=False):
        self.size = size
        self._folder = folder
        # a port that the system gives, so that test processes do not meet
        port = str(free_port())
        program = ["-m", "tests.helpers.ranks", str(folder), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        commands = [program]
        if with_torchrun:
            place = ["--master-addr", "127.0.0.1", "--master-port", port, "--rdzv-id", "tests"]
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1", *place]
            nodes = (["--nnodes", str(size), "--node-rank", str(node)] for node in range(size))
            commands = [[*launcher, *node, *program] for node in nodes]
        else:
            environment |= {
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        self._processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command in commands
        ]
        self._saved = None

    @property
    def saved(self):
        if self._saved is None:
            for process in self._processes:
                _, errors = process.communicate(timeout=LIMIT)
                assert process.returncode == 0, errors
            self._saved = [
                torch.load(self._folder / f"{rank}.pt", weights_only=True)
                for rank in range(self.size)
            ]
        return self._saved

    def results(self, name):
        return [saved["results"][name] for saved in self.saved]

    def probes(self, name):
        return [saved["probes"][name] for saved in self.saved]

    def runs(self, name):
        return [saved["runs"][name] for saved in self.saved]

    def run_folder(self, name):
        assert self.saved
        return self._folder / "runs" / name / "version_0"

    def close(self):
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_demonstrations(folder / DEMONSTRATIONS, num_episodes=3)
    ranks = Ranks(2, folder, with_torchrun=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = Ranks(4, tmp_path_factory.mktemp("four"), *OF_FOUR)
    yield ranks
    ranks.close()


def deviation(found, expected):
    """Largest difference of a tensor, relative to its largest number."""
    scale = expected.double().abs().max().clamp(min=1e-3)
    return float((found.double() - expected.double()).abs().max() / scale)


def assert_equal_to_one(results, name):
    expected = result_of(name)
    for key, value in expected.items():
        for rank, result in enumerate(results):
            both_nan = torch.isnan(value.double()) & torch.isnan(result[key].double())
            assert torch.equal(result[key].where(~both_nan, 0), results[0][key].where(~both_nan, 0))
            if value.numel() and not both_nan.any():
                worst = deviation(result[key], value)
                assert worst < TOLERANCE.get(name, 1e-12), (key, rank)
    moved = [key for key in expected if key.endswith("weight") and "metric" not in key]
    assert moved


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_of_one_process_with_the_joined_batch(pair, double, name):
    assert_equal_to_one(pair.results(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_do_so_too(four, double, name):
    assert_equal_to_one(four.results(name), name)


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(pair):
    assert [int(result["skipped"]) for result in pair.results("skipped step")] == [1, 1]


@pytest.mark.slow
def test_the_cases_repair_and_stop_early(double, monkeypatch):
    """What they are there for happens in them: otherwise they would show nothing."""
    is_repaired = []
    minibatches = []
    after_step = PaCo.after_step
    training_step = PPO.training_step

    def note_repair(network, *given):
        before = network.composition.weight.clone()
        after_step(network, *given)
        is_repaired.append(not torch.equal(network.composition.weight, before))

    def note_minibatch(ppo, *given):
        minibatches.append(given)
        training_step(ppo, *given)

    monkeypatch.setattr(PaCo, "after_step", note_repair)
    monkeypatch.setattr(PPO, "training_step", note_minibatch)
    weight_KT = result_of("paco repairs")["actor.composition.weight"]
    assert torch.isfinite(weight_KT).all()
    assert any(is_repaired) and not all(is_repaired)
    assert result_of("ppo standardize pcgrad")["num_iterations"] == ITERATIONS
    assert ITERATIONS <= len(minibatches) < ITERATIONS * 2 * 3, "2 epochs of 3 minibatches"


@pytest.mark.slow
def test_an_exception_on_one_rank_is_raised_on_all(pair):
    assert pair.probes("fails on 0") == ["the disk is full"] * 2
    assert pair.probes("fails on 1") == ["rank 1: the disk is full", "the disk is full"]
    assert pair.probes("fails nowhere") == ["", ""]
    first, second = pair.probes("fails unexpectedly")
    assert "rank 1 ends with TypeError: a bug" in first and second == "a bug"


@pytest.mark.slow
def test_a_rank_that_hangs_or_ends_is_named_by_the_others(pair, four):
    (said, again), (other, _) = pair.probes("lost")
    assert "rank 1 has not answered rank 0 for 0.5 s (rollout.rank_timeout)" in said
    assert "rank 0 has lost the connection" in again, "which is said at once"
    assert "the other processes have given up rank 1" in other
    for rank, (said, _) in enumerate(four.probes("lost")):
        assert said == "" if rank == 1 else "rank 1 has ended (ValueError: a mistake)." in said


@pytest.mark.slow
def test_what_happens_on_another_rank_is_said_with_its_number(pair):
    assert pair.probes("warned") == [
        "rank 0: environments are rebuilt",
        "rank 1: environments are rebuilt",
    ]


@pytest.mark.slow
def test_no_batch_waits_for_lightnings_exchange_of_signals(pair):
    assert pair.probes("broadcasts") == [0, 0]


@pytest.mark.slow
def test_ranks_that_drift_apart_are_found_by_name(pair):
    for said in pair.probes("drifted"):
        assert "encoder.mean_D of rank 1 is not that of rank 0 (1 such tensors)" in said


@pytest.mark.slow
def test_ranks_that_are_started_differently_are_refused(pair):
    for said in pair.probes("other options"):
        assert "b is 0 on rank 0 and 1 on rank 1. Give all of them the same" in said


@pytest.mark.slow
def test_a_gradient_that_one_rank_lacks_counts_as_zero(pair):
    assert pair.probes("missing gradients") == [[2.0, 2.0, None]] * 2


@pytest.mark.slow
def test_moments_of_unequal_parts_are_those_of_their_union(pair, double):
    joined = RunningMoments(2, (3,))
    parts = [moments_of_parts(rank) for rank in range(2)]
    assert [int(part["count"].sum()) for part in parts] == [7, 3]
    rows = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).numpy()
    joined.add(rows, torch.tensor([0] * 5 + [1] * 2 + [0] * 3).numpy())
    for found in pair.probes("moments"):
        for name, value in joined.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=1e-14)


@pytest.mark.slow
def test_small_exchanges(pair):
    assert pair.probes("largest") == [[1, 0]] * 2
    assert pair.probes("total") == [3, 3]
    one, other = pair.probes("seed")
    assert one == 5 and other != 5


@pytest.mark.slow
def test_all_ranks_start_from_the_policy_that_the_first_one_finds(pair):
    assert pair.probes("policy") == [str(best_checkpoint("mt10").resolve())] * 2
    assert all("there is no checkpoint nothing" in said for said in pair.probes("no policy"))


# ---- runs of the command line, as torchrun starts it ----


def last_checkpoint(ranks, name):
    return load_checkpoint(ranks.run_folder(name) / "checkpoints" / "last.ckpt")


def run_rows(ranks, name):
    with (ranks.run_folder(name) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "parts", "steps"), [("whole", "parts", 180), ("ppo_whole", "ppo_parts", 120)]
)
def test_a_continued_run_of_two_ranks_is_the_uninterrupted_one(pair, whole, parts, steps):
    for name, (run, _) in RUNS.items():
        if run in (whole, parts):
            for ended in pair.runs(name):
                assert ended["code"] == 0, ended["printed"]
    ends = [last_checkpoint(pair, name) for name in (whole, parts)]
    assert ends[0]["mtrl_lightning"]["counters"]["env_steps"] == steps
    for end in ends:
        del end["origin"], end["callbacks"]["checkpoint"]
        del end["callbacks"]["metrics"]["metrics_csv"]
        for part in [end["MultiTaskData"], *(part["data"] for part in end["ranks"])]:
            if "replay" in part:
                del part["replay"]["chunks"]
    assert_same(*ends)
    draws = [part["algorithm"]["generators"]["used"]["act"]["state"] for part in ends[0]["ranks"]]
    assert not torch.equal(*draws), "ranks explore differently"
    assert [path.name for path in pair.run_folder(parts).parent.iterdir()] == ["version_0"]
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in run_rows(pair, name)
        ]
        for name in (whole, parts)
    ]
    # the end of the first part is a row of its own
    scheduled = [[row for row in of_run if row["env_steps"] != "132"] for of_run in rows]
    assert scheduled[0] == scheduled[1]


@pytest.mark.slow
def test_two_ranks_learn_one_policy_from_demonstrations(pair):
    """They sample other batches, and continue as if they had not been interrupted."""
    weights = {}
    for name in ("bc whole", "bc parts", "bc parts continued"):
        for rank, ended in enumerate(pair.runs(name)):
            assert ended["code"] == 0, ended["printed"]
            (weights[name, rank],) = re.findall(r"weights (\w{8})", ended["printed"])
        assert weights[name, 0] == weights[name, 1]
    assert weights["bc parts", 0] != weights["bc whole", 0] == weights["bc parts continued", 0]
    end = last_checkpoint(pair, "bc_whole")
    assert end["mtrl_lightning"]["counters"]["updates"] == 60
    samplers = [part["data"]["buffer"]["generator"] for part in end["ranks"]]
    assert not torch.equal(*samplers)


@pytest.mark.slow
def test_what_a_run_of_two_ranks_prints_and_writes(pair):
    first, second = (ended["printed"] for ended in pair.runs("whole"))
    assert "Each of 2 processes: Stepping 3 environments of 3 tasks" in first
    assert "Each of 2 processes: 48 of the 96 transitions of a batch" in first
    assert "average" in first and "average" not in second
    folder = pair.run_folder("parts")
    assert sorted(path.name for path in (folder / "replay").iterdir()) == ["rank_0", "rank_1"]
    saved = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert saved["ranks"][1]["collector"]["running"]["length"] == [180 // 6 % 20] * 3


@pytest.mark.slow
def test_two_ranks_continue_as_one(pair, command_line):
    root = pair.run_folder("parts").parent.parent
    options = ["--trainer.devices=1", "--rollout.total_steps=240", "--ckpt_path=last"]
    with pytest.warns(UserWarning, match="of 2"):
        command_line("fit", *CONTINUED, *options, f"--root={root}", "--name=parts")
    one = last_checkpoint(pair, "parts")
    collector = one["callbacks"]["rollout"]["collector"]
    assert one["mtrl_lightning"]["counters"]["env_steps"] == 240
    assert collector["running"]["length"] == [240 // 6 % 20] * 6
    assert collector["windows"]["counts"] == [4] * 3
    assert one["MultiTaskData"]["replay"]["added"] == [40] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three copies", "rollout.envs_per_task is 3 for 2 processes"),
        ("odd batch", "99 cannot be shared out equally among 2 processes and 3 tasks: give 96 or"),
        ("short timeout", "rollout.rank_timeout is 100 s: give more than rollout.timeout, 300 s"),
        ("fewer devices", "torchrun has started 2 processes, and trainer.devices 1 times"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_numbers(pair, name, message):
    first, second = pair.runs(name)
    assert first["code"] == second["code"] == 2
    assert message in first["printed"]
    if name != "fewer devices":  # which is found before the processes are connected
        assert message not in second["printed"], "one of them says it"
    assert not list((pair.run_folder("whole").parent.parent).glob("refused/*"))


def test_every_environment_keeps_its_state_and_its_ring_with_another_number_of_ranks(
    command_line,
):
    command_line(
        "fit",
        "--rollout.envs_per_task=4",
        "--rollout.warmup_steps=60",
        "--rollout.total_steps=132",
        "--data.batch_size=48",
        "--data.capacity=72",
        "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
        "--model.init_args.transforms+=mtrl_lightning.algorithms.NormalizeObservation",
    )
    folder = command_line.folder()
    last = folder / "checkpoints" / "last.ckpt"
    whole = load_checkpoint(last)
    envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=0)
    session = SimpleNamespace(
        algorithm=SAC.load_from_checkpoint(last),
        collector=Collector(envs, Constant()),
        data=MultiTaskData,
    )
    for path in ([2], [4], [2, 4], [4, 2]):
        found = whole
        for size in path:
            with pytest.warns(UserWarning, match=f"{size}"):
                resharded = [reshard(found, rank, size, session) for rank in range(size)]
                parts = [own_part(checkpoint) for checkpoint in resharded]
            for part in parts:  # what a rank would save
                part["data"] = {"replay": None, "buffer": part["data"]["buffer"]}
            found = {**whole, "ranks": parts}
        with pytest.warns(UserWarning, match="this run has 1"):
            back = reshard(found, 0, 1, session)
        former, now = (one["callbacks"]["rollout"]["collector"] for one in (whole, back))
        for name in ("tasks", "running", "observation", "envs"):
            assert_same(former[name], now[name])
        assert former["windows"]["counts"] == now["windows"]["counts"]
        for one, other in zip(former["windows"]["windows"], now["windows"]["windows"], strict=True):
            assert sorted(map(repr, one)) == sorted(map(repr, other))
        assert_same(whole["mtrl_lightning"], back["mtrl_lightning"])
        assert_same(whole["state_dict"], back["state_dict"])

    snapshots = ReplaySnapshots(folder / "replay")
    fields = transition_fields(ToyReach().spec)
    manifest = whole["MultiTaskData"]["replay"]
    joined = RingStorage(fields, 12, manifest["capacity"])
    snapshots.load(manifest, joined)
    rings = set()
    for rank in range(2):
        data = reshard(whole, rank, 2, session)["MultiTaskData"]
        (moved,) = data["replay"]["moved"]
        own = RingStorage(fields, 6, manifest["capacity"])
        ReplaySnapshots(folder / "replay").load_rings(moved["manifest"], own, moved["rings"])
        for old, new in moved["rings"]:
            assert own.added_E[new] == joined.added_E[old] == 11
            rows = [
                storage.take(*storage.numbers(ring, 5, 11))
                for storage, ring in ((joined, old), (own, new))
            ]
            assert_same(*rows)
            rings.add(old)
    assert rings == set(range(12))


@pytest.mark.slow
def test_two_ranks_learn_from_equal_transitions_what_one_process_learns(pair, command_line):
    command_line("fit", *STILL, "--name=of_1")
    one = load_checkpoint(command_line.folder("of_1") / "checkpoints" / "last.ckpt")
    two = last_checkpoint(pair, "still")
    assert one["mtrl_lightning"]["counters"] == two["mtrl_lightning"]["counters"]
    assert one["mtrl_lightning"]["counters"]["updates"] >= 20
    for name, value in one["state_dict"].items():
        if isinstance(value, torch.Tensor) and value.numel():
            assert deviation(two["state_dict"][name], value) < 1e-5, name
    rows = [command_line.rows("of_1")[-1], run_rows(pair, "still")[-1]]
    for metric in ("env_steps", "rollout/return", "rollout/episodes", "train/q"):
        assert float(rows[1][metric] or 0) == pytest.approx(float(rows[0][metric] or 0), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two nodes", "slurm"])
def test_two_nodes_make_one_run(pair, name):
    """``torchrun`` has started one process on each; SLURM would set other variables."""
    folder = {"two nodes": "nodes"}.get(name, name)
    for ended in pair.runs(name):
        assert ended["code"] == 0, ended["printed"]
    saved = last_checkpoint(pair, folder)
    assert len(saved["ranks"]) == 2
    assert saved["mtrl_lightning"]["counters"]["env_steps"] == 60
    assert saved["origin"]["job"] == {"slurm": "77"}.get(name, "tests")


def test_lightning_starts_the_other_process_itself(command_line):
    options = [*BOTH, "--rollout.warmup_steps=30", "--rollout.total_steps=60"]
    process = command_line.process("fit", *options)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    folder = command_line.folder()
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    saved = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert len(saved["ranks"]) == 2
    assert saved["mtrl_lightning"]["counters"]["env_steps"] == 60


# ---- who starts the processes ----


def test_one_process_keeps_lightnings_strategy():
    assert processes_for({"accelerator": "cpu", "devices": 1}) == ("auto", 1)
    assert processes_for({"accelerator": "cpu"}) == ("auto", 1)


def test_several_processes_get_the_strategy_that_leaves_the_module_alone():
    strategy, number = processes_for({"accelerator": "cpu", "devices": 3})
    assert type(strategy) is RanksStrategy and number == 3


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"devices": 2, "strategy": "ddp"}, {}),
        ({"num_nodes": 2}, {}),
        ({"accelerator": "cuda", "devices": 99}, {}),
        (
            {"devices": 1},
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        ),
        ({"devices": 4}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}),
    ],
)
def test_processes_that_cannot_be_or_differ_from_those_launched(monkeypatch, options, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError):
        processes_for({"accelerator": "cpu", **options})


def test_more_processes_than_cores_are_warned_of(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of a machine that others use, too
    monkeypatch.setattr("mtrl_lightning.ranks.strategy.usable_cores", lambda: 2)
    with pytest.warns(UserWarning, match="is 3"):
        processes_for({"accelerator": "cpu", "devices": 3})


def test_copies_that_cannot_be_shared_out_are_refused_before_processes_are_started(
    command_line, capsys
):
    with pytest.raises(SystemExit) as ended:
        command_line("fit", "--trainer.devices=2", "--rollout.envs_per_task=3")
    assert ended.value.code == 2
    assert "rollout.envs_per_task is 3 for 2 processes" in capsys.readouterr().err
    assert not list(command_line.root.iterdir())


@pytest.mark.slow
def test_a_replay_file_of_a_rank_that_is_missing_is_named_with_what_remains(pair, tmp_path):
    folder = tmp_path / "version_0"
    shutil.copytree(pair.run_folder("whole"), folder)
    last = folder / "checkpoints" / "last.ckpt"
    shutil.rmtree(folder / "replay" / "rank_1")
    with pytest.raises(ConfigurationError, match="rank_1"):
        load_newest_whole(last, with_replay=True)
    assert load_newest_whole(last, with_replay=False)[0] == last


def test_a_command_that_torchrun_starts_again_finds_its_own_checkpoints(monkeypatch):
    assert find_restart_id("fit") is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    unnamed = find_restart_id("fit")
    assert str(os.getppid()) in unnamed["job"], "another torchrun is another job"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    assert find_restart_id("fit") == {"job": "tuesday", "command": "fit"}


@pytest.mark.slow
def test_a_job_of_torchrun_continues_only_when_it_is_started_again(
    command_line, monkeypatch, caplog
):
    """As one process, which ``torchrun --nproc-per-node 1`` starts."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    command_line("fit")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        command_line("fit")
    folders = list(command_line.folder().parent.iterdir())
    assert [path.name for path in folders] == ["version_0"]
    last = folders[0] / "checkpoints" / "last.ckpt"
    assert f"torchrun started job job again: the run continues from {last}" in caplog.text
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    command_line("fit")
    assert len(list(command_line.folder().parent.iterdir())) == 2
