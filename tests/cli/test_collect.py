"""``collect`` writes episodes of a policy, and refuses early what cannot work."""

from pathlib import Path

import numpy as np
import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.demonstrations import open_data_sets
from mtrl_lightning.policy import load_policy
from tests.helpers.command_line import fails
from tests.helpers.demonstrations import need_minari, read_episodes

TOY = ["--policy=random", "--env=env/toy", "--episodes=2", "--num_workers=0"]
HORIZON = "--data.benchmark.init_args.horizon"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    need_minari()
    monkeypatch.chdir(tmp_path)


def error_of(capsys, *args):
    code, error = fails(main, capsys, ["collect", *args])
    assert code == 2
    return error


def test_episodes_are_written_and_their_results_printed(capsys, tmp_path):
    main(["collect", *TOY, "--split=eval", "--seed=3", "--noise=0.1", "--", HORIZON, "7"])
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed[1:4]]
    assert [row[:3] for row in rows] == [[f"goal-{task}", "2", "14"] for task in range(3)]
    data_sets = open_data_sets("collections/toy_random")
    assert [data.lengths for data in data_sets.values()] == [[7, 7]] * 3
    episodes = list(data_sets["goal-1"].episodes())
    assert "policy_action" in episodes[0].infos
    total = sum(one.rewards.sum() for one in episodes)
    assert float(rows[1][3]) == pytest.approx(total / 2, abs=0.06)
    assert [one.seed for one in episodes] == [0, 1]
    assert data_sets["goal-1"].spec.horizon == 7
    facts = data_sets["goal-1"].facts
    assert facts["benchmark"]["init_args"] == {"num_tasks": 3, "horizon": 7}
    assert (facts["policy"], facts["seed"], facts["split"]) == ("random", 3, "eval")

    assert "toy_random exists" in error_of(capsys, *TOY), "before anything is built"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--policy=nowhere/run"], "nowhere/run"),
        (["--env=env/tyo"], "env/toy"),
        (["--episodes=0"], "episodes"),
        (["--noise=-0.5"], "noise"),
        (["--split=evil"], "eval"),
        (["--policy=scripted"], "scripted"),
        (["--policy=mt10"], "goal-0"),
        (["--env=algorithm/mtsac"], "benchmark"),
        (["--", "--data.benchmark.init_args.horizn=3"], "horizn"),
    ],
)
def test_mistakes_write_nothing(capsys, change, word):
    assert word in error_of(capsys, *TOY, *change)
    assert list(Path().iterdir()) == []


def test_fewer_successes_than_wanted_are_an_error(capsys):
    args = [*TOY, "--successes_only", "--attempts=1", "--episodes=30", "--", HORIZON, "4"]
    with pytest.raises(SystemExit) as exit_info:
        main(["collect", *args])
    error = exit_info.value.code
    episodes = read_episodes("collections/toy_random")
    assert all(one.infos["success"].any() for of_task in episodes.values() for one in of_task)
    counts = {name: len(of_task) for name, of_task in episodes.items()}
    name = min(counts, key=counts.get)
    assert f"{name} has {counts[name]} of 30 successes after 30 attempts" in error


@pytest.mark.slow
def test_a_run_acts_with_its_action_transforms(command_line, tmp_path):
    transform = "{class_path: tests.helpers.rollout.Scale, init_args: {factor: 0.5}}"
    command_line.finished(f"--data.action_transforms=[{transform}]")
    run = command_line.folder()
    main(["collect", f"--policy={run}", *TOY[1:], f"--folder={tmp_path / 'new'}"])
    policy = load_policy(run)
    for name, of_task in read_episodes(tmp_path / "new").items():
        for episode in of_task:
            expected = policy.act(episode.observations[:-1], name)
            np.testing.assert_allclose(episode.actions, 0.5 * expected, atol=1e-6)
