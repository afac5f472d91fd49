"""``export`` writes a run's policy with its card, or its replay."""

import hashlib

import numpy as np
import pytest
import torch
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.export.policy import load_exported
from mtrl_lightning.loading import load_policy


def error_of(capsys, *args):
    with pytest.raises(SystemExit) as exit_info:
        main(["export", *args])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_a_run_is_exported(command_line, tmp_path, capsys):
    options = ["--rollout.total_steps=330", "--evaluation.every=330", "--data.capacity=150"]
    transforms = "[{class_path: tests.helpers.fakes.Scale, init_args: {factor: 0.5}}]"
    command_line("fit", *options, f"--rollout.action_transforms={transforms}")
    run = command_line.folder()
    capsys.readouterr()

    main(["export", str(run), "--to", "torch.export"])
    printed = capsys.readouterr().out
    assert "best.ckpt, after 330 env steps, 3 tasks" in printed
    assert "Largest difference of an action from the policy's: " in printed
    folder = run / "export"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.yaml",
        "policy.pt2",
    ]
    card = (folder / "README.md").read_text()
    digest = hashlib.sha256((run / "checkpoints" / "best.ckpt").read_bytes()).hexdigest()
    assert f"checkpoint: `run/version_0/checkpoints/best.ckpt`, SHA-256 `{digest}`" in card
    steps, values = read_metrics(run)["eval/return/goal-1"]
    assert steps[-1] == 330 and "after 330 env steps; means over the tasks." in card
    metadata, body = card.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(metadata)["library_name"] == "mtrl_lightning"
    assert 'policy = torch.export.load("policy.pt2").module()' in body
    assert "[rows, 2]`, float32" in body and "onnx" not in body and "{" not in body
    assert str(tmp_path) not in card, "no folder of this machine"
    (made,) = [line for line in body.splitlines() if line.startswith("- trained by ")]
    assert "`mtrl-lightning fit -c config.yaml`" in made
    assert f"torch {torch.__version__}" in made and "mtrl_lightning " in made
    cells = [[cell.strip() for cell in line.split("|")[1:]] for line in body.splitlines()]
    (row,) = [one for one in cells if one[:3] == ["1", "goal-1", "yes"]]
    assert f"{values[-1]:.3f}" in row
    assert ["benchmark", "toy", ""] in cells
    assert 20 < len(body.splitlines()) < 80, "a page"
    observation_1D = np.array([[0.3, -0.2]], np.float32)
    policy = load_policy(run / "checkpoints" / "best.ckpt")
    exported = load_exported(folder / "policy.pt2", "torch.export")
    action_1A = exported(observation_1D, np.array([2]))
    np.testing.assert_allclose(action_1A, 0.5 * policy.act(observation_1D, 2), atol=1e-5)

    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    main(["export", str(run), "--to", "minari", f"--folder={tmp_path / 'data'}"])
    lines = capsys.readouterr().out.splitlines()
    # 110 steps of each environment, of which a ring holds 50: those from step 60 on, where an
    # episode of 20 steps happens to begin, and what the oldest one holds is left out
    assert lines[1].split() == ["run/version_0/goal-0-v0", "2", "30"]
    assert len(lines) == 5 and lines[4].endswith(f"MINARI_DATASETS_PATH={tmp_path / 'data'}")
    (run / "config.yaml").unlink()
    message = "was started from Python with the action transforms"
    assert message in error_of(capsys, str(run), "--to=torch.export")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "one of the arguments --slim --to is required"),
        (["run", "--to=onx"], "invalid choice: 'onx' (choose from"),
        (["--to=onnx"], "the following arguments are required: RUN"),
        (["nowhere", "--to=onnx"], "there is no checkpoint nowhere"),
        (["nowhere", "--to=minari"], "there is no checkpoint nowhere"),
    ],
)
def test_what_is_wrong_is_said(capsys, args, message):
    assert message in error_of(capsys, *args)


def test_an_export_names_damaged_metrics(command_line, capsys):
    command_line.finished()
    (command_line.folder() / "metrics.csv").write_text("env_steps,a\nx,1\n")
    assert "metrics.csv cannot be read" in error_of(
        capsys, str(command_line.folder()), "--to=torch.export"
    )
