"""A small version of the fault benchmark, and its judges, which must find what is wrong."""

import json
import random

import numpy as np
import pytest
import torch

from benchmarks import faults
from benchmarks.bench import Row, table
from benchmarks.corruption import FILES, HARMS, REGIONS, harmed, judge, mutations
from benchmarks.faulty import KINDS, FaultyMetaWorld, claim
from benchmarks.judging import compare_rows, differences, examine, examine_toy
from benchmarks.trial import TOY_HORIZON, TOY_TASKS
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.replay import columns_of

HORIZON = 5


def test_the_small_version_survives_everything(tmp_path):
    small = [
        "--total_steps=600",
        "--kills=2",
        "--worker_kills=1",
        "--nans=2",
        "--mutations=30",
        "--continued=0",
    ]
    rows = ["kill", "worker", "nan", "corruption"]
    path = tmp_path / "faults.json"
    code = faults.main(
        [*small, "--rows", *rows, "--json", str(path), "--folder", str(tmp_path / "runs")]
    )
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == rows
    assert [row["failures"] for row in found["rows"]] == [[], [], [], []]
    assert code == 0 and found["ok"]
    kill, worker, nan, corruption = found["rows"]
    assert kill["exact"] is True and (kill["injected"], kill["lost"], kill["false"]) == (2, 0, 0)
    assert (worker["injected"], worker["survived"], worker["lost"], worker["false"]) == (1, 1, 0, 0)
    assert nan["injected"] >= 1 and (nan["lost"], nan["false"]) == (0, 0)
    assert corruption["injected"] == corruption["survived"] == 30
    assert found["machine"]["torch"] == torch.__version__ and found["machine"]["cores"] >= 1
    assert not (tmp_path / "runs").exists()


def test_a_run_of_several_processes_has_rows_of_its_own(capsys):
    assert faults.parse([]).rows == list(faults.ROWS)
    assert faults.parse(["--ranks=2"]).rows == list(faults.RANK_ROWS)
    with pytest.raises(SystemExit):
        faults.parse(["--ranks=2", "--rows", "kill", "rank_hang"])
    assert "kill: with --ranks 2, give rank_kill" in capsys.readouterr().err


def whole_row(**changes):
    return Row(
        **{
            "name": "kill",
            "injected": 2,
            "survived": 2,
            "lost": 0,
            "false": 0,
            "exact": True,
            **changes,
        }
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"injected": 0, "survived": 0},
        {"survived": 1},
        {"lost": 1},
        {"false": 1},
        {"exact": False},
        {"failures": ["a process is left"]},
    ],
)
def test_a_row_that_fails_makes_the_exit_code_1(changes, capsys):
    assert faults.report([whole_row(), whole_row(exact=None, lost=None, false=None)], None) == 0
    assert "all rows are ok" in capsys.readouterr().out
    assert faults.report([whole_row(), whole_row(**changes)], "-") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert "FAILED" in table([whole_row(**changes)])


def test_no_row_at_all_is_a_failure():
    assert faults.report([], "-") == 1


def test_an_error_in_a_row_is_its_failure(tmp_path, monkeypatch, capsys):
    def broken(bench, row):
        row.injected = 3
        raise TimeoutError("nothing came")

    monkeypatch.setitem(faults.ROWS, "hang", broken)
    assert faults.main(["--rows", "hang", "--folder", str(tmp_path / "runs")]) == 1
    assert "TimeoutError: nothing came" in capsys.readouterr().out


def episodes(lengths, seed=0):
    """Rows as MetaWorld's: frame, frame before, goal; an episode begins with equal frames."""
    generator = np.random.default_rng(seed)
    here, after = [], []
    for length in lengths:
        goal, frames = generator.random(3), generator.random((length + 1, 18))
        shown = [np.concatenate([f, frames[max(i - 1, 0)], goal]) for i, f in enumerate(frames)]
        here += shown[:-1]
        after += shown[1:]
    number = len(here)
    tensors = [torch.from_numpy(np.array(field, np.float32)) for field in (here, after)]
    return columns_of(
        tensors[0],
        torch.zeros(number, 4),
        torch.arange(number) * 1.0,
        tensors[1],
        torch.zeros(number) > 0,
    )


def without(rows, k):
    return {name: torch.cat([field[:k], field[k + 1 :]]) for name, field in rows.items()}


def toy_episodes(task, lengths):
    """Rows of an environment of ``ToyReach``."""
    env = ToyReach(TOY_TASKS, TOY_HORIZON).make_env(task, "train", seed=task)
    generator = np.random.default_rng(task)
    steps = []
    for length in lengths:
        here, _ = env.reset()
        for _ in range(length):
            action = generator.uniform(-1.5, 1.5, 2).astype(np.float32)
            after, reward, *_ = env.step(action)
            steps.append((here, action, np.float32(reward), after))
            here = after
    here, action, reward, after = (
        torch.from_numpy(np.array(column)) for column in zip(*steps, strict=True)
    )
    return columns_of(here, action, reward, after, torch.zeros(len(reward)) > 0)


def test_rows_of_the_toy_benchmark_are_checked_by_its_equations():
    rows = toy_episodes(1, [TOY_HORIZON, 7, TOY_HORIZON, 3])
    assert examine_toy(rows, 1) == (0, 1, 0, 0)
    assert examine_toy(toy_episodes(0, [3, TOY_HORIZON, 3]), 0, from_beginning=False).cut == 0
    assert examine_toy(toy_episodes(0, [TOY_HORIZON + 2]), 0).overlong == 2
    assert examine_toy(rows, 2).false == 50, "another task has another reward"
    for field in ("observation", "action", "next_observation", "reward"):
        wrong = {**rows, field: rows[field].clone()}
        wrong[field][4] -= 0.01 * wrong[field][4].sign()
        assert examine_toy(wrong, 1).false == 1, field
    assert examine_toy(without(rows, 4), 1).cut == 3, "a row is missing"


def test_true_transitions_are_found_true():
    assert examine(episodes([5, 5, 5, 3]), HORIZON) == (0, 0, 0, 0)
    assert examine(episodes([5, 2, 5]), HORIZON) == (0, 1, 0, 0)
    assert examine(without(episodes([5, 5]), 0), HORIZON, from_beginning=False) == (0, 0, 0, 0)


@pytest.mark.parametrize("place", ["frame", "goal", "reset"])
def test_a_false_transition_is_found(place):
    rows = episodes([5, 5, 5])
    if place == "frame":
        rows["next_observation"][7, 20] += 1e-3
    elif place == "goal":
        rows["next_observation"][7, 37] += 1e-3
    else:  # what a rebuilt environment shows first, stored as if the former one had come to it
        rows["next_observation"][7] = episodes([1], seed=1)["observation"][0]
    chain = examine(rows, HORIZON)
    assert chain.false == 1
    assert chain.torn == 1


def test_a_lost_transition_and_an_episode_without_its_end_are_found():
    assert examine(without(episodes([5, 5, 5]), 7), HORIZON).torn == 1
    assert examine(without(episodes([5, 5, 5]), 0), HORIZON).torn == 1
    assert examine(episodes([5, 7, 5]), HORIZON).overlong == 2


def test_rows_are_compared_whatever_their_order():
    rows = episodes([5, 5])
    turned = {name: field.flip(0) for name, field in rows.items()}
    assert compare_rows([rows], [turned]) == (0, 0)
    assert compare_rows([rows], [without(rows, 3)]) == (1, 0)
    turned["reward"][2] += 1
    assert compare_rows([rows], [turned]) == (1, 1)


def test_differences_sees_every_bit():
    tensor = torch.tensor([1.0, float("nan"), 0.0])
    value = {"a": [tensor, 1], "b": float("nan")}
    assert differences(value, {"a": [tensor.clone(), 1], "b": float("nan")}) == []
    assert differences(
        value, {"a": [torch.tensor([1.0, float("nan"), -0.0]), 1], "b": float("nan")}
    ) == [".a[0]"]
    assert differences(value, {"a": [tensor.double(), 1], "b": float("nan")}) == [".a[0]"]
    assert len(differences(value, {"a": [tensor, 1.0], "b": float("nan")})) == 1
    assert len(differences(value, {"a": [tensor], "b": float("nan")})) == 1
    assert len(differences(value, {"a": [tensor, 1]})) == 1


def test_the_judge_finds_a_loader_that_ignores_a_flipped_byte(tmp_path):
    path = tmp_path / "numbers.bin"
    original = np.arange(64, dtype=np.uint8).tobytes()

    def careless():
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)

    def careful():
        if path.read_bytes() != original:
            raise ConfigurationError(f"{path} is damaged")
        return careless()

    def nameless():
        raise ConfigurationError("a file is damaged")

    path.write_bytes(original)
    wanted = careless()
    assert judge(careless, wanted, path.name) == judge(careful, wanted, path.name) == "harmless"
    path.write_bytes(original[:9] + b"\xff" + original[10:])
    assert judge(careful, wanted, path.name) == "refused"
    assert judge(careless, wanted, path.name).startswith("read as another")
    assert judge(nameless, wanted, path.name).startswith("refused without")
    assert judge(lambda: 1 / 0, wanted, path.name).startswith("ZeroDivisionError")


def test_every_mutation_damages_its_region():
    draws, content = random.Random(0), bytes(range(1, 201)) * 10
    found = {(m.file, m.harm, m.region) for m in mutations(500, draws)}
    assert {(f, h, i) for f in FILES for h in HARMS for i in range(REGIONS)} < found
    assert len(mutations(30, draws)) == 30 and len(mutations(2000, draws)) == 2000
    for mutation in mutations(500, draws):
        if mutation.harm in HARMS:
            changed = harmed(content, mutation, draws)
            first = next(
                i
                for i, (a, b) in enumerate(zip(content, changed + b"\0" * 99, strict=False))
                if a != b
            )
            part = {16: (0, 64), 17: (1936, 2000)}.get(
                mutation.region, (mutation.region * 125, None)
            )
            assert part[0] <= first < (part[1] or part[0] + 125 + 64)


def test_faults_of_environments_are_counted_and_end(tmp_path):
    ledger = tmp_path / "ledger"
    assert [claim(str(ledger), 4, "reach-v3") for _ in range(6)] == [*KINDS, "nan", None, None]
    benchmark = FaultyMetaWorld(str(tmp_path / "other"), 3, 4, tasks=["reach"], horizon=50)
    env = benchmark.make_env(0, "train", 0)
    seen = set()
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(4):
            try:
                observation, reward, *_ = env.step(np.zeros(4, np.float32))
            except RuntimeError:
                seen.add("raise")
                break
            seen |= (
                {"nan"}
                if np.isnan(observation).any()
                else {"infinite"}
                if np.isinf(reward)
                else set()
            )
    assert seen == set(KINDS)
    assert type(benchmark.make_env(0, "eval", 0)).__name__ == "_GoalSelection"
