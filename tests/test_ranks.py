"""Several processes make the updates of one with all their rows, and one run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mtrl_lightning.algorithms.normalization import RunningMoments
from mtrl_lightning.callbacks.checkpoint_files import load_checkpoint
from tests.conftest import ROOT
from tests.ranks import CASES, moments_of_parts, result_of, use_float64
from tests.test_exact_continuation import assert_same

TOLERANCE = {"sac nash_mtl": 1e-8}
"""Largest relative deviation; Nash-MTL's solver stops where rounding decides."""
OF_FOUR = ("sac pcgrad", "sac famo", "multi_head mean", "ppo")
LIMIT = 300
"""Seconds that processes may take."""


@pytest.fixture
def float64() -> Iterator[None]:
    single = torch.Tensor.float
    use_float64()
    yield
    torch.Tensor.float = single
    torch.set_default_dtype(torch.float32)


class Ranks:
    """Processes that make the updates of some cases together, started at once."""

    def __init__(self, size, folder, *names):
        self.size = size
        self._folder = folder
        # a port that the system gives, so that test processes do not meet
        port = free_port()
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.ranks",
                    *map(str, (rank, size, port, folder)),
                    *names,
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
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

    def close(self):
        for process in self._processes:
            process.kill()
            process.communicate()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
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


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_of_one_process_with_the_joined_batch(pair, float64, name):
    assert_equal_to_one(pair.results(name), name)


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_do_so_too(four, float64, name):
    assert_equal_to_one(four.results(name), name)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(pair):
    assert [int(result["skipped"]) for result in pair.results("skipped step")] == [1, 1]


def test_the_cases_repair_and_stop_early(float64):
    """What they are there for happens in them: otherwise they would show nothing."""
    table = {name: result_of(name) for name in ("paco repairs", "ppo standardize pcgrad")}
    weight_KT = table["paco repairs"]["actor.composition.weight"]
    assert torch.isfinite(weight_KT).all()
    kept = result_of("paco repairs", num_updates=1)["actor.composition.weight"]
    assert not torch.equal(kept, weight_KT)
    assert table["ppo standardize pcgrad"]["num_iterations"] == 3


def test_an_exception_on_one_rank_is_raised_on_all(pair):
    assert pair.probes("fails on 0") == ["the disk is full"] * 2
    assert pair.probes("fails on 1") == ["rank 1: the disk is full", "the disk is full"]
    assert pair.probes("fails nowhere") == ["", ""]


def test_ranks_that_drift_apart_are_found_by_name(pair):
    for said in pair.probes("drifted"):
        assert "encoder.mean_D of rank 1 is not that of rank 0 (1 such tensors)" in said


def test_ranks_that_are_started_differently_are_refused(pair):
    for said in pair.probes("other options"):
        assert "b is 0 on rank 0 and 1 on rank 1. Give all of them the same" in said


def test_a_gradient_that_one_rank_lacks_counts_as_zero(pair):
    assert pair.probes("missing gradients") == [[2.0, 2.0, None]] * 2


def test_moments_of_unequal_parts_are_those_of_their_union(pair, float64):
    joined = RunningMoments(2, (3,))
    parts = [moments_of_parts(rank) for rank in range(2)]
    assert [int(part["count"].sum()) for part in parts] == [7, 3]
    rows = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).numpy()
    joined.add(rows, torch.tensor([0] * 5 + [1] * 2 + [0] * 3).numpy())
    for found in pair.probes("moments"):
        for name, value in joined.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=1e-14)


def test_small_exchanges(pair):
    assert pair.probes("largest") == [[1, 0]] * 2
    assert pair.probes("total") == [3, 3]
    one, other = pair.probes("seed")
    assert one == 5 and other != 5


# ---- runs ----

TWO = [
    "--trainer.devices=2",
    "--rollout.envs_per_task=2",
    "--rollout.check_every=50",
    "--rollout.warmup_steps=60",
]


def finish(process):
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return output


def test_a_run_of_two_ranks_continued_in_mid_episode_is_the_uninterrupted_one(command_line):
    options = [*TWO, "--metrics.every=30", "--data.capacity=120", "--evaluation.every=60"]
    options += ["--model.init_args.transforms+=mtrl_lightning.algorithms.NormalizeObservation"]
    options += ["--model.init_args.encoder=mtrl_lightning.networks.Standardize"]
    whole = command_line.process("fit", *options, "--name=whole", "--rollout.total_steps=180")
    output = finish(whole)
    assert "Each of 2 processes: Stepping 3 environments of 3 tasks" in output
    assert "Each of 2 processes: 48 of the 96 transitions of a batch" in output
    finish(command_line.process("fit", *options, "--name=parts", "--rollout.total_steps=132"))
    folder = command_line.folder("parts")
    assert sorted(path.name for path in (folder / "replay").iterdir()) == ["rank_0", "rank_1"]
    saved = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert saved["mtrl_lightning"]["counters"]["env_steps"] == 132
    assert saved["ranks"][1]["collector"]["running"]["length"] == [132 // 6 % 20] * 3
    finish(
        command_line.process(
            "fit", *options, "--name=parts", "--rollout.total_steps=180", "--ckpt_path=last"
        )
    )
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    ends = [
        load_checkpoint(command_line.folder(name) / "checkpoints" / "last.ckpt")
        for name in ("whole", "parts")
    ]
    for end in ends:
        del end["callbacks"]["checkpoint"]
        for part in [end["MultiTaskData"], *(part["data"] for part in end["ranks"])]:
            del part["replay"]["chunks"]
    assert_same(*ends)
    draws = [part["algorithm"]["generators"]["used"]["act"]["state"] for part in ends[0]["ranks"]]
    assert not torch.equal(*draws)


def test_two_ranks_learn_from_equal_transitions_what_one_process_learns(command_line):
    """Every transition of a task is the same one, so that draws do not matter."""
    options = [
        "--data.benchmark=tests.ranks.still.Still",
        "--model=tests.ranks.still.Steady",
        "--rollout.envs_per_task=2",
        "--rollout.warmup_steps=30",
        "--rollout.total_steps=150",
        "--model.init_args.actor_gradient=mtrl_lightning.gradients.CAGrad",
        "--model.init_args.critic_gradient=mtrl_lightning.gradients.PCGrad",
        "--model.init_args.reward_scale=mtrl_lightning.algorithms.MeanReward",
    ]
    ends = []
    for number in (1, 2):
        name = f"of_{number}"
        more = [f"--name={name}", f"--trainer.devices={number}"]
        finish(command_line.process("fit", *options, *more))
        folder = command_line.folder(name)
        ends.append(load_checkpoint(folder / "checkpoints" / "last.ckpt"))
        assert [row["env_steps"] for row in command_line.rows(name)][-1] == "150"
    assert ends[0]["mtrl_lightning"]["counters"] == ends[1]["mtrl_lightning"]["counters"]
    assert ends[0]["mtrl_lightning"]["counters"]["updates"] >= 20
    for name, value in ends[0]["state_dict"].items():
        if isinstance(value, torch.Tensor) and value.numel():
            assert deviation(ends[1]["state_dict"][name], value) < 1e-5, name
    rows = [command_line.rows(name)[-1] for name in ("of_1", "of_2")]
    for metric in ("eval/return/still-1", "rollout/return", "rollout/episodes", "train/q"):
        assert float(rows[1][metric] or 0) == pytest.approx(float(rows[0][metric] or 0), rel=1e-4)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("rollout.envs_per_task is 3 for 2 processes", ["--rollout.envs_per_task=3"]),
        (
            "data.batch_size 99 cannot be shared out equally among 2 processes and 3 tasks:"
            " give 96 or 102",
            ["--rollout.envs_per_task=2", "--data.batch_size=99"],
        ),
    ],
)
def test_what_does_not_divide_is_refused_once_with_the_nearest_numbers(
    command_line, message, options
):
    process = command_line.process("fit", *options, "--trainer.devices=2")
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert output.count(message) == 1, output
    assert "Traceback" not in output
    assert not command_line.root.exists() or not list(command_line.root.rglob("version_*"))
