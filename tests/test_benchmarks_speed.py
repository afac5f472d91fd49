"""Small versions of the speed benchmarks, what they compute, and the plain loop's losses."""

import io
import json
import math
import mmap
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import (
    encoders,
    end_to_end,
    frames,
    gradients,
    measuring,
    on_policy,
    rendering,
    replay,
    scaling,
    stepping,
    updating,
    upstream_suite,
)
from benchmarks.entrants import Entrant, started
from benchmarks.on_policy_peers import OnPolicyJob, layers_of, products_of
from benchmarks.pace_callback import PaceCallback
from benchmarks.pacing import Pacer
from benchmarks.pixels import METHODS, STRIDES, Encoding, pixel_sac
from benchmarks.plain_sac import PlainReplay, PlainSAC, Sizes
from benchmarks.ranks import parts_of
from benchmarks.updaters import (
    ACTION,
    OBSERVATION,
    Work,
    direct_update,
    make_batches,
    make_minibatches,
    make_ppo,
    make_sac,
    products_of_ppo,
    products_of_sac,
    with_one_hot,
)
from benchmarks.upstream import make_sb3, make_vec, names_of, one_hot_makers
from mtrl_lightning.envs import DMControl, MetaWorld, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import hidden
from mtrl_lightning.precision import ProductTimes
from tests.conftest import ROOT, resolve, skip_without_renderer

WORK = Work(
    tasks=3,
    batch_size=12,
    width=16,
    depth=2,
    precision="32-true",
    compile="none",
    device="cpu",
    threads=None,
    steps=2,
    settle=1,
)


def printed_json(main, *args, capsys):
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_rows(rows, repeats):
    for row in rows:
        assert len(row["rounds"]) == repeats and row["min"] <= row["median"] <= row["max"]
        for reference, ratio in row["times_as_fast_as"].items():
            theirs = next(r["rounds"] for r in rows if r["variant"] == reference)
            each = [b / a for a, b in zip(row["rounds"], theirs, strict=True)]
            assert ratio == pytest.approx(
                {"median": np.median(each), "min": min(each), "max": max(each)}
            )


def check_machine(found):
    assert {
        "cpu",
        "cores",
        "gpu",
        "python",
        "torch",
        "lightning",
        "mujoco",
        "metaworld",
        "gymnasium",
    } <= {*found}
    assert found["torch"] == torch.__version__ and found["cores"] >= 1


def test_end_to_end_runs_all_contestants(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = [
        "--tasks=reach",
        "--batch_size=8",
        "--width=8",
        "--depth=1",
        "--capacity=100",
        "--warmup=10",
    ]
    short = ["--settle=1", "--steps=2", "--repeats=2", "--precisions=32-true", "--workers=0"]
    short += ["--minutes=1000"]  # since the start of this process, which runs other tests
    copies = ["--also", "rollout.envs_per_task=3"]
    found = printed_json(end_to_end.main, *small, *short, *copies, capsys=capsys)
    check_machine(found["machine"])
    check_rows(found["results"], repeats=2)
    rows = {row["variant"]: row for row in found["results"]}
    ours, three = (
        rows.pop(f"ours 32-true, num_workers 0{more}") for more in ("", ", envs_per_task 3")
    )
    assert set(rows) == {"sb3 dummy", "sb3 subproc", "plain sync", "plain async"}
    assert {r.split()[0] for r in ours["times_as_fast_as"]} == {"sb3", "plain"}
    for row, environments in ((ours, 1), (three, 3), (rows["sb3 dummy"], 1)):
        rate = sorted(environments * 1e3 / value for value in row["rounds"])
        assert row["env_steps_per_second"] == pytest.approx(
            {"median": sum(rate) / 2, "min": rate[0], "max": rate[1]}
        )
    assert 0 < ours["time_fractions"]["update"] < sum(ours["time_fractions"].values()) <= 1
    assert "ms per vector step" in end_to_end.text_of(found)


ITERATION = {
    "copies": 2,
    "horizon": 10,
    "num_steps": 20,
    "num_epochs": 2,
    "num_minibatches": 4,
    "width": 8,
    "depth": 2,
}


def test_on_policy_runs_its_contestants(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ["--tasks", "reach", "push", *(f"--{name}={v}" for name, v in ITERATION.items())]
    short = ["--repeats=2", "--minutes=1000", "--workers=0", "--threads", "1"]
    own = ["--sb3_vectors=dummy", "--sb3_environments", "metaworld", "ours", "--peer_threads=2"]
    found = printed_json(on_policy.main, *small, *short, *own, capsys=capsys)
    check_machine(found["machine"])
    check_rows(found["results"], repeats=2)
    assert found["iteration"] == {"env_steps": 80, "updates": 8, "batch_size": 20}
    rows = {row["variant"]: row for row in found["results"]}
    ours = rows.pop("ours 32-true, learner_threads 1, num_workers 0")
    assert list(rows) == ["sb3 dummy", "sb3 dummy, our environments"]
    assert list(ours["times_as_fast_as"]) == list(rows)
    assert set(found["products"]) == {"products, 1 threads", "products, 2 threads"}
    for row, threads in ((ours, 1), *((row, 2) for row in rows.values())):
        rate = np.sort(80 / np.array(row["rounds"]))
        assert list(row["env_steps_per_second"].values()) == pytest.approx([rate.mean(), *rate])
        update = np.array(row["update"]["rounds"])
        assert (update > 0).all() and (update < row["rounds"]).all()
        times = update / found["products"][f"products, {threads} threads"]["rounds"]
        assert row["update"]["times_the_products"]["median"] == pytest.approx(np.median(times))
    assert {"act", "step", "sample", "update"} == set(ours["time_fractions"])
    assert {"collect", "update"} == set(rows["sb3 dummy"]["time_fractions"])
    for row in (ours, rows["sb3 dummy"]):
        assert 0.5 < sum(row["time_fractions"].values()) <= 1
    assert "--model.init_args.max_kl=null" in ours["command"]
    assert "s per iteration" in on_policy.text_of(found)


def test_both_environments_of_the_peer_are_the_same_task():
    envs = make_sb3(["reach", "push"], "dummy", copies=2, horizon=3)
    theirs = envs.envs[2]
    ours = one_hot_makers(["reach", "push"], 2, 3, fast=True)[2]()
    for env in (theirs, ours):
        observation, _ = env.reset()
        assert env.unwrapped.reward_function_version == "v2"
        assert observation.shape == (39 + 2,) and observation[39:].tolist() == [0, 1]
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(3)]
        assert ends == [(False, False), (False, False), (False, True)]
    names = [type(env.unwrapped).__name__ for env in envs.envs]
    assert names[0] == names[1] != names[2] == names[3]
    envs.close()


def test_the_products_are_those_of_the_layers(monkeypatch):
    sizes = {**ITERATION, "num_epochs": 1}
    job = OnPolicyJob(["reach", "push"], **sizes, device="cpu", threads=None, settle=1)
    B, D, H, A = job.batch_size, OBSERVATION + 2, 8, ACTION
    assert (B, job.env_steps, job.updates) == (20, 80, 4)
    done = []
    monkeypatch.setattr(torch, "mm", lambda a, b: done.append((a.shape[0], *b.shape)))
    for layer in layers_of(job):
        products_of(*layer)
    by_hand = []
    for outputs in (A, 1):
        by_hand += [(B, D, H), (H, B, D)]
        by_hand += [(B, H, H), (H, B, H), (B, H, H)]
        by_hand += [(B, H, outputs), (outputs, B, H), (B, outputs, H)]
    assert done == by_hand


SMALL_UPDATES = [
    "--num_tasks=2",
    "--rows=4",
    "--width=8",
    "--depth=1",
    "--updates=2",
    "--settle=1",
    "--repeats=2",
    "--precisions=32-true",
]


def test_updating_runs_all_variants(capsys):
    found = printed_json(updating.main, *SMALL_UPDATES, "--sizes", "--grow", capsys=capsys)
    check_machine(found["machine"])
    (table,) = found["tables"]
    rows = table["results"]
    assert [row["variant"] for row in rows] == [
        f"{k} 32-true" for k in ("direct", "trainer", "plain", "sb3", "products")
    ]
    check_rows(rows, repeats=2)
    assert {"plain 32-true"} <= {*rows[0]["times_as_fast_as"]}
    assert (table["sizes"]["width"], table["sizes"]["batch_size"]) == (8, 8)
    direct, trainer, *_, products = (np.array(row["rounds"]) for row in rows)
    assert table["framework_ms"]["32-true"]["median"] == pytest.approx(np.median(trainer - direct))
    times = rows[0]["times_the_products"]
    assert times["median"] == pytest.approx(np.median(direct / products))
    assert "Lightning's trainer costs" in updating.text_of(found)


def test_updating_has_tables_of_other_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(updating, "compare", lambda title, *table: asked.append((title, *table)))
    sizes = ["--sizes=small", "--grow=width", "--grow_width=16"]
    updating.measure(updating.parse([*SMALL_UPDATES, *sizes]))
    titles, works, kinds, *_ = zip(*asked, strict=True)
    assert titles == ("one update", "small", "width 16")
    assert [(work.width, work.batch_size) for work in works] == [(8, 8), (32, 8), (16, 8)]
    assert kinds[1:] == (("direct", "plain"),) * 2
    # without products in a table, nothing is said of how many times their time an update takes
    row = {"variant": "direct 32-true"}
    updating.add_products([row], {"direct 32-true": [1.0], "plain 32-true": [2.0]})
    assert row["times_the_products"] is None


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of the hidden layers' products."""

    def __init__(self, batch_size):
        super().__init__()
        self.number = 0
        self._batch_size = batch_size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("aten.mm", "aten.addmm")):
            left, right = args[-2:]
            self._add(*left.shape, right.shape[1])
        elif name.startswith("mkldnn._linear"):
            x_BI, weight_OI = args[:2]
            self._add(*x_BI.shape, weight_OI.shape[0])
        return function(*args, **(kwargs or {}))

    def _add(self, *sizes):
        features = list(sizes)
        if self._batch_size in features:
            features.remove(self._batch_size)
        if min(features) > 2 * ACTION:  # else it is an output layer's
            self.number += math.prod(sizes)


@pytest.mark.parametrize("name", ["mt10", *updating.SIZES])
def test_the_products_are_those_that_an_update_makes(name):
    """Counted in an update, by their numbers of multiplications."""
    work = replace(WORK, tasks=10, batch_size=1280, width=96, depth=3)
    kinds: tuple = ("direct", "products")
    if name != "mt10":
        kinds, changes = updating.SIZES[name]
        work = replace(work, **{**changes, "width": 96})
    on_policy = "ppo" in kinds
    algorithm = make_ppo(work) if on_policy else make_sac(work)
    batch = (make_minibatches(work) if on_policy else make_batches(work))[0]
    update = direct_update(work, algorithm)
    update(batch)
    with Multiplications(work.batch_size) as done:
        update(batch)
    products = (products_of_ppo if on_policy else products_of_sac)(work)
    square = work.batch_size * work.width**2 * (work.depth - 1)
    wanted = 0
    for network in products:
        first = work.batch_size * work.width * network.in_dim
        wanted += square * (network.outputs + network.inputs + network.weights)
        wanted += first * (network.outputs + network.first_inputs + network.weights)
    # for the actor, layers multiply also some rows of a critic that have no gradient
    is_large = work.batch_size * work.width >= hidden.MIN_OUTPUTS[torch.float32]
    num_rows = 2 * hidden.ROW_MULTIPLE if is_large else work.batch_size
    critic = products[-1]
    a_row = work.width * (work.width * (work.depth - 1) + critic.in_dim)
    more = 0 if on_policy else num_rows * a_row
    assert wanted <= done.number <= wanted + more


def test_gradient_methods_are_compared_with_the_mean(capsys):
    small = [
        "--tasks",
        "2",
        "3",
        "--rows=4",
        "--width=8",
        "--depth=1",
        "--updates=1",
        "--repeats=2",
    ]
    found = printed_json(gradients.main, *small, "--methods", "pcgrad", "famo", capsys=capsys)
    check_machine(found["machine"])
    assert [(table["tasks"], table["batch_size"]) for table in found["tables"]] == [(2, 8), (3, 12)]
    for table in found["tables"]:
        check_rows(table["results"], repeats=2)
        assert [row["variant"] for row in table["results"]] == ["mean", "pcgrad", "famo"]
        mean, pcgrad, _ = (np.array(row["rounds"]) for row in table["results"])
        assert table["results"][0]["times_the_mean"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        assert table["results"][1]["times_the_mean"]["median"] == pytest.approx(
            np.median(pcgrad / mean)
        )
    assert "times the mean" in gradients.text_of(found)


def test_every_gradient_method_is_measured():
    assert sorted(gradients.METHODS) == sorted(
        path.stem for path in ROOT.glob("configs/gradient/*.yaml")
    )


def test_sizes_grow_one_at_a_time_and_windows_stay_short():
    base = replace(WORK, tasks=10, batch_size=1280, width=400, depth=3, steps=20)
    assert updating.grown(base, "tasks", 50) == replace(base, tasks=50, batch_size=6400, steps=4)
    assert updating.grown(base, "width", 2048) == replace(base, width=2048, steps=2)
    assert updating.grown(base, "batch", 325) == replace(base, batch_size=320)


def test_scaling_measures_ranks(capsys):
    small = ["--num_tasks=2", "--rows=4", "--width=8", "--depth=1", "--updates=3", "--repeats=2"]
    parts = ["--ranks", "1", "2", "--parts", "updates", "methods", "exchanges", "costs"]
    methods = ["--methods", "mean", "pcgrad", "--bytes", "4", "4000", "--times=2"]
    methods += ["--minutes=1000"]  # since the start of this process, which runs other tests
    found = printed_json(scaling.main, *small, *parts, *methods, capsys=capsys)
    check_machine(found["machine"])
    updates = {row["variant"]: row for row in found["updates"]["results"]}
    assert [row["batch_size"] for row in updates.values()] == [8, 8, 16]
    one, strong, weak = updates.values()
    for row, work in ((one, 1), (strong, 1), (weak, 2)):
        times = work * np.array(one["rounds"]) / row["rounds"]
        assert row["throughput"]["median"] == pytest.approx(np.median(times))
        total = np.array([row["parts_ms"][part]["min"] for part in scaling.PARTS_OF_UPDATE])
        assert (total >= 0).all() and 0 < total.sum() <= row["max"] * 1.2
    assert (one["bytes"], one["messages"], one["parts_ms"]["waiting"]["max"]) == (0, 0, 0)
    mean, pcgrad = found["methods"]["results"]
    # the critics have 2 x 2 networks of a layer and the actor one; each task has a last layer
    num_inputs = OBSERVATION + 2
    assert mean["bytes"] == weak["bytes"] > 4 * 8 * (OBSERVATION + 2)
    shared = 8 * (num_inputs + 1) + 2 * 8 * (num_inputs + ACTION + 1)
    assert pcgrad["bytes"] - mean["bytes"] == pytest.approx(4 * shared, abs=100)
    # losses with gradients for critics, actor and temperature; or losses, gradients and weights
    assert (mean["messages"], pcgrad["messages"]) == (3, 2 * 3 + 1)
    links = found["exchanges"]["links"]
    assert links["2"]["latency"] > 0 and links["2"]["bandwidth"] > 0
    for row in found["costs"]["results"]:
        assert row["share"]["min"] > 0
    per_update = [row["per_update"] for row in found["costs"]["results"]]
    assert per_update == [1, 4 / 1_000, 4 / 10_000]
    here, *others = found["projection"]["results"]
    assert here["measured_ms"] == weak["median"]
    assert [row["machines"] for row in others] == [one.name for one in scaling.MACHINES]
    text = scaling.text_of(found)
    assert "2 ranks, weak" in text and "a projection, no measurement" in text


def test_a_window_of_ranks_is_split_by_hand():
    # rank 1 enters the first exchange 2 s after rank 0, which leaves it 1 s later than rank 1 ...
    first = [(1.0, 5.0), (6.0, 6.5)]
    second = [(3.0, 4.0), (5.0, 6.5)]
    parts = parts_of([10.0, 10.0], [first, second], [0.5, 1.5])
    # ... waiting: 2 and 1; exchanges: 2 + 0.5 and 1 + 0.5
    assert parts == {"compute": 10 - 1.5 - 3.0, "reduction": (2.5 + 1.5) / 2 + 1.0, "waiting": 1.5}
    assert parts_of([2.0], [[]], [0.0]) == {"compute": 2.0, "reduction": 0.0, "waiting": 0.0}


def test_the_projection_is_computed_by_hand():
    link = scaling.link_of(4, latency=0.006, seconds=0.306, num_bytes=4_000_000)
    assert link.latency == pytest.approx(0.001)  # 6 hops
    assert link.bandwidth == pytest.approx(6 * 1e6 / 0.3)
    # 2 messages of 6 hops, and 6 quarters of the bytes
    seconds = scaling.projected(0.1, 2, 4_000_000, 4, link)
    assert seconds == pytest.approx(0.1 + 0.012 + 0.3)


def test_whole_runs_of_ranks_have_the_work_of_one_process_on_each(tmp_path):
    numbers = ["--batch_sizes=192", "--copies=6", "--steps=80", "--ranks", "1", "2"]
    more = ["--also", "trainer.precision=bf16-mixed"]
    options = scaling.parse(["--configs=quickstart", *numbers, *more])
    one, two = scaling.runs(options, tmp_path).values()
    for entrant, size in ((one, 1), (two, 2)):
        command = json.loads(entrant._make(7)[-1])
        assert (command["size"], command["descriptor"]) == (size, 7)
        fit, _, config, *given, _ = command["arguments"]
        assert (fit, config) == ("fit", "quickstart")
        assert {
            f"--data.batch_size={size * 192}",
            f"--rollout.envs_per_task={size * 6}",
            f"--trainer.devices={size}",
            "--rollout.num_workers=0",
            "--trainer.precision=bf16-mixed",
        } <= {*given}


def test_the_other_ranks_do_not_wait_for_windows():
    callback = PaceCallback(1, 1, -1)  # rank 0 would open the descriptor
    algorithm = make_sac(WORK)
    callback.on_train_batch_start(SimpleNamespace(is_global_zero=False), algorithm, None, 0)


def test_stepping_runs_all_variants(capsys):
    found = printed_json(
        stepping.main,
        "--tasks=1",
        "--workers",
        "0",
        "1",
        "--env_steps=5",
        "--settle=1",
        "--repeats=2",
        capsys=capsys,
    )
    check_machine(found["machine"])
    (table,) = found["tables"]
    check_rows(table["results"], repeats=2)
    names = ["ours, 0 workers", "ours, 1 workers", "ours with MetaWorld's code, 1 workers"]
    assert [row["variant"] for row in table["results"]] == [
        *names,
        "gymnasium sync",
        "gymnasium async",
    ]
    for row in table["results"]:
        assert set(row["times_as_fast_as"]) == {"gymnasium sync", "gymnasium async"}
        assert (row["gain_over_async"] is not None) == (row["variant"] == "ours, 1 workers")
        assert (
            row["build_seconds"] > 0
            and row["reset_seconds"] > 0
            and row["memory_mib"] > row["memory_mib_per_env"] > 0
        )
    text = stepping.text_of(found)
    assert "MiB per environment" in text
    gain = table["results"][1]["gain_over_async"]
    assert f"{gain['stepping']['median']:.2f} x {gain['code']['median']:.2f}" in text


def test_stepping_runs_tasks_of_dm_control(capsys):
    pytest.importorskip("dm_control")
    arguments = ["--tasks=1", "--workers=0", "--variants", "ours", "slow"]
    found = printed_json(
        stepping.main,
        "--benchmark=dm_control",
        *arguments,
        "--env_steps=5",
        "--settle=1",
        "--repeats=2",
        capsys=capsys,
    )
    (table,) = found["tables"]
    names = ["ours, 0 workers", "ours with dm_control's code, 0 workers"]
    assert [row["variant"] for row in table["results"]] == names
    assert all(row["env_steps_per_second"]["median"] > 0 for row in table["results"])


def test_images_as_in_papers_are_those_of_dm_control(tmp_path, capsys):
    pytest.importorskip("dm_control")
    skip_without_renderer()
    image = tmp_path / "image.png"
    found = printed_json(
        rendering.main,
        "--tasks=cartpole-swingup",
        "--variants",
        "dm_control",
        "papers",
        "--size=16",
        "--frames=2",
        "--settle=1",
        "--repeats=2",
        f"--image={image}",
        capsys=capsys,
    )
    (table,) = found["tables"]
    assert [row["variant"] for row in table["results"]] == ["dm_control", "ours, as in papers"]
    assert [row["difference"] for row in table["results"]] == [0.0, 0.0]
    assert "times as fast as dm_control" in rendering.text_of(found)
    assert Image.open(image).size == (3 * (16 + 4 + 16), 3 * 16)


def test_single_frames_are_measured_beside_stacks(capsys):
    pytest.importorskip("dm_control")
    skip_without_renderer()
    found = printed_json(
        frames.main,
        "--tasks=cartpole-swingup",
        "--size=8",
        "--rows=4",
        "--capacity=40",
        "--calls=1",
        "--repeats=1",
        capsys=capsys,
    )
    assert list(found["results"]) == ["add", "draw", "write all", "read all"]
    for rows in found["results"].values():
        assert [row["variant"] for row in rows] == ["stacks", "frames"]
    for measured in ("gib_of_a_million", "disk_bytes_per_transition"):
        assert found[measured]["frames"] < found[measured]["stacks"] / 4
    assert "a million transitions take" in frames.text_of(found)


def test_encoders_are_measured_in_both_memory_formats(capsys, monkeypatch):
    monkeypatch.setattr(encoders, "in_own_process", lambda call: call())
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    found = printed_json(
        encoders.main,
        "--encoders=pixels_small:24",
        "--method_encoder=pixels_small:24",
        "--rows=2",
        "--capacity=4000",
        "--width=8",
        "--depth=1",
        "--calls=1",
        "--repeats=2",
        "--precisions=32-true",
        capsys=capsys,
    )
    check_machine(found["machine"])
    (measured,) = found["updates"]
    assert (measured["encoder"], measured["batch_size"]) == ("pixels_small, 24 x 24", 8)
    names = [f"32-true, channels_last {value}" for value in ("false", "true")]
    for what, number in {"updates": 1, "1": 1, "8": 8}.items():
        rows = measured["results"][what]
        check_rows(rows, repeats=2)
        assert [row["variant"] for row in rows] == names
        for row in rows:
            assert list(row["times_as_fast_as"]) == names[:1]
            assert row["per_second"]["max"] == pytest.approx(1e3 * number / row["min"])
    (methods,) = found["methods"]
    assert [row["variant"] for row in methods["results"]] == list(METHODS)
    sac, drq, *_ = (np.array(row["rounds"]) for row in methods["results"])
    assert methods["results"][1]["times_sac"]["median"] == pytest.approx(np.median(drq / sac))
    (memory,) = found["memory_mib"].values()
    frames = (4_000 // 4 + 1 + 3) * 4 * 3 * 24 * 24  # of 4 tasks, an episode and a stack
    assert frames < memory["replay_estimated"] * 2**20 < frames * 1.05
    assert memory["peak"] >= memory["before"] + memory["replay_measured"]
    text = encoders.text_of(found)
    assert "encoding 8 at once" in text and "a replay of 4,000 transitions" in text


def test_wrong_options_of_encoders_are_refused(capsys):
    for option, message in {
        "--encoders=pixels": "pixels: takes NAME:SIZE, where NAME is pixels or pixels_small",
        "--encoders=mlp:64": "mlp:64: takes NAME:SIZE",
        "--updates=3": "--updates is 3: give an even number",
    }.items():
        with pytest.raises(SystemExit):
            encoders.parse([option, "--precisions=32-true"])
        assert message in capsys.readouterr().err


def options_in(config):
    """Return the model's options that a file below configs/ sets itself."""
    return yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())["model"]["init_args"]


def test_the_measured_encoders_and_methods_are_those_of_the_configs():
    work = replace(WORK, tasks=4)
    for name, strides in STRIDES.items():
        wanted = options_in(f"encoder/{name}")["encoder"]["init_args"]
        sac = pixel_sac(work, Encoding(name, 24))
        assert list(strides) == wanted["strides"]
        assert sac.encoder.latent_dim == wanted["out_dim"]
        assert sac.encoder.convolutions[0].out_channels == wanted["channels"]
    schedule = options_in("algorithm/sac_ae")
    assert [sac.actor_every, sac.target_every] == [
        schedule["actor_every"],
        schedule["target_every"],
    ]
    for method in METHODS:
        wanted = options_in(f"algorithm/{'mtsac' if method == 'sac' else method}")
        sac = pixel_sac(work, Encoding("pixels_small", 24), method=method)
        for kind in ("auxiliaries", "transforms"):
            names = [part["class_path"].rpartition(".")[2] for part in wanted.get(kind) or []]
            found = [type(part).__name__ for part in getattr(sac, kind)]
            assert [name for name in found if name != "RewardScale"] == names
    context = options_in("encoder/pixels_context")["encoder"]["init_args"]["context"]
    assert sac.encoder.context.out_dim == context["init_args"]["out_dim"]


def test_shimmys_environments_have_our_numbers_and_sizes():
    pytest.importorskip("dm_control")
    pytest.importorskip("shimmy")
    names = ["cartpole-balance", "reacher-easy"]
    slow = DMControl(names, action_repeat=1, fast=False)
    theirs = upstream_suite.make_vec(slow, "sync")
    ours = VectorEnv(DMControl(names, action_repeat=1), [0, 1], "eval", num_workers=0)
    assert theirs.single_observation_space.shape == ours.single_observation_space.shape == (6,)
    assert theirs.metadata["autoreset_mode"].value == "SameStep"
    action_EA = np.full((2, 2), 0.5, np.float32)
    for envs in (theirs, ours):
        envs.reset(seed=[3, 4])
    found, wanted = ours.step(action_EA), theirs.step(action_EA)
    assert found[1].tolist() == wanted[1].tolist()
    ours.close()
    theirs.close()


def test_the_gain_over_async_is_split_by_hand():
    seconds = {
        "ours, 2 workers": [1.0, 2.0, 1.0],
        "ours with MetaWorld's code, 2 workers": [3.0, 4.0, 2.0],
        "ours, 0 workers": [1.0, 1.0, 1.0],
        "gymnasium async": [6.0, 4.0, 3.0],
    }
    gain = stepping.gain_over_async("ours, 2 workers", seconds)
    assert gain == {
        "stepping": {"median": 1.5, "min": 1.0, "max": 2.0},
        "code": {"median": 2.0, "min": 2.0, "max": 3.0},
    }
    others = set(seconds) - {"ours, 2 workers"}
    assert [stepping.gain_over_async(name, seconds) for name in others] == [None] * 3
    del seconds["gymnasium async"]
    assert stepping.gain_over_async("ours, 2 workers", seconds) is None


def test_the_help_of_replay_has_a_line_for_each_variant(capsys):
    with pytest.raises(SystemExit):
        replay.main(["--help"])
    description = capsys.readouterr().out.split("options:")[0]
    named = re.findall(r"^  (\w+) +(?=\S)", description, re.MULTILINE)
    assert named == list(replay.KINDS)


def test_replay_runs_all_variants(capsys):
    small = [
        "--tasks=3",
        "--rows=4",
        "--capacity=60",
        "--calls=2",
        "--updates=1",
        "--width=8",
        "--depth=1",
    ]
    both = ["--precisions", "32-true", "bf16-mixed"]
    found = printed_json(replay.main, *small, *both, "--repeats=2", capsys=capsys)
    check_machine(found["machine"])
    (table,) = found["tables"]
    for rows in table["results"].values():
        check_rows(rows, repeats=2)
        assert [row["variant"] for row in rows] == ["ours", "sb3", "rings", "naive"]
    # two observations, an action and a reward in float32, and whether it ended
    assert table["bytes_per_transition"]["ours"] == 4 * (39 + 39 + 4 + 1) + 1
    assert table["bytes_per_transition"]["rings"] == 4 * (42 + 42 + 4 + 1) + 1
    assert table["bytes_per_transition"]["sb3"] == 8 * (42 + 42) + 4 * (4 + 1 + 1 + 1)
    assert set(table["share_of_update"]) == {"32-true", "bf16-mixed"}
    assert "of an update 32-true" in replay.text_of(found)


@pytest.mark.parametrize("module", [end_to_end, on_policy, updating, replay])
def test_a_missing_peer_is_named_with_its_remedy(module, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(SystemExit) as ended:
        module.parse([])
    assert ended.value.code == 2
    assert (
        'stable_baselines3 is not installed: pip install "mtrl_lightning[bench]"'
        in capsys.readouterr().err
    )
    without = {
        end_to_end: "--contestants=plain",
        on_policy: "--contestants=ours",
        updating: "--variants=plain",
        replay: "--variants=rings",
    }[module]
    module.parse([without])


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (end_to_end, ["--config=nowhere.yaml"], "nowhere.yaml is not there"),
        (end_to_end, ["--tasks=nothing"], "MetaWorld has no task nothing-v3"),
        (end_to_end, ["--also", "rollout.num_workers"], "takes OPTION=VALUE"),
        (on_policy, ["--configs", "nowhere.yaml"], "nowhere.yaml is not there"),
        (on_policy, ["--tasks=nothing"], "MetaWorld has no task nothing-v3"),
        (on_policy, ["--num_minibatches=3"], "among 3 minibatches: give a divisor of 2000"),
        (scaling, ["--ranks", "2", "4"], "--ranks takes 1 first"),
        (scaling, ["--rows=6"], "6 cannot be shared out among [1, 2, 4] ranks"),
        (scaling, ["--configs=quickstart"], "take one number for each of --configs"),
        (stepping, ["--tasks=51"], "numbers from 1 to 50"),
        (stepping, ["--tasks=22", "--benchmark=dm_control"], "numbers from 1 to 21"),
        (stepping, ["--tasks=4", "--benchmark=walker_foot"], "is 8 for a family"),
    ],
)
def test_mistakes_are_said(module, args, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        module.parse(args)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", [end_to_end, updating, replay])
def test_bf16_is_left_out_where_it_is_slower_and_it_is_said(module, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    slow = ProductTimes(64, 400, float32=0.001, bfloat16=0.02)
    monkeypatch.setattr(measuring, "time_products", lambda: slow)
    options = module.parse(["--device=cpu"])
    assert options.precisions == ["32-true"]
    said = "bf16-mixed is left out: matrix products take 20.0 times as long in bfloat16"
    assert said in options.left_out
    assert said in capsys.readouterr().err
    asked = module.parse(["--device=cpu", "--precisions", "bf16-mixed"])
    assert (asked.precisions, asked.left_out) == (["bf16-mixed"], "")
    on_a_gpu = module.parse(["--device=cuda"])
    assert on_a_gpu.precisions == ["32-true", "bf16-mixed"]
    fast = slow._replace(bfloat16=0.0005)
    monkeypatch.setattr(measuring, "time_products", lambda: fast)
    options = module.parse(["--device=cpu"])
    assert (options.precisions, options.left_out) == (["32-true", "bf16-mixed"], "")


def test_variants_of_ours_are_combined(monkeypatch):
    monkeypatch.chdir(ROOT)
    options = end_to_end.parse(
        [
            "--precisions",
            "32-true",
            "--threads",
            "1",
            "2",
            "--workers",
            "0",
            "--also",
            "data.memory_map=true",
        ]
    )
    first, second, *more = end_to_end.variants(options)
    assert first == {
        "trainer.precision": "32-true",
        "rollout.learner_threads": 1,
        "rollout.num_workers": 0,
    }
    assert second == {**first, "rollout.learner_threads": 2}
    assert more == [{**one, "data.memory_map": "true"} for one in (first, second)]
    assert (
        end_to_end.name_of(more[0])
        == "ours 32-true, learner_threads 1, num_workers 0, memory_map true"
    )


def test_spread_and_ratios_by_hand():
    assert measuring.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    # 2 s against 4 s is twice as fast; 2 against 2 the same; 4 against 2 half. Not the ratio of the
    # medians, 1.
    assert measuring.times_as_fast([2.0, 2.0, 4.0], [4.0, 2.0, 2.0]) == {
        "median": 1.0,
        "min": 0.5,
        "max": 2.0,
    }
    assert measuring.times_as_fast([1.0, 10.0, 100.0], [3.0, 20.0, 100.0])["median"] == 2.0
    rows = measuring.results({"a": [0.001, 0.003], "b": [0.002, 0.003]}, ["b", None])
    assert rows[0] == {
        "variant": "a",
        "rounds": [1.0, 3.0],
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "times_as_fast_as": {"b": {"median": 1.5, "min": 1.0, "max": 2.0}},
    }
    assert measuring.quickest({"a": [1.0, 9.0, 9.0], "b": [8.0, 8.0, 8.0]}, ["a", "b", "c"]) == "b"
    assert measuring.quickest({}, ["a"]) is None
    assert measuring.shown({"median": 1.234, "min": 0.5, "max": 20.0}) == "1.23 [0.50, 20.00]"


def test_variants_take_turns():
    order = []
    variants = {name: lambda name=name: float(order.append(name) or len(order)) for name in "abc"}
    assert measuring.alternate(variants, 2) == {"a": [1.0, 4.0], "b": [2.0, 5.0], "c": [3.0, 6.0]}
    assert order == ["a", "b", "c"] * 2
    over = measuring.alternate({"a": lambda: 1.0, "b": lambda: 2.0}, 5, minutes=-1.0)
    assert over == {"a": [1.0], "b": [2.0]}  # the first round is always made


def test_the_memory_of_a_process_is_found():
    before = measuring.proportional_set_size()
    with mmap.mmap(
        -1, 50 << 20
    ) as held:  # pages of its own: NumPy may be given memory that was kept
        for page in range(0, 50 << 20, mmap.PAGESIZE):
            held[page] = 1
        assert 45 < measuring.proportional_set_size() - before < 60


def test_a_pacer_runs_a_window_for_each_line(monkeypatch):
    read, written = os.pipe()
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
    drained = []
    pacer = Pacer(
        2, 3, written, drain=lambda: drained.append(1) or {"update": 1e-9}, about={"built": 4.0}
    )
    assert sum(1 for _ in iter(pacer.tick, False)) == 3 + 2 + 2
    lines = [json.loads(line) for line in os.read(read, 10_000).decode().splitlines()]
    assert lines[0] == {"built": 4.0}
    assert [set(line) for line in lines[1:]] == [{"seconds", "fractions"}] * 2
    assert lines[1]["fractions"]["update"] == pytest.approx(1e-9 / lines[1]["seconds"])
    assert len(drained) == 4  # at the beginning and at the end of both windows
    os.close(read)


def test_a_contestant_that_fails_says_what_it_printed(tmp_path):
    broken = Entrant(
        "one that breaks", "ours", lambda _: [sys.executable, "-c", "print(1 + 1); 1 / 0"], tmp_path
    )
    with (
        pytest.raises(
            RuntimeError, match=r"one that breaks gave no answer(.|\n)*ZeroDivisionError"
        ),
        started([broken]),
    ):
        pass
    once = (
        "import os, sys; os.write(int(sys.argv[1]), b'{}\\n'); sys.stdin.readline();"
        " print('the end', flush=True)"
    )
    ends = Entrant("ends", "ours", lambda d: [sys.executable, "-c", once, str(d)], tmp_path)
    with started([ends]), pytest.raises(RuntimeError, match=r"ends gave no answer(.|\n)*the end"):
        ends.window()


def test_no_contestant_is_left(tmp_path):
    waits = "import os, sys, time; os.write(int(sys.argv[1]), b'{}\\n'); time.sleep(600)"
    entrant = Entrant("waits", "ours", lambda d: [sys.executable, "-c", waits, str(d)], tmp_path)
    with started([entrant]):
        assert entrant._process.poll() is None and entrant.memory() > 1
    assert entrant._process.poll() is not None


def pairs_of(plain, sac):
    """Pair the plain loop's parameters with SAC's, whose critics take the action first."""
    D = OBSERVATION
    T = sac.spec.num_tasks
    A = ACTION
    columns = [*range(D), *range(D + A, D + A + T), *range(D, D + A)]
    networks = [
        (plain.actor, sac.actor),
        *zip((plain.qf1, plain.qf2), sac.critic.members, strict=True),
        *zip((plain.qf1_target, plain.qf2_target), sac.target_critic.members, strict=True),
    ]
    for mine, theirs in networks:
        for k, (a, b) in enumerate(zip(mine.parameters(), theirs.parameters(), strict=True)):
            yield a, b[:, columns] if k == 0 and mine is not plain.actor else b


def test_the_plain_loop_learns_what_sac_does():
    sac = make_sac(WORK)
    plain = PlainSAC(
        Sizes(OBSERVATION, ACTION, WORK.tasks, WORK.batch_size, WORK.width, WORK.depth)
    )
    with torch.no_grad():
        for a, b in pairs_of(plain, sac):
            a.copy_(b)
    plain.generator.set_state(sac.generators.get("learn", sac.device).get_state())
    update = direct_update(WORK, sac)
    for batch in make_batches(WORK):
        update(batch)
        ours, theirs = sac.drain_metrics(), plain.update(with_one_hot(batch, WORK.tasks))
        for name, value in theirs.items():
            assert ours[f"train/{name}"] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(sac.temperature.log_alpha, plain.log_alpha_T, rtol=1e-5, atol=1e-7)
    for a, b in pairs_of(plain, sac):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_measured_model_is_that_of_the_experiment():
    wanted = resolve("experiment/mtmhsac")["model"]["init_args"]
    sac = make_sac(replace(WORK, width=400, depth=3, tasks=10, batch_size=1280))
    for name, value in wanted.items():
        if not isinstance(value, dict):
            assert sac.hparams[name] == value, name
    for k, kind in enumerate(("critic", "actor", "temperature")):
        found, options = sac.configure_optimizers()[k], wanted[f"{kind}_optimizer"]["init_args"]
        options["betas"] = tuple(options["betas"])
        assert {name: found.defaults[name] for name in options} == options
        assert type(found).__name__ == wanted[f"{kind}_optimizer"]["class_path"].rsplit(".", 1)[1]
    assert sac.temperature.log_alpha.shape == (10,) and sac.temperature.log_alpha.abs().max() == 0
    for network, kind in ((sac.actor, "actor"), (sac.critic.members[0], "critic")):
        options = wanted[kind]["init_args"]
        assert type(network).__name__ == wanted[kind]["class_path"].rsplit(".", 1)[1]
        assert network.heads.in_features == options["width"] == 400 and options["depth"] == 3
        assert network.heads.weight.abs().max() <= options["output_bound"]


def test_the_plain_replay_gives_back_whole_rows():
    ring = PlainReplay(2, 3, 1, capacity=8)
    for step in range(6):  # four rows an environment: the first two are overwritten
        value = np.array([[step], [step + 100]], np.float32)
        ring.add(
            np.repeat(value, 3, 1), value, value[:, 0], np.repeat(value + 1, 3, 1), value[:, 0] < 0
        )
    batch = ring.sample(400)
    assert batch.task_B.tolist() == [0] * 200 + [1] * 200
    assert {*batch.reward_B[:200].tolist()} == {2, 3, 4, 5} and {
        *batch.reward_B[200:].tolist()
    } == {102, 103, 104, 105}
    assert torch.equal(batch.observation_BD, batch.reward_B[:, None].expand(-1, 3))
    assert torch.equal(batch.next_observation_BD, batch.observation_BD + 1)
    assert torch.equal(batch.action_BA[:, 0], batch.reward_B) and not batch.terminated_B.any()


def test_upstream_has_our_protocol():
    assert names_of(["MT10"]) == MetaWorld("MT10").task_names
    assert names_of(["reach", "push-v3"]) == ("reach-v3", "push-v3")
    with pytest.raises(ConfigurationError, match="no task nothing-v3"):
        names_of(["nothing"])
    assert stepping.tasks_of(19, "dm_control") == ["DMC19"]
    assert stepping.tasks_of(2, "dm_control") == ["acrobot-swingup", "ball_in_cup-catch"]
    assert stepping.tasks_of(25) == ["MT25"] and stepping.tasks_of(1) == ["reach-v3"]
    assert len(stepping.tasks_of(11)) == 11
    envs = make_vec(["reach", "push"], "sync", use_one_hot=True)
    spec = MetaWorld(["reach", "push"]).spec
    assert (
        envs.single_observation_space.shape == (39 + 2,)
        and envs.metadata["autoreset_mode"].value == "SameStep"
    )
    for one in envs.envs:
        assert one.unwrapped.max_path_length == spec.horizon == 500
        assert one.unwrapped.reward_function_version == spec.protocol["reward_version"] == "v2"
    observation, _ = envs.reset(seed=0)
    assert observation[:, 39:].tolist() == [[1, 0], [0, 1]]
    envs.close()
