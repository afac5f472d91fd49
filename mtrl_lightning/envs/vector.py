"""Many environments stepped at once, in worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from mtrl_lightning.envs.benchmark import Benchmark
from mtrl_lightning.envs.groups import CONTEXT, GroupPlan, LocalGroup, WorkerGroup, close_together
from mtrl_lightning.envs.worker import arrays_in, num_bytes
from mtrl_lightning.errors import (
    CallError,
    ConfigurationError,
    EnvironmentFaultError,
    PolicyFaultError,
    RestartsExhaustedError,
)
from mtrl_lightning.types import StepResult


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(
        os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)
    )  # macOS has none
    return len(affinity(0))


def default_num_workers(num_envs: int, spare: int = 1) -> int:
    """Return the number of usable cores less ``spare``, at least one and at most one an environment."""
    return max(1, min(num_envs, usable_cores() - spare))


class VectorEnv(gym.vector.VectorEnv):
    """Environments of a benchmark, stepped together.

    What comes out does not depend on the number of workers: an environment's draws depend on
    ``seed`` and its place alone. Besides Gymnasium's ``step`` there are ``send`` and ``receive``,
    between which the caller may work.

    Args:
        benchmark: makes the environments.
        tasks: the task of each environment, so that a task may have several.
        split: one of ``benchmark.splits``.
        seed: of all draws.
        num_workers: processes; 0 steps in this one; None takes the cores but one.
        timeout: seconds to wait for a worker's answer.
        max_restarts: how often a group of environments (a worker's, or all if there is none) is
            rebuilt after one of them raised or returned a NaN, or its worker died or hung; None
            raises at the first fault. The rebuilt environments begin new episodes with draws of
            their own, and the step is not valid for them.
        on_restart: told the reason at each restart.

    Raises:
        ConfigurationError: if the split or a task is unknown, or the number of workers negative.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self,
        benchmark: Benchmark,
        tasks: Sequence[int],
        split: str = "train",
        *,
        seed: int = 0,
        num_workers: int | None = None,
        timeout: float = 300.0,
        max_restarts: int | None = None,
        on_restart: Callable[[str], None] = lambda _: None,
    ) -> None:
        if split not in benchmark.splits:
            raise ConfigurationError(
                f"unknown split {split!r}: the benchmark has {', '.join(benchmark.splits)}"
            )
        if num_workers is not None and num_workers < 0:
            raise ConfigurationError(
                f"num_workers is {num_workers}: give 0 (in this process) or more"
            )
        spec = benchmark.spec
        if not tasks or not all(0 <= task < spec.num_tasks for task in tasks):
            raise ConfigurationError(
                f"tasks are {list(tasks)}: give some, each from 0 to {spec.num_tasks - 1}"
            )
        self.spec_ = spec
        self.num_envs = len(tasks)
        self.task_E = np.asarray(tasks, np.int64)
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.observation_space = batch_space(spec.observation_space, self.num_envs)
        self.action_space = batch_space(spec.action_space, self.num_envs)
        self._return_E = np.zeros(self.num_envs)
        self._length_E = np.zeros(self.num_envs, np.int64)

        self._benchmark, self._split, self._seed, self._timeout = benchmark, split, seed, timeout
        self.max_restarts, self._on_restart = max_restarts, on_restart
        self.num_restarts = 0
        """Restarts since this object was made."""
        self.fault: RestartsExhaustedError | None = None
        """The fault that the restarts were not enough for; nothing can be stepped any more."""
        self._dead: set[int] = set()
        self._restarts_E = np.zeros(self.num_envs, np.int64)
        self._new_E = np.zeros(
            self.num_envs, np.bool_
        )  # rebuilt, and the caller does not know the observation

        self._workers = (
            default_num_workers(self.num_envs)
            if num_workers is None
            else min(num_workers, self.num_envs)
        )
        size = num_bytes(self.num_envs, spec)
        self._buffer: Any = CONTEXT.RawArray("B", size) if self._workers else bytearray(size)
        self._arrays = arrays_in(self._buffer, self.num_envs, spec)
        self._slices = [
            slice(p[0], p[-1] + 1) for p in np.array_split(range(self.num_envs), self._workers or 1)
        ]
        self._groups = [self._start(i) for i in range(len(self._slices))]

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._workers

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return [group.pid for group in self._groups if group.pid is not None]

    def send(self, action_EA: npt.NDArray) -> None:
        """Hand over actions and let the workers step.

        Raises:
            PolicyFaultError: if an action is not finite; MuJoCo would silently reset the
                simulation.
            RestartsExhaustedError: if the restarts are used up.
        """
        if self.fault is not None:
            raise self.fault
        finite_E = np.isfinite(action_EA).all(-1)
        if not finite_E.all():
            names = ", ".join(
                dict.fromkeys(self.spec_.task_names[task] for task in self.task_E[~finite_E])
            )
            raise PolicyFaultError(
                f"the policy's actions for {names} are not finite: the training diverged; lower the"
                " learning rates"
            )
        self._arrays.action_EA[:] = action_EA
        for group in self._groups:
            group.ask("step")

    def receive(self) -> StepResult:
        """Wait for the step that ``send`` began.

        A group that broke is rebuilt: its rows are not valid, and its observations are the first of
        new episodes.

        Raises:
            EnvironmentFaultError: at a fault, if there are no restarts; see ``fault`` for what
                happens past them.
        """
        _, faults = self._answers(range(len(self._groups)))
        valid_E = ~self._new_E
        self._begin_new(faults)
        for i, fault in faults.items():
            rows = self._slices[i]
            self._restart(i, fault)
            valid_E[rows] = False
            self._arrays.reward_E[rows] = 0
            self._arrays.next_observation_ED[rows] = self._arrays.observation_ED[rows]
            for flag_E in self._arrays[4:7]:
                flag_E[rows] = False
        return StepResult(*(array.copy() for array in self._arrays[1:7]), valid_E)  # type: ignore[arg-type]

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Begin an episode in every environment; a single seed gives environment ``i`` the seed ``seed + i``."""
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigurationError(
                f"{len(seed)} seeds are given for {self.num_envs} environments"
            )
        self._each("reset", [(list(seed[rows]), options) for rows in self._slices])
        self._new_E[:] = False
        self._return_E[:] = 0
        self._length_E[:] = 0
        return self._arrays.observation_ED.copy(), {}

    def step(
        self, actions: npt.NDArray
    ) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray, npt.NDArray, dict[str, Any]]:
        """Step as Gymnasium's vector environments do; an ended episode's last observation is ``info["final_obs"]``."""
        self.send(actions)
        result = self.receive()
        self._return_E[~result.valid_E] = 0
        self._length_E[~result.valid_E] = -1
        self._return_E += result.reward_E
        self._length_E += 1
        everywhere = np.ones(self.num_envs, np.bool_)
        success_E = result.success_E.astype(np.float64)
        info: dict[str, Any] = {"success": success_E, "_success": everywhere}
        done_E = result.terminated_E | result.truncated_E
        if done_E.any():
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done_E):
                final[i] = result.next_observation_ED[i]
            episode = {
                "r": np.where(done_E, self._return_E, 0.0),
                "l": np.where(done_E, self._length_E, 0),
            }
            info |= {"final_obs": final, "_final_obs": done_E, "_final_info": done_E}
            info["final_info"] = {
                "success": success_E,
                "_success": done_E,
                "episode": episode,
                "_episode": done_E,
            }
            self._return_E[done_E] = 0
            self._length_E[done_E] = 0
        return result.observation_ED, result.reward_E, result.terminated_E, result.truncated_E, info

    def get_state(self) -> list[dict[str, Any]]:
        """Return the state of every environment, as plain values: all that its future depends on."""
        states = [
            state for part in self._each("get_state", [()] * len(self._slices)) for state in part
        ]
        plain = zip(states, self._restarts_E.tolist(), self._new_E.tolist(), strict=True)
        return [
            {"state": state, "restarts": restarts, "new": new} for state, restarts, new in plain
        ]

    def unsavable(self) -> dict[str, str]:
        """Return the tasks whose environments' state cannot be saved, with the reason."""
        self.get_state()
        return {}

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the state of every environment; one that was broken when it was saved begins a new episode."""
        self._restarts_E[:] = [state["restarts"] for state in states]
        self._new_E[:] = [state["new"] or state["state"] is None for state in states]
        parts = [
            state["state"] or {"seed": self._seed_of(e, state["restarts"] + 1)}
            for e, state in enumerate(states)
        ]
        self._each("set_state", [(parts[rows],) for rows in self._slices])

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of every environment, called with the arguments if it is callable."""
        parts = self._each("call", [(name, *args)] * len(self._slices), kwargs)
        return tuple(value for part in parts for value in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers."""
        close_together(self._groups)

    def _seed_of(self, e: int, restarts: int) -> int:
        key = (e, restarts) if restarts else (e,)
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])

    def _start(self, i: int) -> LocalGroup | WorkerGroup:
        rows = self._slices[i]
        tasks = self.task_E[rows].tolist()
        seeds = [self._seed_of(e, int(self._restarts_E[e])) for e in range(rows.start, rows.stop)]
        plan = GroupPlan(
            self._benchmark, tasks, self._split, seeds, self._buffer, self.num_envs, rows.start
        )
        return (
            WorkerGroup(plan, f"environments-{i}", self._timeout)
            if self._workers
            else LocalGroup(plan)
        )

    def _each(
        self, method: str, arguments: list[tuple], keywords: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return every group's answer; one that breaks is rebuilt and asked again, a dead one has no state."""
        if self.fault is not None and method != "get_state":
            raise self.fault
        answers: dict[int, Any] = {}
        while missing := [
            i for i in range(len(self._groups)) if i not in answers and i not in self._dead
        ]:
            for i in missing:
                self._groups[i].ask(method, *arguments[i], **(keywords or {}))
            answered, faults = self._answers(missing)
            answers |= answered
            for i, fault in faults.items():
                self._restart(i, fault)
                if method != "set_state":  # which says itself what the caller does not know
                    self._new_E[self._slices[i]] = True
            if self.fault is not None and method != "get_state":
                raise self.fault
        return [
            answers.get(i, [None] * len(self.task_E[rows])) for i, rows in enumerate(self._slices)
        ]

    def _begin_new(self, faults: dict[int, EnvironmentFaultError]) -> None:
        """Begin the episodes again whose first step was made with an action for another observation."""
        if not self._new_E.any():
            return
        asked = []
        for i, rows in enumerate(self._slices):
            if self._new_E[rows].any() and i not in faults and i not in self._dead:
                self._groups[i].ask("begin", np.flatnonzero(self._new_E[rows]).tolist())
                asked.append(i)
        self._new_E[:] = False
        faults |= self._answers(asked)[1]

    def _answers(
        self, which: Sequence[int]
    ) -> tuple[dict[int, Any], dict[int, EnvironmentFaultError]]:
        """Return answers and faults; all have answered when a fault is raised, so that none is left in a pipe."""
        answers: dict[int, Any] = {}
        faults: dict[int, EnvironmentFaultError] = {}
        mistakes: list[Exception] = []
        for i in which:
            try:
                answers[i] = self._groups[i].answer()
            except (CallError, ConfigurationError) as mistake:
                mistakes.append(mistake)
            except EnvironmentFaultError as fault:
                faults[i] = fault
        if mistakes or (faults and self.max_restarts is None):
            raise [*mistakes, *faults.values()][0]
        return answers, faults

    def _restart(self, i: int, fault: EnvironmentFaultError) -> None:
        """Rebuild a group and begin its episodes, or note the fault if the restarts are used up."""
        assert self.max_restarts is not None
        group = self._groups[i]
        group.kill()
        while True:
            if self.num_restarts >= self.max_restarts:
                self.fault = RestartsExhaustedError(
                    f"{fault} (after {self.num_restarts} restarts, the most allowed)"
                )
                self._dead.add(i)
                return
            self.num_restarts += 1
            self._restarts_E[self._slices[i]] += 1
            self._on_restart(str(fault))
            self._groups[i] = group = self._start(i)
            group.ask("reset", [None] * len(self.task_E[self._slices[i]]), None)
            try:
                group.answer()
                return
            except EnvironmentFaultError as again:
                group.kill()
                fault = again
