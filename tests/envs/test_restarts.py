"""A vector environment with faults: what breaks is rebuilt, and every returned step is true."""

import os
import signal
import threading
import time
from functools import cache
from itertools import pairwise

import numpy as np
import psutil
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import RestartsExhaustedError
from tests.helpers.altered_reach import Large, OnceFaulty
from tests.helpers.environments import assert_toy_steps, run, through_a_file
from tests.helpers.fakes import arrays_of
from tests.helpers.processes import FORK, alive, fork, wait_until_gone

TASKS = [0, 1, 2, 0]
ROWS = {0: [0, 1, 2, 3], 3: [0, 1]}
"""For each number of workers the rows that break together with row 1."""
AT = 5
"""The step, counted from 0, in which row 1 breaks: the first of its second episode."""
NUM_STEPS = 11
ALL_VALID = [True] * 4
TWO_VALID = [False, False, True, True]


def make(fault="raise", workers=0, seed=3, max_restarts=5, timeout=300.0, **options):
    reasons = []
    envs = VectorEnv(
        OnceFaulty(fault, **{"step": AT + 1, **options}),
        TASKS,
        seed=seed,
        num_workers=workers,
        timeout=timeout,
        max_restarts=max_restarts,
        on_restart=reasons.append,
    )
    return envs, reasons


def actions(num_steps=NUM_STEPS):
    """Some are larger than the bounds."""
    return np.random.default_rng(0).normal(0, 1, (num_steps, len(TASKS), 2)).astype(np.float32)


def valid(results):
    return [result.valid_E.tolist() for result in results]


@cache
def undisturbed():
    envs = VectorEnv(ToyReach(3, horizon=5), TASKS, seed=3, num_workers=0)
    return envs.reset()[0], run(envs, actions())


@cache
def after_a_fault(seed=3):
    envs, _ = make(seed=seed)
    envs.reset()
    return run(envs, actions())[AT:]


def assert_true(observation_ED, action_SEA, results):
    """Check that the valid rows are steps of the point from the observation returned before."""
    for action_EA, result in zip(action_SEA, results, strict=True):
        core = (action_EA, result.reward_E, result.next_observation_ED, np.array(TASKS))
        assert_toy_steps(*(column[result.valid_E] for column in (observation_ED, *core)))
        observation_ED = result.observation_ED


def assert_rows_equal(results, others, rows):
    for ours, theirs in zip(results, others, strict=True):
        expected = arrays_of(theirs)
        for name, array in arrays_of(ours).items():
            assert np.array_equal(array[list(rows)], expected[name][list(rows)]), name


@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        (0, "nan"),
        (3, "inf"),
        pytest.param(3, "die", marks=pytest.mark.slow),
        pytest.param(3, "hang", marks=pytest.mark.slow),
    ],
)
def test_fault_voids_one_step_of_its_group_only(workers, fault):
    first_ED, expected = undisturbed()
    envs, reasons = make(fault, workers, timeout=1.0 if fault == "hang" else 300.0)
    assert np.array_equal(envs.reset()[0], first_ED)
    pids = envs.worker_pids
    results = run(envs, actions())
    later = envs.worker_pids
    envs.close()
    broken = ROWS[workers]
    others = [e for e in range(4) if e not in broken]
    assert valid(results) == [
        [not (s == AT and e in broken) for e in range(4)] for s in range(NUM_STEPS)
    ]
    assert_rows_equal(results[:AT], expected[:AT], range(4))
    assert_rows_equal(results[AT:], expected[AT:], others)
    assert_rows_equal(results[AT:], after_a_fault(), ROWS[3])  # for any number of workers
    assert_true(first_ED, actions(), results)
    void = results[AT]
    assert (void.reward_E[broken] == 0).all()
    assert not (void.terminated_E | void.truncated_E | void.success_E)[broken].any()
    assert np.array_equal(void.next_observation_ED[broken], void.observation_ED[broken])
    ends = [s for s, result in enumerate(results) if result.truncated_E[1]]
    assert ends == [4, AT + 5], "a new episode of five steps begins after the fault"
    assert envs.num_restarts == 1 and envs.fault is None
    (reason,) = reasons
    assert "task 'goal-1', step 1 of its episode" in reason
    assert [a != b for a, b in zip(pids, later, strict=True)] == [True, False, False][:workers]
    assert not any(map(psutil.pid_exists, {*pids, *later}))


def test_every_restart_has_draws_of_its_own():
    first_ED, expected = undisturbed()
    again_ED = after_a_fault()[0].observation_ED
    seen = [*first_ED, *expected[4].observation_ED, *again_ED]
    assert len(np.unique(seen, axis=0)) == 12, "neither the first draws nor the next ones"
    assert not (after_a_fault(seed=4)[0].observation_ED == again_ED).any()
    envs, _ = make(step=2)
    envs.reset()
    results = run(envs, actions(10))
    starts = {tuple(r.observation_ED[1].tolist()) for r in results if not r.valid_E[1]}
    assert len(starts) == envs.num_restarts == 5


def test_a_killed_worker_costs_its_own_rows_one_step():
    first_ED, expected = undisturbed()
    envs, reasons = make(workers=3, task=None)
    envs.reset()
    results = []
    for s, action_EA in enumerate(actions()):
        pid = envs.worker_pids[0]
        if s == 2:  # during a step
            os.kill(pid, signal.SIGSTOP)
        if s == 9:  # before a step that cannot be asked for
            os.kill(pid, signal.SIGKILL)
            wait_until_gone([pid])
        envs.send(action_EA)
        if s == 2:
            os.kill(pid, signal.SIGKILL)
        results.append(envs.receive())
    assert valid(results) == [TWO_VALID if s in (2, 9) else ALL_VALID for s in range(NUM_STEPS)]
    assert_rows_equal(results, expected, [2, 3])
    assert_true(first_ED, actions(), results)
    assert len(reasons) == envs.num_restarts == 2
    assert all("goal-0, goal-1 died (exit code -9)" in reason for reason in reasons)

    os.kill(envs.worker_pids[0], signal.SIGKILL)
    plain = VectorEnv(ToyReach(3, horizon=5), TASKS, num_workers=0)
    assert np.array_equal(plain.reset(seed=8)[0], envs.reset(seed=8)[0])
    assert_rows_equal(run(envs, actions()[:1]), run(plain, actions()[:1]), range(4))
    envs.close()


def test_worker_killed_between_steps_voids_the_next_step():
    """The caller holds an observation of the previous episode: the next step begins elsewhere."""
    envs, reasons = make(workers=3, task=None)
    envs.reset()

    def answers(question):
        run(envs, actions()[:3])
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        answer = question()
        results = run(envs, actions()[3:7])
        assert valid(results) == [TWO_VALID, *[ALL_VALID] * 3]
        assert_true(results[0].observation_ED, actions()[4:7], results[1:])
        envs.reset()
        return answer, results

    states, results = answers(envs.get_state)
    assert [state["new"] for state in states] == [True, True, False, False]
    assert [state["restarts"] for state in states] == [1, 1, 0, 0]
    assert [len(state["state"]["actions"]) for state in states] == [0, 0, 3, 3]
    restored, _ = make(task=None)
    restored.set_state(through_a_file(states))
    assert restored.get_state() == states, "the observation is still unknown"
    assert_rows_equal(run(restored, actions()[3:7]), results, range(4))
    assert not any(state["new"] for state in restored.get_state())
    restored.set_state(states)
    restored.reset()
    assert run(restored, actions(1))[0].valid_E.all(), "a reset tells the caller the observation"

    assert answers(lambda: envs.get_attr("_steps"))[0] == (0, 0, 3, 3)
    assert len(answers(lambda: envs.call("get_wrapper_attr", "_steps"))[0]) == 4
    assert envs.num_restarts == len(reasons) == 3
    envs.close()


@pytest.mark.slow
def test_worker_that_hangs_or_dies_in_a_large_message_is_rebuilt():
    envs = VectorEnv(Large(), [0, 1, 2], num_workers=3, timeout=5.0, max_restarts=5)
    envs.reset()
    os.kill(envs.worker_pids[0], signal.SIGSTOP)
    envs.call("take", np.arange(600_000.0))
    assert envs.num_restarts == 1
    threading.Timer(0.3, os.kill, (envs.worker_pids[1], signal.SIGKILL)).start()
    while envs.num_restarts == 1:
        envs.get_attr("ballast")
    results = run(envs, np.full((10, 3, 2), 0.1))
    envs.close()
    assert valid(results) == [[False, False, True], *[[True] * 3] * 9]
    for before, result in pairwise(results):
        expected_ED = np.clip(before.observation_ED + 0.2 * 0.1, -1, 1)
        assert np.allclose(result.next_observation_ED, expected_ED, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "budget", "fatal"), [(3, 0, AT), (0, 1, 2 * AT + 1)])
def test_exhausted_budget_returns_the_step_then_raises(workers, budget, fatal):
    first_ED, expected = undisturbed()
    envs, reasons = make("raise", workers, max_restarts=budget)
    envs.reset()
    run(envs, actions(fatal))
    assert envs.fault is None
    (last,) = run(envs, actions(fatal + 1)[-1:])
    assert last.valid_E.tolist() == [e not in ROWS[workers] for e in range(4)]
    if budget == 0:
        assert_rows_equal([last], [expected[AT]], [2, 3])
    assert len(reasons) == envs.num_restarts == budget
    states = through_a_file(envs.get_state())
    assert [state["state"] is None for state in states] == [e in ROWS[workers] for e in range(4)]
    asked = (lambda: envs.get_attr("_steps")), (lambda: envs.set_state(states))
    for call in (lambda: envs.send(actions()[0]), envs.reset, *asked):
        with pytest.raises(RestartsExhaustedError, match=f"{budget}"):
            call()
    pids = envs.worker_pids
    envs.close()
    assert not alive(pids)

    restored, _ = make(workers=3 - workers, task=None)
    restored.set_state(states)
    results = run(restored, actions()[: AT + 1])
    restored.close()
    assert valid(results) == [last.valid_E.tolist(), *[ALL_VALID] * AT]
    assert_true(results[0].observation_ED, actions()[1 : AT + 1], results[1:])
    starts = [*first_ED, *expected[4].observation_ED, *results[0].observation_ED[~last.valid_E]]
    assert len(np.unique(starts, axis=0)) == len(starts), "with draws of its own"
    # a full episode after the void step
    assert [s for s, result in enumerate(results) if result.truncated_E[1]] == [5]


def test_group_that_stays_broken_exhausts_the_budget():
    seeds = []

    class StaysBroken(OnceFaulty):
        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            seeds.append(seed)
            if len(seeds) > 3:  # rebuilt
                env.reset = lambda **kwargs: 1 / 0
            return env

    envs = VectorEnv(StaysBroken(step=AT + 1), [0, 1, 2], num_workers=0, max_restarts=3)
    envs.reset()
    results = run(envs, actions(AT + 1)[:, :3])
    assert not results[-1].valid_E.any()
    assert "ZeroDivisionError" in str(envs.fault) and "after 3 restarts" in str(envs.fault)
    assert len(set(seeds)) == len(seeds) == 4 * 3


@pytest.mark.slow
def test_a_killed_main_process_leaves_no_workers():
    is_stepping = FORK.Event()

    def main(rank):
        envs, _ = make("hang", workers=3, step=1)
        envs.reset()
        envs.send(actions()[0])
        is_stepping.set()
        time.sleep(60)

    (process,) = fork(main, 1)
    assert is_stepping.wait(60)
    pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(alive(pids)) >= 3
    process.kill()
    wait_until_gone([process.pid, *pids])
