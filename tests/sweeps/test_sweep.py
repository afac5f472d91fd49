"""Sweeps on one machine: what is tried, what is ended early, what a kill costs, what is shown."""

import contextlib
import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from mtrl_lightning.cli import sweep as command
from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.sweeps.sweep_file import read_sweep_file

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install -e '.[sweep]'")

from mtrl_lightning.sweeps import plots  # noqa: E402
from mtrl_lightning.sweeps import sweep as sweeps  # noqa: E402
from mtrl_lightning.sweeps.plots import write_plots  # noqa: E402
from mtrl_lightning.sweeps.study import (  # noqa: E402
    DATABASE,
    interrupted_trials,
    next_trial,
    open_study,
)
from mtrl_lightning.sweeps.sweep import SweepOptions, run_sweep  # noqa: E402
from mtrl_lightning.sweeps.table import (  # noqa: E402
    printed_table,
    rows_of,
    short_names,
    write_tables,
)

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, "-m", "tests.helpers.fake_run"]
CONTENT = {
    "program": "mtrl-lightning",
    "method": "random",
    "metric": {"name": "eval/return", "goal": "maximize"},
    "parameters": {
        "gain": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
        "kind": {"values": ["one", "two", True, 3]},
        "steps": {"min": 3, "max": 5},
    },
    "command": ["${env}", "${program}", "fit", "-c", "base", "-c", "logger/wandb", "${args}"],
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(sweeps, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def sweep_file(folder, *options, **changed):
    path = folder / "try.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **changed}))
    return read_sweep_file(path, options)


def grid(gains, seeds=None, **more):
    parameters = {"gain": {"values": gains}, "steps": {"value": 4}, **more}
    if seeds is not None:
        parameters["seed_everything"] = {"values": seeds}
    return {"method": "grid", "parameters": parameters}


def run(given, folder, lines=None, **options):
    say = (lambda text: None) if lines is None else lines.append
    return run_sweep(given, SweepOptions(folder, "try", **options), 100, FAKE, say)


def found(study):
    return [(one.number, one.params, one.state.name, one.value) for one in study.trials]


DRIVER = """
import sys
from pathlib import Path
from mtrl_lightning.sweeps import sweep
from mtrl_lightning.sweeps.sweep_file import read_sweep_file
sweep.SECONDS_BETWEEN_LOOKS = 0.02
given = read_sweep_file(Path(sys.argv[1]), ("--seconds=0.15",))
options = sweep.SweepOptions(Path(sys.argv[2]), "try", trials=5, jobs=2)
fake = [sys.executable, "-m", "tests.helpers.fake_run"]
sweep.run_sweep(given, options, 100, fake, lambda text: print(text, flush=True))
"""


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_finishes_the_same_trials(tmp_path):
    given = sweep_file(tmp_path, "--seconds=0.15")
    for _ in range(2):
        line = [sys.executable, "-c", DRIVER, str(given.path), str(tmp_path)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        for text in process.stdout:  # killed while other trials are under way
            if "eval/return" in text:
                break
        process.kill()
        process.wait()
        process.stdout.close()
    lines = []
    time.sleep(0.5)  # the runs of the killed sweep end by themselves
    study = run(given, tmp_path, lines, trials=5, jobs=2)
    assert any("was interrupted: it continues" in line for line in lines)
    assert 0 < sum("started" in line for line in lines) < 5, "finished trials are not repeated"
    undisturbed = run(given, tmp_path / "undisturbed", trials=5)
    assert found(study) == found(undisturbed) and len(found(study)) == 5
    assert len({params["gain"] for _, params, _, _ in found(study)}) == 5
    folders = sorted((tmp_path / "try").glob("trial_*/run/version_*"))
    assert len(folders) == 5, "interrupted runs continue in their folder"


@pytest.mark.slow
def test_a_run_ends_when_its_sweep_is_killed(tmp_path):
    start = f"import subprocess, sys, time\nsubprocess.Popen({FAKE} + ['fit', *sys.argv[1:]],"
    start += " stdin=subprocess.PIPE)\nprint('started', flush=True)\ntime.sleep(60)"
    options = [f"--root={tmp_path}", "--name=a", "--steps=1000", "--seconds=0.1"]
    parent = subprocess.Popen([sys.executable, "-c", start, *options], stdout=subprocess.PIPE)
    parent.stdout.readline()
    metrics = tmp_path / "a" / "version_0" / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    time.sleep(0.6)
    ended_at = metrics.stat().st_mtime
    time.sleep(0.5)
    assert metrics.stat().st_mtime == ended_at


def test_every_configuration_of_a_grid_is_run_with_every_seed(tmp_path):
    given = sweep_file(tmp_path, **grid([1.0, 3.0, 2.0], seeds=[1, 2]))
    lines = []
    study = run(given, tmp_path, lines, jobs=3)
    assert [one.value for one in study.trials] == pytest.approx([4.015, 12.015, 8.015])
    assert sum("started" in line for line in lines) == 6
    rows = rows_of(study, given)
    assert [row["trial"] for row in rows] == [1, 2, 0]
    best = rows[0]
    assert (best["seeds"], best["env_steps"]) == (2, 400)
    # scores of tasks a and b: 11.01, 11.02, 13.01, 13.02; the middle half is their mean
    assert (best["last"], best["middle"]) == pytest.approx((12.015, 12.015))
    assert (best["low"], best["high"]) == pytest.approx((12.01, 12.02))
    again = run(given, tmp_path, lines, jobs=3)
    assert found(again) == found(study) and sum("started" in line for line in lines) == 6
    table, page = write_tables(rows, given, tmp_path)
    with table.open() as file:
        written = list(csv.DictReader(file))
    assert [row["gain"] for row in written] == ["3.0", "2.0", "1.0"]
    text = printed_table(rows, given)
    assert "12.015 [12.010, 12.020]" in text and text.splitlines()[1].split()[0] == "1"
    assert len(page.read_text().splitlines()) == 2 + 3
    assert "| 12.015 [12.010, 12.020] |" in page.read_text()


@pytest.mark.slow
def test_weak_trials_end_early_by_their_first_seed(tmp_path, monkeypatch):
    gains = [3.0, 2.0, 1.0, 4.0]
    given = sweep_file(
        tmp_path,
        "--seconds=0.1",
        **grid(gains, seeds=[1, 2], steps={"value": 6}),
        early_terminate={"type": "hyperband", "min_iter": 2, "eta": 2},
    )
    lines = []
    finish = sweeps._Loop._finish

    def end_before_the_weak_one_is_finished(runner, one):
        if one.is_pruned:
            raise Interrupted(128 + signal.SIGKILL)
        finish(runner, one)

    monkeypatch.setattr(sweeps._Loop, "_finish", end_before_the_weak_one_is_finished)
    with pytest.raises(Interrupted):
        run(given, tmp_path, lines)
    monkeypatch.setattr(sweeps._Loop, "_finish", finish)
    study = run(given, tmp_path, lines)
    states = [one.state.name for one in study.trials]
    assert states == ["COMPLETE", "PRUNED", "PRUNED", "COMPLETE"]
    assert list(study.trials[1].intermediate_values) == [100, 200], "at the second evaluation"
    assert not any("trial 1, seed 2" in line for line in lines)
    assert "trial 1 had ended early" in lines, "it does not continue after a kill"
    assert sum("trial 1, seed 1: started" in line for line in lines) == 1
    rows = rows_of(study, given)
    assert [row["trial"] for row in rows] == [3, 0, 1, 2]
    assert (rows[2]["state"], rows[2]["env_steps"]) == ("pruned", 200)
    curve = list(study.trials[3].intermediate_values.items())
    assert curve == [(100 * n, pytest.approx(4 * n + 0.01)) for n in range(1, 7)], "to its end"


@pytest.mark.slow
def test_ctrl_c_lets_the_runs_save_and_end(tmp_path):
    given = sweep_file(tmp_path, "--seconds=0.1", **grid([1.0], steps={"value": 1000}))

    metrics = tmp_path / "try/trial_0000/run/version_0/metrics.csv"

    def interrupt():
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as interrupted:
        run(given, tmp_path)
    thread.join()
    assert interrupted.value.code == 128 + signal.SIGINT
    size = metrics.stat().st_size
    time.sleep(0.3)
    assert metrics.stat().st_size == size


@pytest.mark.slow
def test_failed_trials_are_named_and_three_at_the_start_end_the_sweep(tmp_path):
    given = sweep_file(tmp_path, **grid([1.0], fail={"values": ["no", "yes"]}))
    study = run(given, tmp_path)
    assert [one.state.name for one in study.trials] == ["COMPLETE", "FAIL"]
    text = printed_table(rows_of(study, given), given)
    assert "trial 1 failed (exit code 2): error: these two do not fit" in text
    given = sweep_file(tmp_path, "--fail=yes", **grid([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ConfigurationError, match=r"first 3 trials failed.*these two do not fit"):
        run(given, tmp_path / "all")


def test_a_metric_that_is_never_logged_ends_the_sweep_with_the_first_run(tmp_path):
    given = sweep_file(tmp_path, metric={"name": "eval/success"})
    with pytest.raises(ConfigurationError, match=r"log no eval/success, but eval/return: set"):
        run(given, tmp_path, trials=3)
    assert len(list((tmp_path / "try").glob("trial_*"))) == 1


def test_a_database_of_another_sweep_is_refused(tmp_path):
    given = sweep_file(tmp_path, **grid([1.0]))
    run(given, tmp_path)
    other = sweep_file(tmp_path, **grid([1.0, 2.0]))
    with pytest.raises(ConfigurationError, match=r"another sweep: parameters gain\. Give another"):
        run(other, tmp_path)
    with pytest.raises(ConfigurationError, match=r"another sweep: seed 0 there and 1 here"):
        run(given, tmp_path, seed=1)
    with sweeps.run_lock(tmp_path / "try"), pytest.raises(ConfigurationError, match="another proc"):
        run(given, tmp_path)
    path = tmp_path / "try" / DATABASE
    optuna.create_study(storage=f"sqlite:///{path}", study_name="else")
    with pytest.raises(ConfigurationError, match=r"other studies \(else\)"):
        run(given, tmp_path)
    path.write_text("no database")
    with pytest.raises(ConfigurationError, match="cannot be read as the database of a sweep"):
        run(given, tmp_path)


DAMAGE = [
    (
        "update trial_params set param_name = 'trainer.devices' where param_name = 'gain'",
        "another distribution of trainer.devices",
    ),
    ("update trial_params set param_value = 7 where param_name = 'kind'", "index out of range"),
    ("update trial_params set param_value = 1e9 where param_name = 'gain'", "0.0 of gain"),
    ("update trial_params set param_value = 0.01 where param_name = 'gain'", "0.01 of gain"),
    ("update trial_params set distribution_json = '['", "Expecting value"),
    (
        "update trial_params set distribution_json = replace(distribution_json, '0.1', '0.01')",
        "another distribution of gain",
    ),
    ("update trials set state = 'GONE'", "GONE"),
    ("update study_user_attributes set value_json = '[]'", ""),
    ("update trial_user_attributes set value_json = '{}'", "required positional arguments"),
]


@pytest.mark.slow
def test_a_damaged_database_is_refused(tmp_path):
    parameters = {**CONTENT["parameters"], "kind": {"values": ["one", True]}}
    hyperband = {"type": "hyperband", "min_iter": 1, "eta": 2}
    # slow, so that values are reported before its end
    options = {"parameters": parameters, "early_terminate": hyperband}
    given = sweep_file(tmp_path, "--seconds=0.2", **options)
    run(given, tmp_path, trials=1)
    path = tmp_path / "try" / DATABASE
    whole = path.read_bytes()
    for statement, message in DAMAGE:
        path.write_bytes(whole)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute(statement).rowcount > 0, statement
            connection.commit()
        expected = f"(?s)sweep.db cannot be read as the database of a sweep.*({message}).*move it"
        with pytest.raises(ConfigurationError, match=expected):
            run(given, tmp_path, trials=1)
    path.write_bytes(whole)
    assert len(found(run(given, tmp_path, trials=1))) == 1, "undamaged"


@pytest.mark.parametrize("method", ["random", "bayes", "grid"])
def test_values_that_a_kill_left_out_are_those_of_the_uninterrupted_sweep(tmp_path, method):
    changed = grid([1.0, 2.0]) if method == "grid" else {"method": method}
    given = sweep_file(tmp_path, **changed)
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    study = open_study(killed, given, 7, 100)
    study.ask()  # killed before the trial had a value
    (trial,) = interrupted_trials(study, killed, given, 7)
    uninterrupted = next_trial(open_study(whole, given, 7, 100), given, 7)
    assert trial.number == 0 and trial.params.keys() == given.parameters.keys()
    assert trial.params == uninterrupted.params
    others = next_trial(study, given, 7)
    assert others.number == 1 and others.params != trial.params


@pytest.mark.slow
def test_a_search_by_earlier_results_does_not_depend_on_kills(tmp_path):
    given = sweep_file(tmp_path, method="bayes")
    before = found(run(given, tmp_path, trials=2))
    after = found(run(given, tmp_path, trials=3))
    assert after[:2] == before and len(after) == 3


@pytest.mark.slow
def test_plots_show_the_complete_trials(tmp_path):
    given = sweep_file(tmp_path)
    folder = tmp_path / "try"
    study = run(given, tmp_path, trials=3, jobs=2)
    names = ["history", "curves", "slices", "parallel"]
    assert list(plots._plots(study, "m")) == names, "too few trials for importances"
    study = run(given, tmp_path, trials=5, jobs=2)
    paths = write_plots(study, given, folder)
    assert [path.stem for path in paths] == [*names[:2], "importances", *names[2:]]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


@pytest.mark.slow
def test_plots_name_parameters_shortly_and_need_none(tmp_path):
    long = "model.init_args.critic.init_args.layers"
    given = sweep_file(tmp_path, **grid([1.0], **{long: {"values": [1, 2]}}))
    study = run(given, tmp_path)
    copy = plots._with_short_names(study, given)
    (first, second) = copy.trials
    assert (first.params["layers"], second.params["layers"]) == (1, 2) and long not in first.params
    assert [one.value for one in copy.trials] == [one.value for one in study.trials]
    given = sweep_file(
        tmp_path, "--gain=1", "--steps=3", parameters={"seed_everything": {"values": [1]}}
    )
    study = run(given, tmp_path / "seeds", trials=1)
    paths = write_plots(study, given, tmp_path / "seeds" / "try")
    assert [path.stem for path in paths] == ["history", "curves"]
    failed = run(given._replace(command=(*given.command, "--fail=yes")), tmp_path / "c", trials=1)
    assert write_plots(failed, given, tmp_path / "c" / "try") == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "custom"}, r"method is 'custom': give one of grid, random, bayes"),
        ({"metric": {"goal": "maximize"}}, r"metric is .*: give \{name: eval/success"),
        ({"metric": {"name": "a", "goal": "up"}}, r"metric.goal is 'up'"),
        ({"parameters": {}}, r"parameters is \{\}: give options"),
        ({"parameters": {"a": {"values": [None]}}}, r'parameter a has the value null.*"null"'),
        ({"parameters": {"a": {"values": [{"b": 1}]}}}, r"parameter a has a dictionary"),
        ({"parameters": {"a": {"parameters": {}}}}, r"parameter a is .*: give each its full name"),
        ({"parameters": {"a": {"min": 1}}}, r"give values, value, or min and max"),
        ({"parameters": {"a": {"min": 2, "max": 1}}}, r"min is 2 and max 1"),
        ({"parameters": {"a": {"min": 0, "max": 1, "distribution": "log_uniform_values"}}}, "log"),
        ({"parameters": {"a": {"min": "1e-4", "max": 1.0}}}, r"min is '1e-4': give int or float"),
        (
            {"parameters": {"a": {"min": 1.5, "max": 3, "distribution": "int_uniform"}}},
            r"min is 1.5: give int",
        ),
        (
            {"parameters": {"a": {"min": 1, "max": 2, "distribution": "beta"}}},
            r"distribution is 'beta': give one of constant, .*others need W&B",
        ),
        (
            {"parameters": {"a": {"values": [1, 2], "probabilities": [0.9, 0.1]}}},
            r"distribution categorical has values, and nothing else has an effect here",
        ),
        (
            {"parameters": {"a": {"min": 0.0, "max": 1.0, "q": 0.5}}},
            r"distribution uniform has max, min, and nothing else",
        ),
        (
            {"parameters": {"a": {"min": 0, "max": 4, "q": -1, "distribution": "q_uniform"}}},
            r"min is 0 and max 4: .*step",
        ),
        ({"run_cap": "many"}, r"run_cap is 'many'"),
        ({"method": "grid"}, r"a grid needs values for gain, steps"),
        ({"parameters": {"seed_everything": {"min": 1, "max": 3}}}, r"seeds of every config"),
        ({"command": ["python", "cli.py", "${args}"]}, r"command is .*: give a list with fit"),
        ({"early_terminate": {"type": "envelope"}}, r"give \{type: hyperband"),
        ({"early_terminate": {"type": "hyperband"}}, r"give min_iter \(or max_iter and s\)"),
        ({"run_caps": 3}, r"run_caps is not understood"),
    ],
)
def test_a_sweep_file_that_cannot_be_run_is_refused_with_the_remedy(tmp_path, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        sweep_file(tmp_path, **changed)


def test_what_a_sweep_file_says(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDTH", "32")
    given = sweep_file(
        tmp_path,
        "--more=1",
        metric={"name": "eval/return", "target": 9},
        command=["${env}", "fit", "-c=logger/wandb", "--w=${envvar:WIDTH}", "${args}", "--z=1"],
        early_terminate={"type": "hyperband", "max_iter": 27, "s": 2},
        parameters={
            "a": {"min": -2.302585092994046, "max": 0, "distribution": "log_uniform"},
            "b": {"values": [[1, 2], False]},
            "c": {"min": 0, "max": 4, "q": 2, "distribution": "q_uniform"},
            "d": {"min": 1, "max": 3},
            "e": {"min": 1, "max": 3.0},
            "f": {"value": 7},
        },
    )
    assert given.arguments({"a": 0.5, "b": False}) == [
        "fit",
        "--w=32",
        "--more=1",
        "--a=0.5",
        "--b=False",
        "--z=1",
    ]
    a, b, c, d, e, f = given.parameters.values()
    assert (a.low, a.high, a.log) == (pytest.approx(0.1), 1.0, True)
    assert b.choices == ("[1, 2]", False) and f.choices == (7,)
    assert (c.low, c.high, c.step) == (0, 4, 2)
    assert d == optuna.distributions.IntDistribution(1, 3)
    assert e == optuna.distributions.FloatDistribution(1.0, 3.0)
    assert (given.hyperband.min_iter, given.hyperband.eta) == (3, 3)
    assert not given.is_maximized and given.has_target and given.seeds == (None,)
    assert json.dumps(given.identity())


def test_a_variable_of_the_command_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EMPTY", "")
    command = ["fit", "--a=${envvar:EMPTY}", "--w=${envvar:NO_SUCH_WIDTH}", "${args}"]
    with pytest.raises(ConfigurationError, match="NO_SUCH_WIDTH, which is not set: export it"):
        sweep_file(tmp_path, command=command)
    monkeypatch.setenv("NO_SUCH_WIDTH", "8")
    assert sweep_file(tmp_path, command=command).command == ("fit", "--a=", "--w=8", "${args}")


@pytest.mark.parametrize(
    ("variable", "threads"), [("4,2", 4), (" 3 ", 3), ("", 2), (None, 2), ("1", 1)]
)
def test_runs_get_the_threads_of_the_outermost_level(variable, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("mtrl_lightning.envs.vector.vector.usable_cores", lambda: 6)
    assert command.threads_per_run(jobs=3) == threads


@pytest.mark.parametrize("variable", ["many", "0", "-2", "4.5"])
def test_a_number_of_threads_that_is_none_is_refused(variable, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    with pytest.raises(ConfigurationError, match=f"OMP_NUM_THREADS is '{variable}': give"):
        command.threads_per_run(jobs=1)


def test_names_are_as_short_as_they_can_be():
    names = ["model.init_args.actor_optimizer.init_args.lr", "rollout.lr", "config.network"]
    assert list(short_names(names).values()) == ["actor_optimizer.lr", "rollout.lr", "network"]


def ended(*arguments):
    with pytest.raises(SystemExit) as caught:
        command.main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.mark.slow
def test_mistakes_are_named_before_a_run_starts(tmp_path, capsys, monkeypatch):
    from mtrl_lightning.cli import lightning_cli
    from tests.helpers.command_line import parser

    # takes longer to build than a file to parse
    monkeypatch.setattr(lightning_cli, "build_parser", parser)
    path = tmp_path / "own.yaml"
    content = yaml.safe_load((ROOT / "configs/sweep/networks_gradients.yaml").read_text())
    base = ["--root", tmp_path, "--jobs", "2"]

    def message(**changed):
        path.write_text(yaml.safe_dump({**content, **changed}))
        assert ended(path, *base) == 2
        return capsys.readouterr().err

    parameters = {"rollout.total_stops": {"values": [600]}}
    assert "did you mean rollout.total_steps?" in message(parameters=parameters)
    parameters = {"config.network": {"values": ["network/mlp", "network/mpl"]}}
    assert "did you mean network/mlp?" in message(parameters=parameters)
    assert "give one of eval/success" in message(metric={"name": "eval/succes"})
    assert "which has no end: give --trials" in message(method="random")
    assert not (tmp_path / "networks_gradients").exists()
    seeds = str(ROOT / "configs/sweep/protocol_seeds.yaml")
    command.main([seeds, "--dry_run", "--", "--rollout.total_steps=9"])
    printed = capsys.readouterr().out
    assert printed.strip() == (
        "mtrl-lightning fit -c experiment/mtmhsac --rollout.total_steps=9 --seed_everything=1"
    )
