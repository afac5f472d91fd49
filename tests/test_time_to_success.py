"""Time to success: the rule by hand, the order of runs, and each variant with test episodes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
import yaml

from benchmarks import baselines, time_to_success
from benchmarks.baselines import Hyperparameters, PPOJob, SACJob
from benchmarks.measuring import COMMAND, call_of
from benchmarks.whole_runs import paced_arguments
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.benchmarks import lines_of
from tests.helpers.command_line import ROOT, resolve

TASKS = ["reach", "push"]
"""The names are looked up; nothing is simulated where the runs are faked."""


TINY = {
    "trainer": {"accelerator": "cpu", "enable_model_summary": False},
    "data": {
        "benchmark": {
            "class_path": "mtrl_lightning.envs.ToyReach",
            "init_args": {"num_tasks": 2, "horizon": 5},
        },
        "batch_size": 4,
        "capacity": 200,
    },
    "rollout": {"warmup_steps": 10, "num_workers": 0, "learner_threads": 1},
    "evaluation": {"num_workers": 0},
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


def evaluations(*successes, minutes=1.0):
    """Return evaluations after 100, 200, ... env steps."""
    return [
        {
            "env_steps": 100 * (k + 1),
            "updates": 10 * (k + 1),
            "minutes": minutes * (k + 1),
            "success": {"reach-v3": success, "push-v3": 1.0},
        }
        for k, success in enumerate(successes)
    ]


def test_the_threshold_takes_two_evaluations_in_a_row():
    reached_at = time_to_success.reached_at
    assert reached_at(evaluations(0.2, 0.6, 0.4, 0.6, 0.8)) == 3
    assert reached_at(evaluations(0.6, 0.4, 0.6)) is None
    assert reached_at([]) is None
    exact = {"success": {"a": 0.7, "b": 1.0, "c": 0.7}}
    assert reached_at([exact, exact]) == 0, "2.4 / 3 is a little less in floating point"


def test_rows_by_hand():
    quick = evaluations(0.6, 0.6)
    slow = evaluations(0.0, 0.0, 0.6, 0.6, minutes=2.0)
    never = evaluations(0.0, 0.0, 0.0, minutes=5.0)
    assert time_to_success.row_of("ours", [slow, quick, never]) == {
        "variant": "ours",
        "reached": [True, True, False],
        "env_steps": [300, 100, 300],
        "updates": [30, 10, 30],
        "minutes": [6.0, 1.0, 15.0],
    }


class FakeVariant:
    """Learns in an instant."""

    def __init__(self, name, *_):
        self.name = name
        self.ready_seconds = 30.0
        self.asked = 0
        self.calls.append(name)

    def start(self):
        pass

    def close(self):
        self.calls.append(f"{self.name} ended")

    def ask(self, _):
        self.asked += 1
        return {"seconds": 60.0, **evaluations(*[0.9] * self.asked)[-1]}


def test_runs_take_turns_are_written_and_are_not_made_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    calls = []
    FakeVariant.calls = calls
    monkeypatch.setattr(time_to_success, "Variant", FakeVariant)
    base = [
        "--variants",
        "ours",
        "sb3",
        "--tasks",
        *TASKS,
        f"--folder={tmp_path}",
        "--threads=1",
        "--json",
    ]
    time_to_success.main(base)
    content = json.loads(capsys.readouterr().out)
    turns = ["ours", "ours ended", "sb3", "sb3 ended"]
    assert calls == turns * 2
    (one,) = content["sets"]
    assert one["tasks"] == TASKS
    assert [len(run) for run in one["runs"]["ours"]] == [2, 2]
    assert one["runs"]["sb3"][1][0]["minutes"] == 1.5  # the start counts
    assert one["rows"][1] == {
        "variant": "sb3",
        "reached": [True, True],
        "env_steps": [100, 100],
        "updates": [10, 10],
        "minutes": [1.5, 1.5],
    }
    assert (tmp_path / "time_to_success.png").read_bytes()[:4] == b"\x89PNG"
    assert content["command"].startswith("python -m benchmarks.time_to_success --variants ours")
    written = json.loads((tmp_path / "reach_push" / "ours_1.json").read_text())
    assert (written["command"], written["commit"]) == (content["command"], content["commit"])

    calls.clear()
    (tmp_path / "reach_push" / "sb3_2.json").unlink()
    time_to_success.main(base[:-1])
    assert "100 / 100 10 / 10 1.5 / 1.5" in " ".join(capsys.readouterr().out.split())
    assert calls == ["sb3", "sb3 ended"]
    with pytest.raises(ConfigurationError, match=r"ours_1\.json is of a run with other options"):
        time_to_success.main([*base, "--minutes=3"])

    calls.clear()
    short = [*base, "--minutes=1.1", "--seeds=1", f"--folder={tmp_path / 'short'}"]
    monkeypatch.setattr(time_to_success, "THRESHOLD", 0.96)
    time_to_success.main(short)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["sets"][0]
    assert [len(runs[0]) for runs in found["runs"].values()] == [1, 1]
    assert [row["reached"] for row in found["rows"]] == [[False], [False]]


def test_the_baselines_get_the_quickstarts_hyperparameters(monkeypatch):
    monkeypatch.chdir(ROOT)
    options = time_to_success.options_of(["--threads=1"])
    assert options.tasks == [list(tasks) for tasks in time_to_success.TASKS]
    quickstart = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    assert options.tasks[0] == quickstart["data"]["benchmark"]["init_args"]["tasks"]
    assert quickstart["data"]["benchmark"]["init_args"]["horizon"] == time_to_success.HORIZON
    assert "updates_per_step" not in quickstart["rollout"]  # which is 1
    names = ("sb3", "sb3_quickstart", "sb3_updates", "plain")
    jobs = {name: time_to_success.job_of(name, TASKS, 7, options) for name in names}
    expected = Hyperparameters(1e-3, 1e-8, 0.97, 0.01, 0.1)._asdict()
    for name in names[1:]:
        job = jobs[name]
        assert job.hyperparameters == expected
        assert (job.envs_per_task, job.batch_size, job.capacity, job.width, job.depth) == (
            6,
            192,
            300_000,
            256,
            2,
        )
        assert (job.warmup * 12, job.steps * 12, job.seed) == (9_000, 9_000, 7)
    assert [job.updates for job in jobs.values()] == [1, 1, 12, 1]
    defaults = jobs["sb3"]
    assert (defaults.envs_per_task, defaults.batch_size, defaults.warmup * 2) == (1, 256, 9_000)
    assert defaults.hyperparameters == Hyperparameters(3e-4, 1e-8, 0.99, 0.005, 1.0)._asdict()


def test_the_baseline_ppo_gets_the_sizes_of_quickstart_ppo(monkeypatch):
    monkeypatch.chdir(ROOT)
    options = time_to_success.options_of(["--threads=1"])
    job = time_to_success.job_of("sb3_ppo", TASKS, 7, options)
    config = resolve("quickstart_ppo")
    model = config["model"]["init_args"]
    for name in ("num_steps", "num_epochs", "num_minibatches", "entropy_coef"):
        assert getattr(job, name) == model[name]
    for network in ("actor", "critic"):
        sizes = model[network]["init_args"]
        assert (job.width, job.depth) == (sizes["width"], sizes["depth"])
        assert job.learning_rate == model[f"{network}_optimizer"]["init_args"]["lr"]
    assert job.envs_per_task == config["rollout"]["envs_per_task"]
    assert (job.seed, job.num_episodes, job.iterations) == (7, 10, 2)


@pytest.mark.parametrize("name", ["ours_ppo", "ours_midway"])
def test_ppo_trains_its_own_configuration_in_windows_of_two_iterations(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = time_to_success.options_of(["--threads=1"])
    job = time_to_success.job_of(name, TASKS, 7, options)
    command = time_to_success.variant_of(name, job, tmp_path).command
    assert {str(time_to_success.PPO_CONFIG), "--seed_everything=7"} <= {*command}
    explored = resolve("mt10_quickstart")["rollout"]
    midway = {
        f"--rollout.midway_starts={explored['midway_starts']}",
        f"--rollout.after_success={explored['after_success']}",
        f"--rollout.pausing={explored['pausing']['class_path']}",
    }
    assert (midway <= {*command}) == (name == "ours_midway")
    model = resolve("quickstart_ppo")["model"]["init_args"]
    updates = 2 * model["num_epochs"] * model["num_minibatches"]
    pace = json.loads(command[-1].removeprefix("--trainer.callbacks+="))["init_args"]
    assert pace == {"steps": updates, "settle": 0, "num_episodes": 10}


def test_unknown_tasks_are_errors(capsys):
    with pytest.raises(SystemExit):
        time_to_success.options_of(["--tasks=nothing"])
    assert "MetaWorld has no task nothing-v3" in capsys.readouterr().err


JOB = SACJob(
    tasks=["reach"],
    width=8,
    depth=1,
    batch_size=4,
    capacity=40,
    warmup=3,
    steps=2,
    settle=0,
    device="cpu",
    threads=None,
    updates=2,
    num_episodes=1,
    envs_per_task=2,
    horizon=5,
    environments="ours",
)


PPO_JOB = PPOJob(
    tasks=["reach"],
    width=8,
    depth=1,
    num_steps=4,
    num_epochs=3,
    num_minibatches=2,
    iterations=2,
    settle=0,
    device="cpu",
    threads=None,
    num_episodes=1,
    envs_per_task=2,
    horizon=5,
    environments="ours",
)


@pytest.mark.slow
def test_the_baseline_ppo_runs_test_episodes_between_windows(monkeypatch):
    command = call_of(baselines.train, {"kind": "sb3 ppo", "job": asdict(PPO_JOB)})
    first, *windows = lines_of(command, monkeypatch)
    assert first == {}
    # two iterations of 2 environments' 4 steps, and 3 passes over 2 minibatches in each
    assert [line["env_steps"] for line in windows] == [16, 32]
    assert [line["updates"] for line in windows] == [12, 24]
    assert all(set(line["success"]) == {"reach-v3"} for line in windows)


@pytest.mark.parametrize("kind", ["sb3 sac", "plain sac"])
def test_baselines_run_test_episodes_between_windows(kind, monkeypatch):
    job = asdict(JOB)
    command = call_of(baselines.train, {"kind": kind, "job": job})
    first, *windows = lines_of(command, monkeypatch)
    assert first == {}
    extra = 2 * (kind == "sb3 sac")  # it has made the step before the update
    assert [line["env_steps"] for line in windows] == [10 + extra, 14 + extra]
    assert [line["updates"] for line in windows] == [4, 8]
    assert all(set(line["success"]) == {"reach-v3"} for line in windows)


def test_ours_runs_test_episodes_between_windows(tmp_path, monkeypatch):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)

    arguments = paced_arguments(config, {"evaluation.every": 10**12}, 2, 0, num_episodes=2)
    first, *windows = lines_of([sys.executable, *COMMAND, *arguments], monkeypatch)
    assert first == {"environments": 2.0}
    assert [line["env_steps"] for line in windows] == [14, 18]
    assert [line["updates"] for line in windows] == [2, 4]
    assert all(len(line["success"]) == 2 and line["seconds"] > 0 for line in windows)
