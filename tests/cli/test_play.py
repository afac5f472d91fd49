"""``play`` writes the videos of a run's policy, and says what was wrong with its arguments."""

from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli import loaded_run
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.policy import load_policy
from mtrl_lightning.video.recording import Recording
from tests.helpers.video import frames_of

SMALL = ["--width=64", "--height=48", "--num_workers=0"]


@pytest.fixture
def run(command_line):
    command_line.finished()
    return command_line.folder()


def test_play_writes_the_videos_of_a_run(run, capsys, tmp_path):
    best = load_policy(run / "checkpoints" / "best.ckpt").env_steps
    capsys.readouterr()
    main(["play", str(run), *SMALL, "--tasks", "goal-2", "goal-0", "--episodes=2"])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines[2:6]]
    assert [(task, episode, length) for task, episode, _, length, _ in shown] == [
        (task, episode, "20") for task in ("goal-2", "goal-0") for episode in ("0", "1")
    ]
    folder = run / "videos" / f"env_steps={best:012d}"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["all_tasks.mp4", "goal-0.mp4", "goal-2.mp4"]
    assert frames_of(folder / "goal-2.mp4")[0].shape == (2 * 61, 48, 64, 3)


def test_checkpoint_may_use_the_configurations_classes():
    model = {
        "class_path": "mtrl_lightning.algorithms.SAC",
        "init_args": {
            "actor": {"class_path": "gated.Gated", "init_args": {}},
            "transforms": [{"class_path": "own.parts.Crop"}],
            "actor_optimizer": {"class_path": "torch.optim.Adam"},
        },
    }
    expected = ["gated.Gated", "gated", "own.parts.Crop", "own.parts"]
    assert loaded_run.named_classes(model) == expected


def test_a_run_is_played_with_its_action_transforms(run, monkeypatch):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    options = config["data"]["init_args"]
    half = {"class_path": "tests.helpers.rollout.Scale", "init_args": {"factor": 0.5}}
    options["action_transforms"] = [half]
    file.write_text(yaml.safe_dump(config))
    record = Mock(return_value=Recording({}, []))
    monkeypatch.setattr("mtrl_lightning.video.record_videos", record)
    main(["play", str(run), *SMALL])
    observation_ED = np.zeros((1, 2), np.float32)
    own = load_policy(run).act(observation_ED, np.array([0]), "exploit")
    sent = record.call_args.args[0].act(observation_ED, np.array([0]), "exploit")
    np.testing.assert_allclose(sent, 0.5 * own, rtol=1e-6)
    options["no_option"] = 1
    with pytest.raises(ConfigurationError, match="no_option"):
        loaded_run.data_of(config)
