"""A small version of the fault benchmark, and its judges, which must find what is wrong."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import faults
from benchmarks.faults import Bench, Outcome, Row, check_chain, differences, options_of
from tests.helpers.replay import columns_of

HORIZON = 5
check = partial(check_chain, horizon=HORIZON)


@pytest.mark.slow
def test_a_killed_run_ends_as_the_uninterrupted_one(capsys, monkeypatch):
    monkeypatch.setattr(faults, "NUM_WORKERS", 1)
    assert faults.main(["--total_steps=310", "--rows", "kill=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "python -m benchmarks.faults --total_steps=310 --rows kill=1 --json"
    (row,) = found["tables"][0]["rows"]
    assert (row["injected"], row["survived"], row["lost"], row["false"]) == (1, 1, 0, 0)
    assert (row["exact"], row["verdict"]) == ("yes", "ok")
    assert found["ok"] and found["notes"] == ["kill: 1 meant for save; 1 left an unfinished file"]


def test_a_run_of_several_processes_has_rows_of_its_own(capsys):
    def rows(*args):
        return [(row.name, row.number) for row in faults.rows_of(options_of(args))]

    assert rows() == [("kill", 20), ("worker", 20), ("hang", 2)]
    assert rows("--ranks=2") == [("kill", 20), ("restart", 2), ("hang", 2), ("worker", 6)]
    assert rows("--rows", "hang", "kill=3") == [("hang", 2), ("kill", 3)]
    for args, message in (
        (["--ranks=2", "--rows", "nan=2"], "--rows nan=2: with --ranks 2, give kill, restart"),
        (["--rows", "kill=many"], "--rows kill=many: with --ranks 1, give kill, worker"),
    ):
        with pytest.raises(SystemExit):
            options_of(args)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"injected": 0, "survived": 0},
        {"survived": 1},
        {"lost": 1},
        {"lost": None},
        {"false": 1},
        {"exact": False},
        {"failures": ["a process is left"]},
    ],
)
def test_a_row_that_fails_is_seen(changes):
    whole = {"injected": 2, "survived": 2, "lost": 0, "false": 0, "exact": True}
    assert Row("kill", 2, **whole).ok and Row("hang", 2, **whole | {"exact": None}).ok
    assert Row("kill", 2, **whole).shown()["verdict"] == "ok"
    assert Row("kill", 2, **whole | changes).shown()["verdict"] == "FAILED"


def test_an_error_in_a_row_is_its_failure(tmp_path, monkeypatch, capsys):
    def broken(bench, row):
        row.injected = 3
        raise TimeoutError("nothing came")

    monkeypatch.setattr(faults.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setitem(faults.FAULTS, "hang", (broken, 2))
    assert faults.main(["--rows", "hang"]) == 1
    printed = capsys.readouterr().out
    assert "hang: FAILED: TimeoutError: nothing came" in printed
    assert f"the runs are kept in {tmp_path}" in printed and tmp_path.exists()


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


def test_true_transitions_are_found_true():
    assert check(episodes([5, 5, 5, 3])) == (0, 0, 0)
    assert check(episodes([5, 2, 5])) == (0, 1, 0)


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
    assert (chain.false, chain.broken) == (1, 2)


def test_a_lost_transition_and_an_episode_without_its_end_are_found():
    assert check(without(episodes([5, 5, 5]), 7)).broken == 2
    assert check(without(episodes([5, 5, 5]), 0)).broken == 2
    assert check(episodes([5, 7, 5])).overlong == 2


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


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Return a function that judges two rings after a fault, with changes of their counters."""

    def judge(*rings, metrics=("1", "1"), **changes):
        stored = sum(len(rows["reward"]) for rows in rings)
        counters = {"env_steps": stored, "vector_steps": 8, "dropped_transitions": 1}
        counters |= {"worker_restarts": 1} | changes
        names = ("fault/worker_restarts", "fault/dropped_transitions")
        logged = dict(zip(names, metrics, strict=True))
        outcome = Outcome({"mtrl_lightning": {"counters": counters}}, list(rings), [logged])
        monkeypatch.setattr(faults, "read_outcome", lambda run: outcome)
        row = Row("worker", 1, injected=1)
        Bench(tmp_path, 1, 15, 1).judge_rows(row, SimpleNamespace())
        return row

    monkeypatch.setattr(faults, "check_chain", check)
    return judge


def test_rows_after_a_fault_are_judged(judged):
    whole = episodes([5, 3])
    broken = episodes([5, 2])  # a step of eight was dropped, with the episode that it belonged to
    broken_before = episodes([2, 5])
    row = judged(whole, broken_before)
    assert row.ok and (row.survived, row.lost, row.false) == (1, 0, 0)
    assert "1 restarts, 1 steps dropped, 1 episodes broken, 15 rows stored" in row.checks
    assert judged(whole, whole).lost == 1, "more is stored than happened"
    assert judged(whole, without(whole, 6)).lost == 0, "the dropped step itself"
    assert judged(whole, broken, env_steps=16).lost == 1
    assert judged(whole, broken, env_steps=14).failures == ["ended too early"]
    assert not judged(whole, broken_before, worker_restarts=2).ok
    assert not judged(whole, broken_before, worker_restarts=0).ok
    assert not judged(whole, broken_before, dropped_transitions=2, vector_steps=9).ok
    assert not judged(whole, broken_before, metrics=("1", "2")).ok
    assert not judged(whole, episodes([7])).ok, "an episode did not end in time"
