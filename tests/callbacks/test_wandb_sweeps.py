"""Sweeps of Weights & Biases: the commands of its agents, preempted runs, the best in the table."""

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

SWEEP = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_MODE": "offline"}


EXAMPLE = ROOT / "examples" / "sweep_wandb.yaml"


def agent_arguments(values):
    """Return what follows the program in the command that W&B's agent makes of the example."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = yaml.safe_load(EXAMPLE.read_text())
    assert values.keys() == sweep["parameters"].keys()
    given = {"args": {name: {"value": value} for name, value in sorted(values.items())}}
    replaced = utils.create_sweep_command_args(given)
    replaced |= {"program": [sweep["program"]], "env": ["/usr/bin/env"]}
    words = []
    for word in utils.create_sweep_command(sweep["command"]):
        words += replaced[word[2:-1]] if word.startswith("${") else [word]
    assert words[:2] == ["/usr/bin/env", "mtrl-lightning"]
    return words[2:]


def test_the_command_line_accepts_what_an_agent_makes_of_the_example():
    model = "model.init_args"
    arguments = agent_arguments(
        {
            f"{model}.actor_optimizer.init_args.lr": 3e-05,
            f"{model}.critic_optimizer.init_args.lr": 0.002,
            f"{model}.critic.init_args.layer_norm": False,
            "rollout.updates_per_step": 0.5,
        }
    )
    config = parser().parse_args(arguments[1:])
    assert config[f"{model}.actor_optimizer.init_args.lr"] == 3e-05
    assert config[f"{model}.critic_optimizer.init_args.lr"] == 0.002
    assert config[f"{model}.critic.init_args.layer_norm"] is False
    assert config["rollout.updates_per_step"] == 0.5
    assert config["trainer.logger"][0].class_path.endswith("EnvStepWandbLogger")


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
