"""A vector environment with faults: what breaks is rebuilt, and every returned step is true."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import (
    CallError,
    EnvironmentFaultError,
    RestartsExhaustedError,
)
from tests.helpers.altered_reach import Large, OnceFaulty
from tests.helpers.environments import through_a_file
from tests.helpers.fakes import Faulty, arrays_of
from tests.helpers.processes import alive, wait_until_gone

ROOT = Path(__file__).parents[2]
TASKS = [0, 1, 2, 0]
ROWS = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 3: [0, 1]}
"""For each number of workers the rows that break together with row 1."""
AT = 6
"""The step, counted from 0, in which row 1 breaks."""
FAULTS = [
    (0, "raise"),
    (0, "nan"),
    (0, "inf"),
    (1, "die"),
    (3, "raise"),
    (3, "die"),
    (3, "hang"),
]
MESSAGES = {
    "raise": "task 'goal-1', step 2 of its episode: RuntimeError: broken",
    "nan": "task 'goal-1', step 2 of its episode: the observation",
    "inf": "task 'goal-1', step 2 of its episode: the reward",
    "die": r"died (exit code 3)",
    "hang": "gave no answer for 0.5 s",
}


def make(fault="raise", workers=0, seed=3, max_restarts=5, **options):
    told = []
    envs = VectorEnv(
        OnceFaulty(fault, **options),
        TASKS,
        seed=seed,
        num_workers=workers,
        max_restarts=max_restarts,
        on_restart=told.append,
    )
    return envs, told


def begin(envs):
    first_ED, _ = envs.reset()
    for group in envs._groups if envs.num_workers else []:
        group._timeout = group._timeout_now = 0.5  # beginning takes longer, and rebuilding too
    return first_ED


def actions(num_steps=2 * AT, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (num_steps, len(TASKS), 2)).astype(np.float32)


def run(envs, action_SEA):
    results = []
    for action_EA in action_SEA:
        envs.send(action_EA)
        results.append(envs.receive())
    return results


def undisturbed(seed=3):
    envs = VectorEnv(ToyReach(3, horizon=5), TASKS, seed=seed, num_workers=0)
    first_ED, _ = envs.reset()
    return first_ED, run(envs, actions())


def assert_true(observation_ED, action_EA, result):
    """Check that the valid rows are steps of the point from the observation returned before."""
    for e in range(len(TASKS)):
        if result.valid_E[e]:
            wanted_D = np.clip(observation_ED[e].astype(np.float64) + 0.2 * action_EA[e], -1, 1)
            np.testing.assert_allclose(result.next_observation_ED[e], wanted_D, rtol=0, atol=3e-7)
            angle = 2 * np.pi * TASKS[e] / 3
            distance = np.linalg.norm(wanted_D - 0.7 * np.array([np.cos(angle), np.sin(angle)]))
            assert result.reward_E[e] == pytest.approx(1 - distance, abs=5e-7)


def assert_rows_equal(ours, theirs, rows):
    expected = arrays_of(theirs)
    for name, array in arrays_of(ours).items():
        assert np.array_equal(array[list(rows)], expected[name][list(rows)]), name


# ---- faults in a step ----


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "fault"), FAULTS)
def test_fault_voids_one_step_of_its_group_only(workers, fault):
    first_ED, expected = undisturbed()
    envs, told = make(fault, workers)
    observation_ED = begin(envs)
    assert np.array_equal(observation_ED, first_ED)
    pids = envs.worker_pids
    results = run(envs, actions())
    later = envs.worker_pids
    envs.close()
    broken = ROWS[workers]
    others = [e for e in range(4) if e not in broken]
    for s, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.valid_E.tolist() == [not (s == AT and e in broken) for e in range(4)]
        assert_rows_equal(result, wanted, range(4) if s < AT else others)
        assert_true(observation_ED, actions()[s], result)
        observation_ED = result.observation_ED
    void = results[AT]
    assert (void.reward_E[broken] == 0).all()
    assert not (void.terminated_E | void.truncated_E | void.success_E)[broken].any()
    assert np.array_equal(void.next_observation_ED[broken], void.observation_ED[broken])
    assert np.isfinite(void.observation_ED).all()
    ends = [s for s, result in enumerate(results) if result.truncated_E[1]]
    assert ends == [4, AT + 5], "a new episode of five steps begins after the fault"
    assert envs.num_restarts == 1 and envs.fault is None
    (reason,) = told
    assert MESSAGES[fault] in reason
    if workers:
        assert sum(a != b for a, b in zip(pids, later, strict=True)) == 1
        assert pids[0] != later[0]
        assert not alive(pids) and not alive(later)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_void_step_does_not_repeat_the_end_of_the_step_before(workers):
    envs, _ = make("raise", workers, step=6)
    begin(envs)
    end, void = run(envs, actions(6))[-2:]
    envs.close()
    assert end.truncated_E.all()
    assert void.valid_E.tolist() == [e not in ROWS[workers] for e in range(4)]
    assert not (void.terminated_E | void.truncated_E).any()


def starts_after_a_fault(workers, seed, fault="raise"):
    envs, _ = make(fault, workers, seed)
    first_ED = begin(envs)
    results = run(envs, actions())
    envs.close()
    return first_ED, results


@pytest.mark.slow
def test_draws_after_a_fault_are_new_for_any_num_workers():
    first_ED, results = starts_after_a_fault(0, seed=3)
    again_ED = results[AT].observation_ED
    seen = [*first_ED.tolist(), *undisturbed()[1][4].observation_ED.tolist(), *again_ED.tolist()]
    assert len({tuple(row) for row in seen}) == len(seen), (
        "neither the first draws nor those that would have followed"
    )
    for workers, fault in ((0, "nan"), (1, "die"), (3, "raise")):
        _, others = starts_after_a_fault(workers, 3, fault)
        for s in range(AT, 2 * AT):
            assert_rows_equal(results[s], others[s], ROWS[3])
    _, other = starts_after_a_fault(0, seed=4)
    assert not (other[AT].observation_ED == again_ED).any()


def test_every_restart_has_draws_of_its_own():
    envs, _ = make(step=2)
    begin(envs)
    results = run(envs, actions(10))
    starts = {tuple(r.observation_ED[1].tolist()) for r in results if not r.valid_E[1]}
    assert len(starts) == 5
    assert envs.num_restarts == 5


# ---- killed workers ----


@pytest.mark.parametrize("when", ["before a step", "during a step", "after a step was taken"])
def test_a_killed_worker_costs_its_own_rows_one_step(when):
    _, expected = undisturbed()
    envs, told = make(workers=3, task=None)
    observation_ED = begin(envs)
    for s, action_EA in enumerate(actions()):
        if s == AT and when == "before a step":
            os.kill(envs.worker_pids[0], signal.SIGKILL)
        if s == AT and when == "during a step":
            os.kill(envs.worker_pids[0], signal.SIGSTOP)
        envs.send(action_EA)
        if s == AT and when == "during a step":
            os.kill(envs.worker_pids[0], signal.SIGKILL)
        result = envs.receive()
        if s == AT - 1 and when == "after a step was taken":
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            wait_until_gone(envs.worker_pids[:1])
        assert result.valid_E.tolist() == ([False, False, True, True] if s == AT else [True] * 4)
        assert np.array_equal(result.observation_ED[2:], expected[s].observation_ED[2:])
        assert np.array_equal(result.reward_E[2:], expected[s].reward_E[2:])
        assert_true(observation_ED, action_EA, result)
        observation_ED = result.observation_ED
    envs.close()
    assert envs.num_restarts == 1
    assert "goal-0, goal-1 died (exit code -9)" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("question", ["get_state", "get_attr", "call"])
def test_killed_worker_restarts_and_voids_next_step(
    question,
):
    """The caller holds an observation of the former episode: the next step begins elsewhere."""
    envs, told = make(workers=3, task=None)
    begin(envs)
    run(envs, actions()[:3])
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    if question == "get_state":
        states = envs.get_state()
        assert [state["new"] for state in states] == [True, True, False, False]
        assert [state["restarts"] for state in states] == [1, 1, 0, 0]
        assert [len(state["state"]["actions"]) for state in states] == [0, 0, 3, 3]
    elif question == "get_attr":
        assert envs.get_attr("_steps") == (0, 0, 3, 3)
    else:
        assert len(envs.call("get_wrapper_attr", "_steps")) == 4
    assert envs.num_restarts == len(told) == 1
    first, second = run(envs, actions()[3:5])
    envs.close()
    assert first.valid_E.tolist() == [False, False, True, True]
    assert second.valid_E.all()
    assert_true(first.observation_ED, actions()[4], second)


def test_worker_killed_before_a_reset_voids_nothing():
    envs, _ = make(workers=3, task=None)
    begin(envs)
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    observation_ED, _ = envs.reset(seed=8)
    (result,) = run(envs, actions()[:1])
    plain = VectorEnv(ToyReach(3, horizon=5), TASKS, num_workers=0)
    assert np.array_equal(plain.reset(seed=8)[0], observation_ED)
    assert result.valid_E.all() and np.array_equal(
        run(plain, actions()[:1])[0].reward_E, result.reward_E
    )
    envs.close()


# ---- the budget ----


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("budget", [0, 1])
def test_exhausted_budget_returns_the_step_then_raises(workers, budget):
    _, expected = undisturbed()
    envs, told = make("raise", workers, max_restarts=budget)
    begin(envs)
    fatal = AT if budget == 0 else 2 * AT + 1
    results = run(envs, actions(fatal))
    assert envs.fault is None
    (last,) = run(envs, actions(fatal + 1)[-1:])
    broken = ROWS[workers]
    assert last.valid_E.tolist() == [e not in broken for e in range(4)]
    if budget == 0 and workers == 3:
        assert np.array_equal(last.reward_E[2:], expected[AT].reward_E[2:])
    assert len(results) == fatal and len(told) == envs.num_restarts == budget
    assert isinstance(envs.fault, RestartsExhaustedError) and isinstance(
        envs.fault, EnvironmentFaultError
    )
    states = envs.get_state()
    for ask in (
        lambda: envs.send(actions()[0]),
        lambda: envs.step(actions()[0]),
        envs.reset,
        lambda: envs.get_attr("_steps"),
        lambda: envs.set_state(states),
    ):
        with pytest.raises(RestartsExhaustedError, match=f"{budget}"):
            ask()
    assert [state["state"] is None for state in states] == [e in broken for e in range(4)]
    pids = envs.worker_pids
    envs.close()
    assert not alive(pids)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_state_past_the_budget_restarts_broken_rows_only(
    workers,
):
    _, expected = undisturbed()
    envs, _ = make("raise", 3, max_restarts=0)
    begin(envs)
    run(envs, actions()[: AT + 1])
    state = through_a_file(envs.get_state())
    envs.close()
    restored, _ = make(workers=workers, seed=3, task=None)
    restored.set_state(state)
    results = run(restored, actions()[AT + 1 :])
    assert [result.valid_E.tolist() for result in results[:2]] == [
        [False, False, True, True],
        [True] * 4,
    ]
    for result, wanted in zip(results, expected[AT + 1 :], strict=True):
        assert_rows_equal(result, wanted, [2, 3])
    observation_ED = results[0].observation_ED
    for action_EA, result in zip(actions()[AT + 2 :], results[1:], strict=True):
        assert_true(observation_ED, action_EA, result)
        observation_ED = result.observation_ED
    results += run(restored, actions()[:1])
    assert [s for s, result in enumerate(results) if result.truncated_E[1]] == [5], (
        "a whole episode after the drop"
    )
    assert restored.num_restarts == 0
    restored.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_group_that_stays_broken_exhausts_the_budget(tmp_path, workers):
    envs, told = make(workers=workers, log=str(tmp_path / "log"), broken_resets=99, max_restarts=3)
    begin(envs)
    results = run(envs, actions()[: AT + 1])
    assert not results[-1].valid_E[ROWS[workers]].any()
    assert "still broken" in str(envs.fault) and "after 3 restarts" in str(envs.fault)
    assert len(told) == 3
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    pids = envs.worker_pids
    envs.close()
    assert not alive(pids)


def test_env_that_breaks_at_its_first_reset_is_not_rebuilt():
    envs = VectorEnv(Faulty(3), [0, 1, 2], num_workers=0, max_restarts=2)
    with pytest.raises(CallError, match="task-1"):
        envs.reset(options={"fault": "raise_reset", "task": "task-1"})
    assert envs.num_restarts == 0


def test_without_a_budget_a_fault_raises_as_it_is():
    envs, told = make(max_restarts=None)
    begin(envs)
    run(envs, actions()[:AT])
    with pytest.raises(EnvironmentFaultError, match="RuntimeError: broken") as caught:
        run(envs, actions()[:1])
    assert not isinstance(caught.value, RestartsExhaustedError) and envs.fault is None and not told


# ---- saving and going on ----


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "steps"), [((3, 0), 3), ((3, 0), AT + 1), ((0, 3), AT + 3)])
def test_saved_state_continues_across_faults(workers, steps):
    """The second fault's draws are those of the uninterrupted run.

    The number of restarts is part of the state.
    """
    all_actions = actions(3 * AT)
    envs, _ = make(workers=workers[0])
    begin(envs)
    run(envs, all_actions[:steps])
    state = through_a_file(envs.get_state())
    expected = run(envs, all_actions[steps:])
    restored, _ = make(workers=workers[1])
    restored.set_state(state)
    found = run(restored, all_actions[steps:])
    for each in (envs, restored):
        each.close()
    rows = ROWS[3] if (0 in workers) else range(4)
    assert [int((~result.valid_E[rows]).sum()) for result in expected].count(2) == 1 + (steps <= AT)
    for ours, theirs in zip(found, expected, strict=True):
        assert_rows_equal(ours, theirs, rows)


def test_unknown_observation_is_saved_and_voids_one_step():
    envs, _ = make(workers=3, task=None)
    begin(envs)
    os.kill(envs.worker_pids[2], signal.SIGKILL)
    state = through_a_file(envs.get_state())
    assert through_a_file(envs.get_state()) == state, "it is still so"
    restored, _ = make(task=None)
    restored.set_state(state)
    expected, found = run(envs, actions()[:7]), run(restored, actions()[:7])
    assert [result.valid_E.tolist() for result in found[:2]] == [
        [True, True, True, False],
        [True] * 4,
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert_rows_equal(ours, theirs, range(4))
    assert not any(state["new"] for state in restored.get_state())
    restored.set_state(state)
    restored.reset()
    assert run(restored, actions()[:1])[0].valid_E.all(), "a reset tells the caller the observation"
    envs.close()


# ---- nothing is left behind ----


MAIN = """
import sys, time
import numpy as np
from mtrl_lightning.envs import VectorEnv
from tests.helpers.altered_reach import OnceFaulty

if __name__ == "__main__":
    envs = VectorEnv(OnceFaulty(sys.argv[1], step=2), [0, 1, 2], num_workers=3, max_restarts=5)
    envs.reset()
    envs.step(np.zeros((3, 2)))
    if sys.argv[1] == "hang":
        envs.send(np.zeros((3, 2)))
        time.sleep(0.5)
    else:
        envs.step(np.zeros((3, 2)))
    print(*envs.worker_pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's shared memory")
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_killed_main_process_leaves_neither_workers_nor_memory(tmp_path, fault):
    script, temporary = tmp_path / "main.py", tmp_path / "temporary"
    script.write_text(MAIN)
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    main = subprocess.Popen(
        [sys.executable, str(script), fault],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    try:
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 3 and alive(pids)
        family = [process.pid for process in psutil.Process(main.pid).children(recursive=True)]
    finally:
        main.kill()
        main.wait(30)
        main.stdout.close()
    wait_until_gone({*pids, *family})
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{main.pid}-" in path.name]
    assert list(temporary.rglob("*")) == []


def test_worker_killed_in_a_large_answer_keeps_others_in_step():
    envs, told = VectorEnv(Large(), [0, 1, 2], num_workers=3, max_restarts=5), []
    envs._on_restart = told.append
    observation_ED, _ = envs.reset()
    pid = envs.worker_pids[1]
    threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
    while not told:
        envs.get_attr("ballast")
    observation_ED = envs._arrays["observation"].copy()
    action_EA = np.full((3, 2), 0.1)
    for step in range(30):
        envs.send(action_EA)
        result = envs.receive()
        valid_E = result.valid_E
        assert valid_E.tolist() == [True, step > 0, True]
        expected_ED = np.clip(observation_ED + 0.2 * action_EA, -1, 1).astype(np.float32)
        assert np.allclose(result.next_observation_ED[valid_E], expected_ED[valid_E], atol=1e-6)
        observation_ED = result.observation_ED
    envs.close()


@pytest.mark.slow
def test_worker_that_hangs_in_a_large_message_is_killed():
    envs = VectorEnv(Large(), [0, 1], num_workers=2, timeout=2.0, max_restarts=5)
    envs.reset()
    os.kill(envs.worker_pids[0], signal.SIGSTOP)
    envs.call("take", np.arange(600_000.0))
    assert envs.num_restarts == 1
    envs.close()


def test_broken_episode_is_not_added_to_the_next():
    envs, _ = make("raise", 1)
    begin(envs)
    lengths = []
    for action_EA in [*actions(), *actions()]:
        info = envs.step(action_EA)[4]
        if "final_info" in info:
            lengths += info["final_info"]["episode"]["l"][info["_final_info"]].tolist()
    assert lengths and set(lengths) == {5}
    envs.close()
