"""A small version of the fault benchmark, and its judges, which must find what is wrong."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import faults
from benchmarks.environments import FAULTS, FaultyMetaWorld, claim
from benchmarks.fault_runs import (
    TOY_HORIZON,
    TOY_TASKS,
    check_chain,
    check_toy_chain,
    compare_rows,
    differences,
)
from benchmarks.faults import Fault, Row, all_ok, damaged, options_of, table
from mtrl_lightning.envs import ToyReach
from tests.helpers.replay import columns_of

HORIZON = 5
check = partial(check_chain, horizon=HORIZON)


@pytest.mark.slow
def test_the_small_version_survives_everything(tmp_path):
    rows = ["kill", "worker", "nan", "corruption"]
    counts = ["--counts", "kill=2", "worker=1", "nan=2", "corruption=2"]
    path = tmp_path / "faults.json"
    small = ["--total_steps=600", "--folder", str(tmp_path / "runs"), f"--json={path}"]
    code = faults.main([*small, "--rows", *rows, *counts])
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == rows
    assert [row["failures"] for row in found["rows"]] == [[], [], [], []]
    assert code == 0 and found["ok"]
    kill, worker, nan, corruption = found["rows"]
    for row in (kill, corruption):
        assert row["exact"] is True and (row["lost"], row["false"]) == (0, 0)
        assert row["injected"] == row["survived"] == 2
    assert (worker["injected"], worker["survived"], worker["lost"], worker["false"]) == (1, 1, 0, 0)
    assert nan["injected"] >= 1 and (nan["lost"], nan["false"]) == (0, 0)
    assert found["machine"]["torch"] == torch.__version__
    assert found["command"].startswith("python -m benchmarks.faults --total_steps=600")


def test_a_run_of_several_processes_has_rows_of_its_own(capsys):
    assert options_of([]).rows == list(faults.FAULTS)
    several = options_of(["--ranks=2", "--counts", "kill=3"])
    assert several.rows == list(faults.RANK_FAULTS)
    assert several.counts == ["kill=3", "restart=2", "hang=2", "worker=6"]
    for args, message in (
        (["--ranks=2", "--rows", "kill", "nan"], "nan: with --ranks 2, give kill, restart"),
        (["--counts", "kill"], "--counts kill: takes ROW=NUMBER, as kill=2"),
        (["--folder", "."], ". exists: give a folder that does not"),
    ):
        with pytest.raises(SystemExit):
            options_of(args)
        assert message in capsys.readouterr().err


def whole_row(**changes):
    counts = {"injected": 2, "survived": 2, "lost": 0, "false": 0, "exact": True}
    return Row("kill", **counts | changes)


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
def test_a_row_that_fails_is_seen(changes):
    whole = [whole_row(), whole_row(exact=None, lost=None, false=None)]
    assert all_ok(whole) and table(whole).endswith("all rows are ok")
    assert not all_ok([whole_row(), whole_row(**changes)])
    assert "SOME ROWS FAILED" in table([whole_row(**changes)])
    assert not all_ok([]), "no row at all is a failure"


def test_an_error_in_a_row_is_its_failure(tmp_path, monkeypatch, capsys):
    def broken(bench, row):
        row.injected = 3
        raise TimeoutError("nothing came")

    monkeypatch.setitem(faults.FAULTS, "hang", Fault(broken, 2, False, ""))
    assert faults.main(["--rows", "hang", "--folder", str(tmp_path / "runs")]) == 1
    assert "TimeoutError: nothing came" in capsys.readouterr().out
    assert (tmp_path / "runs").exists()


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
    reward = torch.arange(number) * 1.0
    terminated = torch.zeros(number) > 0
    return columns_of(tensors[0], torch.zeros(number, 4), reward, tensors[1], terminated)


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
    columns = (torch.from_numpy(np.array(column)) for column in zip(*steps, strict=True))
    here, action, reward, after = columns
    return columns_of(here, action, reward, after, torch.zeros(len(reward)) > 0)


def test_rows_of_the_toy_benchmark_are_checked_by_its_equations():
    rows = toy_episodes(1, [TOY_HORIZON, 7, TOY_HORIZON, 3])
    assert check_toy_chain(rows, 1) == (0, 1, 0, 0)
    later = toy_episodes(0, [3, TOY_HORIZON, 3])
    assert check_toy_chain(later, 0, from_beginning=False).cut == 0
    assert check_toy_chain(toy_episodes(0, [TOY_HORIZON + 2]), 0).overlong == 2
    assert check_toy_chain(rows, 2).false == 50, "another task has another reward"
    for field in ("observation", "action", "next_observation", "reward"):
        wrong = {**rows, field: rows[field].clone()}
        wrong[field][4] -= 0.01 * wrong[field][4].sign()
        assert check_toy_chain(wrong, 1).false == 1, field
    assert check_toy_chain(without(rows, 4), 1).cut == 3, "a row is missing"


def test_true_transitions_are_found_true():
    assert check(episodes([5, 5, 5, 3])) == (0, 0, 0, 0)
    assert check(episodes([5, 2, 5])) == (0, 1, 0, 0)
    assert check(without(episodes([5, 5]), 0), from_beginning=False) == (0, 0, 0, 0)


@pytest.mark.parametrize("place", ["frame", "goal", "reset"])
def test_a_false_transition_is_found(place):
    rows = episodes([5, 5, 5])
    if place == "frame":
        rows["next_observation"][7, 20] += 1e-3
    elif place == "goal":
        rows["next_observation"][7, 37] += 1e-3
    else:  # the first observation of a rebuilt environment, stored as the successor
        rows["next_observation"][7] = episodes([1], seed=1)["observation"][0]
    chain = check(rows)
    assert (chain.false, chain.torn) == (1, 1)


def test_a_lost_transition_and_an_episode_without_its_end_are_found():
    assert check(without(episodes([5, 5, 5]), 7)).torn == 1
    assert check(without(episodes([5, 5, 5]), 0)).torn == 1
    assert check(episodes([5, 7, 5])).overlong == 2


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
    negative_zero = torch.tensor([1.0, float("nan"), -0.0])
    assert differences(value, {"a": [negative_zero, 1], "b": float("nan")}) == [".a[0]"]
    assert differences(value, {"a": [tensor.double(), 1], "b": float("nan")}) == [".a[0]"]
    assert len(differences(value, {"a": [tensor, 1.0], "b": float("nan")})) == 1
    assert len(differences(value, {"a": [tensor], "b": float("nan")})) == 1
    assert len(differences(value, {"a": [tensor, 1]})) == 1


def test_every_harm_changes_a_file(tmp_path):
    generator = random.Random(0)
    content = bytes(range(1, 201)) * 10
    for harm in faults.HARMS:
        if harm == "missing":
            continue
        changed = damaged(content, harm, generator, tmp_path / "executed")
        assert changed != content
        if harm == "flip":
            different = [a ^ b for a, b in zip(content, changed, strict=True) if a != b]
            assert len(different) == 1 and different[0].bit_count() == 1
        sizes = {"flip": 2000, "zero": 2000, "insert": 2016}
        assert len(changed) == sizes.get(harm, len(changed))
    (tmp_path / "code.pt").write_bytes(damaged(content, "code", generator, tmp_path / "executed"))
    torch.load(tmp_path / "code.pt", weights_only=False)
    assert (tmp_path / "executed").is_dir(), "the code would run where files are unpickled"


def test_faults_of_environments_are_counted_and_end(tmp_path):
    ledger = tmp_path / "ledger"
    assert [claim(str(ledger), 4, "reach-v3") for _ in range(6)] == [*FAULTS, "nan", None, None]
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
            if np.isnan(observation).any():
                seen.add("nan")
            elif np.isinf(reward):
                seen.add("infinite")
    assert seen == set(FAULTS)
    assert type(benchmark.make_env(0, "eval", 0)).__name__ == "_GoalSelection"
