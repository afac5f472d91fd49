"""A slim policy is a small folder that commands take like a run's, and the package has some."""

import hashlib
import json
import re
import shutil
from unittest.mock import ANY

import numpy as np
import pytest
import yaml
from scipy.stats import binomtest

from mtrl_lightning import load_policy
from mtrl_lightning.__main__ import main
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import policies, read_card, read_config
from tests.helpers.command_line import ROOT

MAX_MIB = 2
MAX_MIB_OF_ALL = 6


@pytest.fixture
def run_folder(command_line, capsys):
    """A finished run of the toy tasks that was evaluated with four test episodes of each task."""
    command_line.finished("--rollout.total_steps=330", "--evaluation.every=330")
    main(["validate", str(command_line.folder()), "--evaluation.num_episodes=4"])
    capsys.readouterr()
    return command_line.folder()


def test_a_run_is_exported_as_a_slim_policy(run_folder, tmp_path, capsys):
    slim = tmp_path / "slim"
    main(["export", str(run_folder), "--slim", f"--folder={slim}"])
    assert f"Exported {run_folder / 'checkpoints' / 'best.ckpt'}" in capsys.readouterr().out
    files = sorted(path.relative_to(slim).as_posix() for path in slim.rglob("*") if path.is_file())
    assert files == ["checkpoints/best.ckpt", "config.yaml", "policy.json"]

    checkpoint = slim / "checkpoints" / "best.ckpt"
    full = load_checkpoint(run_folder / "checkpoints" / "best.ckpt")
    kept = load_checkpoint(checkpoint)
    assert kept.keys() == {"pytorch-lightning_version", "state_dict", "mtrl_lightning"}
    assert kept["mtrl_lightning"]["spec"] == full["mtrl_lightning"]["spec"]
    assert checkpoint.stat().st_size < 0.5 * (run_folder / "checkpoints/best.ckpt").stat().st_size

    observation_ED = np.random.default_rng(0).normal(size=(6, 2))
    tasks = ["goal-0", "goal-1"] * 3
    wanted_EA = load_policy(run_folder).act(observation_ED, tasks)
    np.testing.assert_array_equal(load_policy(slim).act(observation_ED, tasks), wanted_EA)

    card = read_card(slim)
    (result,) = map(json.loads, (run_folder / "validations.jsonl").read_text().splitlines())
    assert card["evaluation"]["by"] == "validate" and card["env_steps"] == 330
    assert card["evaluation"]["metrics"] == result["metrics"]
    assert card["tasks"] == ["goal-0", "goal-1", "goal-2"]
    assert card["sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    texts = [(slim / name).read_text() for name in ("config.yaml", "policy.json")]
    assert not any(str(tmp_path) in text for text in texts), "no folder of this machine"
    assert read_config(slim / "config.yaml")["evaluation"]["num_episodes"] == 4

    main(["validate", str(slim)])  # repeats the evaluation
    (again,) = map(json.loads, (slim / "validations.jsonl").read_text().splitlines())
    assert again["metrics"] == result["metrics"]


def test_without_a_validation_the_card_has_the_last_evaluation(command_line, tmp_path):
    command_line.finished("--rollout.total_steps=330", "--evaluation.every=330")
    main(["export", str(command_line.folder()), "--slim", f"--folder={tmp_path / 'slim'}"])
    evaluation = read_card(tmp_path / "slim")["evaluation"]
    (row,) = [row for row in command_line.rows() if row["eval/return"]]
    assert evaluation["by"] == "fit" and evaluation["env_steps"] == 330
    assert evaluation["metrics"]["eval/return"] == float(row["eval/return"])


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_not_written_over(run_folder, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    before = files_of(run_folder) | files_of(other)
    for checkpoint in ("last", "best"):
        path = run_folder / "checkpoints" / f"{checkpoint}.ckpt"
        for folder in (run_folder, other):
            with pytest.raises(SystemExit):
                main(["export", str(path), "--slim", f"--folder={folder}"])
            assert "give another --folder" in capsys.readouterr().err
    assert files_of(run_folder) | files_of(other) == before
    slim = tmp_path / "slim"
    for _ in range(2):  # a slim policy may be replaced by a newer one
        main(["export", str(run_folder), "--slim", f"--folder={slim}"])


def test_a_card_has_the_runs_own_evaluation_alone(run_folder, tmp_path):
    stored = run_folder / "validations.jsonl"
    (line,) = stored.read_text().splitlines()
    other = json.loads(line)
    other["protocol"]["horizon"] = 5
    some = json.loads(line)
    some["metrics"] = {"eval/return": 0.0, "eval/return/goal-0": 0.0}
    broken = [json.dumps({"env_steps": 330}), '{"env_steps"', "[]"]
    stored.write_text("\n".join([line, json.dumps(other), json.dumps(some), *broken]) + "\n")
    main(["export", str(run_folder), "--slim", f"--folder={tmp_path / 'slim'}"])
    card = read_card(tmp_path / "slim")
    assert card["evaluation"]["metrics"] == json.loads(line)["metrics"]
    # and it stays when the slim policy is exported again
    main(["export", str(tmp_path / "slim"), "--slim", f"--folder={tmp_path / 'again'}"])
    assert read_card(tmp_path / "again") == {**card, "sha256": ANY}


def test_paths_of_the_machine_are_in_the_command_and_not_in_the_configuration(run_folder, tmp_path):
    config = read_config(run_folder / "config.yaml")
    config["init_from"] = str(tmp_path / "other")
    config["trainer"]["default_root_dir"] = str(tmp_path / "runs")
    config["data"]["demonstrations"] = str(tmp_path / "experts")
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    main(["export", str(run_folder), "--slim", f"--folder={tmp_path / 'slim'}"])
    assert str(tmp_path) not in (tmp_path / "slim" / "config.yaml").read_text()
    command = "mtrl-lightning fit -c config.yaml --init_from POLICY"
    assert read_card(tmp_path / "slim")["command"] == (
        f"{command} --data.demonstrations COLLECTION"
    )


def test_exports_of_the_packages_policies_go_into_the_present_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = files_of(policies()["mt10"])
    main(["export", "mt10", "--slim"])
    main(["export", "mt10", "--to=torch.export"])
    assert (tmp_path / "export/mt10/policy.pt2").is_file()
    assert (tmp_path / "export/mt10/slim/policy.json").is_file()
    assert files_of(policies()["mt10"]) == before


def test_what_cannot_work_is_refused(run_folder, tmp_path, capsys):
    slim = tmp_path / "slim"
    main(["export", str(run_folder), "--slim", f"--folder={slim}"])

    def error_of(*args):
        with pytest.raises(SystemExit) as exit_info:
            main(list(args))
        assert exit_info.value.code == 2
        return capsys.readouterr().err

    assert "start a new run from it by --init_from" in error_of("fit", "--resume", str(slim))
    assert "start a new run from it by --init_from mt10" in error_of("fit", "--resume", "mt10")
    assert "is exported: give" in error_of("export", str(slim), "--slim", f"--folder={slim}")
    assert "by --init_from mt10" in error_of("fit", "--ckpt_path", "mt10", "-c", "quickstart")
    late = error_of("validate", "--evaluation.num_episodes", "1", "mt10")
    assert "give the policy mt10 first: mtrl-lightning validate mt10" in late
    for policy in ("mt10", str(slim)):
        assert "without a replay" in error_of("export", policy, "--to=minari")
    assert "did you mean policies" in error_of("list", "polcies")
    assert "not allowed with argument" in error_of("export", str(slim), "--slim", "--to=onnx")
    for command in ("play", "validate"):
        assert "did you mean mt10" in error_of(command, "mt11")
    with pytest.raises(ConfigurationError, match=r"there is no checkpoint mt11.*did you mean mt10"):
        load_policy("mt11")
    (slim / "policy.json").write_text("{")
    with pytest.raises(ConfigurationError, match="write the policy again by"):
        read_card(slim)


def test_a_run_of_a_policys_name_comes_first_and_no_other_folder(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mt10").mkdir()
    assert load_policy("mt10").spec.num_tasks == 10
    main(["export", str(run_folder), "--slim", "--folder=mt10"])
    assert load_policy("mt10").spec.num_tasks == 3


@pytest.mark.parametrize("name", policies())
def test_the_packages_policies_are_small_and_as_their_cards_say(name):
    folder = policies()[name]
    card = read_card(folder)
    file = folder / "checkpoints" / "best.ckpt"
    assert file.stat().st_size <= MAX_MIB * 2**20
    assert hashlib.sha256(file.read_bytes()).hexdigest() == card["sha256"]
    policy = load_policy(name)
    assert list(policy.task_names) == card["tasks"] and policy.env_steps == card["env_steps"]
    assert policy.spec.protocol == card["protocol"]
    assert card["evaluation"]["by"] == "validate"
    assert card["evaluation"]["env_steps"] == card["env_steps"]
    text = (folder / "config.yaml").read_text() + (folder / "policy.json").read_text()
    assert not re.search(r"/(root|home|tmp|work)/", text)


def test_all_policies_together_are_small():
    assert {"mt10", "mt50", "dmc3"} <= policies().keys()
    files = (ROOT / "mtrl_lightning" / "policies").rglob("*.ckpt")
    assert sum(file.stat().st_size for file in files) <= MAX_MIB_OF_ALL * 2**20


def test_list_prints_the_policies(capsys):
    main(["list"])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("  mt10  ")]
    card = read_card(policies()["mt10"])
    success = f"{card['evaluation']['metrics']['eval/success']:.2f}"
    steps = f"{card['env_steps']:,}"
    assert line.split() == ["mt10", "10", success, "500", steps, "env", "steps"]
    main(["list", "policies"])
    printed = capsys.readouterr().out
    assert card["sha256"] in printed
    assert f"mtrl-lightning fit -c {policies()['mt10']}" in printed.replace("\n    ", " ")
    line = next(one for one in printed.splitlines() if one.startswith("  door-open-v3 "))  # mt10's
    assert line.split()[1] == f"{card['evaluation']['metrics']['eval/success/door-open-v3']:.2f}"


@pytest.mark.slow
def test_mt10_does_as_well_as_its_card_says(tmp_path):
    file = tmp_path / "results.json"
    main(["validate", "mt10", "--evaluation.num_episodes=2", f"--json={file}"])
    assert not (policies()["mt10"] / "validations.jsonl").exists()
    found = json.loads(file.read_text())["metrics"]
    expected = read_card(policies()["mt10"])["evaluation"]["metrics"]
    interval = binomtest(round(20 * found["eval/success"]), 20).proportion_ci(0.99)
    assert interval.low <= expected["eval/success"] <= interval.high
    assert {name for name in expected if "success/" in name} <= found.keys()
