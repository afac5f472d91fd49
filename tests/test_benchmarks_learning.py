"""Runs of variants that are trained, read, compared and resumed; see tests/reports for numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from benchmarks import learning
from benchmarks.learning import Variant
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.precision import ProductTimes
from mtrl_lightning.runs import run_lock
from tests.conftest import ROOT

TINY = {
    "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
    "data": {
        "benchmark": {
            "class_path": "mtrl_lightning.envs.ToyReach",
            "init_args": {"num_tasks": 2, "horizon": 5},
        },
        "batch_size": 4,
        "capacity": 200,
    },
    "rollout": {"total_steps": 60, "warmup_steps": 10, "num_workers": 0, "learner_threads": 1},
    "evaluation": {"every": 20, "num_episodes": 2, "num_workers": 0},
    "checkpoint": {"every": 20},
    "model": {
        "class_path": "mtrl_lightning.algorithms.SAC",
        "init_args": {
            part: {
                "class_path": "mtrl_lightning.networks.MLP",
                "init_args": {"width": 8, "depth": 1},
            }
            for part in ("actor", "critic")
        },
    },
}


def test_variants_take_the_options_that_follow_them():
    words = "--seeds 2 --variant a --variant b --x.y 3 --z --variant c -o"
    given, variants = learning.parse(words.split())
    assert given.seeds == 2
    assert variants == [Variant("a", []), Variant("b", ["--x.y", "3", "--z"]), Variant("c", ["-o"])]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--variant",
        "--variant a --variant a",
        "--variant --x 3",
        "--seeds 0 --variant a",
        "--config nowhere.yaml --variant a",
    ],
)
def test_wrong_options_and_variants_without_a_name_of_their_own_are_an_error(arguments, capsys):
    with pytest.raises(SystemExit):
        learning.parse(arguments.split())
    assert "error:" in capsys.readouterr().err


def test_variants_in_bf16_are_left_out_where_it_is_slower(tmp_path, monkeypatch, capsys):
    slow = ProductTimes(64, 400, float32=0.001, bfloat16=0.02)
    monkeypatch.setattr(learning, "slow_bfloat16", lambda device: slow)
    options = f"--seeds 1 --folder {tmp_path} --variant a --variant b --trainer.precision"
    for words in (f"{options} bf16-mixed", f"{options}=bf16-mixed"):
        given, variants = learning.parse(words.split())
        kept, left_out = learning.leave_out_slow(variants, given)
        assert [variant.name for variant in kept] == ["a"]
        assert len(left_out) == 1
        assert "b is left out: matrix products take 20.0 times as long" in left_out[0]
        assert left_out[0] in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="give a variant with"):
        learning.leave_out_slow(variants[1:], given)
    (tmp_path / "b_1.json").write_text("{}")  # its run is finished
    assert learning.leave_out_slow(variants, given) == (variants, [])
    (tmp_path / "b_1.json").unlink()
    monkeypatch.setattr(learning, "slow_bfloat16", lambda device: None)
    assert learning.leave_out_slow(variants, given) == (variants, [])


def refusal(capsys, *arguments):
    """What the program says when it refuses something."""
    with pytest.raises(SystemExit) as ended:
        learning.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_runs_are_made_once_compared_and_continued(tmp_path, capsys, monkeypatch):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(TINY))
    base = [
        "--config",
        str(config),
        "--folder",
        str(tmp_path / "out"),
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--json",
    ]
    named = tmp_path / "named.yaml"
    named.write_text("name: not_the_variants_name")
    variants = [
        "--variant",
        "plain",
        "--variant",
        "wide",
        "--config",
        str(named),
        "--model.init_args.actor.init_args.width",
        "9",
    ]
    learning.main([*base, *variants])
    content = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in content["rows"]] == ["plain", "wide"]
    assert [row["seeds"] for row in content["rows"]] == [2, 2]
    assert (tmp_path / "out" / "learning.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "out" / "learning.json").read_text()) == content
    saved = yaml.safe_load((tmp_path / "out" / "wide_2" / "version_0" / "config.yaml").read_text())
    assert (
        saved["seed_everything"] == 2
        and saved["model"]["init_args"]["actor"]["init_args"]["width"] == 9
    )

    # a run that is not finished is continued, after one that fails; the others are not made again
    (tmp_path / "out" / "plain_1.json").unlink()
    calls = []
    popen = learning.subprocess.Popen
    monkeypatch.setattr(
        learning.subprocess,
        "Popen",
        lambda line, **given: calls.append(line) or popen(line, **given),
    )
    broken = ["--variant", "broken", "--data.bananas", "3"]
    error = refusal(capsys, *base, "--seeds", "1", "--jobs", "1", *broken, *variants)
    assert re.search(r"(?s)broken_1 ended with code 2: .*bananas", error)
    assert "error: broken_1 failed, see above; 2 of 3 runs are finished: the same" in error
    assert ["broken_1" in line for line in calls] == [True, False]
    assert calls[1][-2:] == ["--ckpt_path", "last"]
    learning.main([*base, *variants])
    assert json.loads(capsys.readouterr().out)["rows"] == content["rows"]
    assert len(calls) == 2

    assert "plain_1.json is of a run with other options: give another" in refusal(
        capsys, *base, "--variant", "plain", "--data.seed", "3"
    )
    assert "eval/nothing of plain has no values" in refusal(
        capsys, *base, "--metric", "eval/nothing", "--variant", "plain"
    )


def test_a_folder_in_which_another_call_trains_is_refused(tmp_path, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(TINY))
    options = ["--config", str(config), "--folder", str(tmp_path), "--seeds", "1"]
    with run_lock(tmp_path):
        error = refusal(capsys, *options, "--variant", "a")
    assert re.search(f"error: another process .* in {tmp_path}:", error)
    assert not (tmp_path / "a_1").exists()


def test_a_signal_ends_the_runs_too_and_they_can_be_continued(tmp_path):
    config, out = tmp_path / "tiny.yaml", tmp_path / "out"
    config.write_text(
        yaml.safe_dump(TINY | {"rollout": TINY["rollout"] | {"total_steps": 1_000_000}})
    )
    line = [
        sys.executable,
        "-m",
        learning.__name__,
        "--config",
        str(config),
        "--folder",
        str(out),
        "--variant",
        "a",
    ]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    csv = out / "a_1" / "version_0" / "metrics.csv"
    while not csv.exists():
        assert process.poll() is None
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(60) == 143
    assert "ended with code" not in process.stderr.read(), "it has not failed"
    assert psutil.wait_procs(children, 20)[1] == []
    assert (out / "a_1" / "version_0" / "checkpoints" / "last.ckpt").exists() and not (
        out / "a_1.json"
    ).exists()
