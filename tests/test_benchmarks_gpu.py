"""The script for a GPU, as far as it runs without one."""

from __future__ import annotations

import sys

from benchmarks import gpu


def test_a_part_that_fails_or_takes_too_long_is_reported_and_ends_nothing():
    failing = gpu.Part("one", 9, [sys.executable, "-c", "print('said'); raise SystemExit(3)"])
    text = gpu.run_part(failing, 60)
    assert "## one: failed with 3" in text and "\nsaid\n" in text
    long = gpu.Part(
        "two", 1, [sys.executable, "-c", "import time; time.sleep(60)"], lambda: "after"
    )
    text = gpu.run_part(long, 1)
    assert "## two: over its time" in text and "\nafter\n" in text


def test_the_pace_of_a_run_is_that_after_its_warm_up(tmp_path):
    folder = tmp_path / "runs" / "sac" / "version_0"
    folder.mkdir(parents=True)
    rows = ["env_steps,time/env_steps_per_second,eval/success"]
    rows += ["10,90000,", "20,,0.25", "30,4000,", "40,6000,0.5"]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert gpu.pace_of(tmp_path, "sac") == "5,000 env steps/s: 67 min for 20,000,000"
    assert gpu.success_of(tmp_path, "sac") == "20: 0.25, 40: 0.50"
    assert gpu.pace_of(tmp_path, "ppo") == "no row of metrics"


def test_the_most_important_part_comes_first_and_all_use_graphs(tmp_path):
    parts = {part.name: part for part in gpu.parts_of(tmp_path, is_dry=False)}
    assert [*parts][:5] == ["tests", "updates", "sac", "ppo", "memory"]
    assert sum(part.limit_s for part in list(parts.values())[:5]) < 60 * gpu.MINUTES
    for name in ("sac", "ppo", "learning_graph_1"):
        assert "--model.init_args.compile=graph" in parts[name].command
    assert "--model.init_args.compile=none" in parts["learning_none_1"].command


def test_memory_is_printed_while_updates_are_made(capsys):
    assert gpu.main(["--dry", "--run", "memory"]) == 0
    assert capsys.readouterr().out.splitlines() == ["0.00 MiB"] * 5


def test_acting_is_timed_on_the_device_and_on_the_host(capsys):
    assert gpu.main(["--dry", "--run", "acting"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 graphs of acting"  # there is no GPU
    names = ("on the device", "on the host", "copy of the weights to the host", "by a graph")
    found = [line.rpartition(": ")[0] for line in lines if line.endswith(" ms")]
    assert found == [f"{num} environments, {name}" for num in (2, 16) for name in names]
