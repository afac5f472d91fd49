"""Sweeps on one machine: what is tried, what is ended early, what a kill costs, what is shown."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli import sweep as command
from mtrl_lightning.errors import ConfigurationError, Interrupted

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install -e '.[sweep]'")

from mtrl_lightning.sweeps import sweep as sweeps  # noqa: E402
from mtrl_lightning.sweeps.results import write_plots, write_table  # noqa: E402
from mtrl_lightning.sweeps.sweep import DATABASE, next_trial, open_study  # noqa: E402
from mtrl_lightning.sweeps.sweep_file import read_sweep_file  # noqa: E402

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
    monkeypatch.setattr(sweeps, "PROGRAM", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def sweep_file(folder, *options, **changed):
    path = folder / "try.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **changed}, sort_keys=False))
    return read_sweep_file(path, options)


def grid(gains, seeds=None, **more):
    parameters = {"gain": {"values": gains}, "steps": {"value": 4}, **more}
    if seeds is not None:
        parameters["seed_everything"] = {"values": seeds}
    return {"method": "grid", "parameters": parameters}


def run(given, folder, **options):
    return sweeps.run_sweep(given, folder, **options)


def found(study):
    return [(one.number, one.params, one.state.name, one.value) for one in study.trials]


def asked(folder, given, num):
    """Return the values of a sweep's first trials, which are not run."""
    folder.mkdir()
    study = open_study(folder, given)
    trials = [next_trial(study, given, num) for _ in range(num)]
    assert [trial.number for trial in trials] == list(range(num))
    return [trial.params for trial in trials]


DRIVER = """
import sys
from pathlib import Path
from mtrl_lightning.sweeps import sweep
from mtrl_lightning.sweeps.sweep_file import read_sweep_file
sweep.SECONDS_BETWEEN_LOOKS = 0.02
sweep.PROGRAM = [sys.executable, "-m", "tests.helpers.fake_run"]
given = read_sweep_file(Path(sys.argv[1]), ("--seconds=0.15",))
sweep.run_sweep(given, Path(sys.argv[2]), trials=3, jobs=2)
"""


@pytest.mark.slow
def test_a_sweep_that_is_killed_finishes_the_same_trials(tmp_path, capfd):
    given = sweep_file(tmp_path, "--seconds=0.15")
    driver = [sys.executable, "-c", DRIVER, str(given.path), str(tmp_path / "try")]
    process = subprocess.Popen(driver, stdout=subprocess.PIPE, text=True)
    before = ""
    for line in process.stdout:
        before += line
        if before.count("started") == 3:  # the third when one of two has finished
            break
    assert before.count("started") == 3, before
    metrics = tmp_path / "try" / "trial_0002" / "version_0" / "metrics.csv"
    while not metrics.exists():  # the last trial is under way
        time.sleep(0.02)
    runs = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    before += process.stdout.read()
    process.stdout.close()
    finished = before.count("eval/return")
    assert finished >= 1
    _, running = psutil.wait_procs(runs, timeout=60)
    assert not running, "the runs of a killed sweep end by themselves"
    study = run(given, tmp_path / "try", trials=3, jobs=2)
    printed = capfd.readouterr().out
    assert re.search(r"trial_000\d: continues gain=", printed)
    assert printed.count("eval/return") == 3 - finished, "a finished trial is not repeated"
    assert [one.params for one in study.trials] == asked(tmp_path / "undisturbed", given, 3)
    for one in study.trials:
        assert one.value == pytest.approx(one.params["gain"] * one.params["steps"])
    folders = sorted((tmp_path / "try").glob("trial_*/version_*"))
    assert len(folders) == 3, "interrupted runs continue in their folder"


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


def test_every_configuration_of_a_grid_is_run_with_every_seed(tmp_path, capfd):
    given = sweep_file(tmp_path, **grid([1.0, 3.0], seeds=[1, 2]))
    folder = tmp_path / "try"
    study = run(given, folder, jobs=4)
    values = [one.value for one in study.trials]
    assert values == pytest.approx([4.01, 4.02, 12.01, 12.02])
    assert all((folder / f"trial_000{number}" / "version_0").is_dir() for number in range(4))
    assert found(run(given, folder)) == found(study)
    assert capfd.readouterr().out.count("started") == 4, "finished trials are not repeated"
    text = write_table(study, given, folder)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells[0] == ["trial", "state", "eval/return", "gain", "steps", "seed_everything"]
    assert cells[2] == ["3", "complete", "12.020", "3", "4", "2"]
    assert [line[0] for line in cells[2:6]] == ["3", "2", "1", "0"], "the best first"
    assert (folder / "sweep.md").read_text() == text + "\n"


@pytest.mark.slow
def test_weak_trials_end_early(tmp_path, capfd):
    given = sweep_file(
        tmp_path,
        "--seconds=0.1",
        **grid([3.0, 2.0, 4.0], steps={"value": 6}),
        early_terminate={"type": "hyperband", "min_iter": 2, "eta": 2},
    )
    study = run(given, tmp_path / "try")
    assert [one.state.name for one in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert list(study.trials[1].intermediate_values) == [1, 2], "at the second evaluation"
    run(given, tmp_path / "try")
    assert capfd.readouterr().out.count("started") == 3, "it does not continue"
    lines = write_table(study, given, tmp_path).splitlines()[2:5]
    assert [line.split()[1:4:2] for line in lines] == [
        ["2", "complete"],
        ["0", "complete"],
        ["1", "pruned"],
    ]
    curve = list(study.trials[2].intermediate_values.items())
    assert curve == [(n, pytest.approx(4 * n)) for n in range(1, 7)], "to its end"


@pytest.mark.slow
def test_ctrl_c_lets_the_runs_save_and_end(tmp_path):
    given = sweep_file(tmp_path, "--seconds=0.1", **grid([1.0], steps={"value": 1000}))

    metrics = tmp_path / "try/trial_0000/version_0/metrics.csv"

    def interrupt():
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as interrupted:
        run(given, tmp_path / "try")
    thread.join()
    assert interrupted.value.code == 128 + signal.SIGINT
    size = metrics.stat().st_size
    time.sleep(0.3)
    assert metrics.stat().st_size == size
    states = [one.state.name for one in open_study(tmp_path / "try", given).trials]
    assert states == ["WAITING"], "it continues"


@pytest.mark.slow
def test_a_run_that_ends_with_its_interrupted_sweep_continues(tmp_path):
    """As where SLURM sends SIGTERM to the sweep and to its runs."""
    given = sweep_file(tmp_path)
    trial = next_trial(open_study(tmp_path, given), given, 1)
    stop = threading.Event()
    stop.set()
    with subprocess.Popen([sys.executable, "-c", "exit(143)"]) as process:
        process.wait()
        assert sweeps._follow(process, trial, given, tmp_path, stop)[0] is None


@pytest.mark.slow
def test_failed_runs_are_named(tmp_path, capfd):
    given = sweep_file(tmp_path, **grid([1.0], fail={"values": ["no", "yes"]}))
    study = run(given, tmp_path / "try")
    assert [one.state.name for one in study.trials] == ["COMPLETE", "FAIL"]
    assert "trial_0001: failed (error: these two do not fit); see" in capfd.readouterr().out
    assert "| 1     | fail " in write_table(study, given, tmp_path)
    given = sweep_file(tmp_path, metric={"name": "eval/success"})
    run(given, tmp_path / "metric", trials=1)
    assert "failed (it logged no eval/success)" in capfd.readouterr().out


def test_a_database_of_another_sweep_is_refused(tmp_path):
    given = sweep_file(tmp_path, **grid([1.0]))
    open_study(tmp_path, given)
    other = sweep_file(tmp_path, **grid([1.0, 2.0]))
    with pytest.raises(ConfigurationError, match=r"another sweep, with other parameters\. Give an"):
        run(other, tmp_path)
    with sweeps.run_lock(tmp_path), pytest.raises(ConfigurationError, match="another process"):
        run(given, tmp_path)


DAMAGE = [
    (
        "update trial_params set param_name = 'trainer.devices' where param_name = 'gain'",
        "another sweep, with other values of trial 0",
    ),
    ("update trial_params set param_value = 7 where param_name = 'kind'", "cannot be read as"),
    ("update trial_params set distribution_json = '['", "cannot be read as"),
    (
        "update trial_params set distribution_json = replace(distribution_json, '0.1', '0.01')",
        "another sweep, with other values of trial 0",
    ),
    ("update trials set state = 'GONE'", "cannot be read as"),
]


def test_a_damaged_database_is_refused(tmp_path):
    given = sweep_file(tmp_path)
    asked(tmp_path / "try", given, 1)
    path = tmp_path / "try" / DATABASE
    whole = path.read_bytes()
    for statement, message in DAMAGE:
        path.write_bytes(whole)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute(statement).rowcount > 0, statement
            connection.commit()
        with pytest.raises(ConfigurationError, match=message):
            open_study(tmp_path / "try", given)
    path.write_text("no database")
    with pytest.raises(ConfigurationError, match="cannot be read as the database of a sweep"):
        open_study(tmp_path / "try", given)
    path.write_bytes(whole)
    assert len(open_study(tmp_path / "try", given).trials) == 1, "undamaged"


@pytest.mark.parametrize("method", ["random", "bayes", "grid"])
def test_values_that_a_kill_left_out_are_those_of_the_uninterrupted_sweep(tmp_path, method):
    changed = grid([1.0, 2.0], seeds=[5, 6]) if method == "grid" else {"method": method}
    given = sweep_file(tmp_path, **changed)
    uninterrupted = asked(tmp_path / "whole", given, 2)
    killed = tmp_path / "killed"
    killed.mkdir()
    open_study(killed, given).ask()  # killed before the trial had a value
    study = open_study(killed, given)
    trials = [next_trial(study, given, 2) for _ in range(2)]
    assert [trial.number for trial in trials] == [0, 1]
    assert trials[0].params.keys() == given.parameters.keys()
    if method == "grid":  # whose values are stored with the trial
        return
    assert [trial.params for trial in trials] == uninterrupted
    assert trials[0].params != trials[1].params


def test_a_search_by_earlier_results_does_not_depend_on_kills(tmp_path):
    given = sweep_file(tmp_path, method="bayes")
    whole = tmp_path / "whole"
    whole.mkdir()
    study = open_study(whole, given)
    for _ in range(10):  # which are random
        trial = next_trial(study, given, 11)
        study.tell(trial, trial.params["gain"])
    shutil.copytree(whole, tmp_path / "killed")
    continued = open_study(tmp_path / "killed", given)
    values = next_trial(continued, given, 11).params
    assert values == next_trial(study, given, 11).params
    assert isinstance(study.sampler, optuna.samplers.TPESampler)
    assert next_trial(study, given, 11) is None


@pytest.mark.slow
def test_plots_show_the_complete_trials(tmp_path):
    given = sweep_file(tmp_path)
    study = open_study(tmp_path, given)

    for number in range(3):
        trial = next_trial(study, given, 3)
        for step in (1, 2):
            trial.report(number * step, step)
        study.tell(trial, number * 2)
    write_plots(study, given.metric, tmp_path / "plots")
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "plots").iterdir()}
    assert sizes.keys() == {"history", "curves", "slices", "parallel"}
    assert min(sizes.values()) > 5_000


def test_a_sweep_over_seeds_alone_has_plots(tmp_path):
    given = sweep_file(tmp_path, method="grid", parameters={"seed_everything": {"values": [1, 2]}})
    study = open_study(tmp_path, given)
    for _ in range(2):
        study.tell(next_trial(study, given, None), 1.0)
    assert next_trial(study, given, None) is None
    write_plots(study, given.metric, tmp_path / "plots")
    assert len(list((tmp_path / "plots").iterdir())) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "custom"}, r"method is 'custom': give one of grid, random, bayes"),
        ({"metric": {"goal": "maximize"}}, r"metric is .*: give \{name: eval/success"),
        ({"metric": {"name": "a", "goal": "up"}}, r"metric.goal is 'up'"),
        ({"parameters": {}}, r"parameters is \{\}: see configs/sweep"),
        ({"command": "fit"}, r"command is 'fit': see configs/sweep"),
        ({"parameters": {"a": {"values": 3}}}, r"parameter a is \{'values': 3\}: "),
        ({"parameters": {"a": {"values": []}}}, r"parameter a is \{'values': \[\]\}: "),
        ({"parameters": {"a": {"parameters": {}}}}, r"parameter a is .*, give each its full name"),
        (
            {"parameters": {"a": {"min": 1}}},
            r"uniform missing 1 .* 'max'\. Give values, value, or min and max",
        ),
        ({"parameters": {"a": {"min": 2, "max": 1}}}, r"'min': 2, 'max': 1.*low=2"),
        ({"parameters": {"a": {"min": 0, "max": 1, "distribution": "log_uniform_values"}}}, "log"),
        ({"parameters": {"a": {"min": "1e-4", "max": 1.0}}}, r"'1e-4'.*YAML takes 1e-4 for a text"),
        (
            {"parameters": {"a": {"min": 1.5, "max": 3, "distribution": "int_uniform"}}},
            r"'min': 1.5, .*'float' object cannot be interpreted as an integer",
        ),
        (
            {"parameters": {"a": {"min": 1, "max": 2, "distribution": "beta"}}},
            r"distribution is 'beta': give one of constant, .*others need W&B",
        ),
        (
            {"parameters": {"a": {"values": [1, 2], "probabilities": [0.9, 0.1]}}},
            r"categorical got an unexpected keyword argument 'probabilities'",
        ),
        (
            {"parameters": {"a": {"min": 0.0, "max": 1.0, "q": 0.5}}},
            r"uniform got an unexpected keyword argument 'q'",
        ),
        (
            {"parameters": {"a": {"min": 0, "max": 4, "q": -1, "distribution": "q_uniform"}}},
            r"'q': -1.*step",
        ),
        ({"run_cap": "many"}, r"run_cap is 'many'"),
        ({"method": "grid"}, r"a grid needs values for gain, steps"),
        ({"command": ["python", "cli.py", "${args}"]}, r"command is .*: give a list with fit"),
        ({"early_terminate": {"type": "envelope"}}, r"give \{type: hyperband"),
        ({"early_terminate": "hyperband"}, r"give \{type: hyperband"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 2.5}}, r"min_iter: 3"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 2, "eta": 1}}, r"eta of at least 2"),
        ({"early_terminate": {"type": "hyperband"}}, r"min_iter: 3"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 0}}, r"min_iter of at least 1"),
        ({"command": ["fit", "--w=${envvar:WIDTH}", "${args}"]}, r"No other macro is replaced"),
        ({"run_caps": 3}, r"key is 'run_caps': give one of method, .*run_cap"),
    ],
)
def test_a_sweep_file_that_cannot_be_run_is_refused_with_the_remedy(tmp_path, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        sweep_file(tmp_path, **changed)


def test_what_a_sweep_file_says(tmp_path):
    given = sweep_file(
        tmp_path,
        "--more=1",
        metric={"name": "eval/return", "target": 9},
        command=["${env}", "fit", "-c=logger/wandb", "--w=32", "${args}", "--z=1"],
        early_terminate={"type": "hyperband", "min_iter": 4},
        parameters={
            "model.init_args.a.init_args.lr": {"values": [[1, 2], {"b": None}, None, False]},
            "c": {"min": 0, "max": 4, "q": 2, "distribution": "q_uniform"},
            "d": {"min": 1, "max": 3},
            "e": {"min": 1, "max": 3.0},
            "f": {"value": 7},
        },
    )
    assert given.arguments({"model.init_args.a.init_args.lr": 0.5, "f": False}) == [
        "fit",
        "--w=32",
        "--more=1",
        "--model.init_args.a.init_args.lr=0.5",
        "--f=False",
        "--z=1",
    ]
    lr, c, d, e, f = given.parameters.values()
    assert lr.choices == ("[1, 2]", '{"b": null}', None, False) and f.choices == (7,)
    assert (c.low, c.high, c.step) == (0, 4, 2)
    assert d == optuna.distributions.IntDistribution(1, 3)
    assert e == optuna.distributions.FloatDistribution(1.0, 3.0)
    assert isinstance(given.pruner, optuna.pruners.SuccessiveHalvingPruner)
    assert given.goal == "minimize"


def ended(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["sweep", *map(str, arguments)])
    return caught.value.code


def test_runs_get_equal_parts_of_the_cores(tmp_path, monkeypatch, capsys):
    path = sweep_file(tmp_path, **grid([1.0])).path
    given = []

    def interrupted(sweep, folder, **options):
        given.append((folder, options["jobs"], os.environ["OMP_NUM_THREADS"]))
        raise Interrupted(143)

    monkeypatch.setattr(command, "check_sweep", lambda sweep: None)
    monkeypatch.setattr(sweeps, "run_sweep", interrupted)
    monkeypatch.setattr("mtrl_lightning.cli.sweep.usable_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert ended(path, "--root", tmp_path, "--jobs", "3") == 143
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ended(path, "--root", tmp_path, "--jobs", "3") == 143
    assert given == [(tmp_path / "try", 3, "4,2"), (tmp_path / "try", 3, "2")]
    assert "The same command continues the sweep" in capsys.readouterr().out
    assert ended(path, "--jobs", "0") == 2
    assert "--jobs is 0: give at least 1" in capsys.readouterr().err


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
        return error_of(path)

    def error_of(*args):
        assert ended(*args, *base) == 2
        return capsys.readouterr().err

    parameters = {"rollout.total_stops": {"values": [600]}}
    assert "did you mean rollout.total_steps?" in message(parameters=parameters)
    parameters = {"config.network": {"values": ["network/mlp", "network/mpl"]}}
    assert "did you mean network/mlp?" in message(parameters=parameters)
    assert "did you mean eval/success" in message(metric={"name": "eval/succes"})
    assert "which has no end: give --trials" in message(method="random")
    assert "this is no sweep file" in error_of(ROOT / "configs/env/toy.yaml")
    assert "would not lie in the root folder" in error_of(path, "--dry_run", "--name=../a")
    assert "options of fit come last, after --" in error_of(path, "--rollout.total_steps=9")
    assert not (tmp_path / "networks_gradients").exists()
    seeds = str(ROOT / "configs/sweep/protocol_seeds.yaml")
    main(["sweep", seeds, "--dry_run", "--", "--rollout.total_steps=9"])
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        f"mtrl-lightning fit -c experiment/mtmhsac --rollout.total_steps=9 --seed_everything={seed}"
        for seed in range(1, 11)
    ]
