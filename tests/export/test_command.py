"""``export`` of runs, and of checkpoints without the state of their training; shipped policies."""

import hashlib
import json

import numpy as np
import pytest
from scipy.stats import binomtest

from mtrl_lightning import load_policy
from mtrl_lightning.__main__ import main
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.cli.config_list import read_card
from mtrl_lightning.export.policy import load_exported
from mtrl_lightning.runs import policies
from tests.helpers.command_line import fails
from tests.helpers.demonstrations import need_minari


def test_exported_policy_acts_as_its_run_and_cannot_be_continued(command_line, tmp_path):
    command_line.finished()
    run, exported = command_line.folder(), tmp_path / "shared"
    main(["export", str(run), "--to=policy", f"--folder={exported}"])
    kept = load_checkpoint(exported / "checkpoints" / "best.ckpt")
    sections = {"pytorch-lightning_version", "state_dict", "hyper_parameters", "mtrl_lightning"}
    assert kept.keys() == sections
    full = run / "checkpoints" / "best.ckpt"
    observation_ED = np.random.default_rng(0).normal(size=(6, 2))
    tasks = ["goal-0", "goal-1"] * 3
    for mode in ("exploit", "explore"):
        found_EA, wanted_EA = (
            load_policy(path).act(observation_ED, tasks, mode) for path in (exported, full)
        )
        np.testing.assert_array_equal(found_EA, wanted_EA)
    before = full.read_bytes()
    for args in (
        ["fit", f"--resume={exported}"],
        ["export", str(run), "--to=policy", f"--folder={run}"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        assert exit_info.value.code == 2
    files = {path.name for path in exported.rglob("*") if path.is_file()}
    assert files - {"run.lock"} == {"best.ckpt", "config.yaml"} and full.read_bytes() == before


def test_a_run_is_exported(command_line, tmp_path, capsys):
    options = ["--data.total_steps=330", "--evaluation.every=330", "--data.capacity=150"]
    transforms = "[{class_path: tests.helpers.rollout.Scale, init_args: {factor: 0.5}}]"
    command_line("fit", *options, f"--data.action_transforms={transforms}")
    run = command_line.folder()
    main(["export", str(run), "--to", "torch.export"])
    folder = run / "export"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "policy.pt2"]
    observation_1D = np.array([[0.3, -0.2]], np.float32)
    policy = load_policy(run / "checkpoints" / "best.ckpt")
    exported = load_exported(folder / "policy.pt2", "torch.export")
    action_1A = exported(observation_1D, np.array([2]))
    np.testing.assert_allclose(action_1A, 0.5 * policy.act(observation_1D, 2), atol=1e-5)

    need_minari()
    capsys.readouterr()
    main(["export", str(run), "--to", "minari", f"--folder={tmp_path / 'data'}"])
    lines = capsys.readouterr().out.splitlines()
    # 110 steps of each environment, of which a ring holds 50: those from step 60 on, where an
    # episode of 20 steps happens to begin, and what the oldest one holds is left out
    assert lines[1].split() == ["goal-0", "2", "30"]
    (run / "config.yaml").unlink()
    code, error = fails(main, capsys, ["export", str(run), "--to=torch.export"])
    assert code == 2 and "config.yaml" in error


def test_shipped_policy_is_exported_here_and_a_run_precedes_it(command_line, tmp_path, monkeypatch):
    command_line.finished()
    monkeypatch.chdir(tmp_path)
    main(["export", "mt10", "--to=policy"])
    assert (tmp_path / "export" / "mt10" / "policy" / "checkpoints" / "best.ckpt").exists()
    (tmp_path / "mt10").mkdir()
    assert load_policy("mt10").spec.num_tasks == 10
    main(["export", str(command_line.folder()), "--to=policy", "--folder=mt10"])
    assert load_policy("mt10").spec.num_tasks == 3


@pytest.mark.parametrize("name", policies())
def test_policies_of_the_package_are_those_of_their_cards(name):
    folder = policies()[name]
    card = read_card(folder)
    file = folder / "checkpoints" / "best.ckpt"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == card["sha256"]
    policy = load_policy(name)
    assert list(policy.task_names) == card["tasks"] and policy.env_steps == card["env_steps"]
    assert policy.spec.protocol == card["protocol"]
    assert card["evaluation"]["env_steps"] == card["env_steps"]


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
