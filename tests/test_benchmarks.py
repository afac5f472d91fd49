"""Small versions of the benchmarks, what they compute, and the plain loop's losses."""

import io
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from benchmarks import measuring, rendering, replay, scaling, stepping, updates, whole_runs
from benchmarks.baselines import PlainReplay, PlainSAC, PPOJob, SACJob
from benchmarks.environments import (
    envpool_id,
    metaworld_vector,
    names_of,
    one_hot_makers,
    suite_vector,
)
from benchmarks.measuring import Pacer, Variant, started
from benchmarks.updates import (
    ACTION,
    OBSERVATION,
    PIXEL_METHODS,
    STRIDES,
    Work,
    direct_update,
    make_batches,
    make_sac,
    pixel_sac,
    with_one_hot,
)
from benchmarks.whole_runs import PaceCallback
from mtrl_lightning.envs import DMControl, MetaWorld, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.benchmarks import lines_of
from tests.helpers.command_line import ROOT, resolve, skip_without_renderer

WORK = Work(tasks=3, batch_size=12, width=16, depth=2)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def in_this_process(monkeypatch):
    """Let variants run all windows in this process when they start, but for groups of ranks."""
    start = Variant.start
    ask = Variant.ask

    def start_here(variant):
        if '"size": 2' in variant.command[-1]:
            start(variant)
            return
        variant.about, *variant.answers = lines_of(variant.command, monkeypatch)

    def answer(variant, request):
        return variant.answers.pop(0) if hasattr(variant, "answers") else ask(variant, request)

    monkeypatch.setattr(Variant, "start", start_here)
    monkeypatch.setattr(Variant, "ask", answer)
    monkeypatch.setattr(Variant, "pid", os.getpid())


def measured(program, *args, capsys):
    """Run a program and return its tables; check what all results have in common."""
    assert program.main([*args, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    name = program.__name__.rpartition(".")[2]
    assert content["command"].startswith(f"python -m benchmarks.{name} {args[0]}")
    assert content["commit"] == measuring.commit()
    names = {"cpu", "cores", "gpu", "python", "threads", "lightning", "mujoco", "gymnasium"}
    assert names <= {*content["machine"]}
    assert content["machine"]["torch"] == torch.__version__
    text = measuring.text_of_tables(content)
    for table in content["tables"]:
        assert table["title"] in text
        check_ratios(table["rows"])
    return content["tables"]


def check_ratios(rows):
    """Check the ratios of a table by its rounds."""
    prefix = "times as fast as "
    for row in rows:
        for column in row:
            if column.startswith(prefix):
                name = column.removeprefix(prefix)
                theirs = next(other["rounds"] for other in rows if other["variant"] == name)
                each = np.array(theirs) / row["rounds"]
                expected = {"median": np.median(each), "min": each.min(), "max": each.max()}
                assert row[column] == pytest.approx(expected)


# ---- every program with small sizes ----


@pytest.mark.slow
def test_stepping_runs_variants(capsys, in_this_process):
    sizes = ["--workers", "1", "--env_steps=5", "--settle=1", "--rounds=2"]
    variants = ["--variants", "ours", "original", "async"]
    (table,) = measured(stepping, "--tasks=1", *sizes, *variants, capsys=capsys)
    variants = [row["variant"] for row in table["rows"]]
    assert variants[:2] == ["ours, 1 workers", "original, 1 workers"]
    assert variants[2:] == ["gymnasium async"]
    assert all("times as fast as gymnasium async" in row for row in table["rows"])
    assert [("stepping" in row) for row in table["rows"]] == [True, False, False]
    for row in table["rows"]:
        rates = np.sort(1e3 / np.array(row["rounds"]))
        found = row["env steps/s"]
        assert [found["min"], found["max"]] == pytest.approx([rates[0], rates[1]])
        assert row["s to build"] > 0 and row["ms per reset"] > 0
        assert "built per s of processor" not in row, "others have built them"
        assert row["MiB"] > 0


def test_updates_run_all_programs(capsys, in_this_process):
    sizes = ["--tasks=2", "--rows=4", "--width=8", "--depth=1", "--updates=2", "--settle=1"]
    short = ["--rounds=2", "--precisions=32-true"]
    (table,) = measured(updates, *sizes, *short, capsys=capsys)
    direct, trainer = table["rows"][:2]
    names = ["direct 32-true", "trainer 32-true", "plain 32-true", "sb3 32-true"]
    assert [row["variant"] for row in table["rows"]] == names
    assert [f"times as fast as {name}" in direct for name in names] == [True, False, True, True]
    assert table["title"].startswith("2 tasks, batch 8, 1 x 8, on cpu")
    more = np.array(trainer["rounds"]) - direct["rounds"]
    assert trainer["ms more than direct"]["median"] == pytest.approx(np.median(more))


def test_gradient_methods_and_encoders_are_measured_in_this_process(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(updates, "ENCODINGS", [("pixels_small", 24)])
    monkeypatch.setattr(updates, "PIXEL_WORK", dict(tasks=4, batch_size=8, width=8, depth=2))
    chosen = {name: updates.GRADIENTS[name] for name in ("mean", "pcgrad", "famo")}
    monkeypatch.setattr(updates, "GRADIENTS", chosen)
    parts = ["--parts", "gradients", "encoders", "pixel_methods", "--rounds=2"]
    small = ["--tasks", "2", "3", "--rows=4", "--width=8", "--depth=1", "--updates=4"]
    methods = ["--precisions=32-true", "--threads=1"]
    tables = measured(updates, *parts, *small, *methods, capsys=capsys)
    two, three, encoder, pixel_methods = tables
    assert "2 tasks, batch 8, 32-true" in two["title"]
    assert "3 tasks, batch 12, 32-true" in three["title"]
    for table, reference, column in (
        (two, "mean", "times mean"),
        (three, "mean", "times mean"),
        (pixel_methods, "sac", "times sac"),
    ):
        first, second, *_ = table["rows"]
        assert first["variant"] == reference
        assert first[column] == {"median": 1.0, "min": 1.0, "max": 1.0}
        times = np.array(second["rounds"]) / first["rounds"]
        assert second[column]["median"] == pytest.approx(np.median(times))
    assert [row["variant"] for row in two["rows"]] == ["mean", "pcgrad", "famo"]
    assert [row["variant"] for row in encoder["rows"]] == ["32-true", "32-true, channels_last"]
    assert [row["variant"] for row in pixel_methods["rows"]] == list(PIXEL_METHODS)


@pytest.mark.slow
def test_whole_runs_of_sac(capsys, in_this_process):
    sizes = ["batch_size=8", "width=8", "depth=1", "capacity=100", "warmup=10", "settle=1"]
    small = ["--sizes", *sizes, "steps=2", "--rounds=2", "--precisions=32-true", "--vectors=sync"]
    also = ["--also", "rollout.num_workers=0", "rollout.envs_per_task=3"]
    (table,) = measured(whole_runs, "--tasks=reach", *small, *also, capsys=capsys)
    ours, three, sb3, plain = table["rows"]
    assert three["variant"] == "ours 32-true, num_workers 0, envs_per_task 3"
    names = ["times as fast as sb3 sync", "times as fast as plain sync"]
    assert [name in ours for name in names] == [True, True]
    for row, num_envs in ((ours, 1), (three, 3), (sb3, 1), (plain, 1)):
        rates = np.sort(num_envs * 1e3 / np.array(row["rounds"]))
        assert row["env steps/s"]["min"] == pytest.approx(rates[0])
    for row in (ours, plain):
        shares = row["shares of the time"]
        assert 0 < shares["update"] < sum(shares.values()) <= 1


@pytest.mark.slow
def test_whole_runs_of_ppo(capsys, in_this_process):
    sizes = ["envs_per_task=2", "horizon=10", "num_steps=20", "num_epochs=2", "num_minibatches=4"]
    small = ["--sizes", *sizes, "width=8", "depth=2", "--rounds=2", "--precisions=32-true"]
    baseline = ["--vectors=sync", "--baseline_environments", "ours"]
    tasks = ["--tasks", "reach", "push"]
    (table,) = measured(whole_runs, "--algorithm=ppo", *tasks, *small, *baseline, capsys=capsys)
    ours, sb3 = table["rows"]
    assert ours["variant"] == "ours 32-true"
    assert sb3["variant"] == "sb3 sync, our environments"
    assert "80 env steps and 8 updates" in table["title"]
    for row in (ours, sb3):
        rates = np.sort(80 / np.array(row["rounds"]))
        assert row["env steps/s"]["max"] == pytest.approx(rates[1])
        assert 0.5 < sum(row["shares of the time"].values()) <= 1
    assert {*ours["shares of the time"]} == {"act", "step", "sample", "update"}
    assert {*sb3["shares of the time"]} == {"collect", "update"}
    assert "--model.init_args.max_kl=null" in ours["command"]


def test_the_sizes_of_whole_runs_are_those_of_the_experiments():
    for name, job in (("sac", SACJob), ("ppo", PPOJob)):
        config = resolve(whole_runs.CONFIGS[name])
        made = job(tasks=["MT10"], device="cpu", threads=None)
        networks = config["model"]["init_args"]
        for network in ("actor", "critic"):
            sizes = networks[network]["init_args"]
            assert (made.width, made.depth) == (sizes["width"], sizes["depth"])
        assert made.envs_per_task == config["rollout"]["envs_per_task"]
        assert made.horizon == config["data"]["benchmark"]["init_args"]["horizon"]
    for size in ("num_steps", "num_epochs", "num_minibatches"):
        assert getattr(made, size) == networks[size]


def test_replays_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(replay, "WIDTH", 8)
    small = ["--tasks=3", "--rows=4", "--capacity=60", "--calls=2"]
    both = ["--precisions", "32-true", "bf16-mixed", "--rounds=2"]
    added, sampled, update = measured(replay, *small, *both, capsys=capsys)
    sizes = {row["variant"]: row["bytes per transition"] for row in added["rows"]}
    # two observations, an action and a reward in float32, and whether it ended
    assert sizes["ours"] == 4 * (39 + 39 + 4 + 1) + 1
    assert sizes["sb3"] == 8 * (42 + 42) + 4 * (4 + 1 + 1 + 1)
    for row in sampled["rows"]:
        for precision, other in zip(("32-true", "bf16-mixed"), update["rows"], strict=True):
            share = np.array(row["rounds"]) / 1e3 / other["rounds"]
            found = row[f"share of an update {precision}"]
            assert found["median"] == pytest.approx(np.median(share))


def test_saving_is_measured_beside_torch(capsys, tmp_path):
    small = ["--parts=saving", "--capacity=2000", "--rounds=2", f"--folder={tmp_path}"]
    (table,) = measured(replay, *small, "--precisions=32-true", capsys=capsys)
    rows = {row["variant"]: row for row in table["rows"]}
    assert rows["the replay in memory"]["MiB"] == pytest.approx(2000 * 333 / 2**20)
    for name in ("all at once", "torch.save", "load", "torch.load", "the tenth checkpoint"):
        assert len(rows[name]["rounds"]) == 2 and rows[name]["s"]["min"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_images_as_in_papers_are_those_of_dm_control(capsys):
    pytest.importorskip("dm_control")
    skip_without_renderer()
    small = ["--variants", "dm_control", "papers", "--size=16", "--frames=2", "--settle=1"]
    (table,) = measured(rendering, "--tasks=cartpole-swingup", *small, "--rounds=2", capsys=capsys)
    assert [row["mean difference of 255"] for row in table["rows"]] == [0.0, 0.0]


@pytest.mark.slow
def test_scaling_measures_ranks(capsys, monkeypatch):
    chosen = {name: updates.GRADIENTS[name] for name in ("mean", "pcgrad")}
    monkeypatch.setattr(scaling, "GRADIENTS", chosen)
    small = ["--tasks=2", "--rows=4", "--width=8", "--depth=1", "--updates=3", "--rounds=2"]
    parts = ["--device=cpu", "--ranks", "1", "2", "--parts", "updates", "methods"]
    tables = measured(scaling, *small, *parts, capsys=capsys)
    one, strong, weak = tables[0]["rows"]
    assert [row["batch"] for row in (one, strong, weak)] == [8, 8, 16]
    for row, work in ((one, 1), (strong, 1), (weak, 2)):
        times = work * np.array(one["rounds"]) / row["rounds"]
        assert row["times the rows/s of 1 rank"]["median"] == pytest.approx(np.median(times))
        total = np.array([row[f"ms {part}"]["min"] for part in scaling.SHARES])
        assert (total >= 0).all() and 0 < total.sum() <= row["ms"]["max"] * 1.2
    assert (one["bytes"], one["messages"], one["ms waiting"]["max"]) == (0, 0, 0)
    mean, pcgrad = tables[1]["rows"]
    # the critics have 2 x 2 networks of a layer and the actor one; each task has a last layer
    num_inputs = OBSERVATION + 2
    assert mean["bytes"] == weak["bytes"] > 4 * 8 * num_inputs
    shared = 8 * (num_inputs + 1) + 2 * 8 * (num_inputs + ACTION + 1)
    assert pcgrad["bytes"] - mean["bytes"] == pytest.approx(4 * shared, abs=100)
    # losses with gradients for critics, actor and temperature; or losses, gradients and weights
    assert (mean["messages"], pcgrad["messages"]) == (3, 2 * 3 + 1)


@pytest.mark.slow
def test_scaling_runs_ranks_through_the_command_line(capsys, monkeypatch, in_this_process):
    monkeypatch.setattr(scaling, "RUNS", {"quickstart": (12, 1, 2)})
    monkeypatch.setattr(scaling, "SETTLE", 1)
    monkeypatch.setattr(scaling, "WARMUP", 60)
    # one process is this one, and keeps its cores and threads
    monkeypatch.setattr(scaling, "use_one_core", lambda rank: None)
    small = ["--parts=runs", "--device=cpu", "--ranks", "1", "2", "--rounds=2"]
    (table,) = measured(scaling, *small, capsys=capsys)
    one, two = table["rows"]
    for row, num_envs in ((one, 3), (two, 6)):
        rates = num_envs * 1e3 / np.array(row["rounds"])
        assert row["env steps/s"]["max"] == pytest.approx(max(rates))
    times = 2 * np.array(one["rounds"]) / two["rounds"]
    assert two["times the steps/s of 1 rank"]["min"] == pytest.approx(min(times))


# ---- statistics and options ----


def test_spread_and_ratios_by_hand():
    assert measuring.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    # 4 s beside 2 s is 2; 2 beside 2 is 1; 2 beside 4 a half. Not the ratio of the medians, 1
    found = measuring.ratios([3.0, 20.0, 100.0], [1.0, 10.0, 100.0])
    assert found == {"median": 2.0, "min": 1.0, "max": 3.0}
    seconds = {"a": [0.001, 0.004], "b": [0.002, 0.004]}
    a, b = measuring.rows_of(seconds, ["b", "c"], rate="steps/s", amount=2)
    assert a == {
        "variant": "a",
        "ms": {"median": 2.5, "min": 1.0, "max": 4.0},
        "times as fast as b": {"median": 1.5, "min": 1.0, "max": 2.0},
        "steps/s": {"median": 1250.0, "min": 500.0, "max": 2000.0},
        "rounds": [1.0, 4.0],
    }
    assert b["times as fast as b"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_cells_and_tables_by_hand():
    values = [None, {"median": 1.234, "min": 0.5, "max": 20.0}, {"update": 0.6, "step": 0.3}]
    values += [{"median": 0.0123, "min": 0.01, "max": 0.02}, 12_345, 0.5, "a"]
    assert [measuring.cell(value) for value in values] == [
        "-",
        "1.23 [0.50, 20.00]",
        "update 60%, step 30%",
        "0.0123 [0.0100, 0.0200]",
        "12,345",
        "0.50",
        "a",
    ]
    rows = [{"variant": "a", "MiB": 1, "rounds": [1.0]}, {"variant": "long", "more": "x"}]
    assert measuring.table_text({"title": "t", "rows": rows}).splitlines() == [
        "t",
        "variant  MiB  more",
        "a          1     -",
        "long       -     x",
    ]


def test_variants_take_turns():
    order = []
    variants = {name: lambda name=name: float(order.append(name) or len(order)) for name in "abc"}
    assert measuring.alternate(variants, 2) == {"a": [1.0, 4.0], "b": [2.0, 5.0], "c": [3.0, 6.0]}
    assert order == ["a", "b", "c"] * 2


@pytest.mark.parametrize(
    ("program", "without"),
    [
        (updates, ["--variants=plain"]),
        (whole_runs, ["--variants=ours"]),
        (replay, ["--variants=ours"]),
    ],
)
def test_a_missing_baseline_is_an_error_with_a_hint(program, without, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(SystemExit) as ended:
        program.options_of(["--precisions=32-true"])
    assert ended.value.code == 2
    hint = 'stable_baselines3 is not installed: pip install "mtrl_lightning[bench]"'
    assert hint in capsys.readouterr().err
    program.options_of(["--precisions=32-true", *without])


@pytest.mark.parametrize(
    ("program", "args", "message"),
    [
        (whole_runs, ["--tasks=reech"], "MetaWorld has no task reech-v3: did you mean reach-v3"),
        (whole_runs, ["--also", "rollout.num_workers"], "takes OPTION=VALUE"),
        (whole_runs, ["--sizes", "num_steps=3"], "num_steps=3: give one of batch_size, capacity"),
        (whole_runs, ["--sizes", "width=wide"], "width=wide: give one of"),
        (whole_runs, ["--sizes", "updates=2"], "updates=2: give one of"),
        (whole_runs, ["--algorithm=ppo", "--variants=plain"], "plain: give ours, sb3"),
        (scaling, ["--ranks", "2", "4"], "--ranks takes 1 first"),
        (scaling, ["--rows=6"], "--rows 6 cannot be shared out among 4 ranks"),
        (scaling, ["--device=cuda", "--ranks", "1", "64"], "--ranks 64 needs as many GPUs"),
        (stepping, ["--tasks=51"], "numbers from 1 to 50"),
        (stepping, ["--envs_per_task=2"], "--envs_per_task is for --variants ours original"),
        (
            stepping,
            ["--variants=envpool", "--benchmark=dm_control"],
            "envpool is for --benchmark metaworld",
        ),
        (stepping, ["--tasks=22", "--benchmark=dm_control"], "numbers from 1 to 21"),
        (stepping, ["--tasks=4", "--benchmark=walker_foot"], "is 8 for a family"),
        (updates, ["--rounds=0"], "0: give 1 or more"),
    ],
)
def test_wrong_options_are_errors_with_a_hint(program, args, message, capsys):
    with pytest.raises(SystemExit):
        program.options_of(args)
    assert message in capsys.readouterr().err


def test_the_commit_is_that_of_the_clone():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert measuring.commit().removesuffix(" with changes") == head.strip()


def test_a_result_is_written_to_a_file_beside_the_tables(tmp_path, capsys):
    path = tmp_path / "result.json"
    program = measuring.Program(
        "updates",
        None,
        updates.add_options,
        lambda options: {"tables": [{"title": "t", "rows": [{"variant": "a", "ms": 1.5}]}]},
        precisions=True,
    )
    assert program.main(["--precisions=32-true", "--variants=plain", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    assert content["tables"][0]["rows"] == [{"variant": "a", "ms": 1.5}]
    command = f"python -m benchmarks.updates --precisions=32-true --variants=plain --json={path}"
    assert content["command"] == command
    printed = capsys.readouterr().out
    assert command in printed and content["commit"] in printed and "a        1.50" in printed


# ---- processes that take turns ----


def test_the_memory_of_a_process_is_found():
    before = measuring.proportional_set_size()
    # pages of its own: NumPy may be given memory that was kept
    with mmap.mmap(-1, 50 << 20) as held:
        for page in range(0, 50 << 20, mmap.PAGESIZE):
            held[page] = 1
        assert 45 < measuring.proportional_set_size() - before < 60


@pytest.mark.slow
def test_the_memory_of_environments_is_measured(capsys):
    options = ["--tasks=1", "--envs_per_task=2", "--variants=ours", "--workers=0"]
    short = ["--env_steps=2", "--settle=0", "--rounds=1"]
    (table,) = measured(stepping, *options, *short, capsys=capsys)
    (row,) = table["rows"]
    assert row["variant"] == "ours, 0 workers" and "1 tasks, 2 environments" in table["title"]
    assert row["built per s of processor"] == pytest.approx(2 / row["s of processor to build"])
    assert abs(row["MiB per environment"]) < 200


@pytest.mark.slow
def test_the_code_of_a_step_is_timed_without_physics(capsys, monkeypatch):
    monkeypatch.setattr(stepping, "MOMENTS", 2)
    monkeypatch.setattr(stepping, "CODE_STEPS", 5)
    (table,) = measured(stepping, "--code", "reach", "--rounds=2", capsys=capsys)
    (row,) = table["rows"]
    assert row["task"] == "reach"
    assert 1 < row["ours, us"]["median"] < row["original, us"]["median"]
    assert row["times as fast"]["median"] > 1
    (env, action), (later, _) = stepping.paused("reach", True)
    before = env.unwrapped.data.time
    assert before < later.unwrapped.data.time
    with stepping.without_physics():
        env.step(action)
    assert env.unwrapped.data.time == before
    env.step(action)
    assert env.unwrapped.data.time > before


def test_the_peak_of_a_run_is_measured_until_it_ends(capsys):
    assert whole_runs.main(["--json", "-", "--memory_of", "--version"]) == 0
    content = json.loads(capsys.readouterr().out)
    (row,) = content["tables"][0]["rows"]
    assert row["run"] == "--version" and 1 < row["peak MiB"] < 2_000
    with pytest.raises(subprocess.CalledProcessError):
        whole_runs.main(["--memory_of", "list", "no_such_group_or_word"])


def test_a_pacer_runs_a_window_for_each_line(monkeypatch):
    read, written = os.pipe()
    monkeypatch.setenv(measuring.PIPE, str(written))
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
    drained = []
    pacer = Pacer(2, 3, lambda: drained.append(1) or {"update": 1e-9}, about={"built": 4.0})
    assert sum(1 for _ in iter(pacer.tick, False)) == 3 + 2 + 2
    lines = [json.loads(line) for line in os.read(read, 10_000).decode().splitlines()]
    assert lines[0] == {"built": 4.0}
    assert [set(line) for line in lines[1:]] == [{"seconds", "shares"}] * 2
    assert lines[1]["shares"]["update"] == pytest.approx(1e-9 / lines[1]["seconds"])
    assert len(drained) == 4  # at the beginning and at the end of both windows
    os.close(read)


def test_a_variant_that_fails_reports_its_output():
    code = "print(1 + 1); 1 / 0"
    broken = Variant("one that breaks", [sys.executable, "-c", code])
    message = r"one that breaks gave no answer(.|\n)*ZeroDivisionError"
    with pytest.raises(RuntimeError, match=message), started([broken]):
        pass
    once = f"import os, sys; os.write(int(os.environ['{measuring.PIPE}']), b'{{}}\\n');"
    once += " sys.stdin.readline(); print('the end', flush=True)"
    ends = Variant("ends", [sys.executable, "-c", once])
    with started([ends]), pytest.raises(RuntimeError, match=r"ends gave no answer(.|\n)*the end"):
        ends.window()


def test_no_variant_is_left_and_none_comes_twice():
    waits = f"import os, time; os.write(int(os.environ['{measuring.PIPE}']), b'{{}}\\n')"
    command = [sys.executable, "-c", f"{waits}; time.sleep(600)"]
    variant = Variant("waits", command)
    with started([variant]):
        assert variant._process.poll() is None
        assert measuring.proportional_set_size(variant.pid) > 1
    assert variant._process.poll() is not None
    with pytest.raises(ConfigurationError, match="give each variant once"), started([variant] * 2):
        pass


def test_the_other_ranks_do_not_wait_for_windows():
    callback = PaceCallback(1, 1)  # rank 0 would open the pipe, which is not there
    trainer = SimpleNamespace(is_global_zero=False)
    callback.on_train_batch_start(trainer, make_sac(WORK), None, 0)


# ---- the parts of the programs ----


def test_variants_of_ours_are_combined():
    also = ["--also", "rollout.num_workers=0", "data.memory_map=true", "--also", "a.b=1"]
    options = whole_runs.options_of(["--precisions", "32-true", "bf16-mixed", *also])
    assert whole_runs.differences_of_ours(options) == {
        name + more: {"trainer.precision": precision} | chosen
        for more, chosen in (
            ("", {}),
            (
                ", num_workers 0, memory_map true",
                {"rollout.num_workers": "0", "data.memory_map": "true"},
            ),
            (", b 1", {"a.b": "1"}),
        )
        for name, precision in (("ours 32-true", "32-true"), ("ours bf16-mixed", "bf16-mixed"))
    }


def test_every_gradient_method_is_measured():
    files = ROOT.glob("configs/gradient/*.yaml")
    assert sorted(updates.GRADIENTS) == sorted(path.stem for path in files)


def test_the_gain_over_async_is_split_by_hand():
    seconds = {
        "ours, 2 workers": [1.0, 2.0, 1.0],
        "original, 2 workers": [3.0, 4.0, 2.0],
        "ours, 0 workers": [1.0, 1.0, 1.0],
        "gymnasium async": [6.0, 4.0, 3.0],
    }
    assert stepping.split_gain("ours, 2 workers", seconds) == {
        "stepping": {"median": 1.5, "min": 1.0, "max": 2.0},
        "code": {"median": 2.0, "min": 2.0, "max": 3.0},
    }
    others = set(seconds) - {"ours, 2 workers"}
    assert [stepping.split_gain(name, seconds) for name in others] == [{}] * 3
    del seconds["gymnasium async"]
    assert stepping.split_gain("ours, 2 workers", seconds) == {}


def test_a_window_of_ranks_is_split_by_hand():
    # rank 1 begins the first exchange 2 s after rank 0, which ends it 1 s later than rank 1 ...
    first = [(1.0, 5.0), (6.0, 6.5)]
    second = [(3.0, 4.0), (5.0, 6.5)]
    parts = scaling.split_window([10.0, 10.0], [first, second])
    # ... waiting: 2 and 1; exchanges: 2 + 0.5 and 1 + 0.5
    assert parts == {"compute": 10 - 1.5 - 2.0, "reduction": (2.5 + 1.5) / 2, "waiting": 1.5}
    alone = scaling.split_window([2.0], [[]])
    assert alone == {"compute": 2.0, "reduction": 0.0, "waiting": 0.0}


def test_whole_runs_of_ranks_have_the_work_of_one_process_on_each(tmp_path):
    options = scaling.options_of(["--ranks", "1", "2"])
    runs = scaling.runs_of(options, tmp_path)
    for size in (1, 2):
        variant = runs["quickstart", size]
        command = json.loads(variant.command[-1])
        assert command["size"] == size
        assert command["arguments"][:3] == ["fit", "-c", "quickstart"]
        assert {
            f"--data.batch_size={size * 192}",
            f"--rollout.envs_per_task={size * 6}",
            f"--trainer.devices={size}",
            "--rollout.num_workers=0",
        } <= {*command["arguments"]}


# ---- the environments of the baselines ----


@pytest.mark.slow
def test_all_environments_of_the_baselines_are_the_same_task():
    for environments, class_name in (
        ("metaworld", "SawyerPushEnvV3"),
        ("our goals", "SawyerPushEnvV3"),
        ("ours", None),
    ):
        makers = one_hot_makers(["reach", "push"], environments, 2, horizon=3)
        assert len(makers) == 4
        env = makers[2]()
        observation, _ = env.reset()
        assert env.unwrapped.reward_function_version == "v2"
        assert observation.shape == (39 + 2,) and observation[39:].tolist() == [0, 1]
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(3)]
        assert ends == [(False, False), (False, False), (False, True)]
        assert class_name in (type(env.unwrapped).__name__, None)


@pytest.mark.slow
def test_upstream_has_our_protocol():
    assert names_of(["MT10"]) == MetaWorld("MT10").task_names
    assert names_of(["reach", "push-v3"]) == ("reach-v3", "push-v3")
    assert envpool_id("pick-out-of-hole-v3") == "MetaWorld/PickOutOfHole-v3"
    assert stepping.tasks_of(19, "dm_control") == ["DMC19"]
    assert stepping.tasks_of(2, "dm_control") == ["acrobot-swingup", "ball_in_cup-catch"]
    assert stepping.tasks_of(25) == ["MT25"] and stepping.tasks_of(1) == ["reach-v3"]
    assert len(stepping.tasks_of(11)) == 11
    envs = metaworld_vector(["reach", "push"], "sync")
    spec = MetaWorld(["reach", "push"]).spec
    assert envs.single_observation_space.shape == (39,)
    assert envs.metadata["autoreset_mode"].value == "SameStep"
    for one in envs.envs:
        assert one.unwrapped.max_path_length == spec.horizon == 500
        assert one.unwrapped.reward_function_version == spec.protocol["reward_version"] == "v2"
    envs.close()


def test_shimmys_environments_have_our_numbers_and_sizes():
    pytest.importorskip("dm_control")
    pytest.importorskip("shimmy")
    names = ["cartpole-balance", "reacher-easy"]
    theirs = suite_vector(stepping.make_suite("dm_control", names, is_fast=False), "sync")
    ours = VectorEnv(DMControl(names, action_repeat=1), [0, 1], "eval", num_workers=0)
    assert theirs.single_observation_space.shape == ours.single_observation_space.shape == (6,)
    assert theirs.metadata["autoreset_mode"].value == "SameStep"
    action_EA = np.full((2, 2), 0.5, np.float32)
    for envs in (theirs, ours):
        envs.reset(seed=[3, 4])
    assert ours.step(action_EA)[1].tolist() == theirs.step(action_EA)[1].tolist()
    for kind in ("ours", "original"):
        envs, step = stepping.build(kind, "dm_control", names, 0)
        envs.reset(seed=1)
        assert step(action_EA).reward_E.shape == (2,)
        envs.close()
    ours.close()
    theirs.close()


# ---- the measured models ----


def options_in(config):
    """Return the model's options that a file below configs/ sets itself."""
    return yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())["model"]["init_args"]


def test_the_measured_encoders_and_methods_are_those_of_the_configs():
    work = replace(WORK, tasks=4, image_size=24)
    for name, strides in STRIDES.items():
        expected = options_in(f"encoder/{name}")["encoder"]["init_args"]
        sac = pixel_sac(work, name)
        assert list(strides) == expected["strides"]
        assert sac.encoder.latent_dim == expected["out_dim"]
        assert sac.encoder.convolutions[0].out_channels == expected["channels"]
    schedule = options_in("algorithm/sac_ae")
    assert sac.actor_every == schedule["actor_every"]
    assert sac.target_every == schedule["target_every"]
    for method in PIXEL_METHODS:
        expected = options_in(f"algorithm/{'mtsac' if method == 'sac' else method}")
        sac = pixel_sac(work, "pixels_small", method=method)
        for kind in ("auxiliaries", "transforms"):
            names = [part["class_path"].rpartition(".")[2] for part in expected.get(kind) or []]
            found = [type(part).__name__ for part in getattr(sac, kind)]
            assert [name for name in found if name != "RewardScale"] == names
    context = options_in("encoder/pixels_context")["encoder"]["init_args"]["context"]
    assert sac.encoder.context.out_dim == context["init_args"]["out_dim"]


def test_the_measured_model_is_that_of_the_experiment():
    expected = resolve("experiment/mtmhsac")["model"]["init_args"]
    sac = make_sac(Work(tasks=10, batch_size=1280, width=400, depth=3))
    for name, value in expected.items():
        if not isinstance(value, dict):
            assert sac.hparams[name] == value, name
    for k, kind in enumerate(("critic", "actor", "temperature")):
        optimizer = sac.configure_optimizers()[k]
        options = expected[f"{kind}_optimizer"]["init_args"]
        options["betas"] = tuple(options["betas"])
        assert {name: optimizer.defaults[name] for name in options} == options
        class_path = expected[f"{kind}_optimizer"]["class_path"]
        assert type(optimizer).__name__ == class_path.rsplit(".", 1)[1]
    assert sac.temperature.log_alpha.shape == (10,) and sac.temperature.log_alpha.abs().max() == 0
    for network, kind in ((sac.actor, "actor"), (sac.critic.members[0], "critic")):
        options = expected[kind]["init_args"]
        assert type(network).__name__ == expected[kind]["class_path"].rsplit(".", 1)[1]
        assert network.heads.in_features == options["width"] == 400 and options["depth"] == 3
        assert network.heads.weight.abs().max() <= options["output_bound"]


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
    plain = PlainSAC(OBSERVATION, ACTION, WORK.tasks, WORK.width, WORK.depth)
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


def test_the_plain_replay_gives_back_whole_rows():
    ring = PlainReplay(2, 3, 1, capacity=8)
    for step in range(6):  # four rows an environment: the first two are overwritten
        value = np.array([[step], [step + 100]], np.float32)
        row = (np.repeat(value, 3, 1), value, value[:, 0], np.repeat(value + 1, 3, 1))
        ring.add(*row, value[:, 0] < 0)
    batch = ring.sample(400)
    assert batch.task_B.tolist() == [0] * 200 + [1] * 200
    assert {*batch.reward_B[:200].tolist()} == {2, 3, 4, 5}
    assert {*batch.reward_B[200:].tolist()} == {102, 103, 104, 105}
    assert torch.equal(batch.observation_BD, batch.reward_B[:, None].expand(-1, 3))
    assert torch.equal(batch.next_observation_BD, batch.observation_BD + 1)
    assert torch.equal(batch.action_BA[:, 0], batch.reward_B) and not batch.terminated_B.any()


def test_the_plain_replay_samples_from_all_environments_of_a_task():
    ring = PlainReplay(4, 1, 1, capacity=8, envs_per_task=2)
    number_E = np.arange(4, dtype=np.float32)
    column_E1 = number_E[:, None]
    ring.add(column_E1, column_E1, number_E, column_E1, number_E < 0)
    batch = ring.sample(40)
    assert batch.task_B.tolist() == [0] * 20 + [1] * 20
    assert {*batch.reward_B[:20].tolist()} == {0, 1}
    assert {*batch.reward_B[20:].tolist()} == {2, 3}
