"""The program for a GPU: its dry run, what it computes, and what becomes of parts that fail."""

import json
import subprocess
import sys

import psutil
import pytest
import torch

from benchmarks import (
    gpu,
    gpu_parts,
    gpu_runs,
    gpu_training,
    gpu_updates,
    gpu_windows,
    measuring,
)
from benchmarks.gpu_setup import FULL, Setup, Shape
from benchmarks.gpu_sheet import Sheet, read_sheet
from mtrl_lightning.__main__ import main
from tests.conftest import ROOT, parser


class FakeEntrant:
    """A process of which each window takes 2 s; of two kinds, one does not start, one ends."""

    def __init__(self, name, kind, command, folder, timeout):
        self.name = name
        self.ready_seconds = 1.0
        self.about = {"environments": 12.0}
        self.command = command(3)

    def start(self):
        if "bf16-mixed" in self.name and "PPO" in self.name:
            raise RuntimeError("it printed: no bfloat16")

    def window(self):
        if "4 copies" in self.name:
            raise RuntimeError("it printed: out of memory")
        return 2.0

    def memory(self):
        return 100.0

    def fractions(self):
        return {"update": 0.75, "act": 0.25}

    def close(self):
        pass


def in_this_process(monkeypatch):
    """Run parts and `fit` without processes of their own; imports take longer than all else."""

    def run_here(setup):
        gpu_parts.run_part(setup)
        return 0

    def fit_here(log, command, setup):
        assert command[:3] == [sys.executable, "-m", "mtrl_lightning"]
        monkeypatch.setattr(sys, "argv", ["mtrl-lightning", *command[3:]])
        main()
        return 0

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "in_own_process", run_here)
    monkeypatch.setattr(gpu, "usable_cores", lambda: 1)
    for module in (gpu_runs, gpu_updates):
        monkeypatch.setattr(module, "Entrant", FakeEntrant)
    monkeypatch.setattr(gpu_training, "printing_to", fit_here)


def test_without_a_gpu_all_is_measured_on_the_cpu(tmp_path, monkeypatch, capsys):
    in_this_process(monkeypatch)
    parts = [part for part in gpu_parts.PARTS if part != "tests"]
    assert gpu.main(["--folder", str(tmp_path), "--parts", *parts]) == 1
    assert "no GPU that PyTorch can use: a dry run" in capsys.readouterr().err
    found = json.loads((tmp_path / "report.json").read_text())
    states = {name: part["state"] for name, part in found["parts"].items()}
    failing = ("updates", "pace")
    assert states == {name: "failed" if name in failing else "done" for name in parts}
    assert found["is_dry"] and found["machine"]["torch"] == torch.__version__

    tables = {name: part["tables"] for name, part in found["parts"].items()}
    ((update,),) = tables["updates"].values()
    assert update["variant"] == "cpu direct 32-true"
    assert (update["ms"], update["per_second"], update["times_eager"]) == (1000.0, 1.0, 1.0)
    (failure,) = found["parts"]["updates"]["failures"]
    assert failure["what"].endswith("ppo bf16-mixed") and "no bfloat16" in failure["error"]
    (methods,) = tables["gradients"].values()
    assert {row["method"] for row in methods} == set(gpu_updates.gradients.METHODS)
    (draws,) = tables["replay"].values()
    assert {row["replay"] for row in draws} == {"host", "cpu"} and draws[0]["us"] > 0
    assert len(tables["pixels"]) == 2
    (row,) = tables["pace"]["env steps per second of whole runs"]
    # 5 updates in 2 s, and 12 environment steps for each
    assert (row["variant"], row["env_steps_per_s"], row["updates_per_s"]) == ("32-true", 30.0, 2.5)
    trained = {row["what"]: row["value"] for row in tables["training"]["training"]}
    assert trained["env steps"] == 600 and "eval/success after 600 steps" in trained
    # the quickest variant is the only one that could be measured
    assert found["parts"]["training"]["notes"] == ["options: 32-true"]

    text = (tmp_path / "report.md").read_text()
    assert "A dry run" in text and "### failed: bf16-mixed, 4 copies" in text
    assert gpu.main(["--folder", str(tmp_path), "--parts", "replay"]) == 0
    assert list(json.loads((tmp_path / "report.json").read_text())["parts"]) == parts


def test_the_projection_by_hand():
    curves = {
        "time/env_steps_per_second": ([100, 200, 300, 400, 500], [50.0, 1.0, 1.0, 50.0, 100.0]),
        "time/updates_per_second": ([100, 200, 300, 400, 500], [0.0, 1.0, 1.0, 5.0, 10.0]),
        "time/evaluate_fraction": ([100, 200, 300, 400, 500], [0.0, 0.0, 0.0, 0.5, 0.0]),
        "time/checkpoint_fraction": ([100, 200, 300, 400, 500], [0.0, 0.0, 0.0, 0.25, 0.0]),
    }
    found = gpu_training.projection(curves)
    # the warm-up and two rows are left out; 100 steps in 2 s, of which 1.5 s no training; 100 in 1
    assert found["env steps that are counted"] == 200 and found["seconds of them"] == 3.0
    assert found["env steps per second while training"] == pytest.approx(200 / 1.5)
    assert found["updates per second while training"] == pytest.approx(20 / 1.5)
    hours = [value for name, value in found.items() if name.startswith("hours")]
    assert hours == pytest.approx([20e6 / (200 / 1.5) / 3600, 20e6 / (200 / 3) / 3600])
    early = {name: (steps[:2], values[:2]) for name, (steps, values) in curves.items()}
    assert gpu_training.projection(early) == {"env steps": 200.0}


def test_all_is_over_within_40_minutes():
    limits = [gpu.limit_of(part, gpu.parse([]).minutes, False) for part in gpu_parts.PARTS]
    assert sum(limits) <= 40 * 60
    assert gpu.limit_of("training", 2.0, False) == gpu.LIMITS["training"] + 120
    assert gpu_training.clock(10.0) == "00:00:10:00" and gpu_training.clock(61.55) == "00:01:01:33"


def test_the_options_on_a_gpu_are_known(tmp_path):
    setup = Setup("pace", str(tmp_path), False, 10.0, 300.0)
    variants = gpu_runs.run_variants(setup)
    commands = [gpu_runs.paced(v.name, v.options, setup, 20)._make(7) for v in variants]
    everything = max(commands, key=len)
    assert "--model.init_args.compile=cudagraphs" in everything
    arguments = everything[everything.index("fit") :]
    found = parser().parse_args([*arguments, "--data.on_device=false"])["fit"]
    assert found.rollout.updates_per_step == found.rollout.envs_per_task == 4
    assert found.trainer.accelerator == "gpu" and found.rollout.num_workers is None
    assert gpu_training.quickest(setup).name == "bf16-mixed, cudagraphs"
    sheet = Sheet(tmp_path / "pace.json")
    for name, rate in ((gpu_runs.ON_CPU, 3.0), ("bf16-mixed", 2.0), ("32-true", 1.0)):
        sheet.row("runs", variant=name, env_steps_per_s=rate)
    assert gpu_training.quickest(setup).name == "bf16-mixed"


def test_what_is_compared_on_a_gpu(tmp_path):
    setup = Setup("updates", str(tmp_path), False, 10.0, 300.0)
    assert {400, 1024, 4096} <= {shape.width for shape in FULL.shapes}
    works = gpu_updates.works_of(FULL.shapes[0], setup)
    ways = ("", ", compile default", ", compile cudagraphs")
    wanted = {f"cuda direct {p}{how}" for p in measuring.PRECISIONS for how in ways}
    assert wanted == {name for name in works if name.startswith("cuda direct")}
    assert works["cuda direct 32-true, compile cudagraphs"][1].compile == "cudagraphs"
    assert {"cuda plain 32-true", "cuda trainer bf16-mixed", "cpu direct 32-true"} <= set(works)
    large = gpu_updates.works_of(Shape("", "direct", 10, 1280, 4096, 3), setup)
    steps = {name: work.steps for name, (_, work) in large.items()}
    assert steps["cuda direct 32-true"] == 29 and steps["cpu direct 32-true"] == 2


@pytest.mark.parametrize(
    ("returncode", "failures", "state"),
    [(0, 0, "done"), (0, 1, "failed"), (-9, 0, "failed"), (None, 0, "over its time")],
)
def test_the_state_of_a_part(returncode, failures, state, tmp_path, monkeypatch):
    def fake(setup):
        sheet = Sheet(gpu_parts.sheet_path(setup))
        sheet.row("table", variant="a", ms=1.0)
        for _ in range(failures):
            with sheet.trying("b"):
                raise ValueError("c")
        return returncode

    monkeypatch.setattr(gpu, "in_own_process", fake)
    found = gpu.run(Setup("replay", str(tmp_path), True, 1.0, 5.0))
    assert found["state"] == state and found["tables"]["table"] == [{"variant": "a", "ms": 1.0}]
    assert len(found["failures"]) == (1 if state == "failed" else 0)


def test_one_device_has_no_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = gpu.run(Setup("ranks", str(tmp_path), False, 1.0, 5.0))
    assert found["state"] == "not run: 1 device"
    assert gpu.reason_against("ranks", True) is None
    assert gpu.reason_against("pace", False) is None


def test_a_part_is_ended_with_all_that_it_has_started():
    code = (
        "import subprocess, time;"
        " child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        " print(child.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = psutil.Process(int(process.stdout.readline()))
    gpu.end(process)
    assert process.poll() is not None
    child.wait(5)
    process.stdout.close()


def test_results_of_tests_are_counted(tmp_path):
    (tmp_path / "tests.xml").write_text(
        "<testsuites><testsuite><testcase classname='tests.a' name='x' time='1.5'/>"
        "<testcase classname='tests.a' name='y' time='0.5'><failure message='m'>it broke</failure>"
        "</testcase><testcase classname='tests.b' name='z' time='0'><skipped/></testcase>"
        "</testsuite></testsuites>"
    )
    sheet = Sheet(tmp_path / "tests.json")
    gpu_parts.note_tests(tmp_path / "tests.xml", sheet)
    found = read_sheet(tmp_path / "tests.json")
    (rows,) = found["tables"].values()
    assert rows == [
        {"file": "tests.a", "passed": 1, "failed": 1, "skipped": 0, "seconds": 2.0},
        {"file": "tests.b", "passed": 0, "failed": 0, "skipped": 1, "seconds": 0.0},
    ]
    assert found["failures"] == [{"what": "tests.a::y", "error": "it broke"}]
    assert ROOT / "tests/gradients/test_every_method.py" in gpu_parts.marked_files(ROOT / "tests")


def test_a_command_whose_time_is_over_is_ended(tmp_path):
    setup = Setup("tests", str(tmp_path), True, 1.0, 0.3)
    log = tmp_path / "log"
    assert gpu_windows.printing_to(log, ["sh", "-c", "echo started; exec sleep 60"], setup) is None
    assert log.read_text().split() == ["started", "ended", "after", "0", "s"]
    assert gpu_windows.printing_to(log, ["false"], setup) == 1


def test_what_is_read_from_logs(tmp_path):
    assert gpu_training.mean_columns("50, 100.0, 3\n[N/A], 1, 1\n70, 200.0, 5\n") == [60, 150, 4]
    assert gpu_training.mean_columns("no such device") == []
    (tmp_path / "a.log").write_text("x\n[1] skipping cudagraphs due to cpu device\n")
    (tmp_path / "b.log").write_text("x\n")
    gpu_windows.note_skipped(tmp_path, Sheet(tmp_path / "sheet.json"))
    (note,) = read_sheet(tmp_path / "sheet.json")["notes"]
    assert note == "a: 1 times [1] skipping cudagraphs due to cpu device"


def test_cells_of_the_report():
    cells = [gpu.cell(value) for value in (None, True, 12345.6, 0.012345, 1234, "a")]
    assert cells == ["", "yes", "12,346", "0.0123", "1,234", "a"]
    rows = [{"a": 1, "b": 2.5}, {"b": 3.0, "c": "x"}]
    expected = ["| a | b | c |", "| --- | --- | --- |", "| 1 | 2.5 |  |", "|  | 3 | x |"]
    assert gpu.markdown_table(rows) == expected


def test_a_dry_run_leaves_the_report_of_a_gpu_alone(tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text('{"is_dry": false, "parts": {}}')
    assert gpu.main(["--folder", str(tmp_path), "--parts", "ranks", "--dry"]) == 2
    assert "is of a run on a GPU: give another --folder" in capsys.readouterr().err
    assert report.read_text() == '{"is_dry": false, "parts": {}}'
