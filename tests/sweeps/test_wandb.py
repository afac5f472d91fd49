"""Sweeps of Weights & Biases: the commands of its agents, preempted runs, the best in the table."""

import copy
import os
import signal
import types

import pytest
import yaml

from mtrl_lightning.callbacks import EnvStepWandbLogger, MetricsCallback, read_metrics
from mtrl_lightning.cli.lightning_cli import main
from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.launch.folder import find_restart_id, locate_run
from tests.helpers.command_line import CONFIGS, ROOT, parser
from tests.helpers.wandb_files import records

FILES = sorted(ROOT.glob("configs/sweep/*.yaml"))
SWEEP = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_MODE": "offline"}


def agent_arguments(path, values):
    """Return what follows the program in the command that W&B's agent makes for a run."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    content = yaml.safe_load(path.read_text())
    command = utils.create_sweep_command(copy.deepcopy(content["command"]))
    # from the server parameters come in the order of the alphabet
    given = {"args": {name: {"value": values[name]} for name in sorted(values)}}
    replaced = utils.create_sweep_command_args(given)
    replaced |= {"program": [content["program"]], "env": ["/usr/bin/env"]}
    words = []
    for word in command:
        is_macro = word.startswith("${")
        words += replaced[word[2:-1]] if is_macro else [word]
    assert words[:3] == ["/usr/bin/env", "mtrl-lightning", "fit"]
    return words[2:]


def parsed(arguments):
    return parser().parse_args(arguments[1:]).as_dict()


def values_of(path, number):
    """Return the n-th choice of every parameter of a sweep file, as W&B's server sends it."""
    values = {}
    for name, one in yaml.safe_load(path.read_text())["parameters"].items():
        choices = one.get("values") or [one["min"], one["max"]]
        values[name] = choices[number % len(choices)]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("number", [0, 1])
def test_every_sweep_file_makes_runs_that_the_program_accepts(path, number):
    values = values_of(path, number)
    config = parsed(agent_arguments(path, values))
    sac = config["model"]["init_args"]
    assert config["trainer"]["logger"][0]["class_path"].endswith("EnvStepWandbLogger")
    assert config["seed_everything"] == values.get("seed_everything", 1)
    wanted = {
        "model.init_args.critic.init_args.layer_norm": lambda: sac["critic"]["init_args"][
            "layer_norm"
        ],
        "model.init_args.target_entropy": lambda: sac["target_entropy"] or "null",
        "rollout.updates_per_step": lambda: config["rollout"]["updates_per_step"],
    }
    assert all(found() == values[name] for name, found in wanted.items() if name in values)
    for axis, part in (("config.gradient", "actor_gradient"), ("config.network", "actor")):
        if axis in values:
            file = yaml.safe_load((ROOT / "configs" / f"{values[axis]}.yaml").read_text())
            chosen = file["model"]["init_args"][part]["class_path"]
            assert sac[part]["class_path"] == chosen
            assert part != "actor" or sac[part]["init_args"]["width"] == 64, "the option is last"
    pytest.importorskip("optuna")
    from mtrl_lightning.sweeps.sweep_file import read_sweep_file

    sweep = read_sweep_file(path)
    assert (sweep.metric, sweep.goal) == ("eval/success", "maximize")
    own = sweep.arguments(values)
    of_agent = [word for word in agent_arguments(path, values) if word != "logger/wandb"]
    of_agent.remove("-c")
    assert sorted(own) == sorted(of_agent), "the same without W&B"


def test_files_come_before_options_and_behind_files_in_any_order():
    width = "--model.init_args.actor.init_args.width=7"
    for named in (["--config.network=network/moore"], ["--config.network", "network/moore"]):
        config = parsed(["fit", "-c", "quickstart", width, *named, "--name", "x"])
        actor = config["model"]["init_args"]["actor"]
        assert actor["class_path"] == "mtrl_lightning.networks.MOORE", "it replaces quickstart's"
        assert actor["init_args"]["width"] == 7 and config["name"] == "x"
    for missing in (["--config.x"], ["--config.x="], ["--config.a=env/toy", "--config.x", "-c=a"]):
        with pytest.raises(ConfigurationError, match=r"--config.x needs a configuration"):
            parsed(["fit", *missing])


def test_files_of_a_repeated_name_keep_the_order_of_the_command_line(tmp_path):
    contents = {
        "one": "name: one\nroot: one",
        "two": "name: two\nroot: two",
        "three": "name: three",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    named = zip(("a", "b", "a"), contents, strict=True)
    files = [f"--config.{parameter}={tmp_path / file}" for parameter, file in named]
    config = parsed(["fit", "-c", "quickstart", *files])
    assert (config["name"], config["root"]) == ("three", "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("model.init_args.target_entropy", "null", None),
        ("model.init_args.critic.init_args.layer_norm", False, False),
        ("data.batch_size", 384, 384),
        ("data.info_keys", ["a", "b"], ["a", "b"]),
        ("model.init_args.actor_optimizer.init_args.lr", 3e-05, 3e-05),
        ("model.init_args.encoder", "Standardize", "mtrl_lightning.networks.Standardize"),
    ],
)
def test_values_arrive_as_they_are_in_the_sweep_file(name, value, found):
    config = parsed(agent_arguments(ROOT / "configs/sweep/learning_rates.yaml", {name: value}))
    for part in name.split("."):
        config = config[part]
    assert (config["class_path"] if name.endswith("encoder") else config) == found


def records_of(folder):
    """Return the records of all offline files of a run, in their order."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    pytest.importorskip("wandb").teardown()  # W&B writes the last block after `finish` returns
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = internal.Record()
            record.ParseFromString(data)
            found.append(record)
    return found


@pytest.mark.slow
def test_a_preempted_run_is_marked_and_continues_exactly(
    command_line, monkeypatch, request, caplog
):
    wandb = pytest.importorskip("wandb")
    for name, value in {**SWEEP, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # else it may have read the environment in an earlier test
    request.addfinalizer(wandb.teardown)  # nor must a later one have this environment
    real = MetricsCallback.log_if_due
    preempted = []

    def log(callback, env_steps, at_end):
        real(callback, env_steps, at_end)
        if env_steps == 600 and not preempted:
            preempted.append(env_steps)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsCallback, "log_if_due", log)
    arguments = command_line.arguments("fit", configs=(*CONFIGS, "logger/wandb"))
    with pytest.raises(Interrupted) as interrupted:
        main(arguments)
    assert interrupted.value.code == 128 + signal.SIGTERM
    folder = command_line.folder()
    first = records_of(folder)
    kinds = [record.WhichOneof("record_type") for record in first]
    assert "preempting" in kinds and kinds.index("preempting") < kinds.index("exit")
    assert [record.exit.exit_code for record in first if record.HasField("exit")] == [143]
    metrics = {
        record.metric.name: record.metric.summary for record in first if record.HasField("metric")
    }
    assert metrics["eval/success"].max and metrics["eval/success/goal-1"].max
    assert metrics["rollout/return"].max and "train/q" not in metrics
    assert {record.run.sweep_id for record in first if record.HasField("run")} == {"s1"}

    # the agent starts the same command with the same id
    caplog.clear()
    main(arguments)
    wandb.finish()
    assert "W&B started run r1 of the sweep again: the run continues from" in caplog.text
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert (folder / "config_from_000000000600.yaml").exists()
    both = records_of(folder)
    assert {record.run.run_id for record in both if record.HasField("run")} == {"r1"}
    rows = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in both
        if record.HasField("history")
    ]
    evaluated = [int(row["env_steps"]) for row in rows if "eval/success" in row]
    logged = read_metrics(folder)["eval/success"][0]
    assert evaluated == logged and len(logged) == 3, "no point is lost and none comes twice"
    monkeypatch.setenv("WANDB_RUN_ID", "r2")
    restart_id = find_restart_id("the same command")
    other = locate_run(str(command_line.root), "run", restart_id=restart_id)
    assert other.checkpoint is None and other.folder.name == "version_1", "of another run"


class FakeRun:
    """A W&B run that keeps what is done with it."""

    sweep_id = "s1"
    disabled = False
    offline = False

    def __init__(self):
        self.calls = []

    def mark_preempting(self):
        self.calls.append("preempting")

    def finish(self, exit_code):
        self.calls.append(exit_code)


@pytest.mark.parametrize(
    ("number", "is_stopped", "calls"),
    [
        (signal.SIGTERM, False, ["preempting", 143]),
        (signal.SIGTERM, True, ["preempting", 0]),
        (signal.SIGINT, True, [0]),
        (signal.SIGINT, False, [130]),
    ],
)
def test_a_run_that_hyperband_stops_is_not_repeated(monkeypatch, number, is_stopped, calls):
    module = "mtrl_lightning.callbacks.loggers.wandb_logger"
    monkeypatch.setattr(f"{module}.SECONDS_UNTIL_STOP_IS_KNOWN", 0.0)
    run = FakeRun()
    logger = types.SimpleNamespace(experiment=run, is_stopped=is_stopped, _can_be_stopped=True)
    assert EnvStepWandbLogger.end_interrupted(logger, 128 + number) == calls[-1]
    assert run.calls == calls
    run.sweep_id = None
    run.calls.clear()
    assert EnvStepWandbLogger.end_interrupted(logger, 143) == 143 and run.calls == []


@pytest.mark.parametrize("is_ending", [True, False])
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_run_that_its_agent_has_interrupted_gets_no_second_signal(
    monkeypatch, is_ending, is_interrupted
):
    sent = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    logger = types.SimpleNamespace(_is_ending=is_ending, is_interrupted=lambda: is_interrupted)
    EnvStepWandbLogger._stop(logger)
    assert logger.is_stopped
    assert sent == ([] if is_ending or is_interrupted else [signal.SIGINT])


def test_without_a_login_the_remedy_is_named(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")

    def init(**options):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", init)
    logger = EnvStepWandbLogger(save_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"log in\. Log in by .*WANDB_MODE=offline"):
        logger.experiment  # noqa: B018
