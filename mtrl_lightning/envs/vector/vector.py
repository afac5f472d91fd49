"""A vector environment that steps environments in worker processes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, check_spec
from mtrl_lightning.envs.vector.env_group import GroupPlan
from mtrl_lightning.envs.vector.group_handles import LocalGroup, WorkerGroup, close_together
from mtrl_lightning.envs.vector.shared_arrays import SharedMemory, arrays_in, num_bytes
from mtrl_lightning.errors import (
    CallError,
    ConfigurationError,
    EnvironmentFaultError,
    PolicyFaultError,
    RestartsExhaustedError,
)
from mtrl_lightning.transitions import StepResult, info_column, step_fields
from mtrl_lightning.utils.cores import usable_cores


def default_num_workers(num_envs: int, spare: int = 1, num_processes: int = 1) -> int:
    """Return the number of usable cores minus ``spare``, from one to one per environment.

    Args:
        num_envs: number of environments of this process.
        spare: number of cores reserved for this process itself.
        num_processes: number of processes of the run on this machine, which share its cores.
    """
    return max(1, min(num_envs, usable_cores() // num_processes - spare))


class VectorEnv(gym.vector.VectorEnv):
    """Vector environment of a benchmark's tasks.

    Results do not depend on the number of workers: an environment's random numbers depend only on
    ``seed`` and its global index. In addition to Gymnasium's ``step``, there are ``send`` and
    ``receive``, between which the caller may do other work.

    It implements Gymnasium's vector environments with same-step autoreset, with these differences:

    - ``reset`` returns an empty ``info``; that of ``step`` only has ``success``. The spec's other
      fields are returned by ``receive``.
    - After a restart, ``step`` returns a reward of 0 and no end; ``receive`` marks such a step.
    - A task's own observation space may be smaller than the spec's.
    - ``render`` and ``set_attr`` are not supported.

    Args:
        benchmark: the benchmark that makes the environments.
        tasks: the task of each environment; a task may have several.
        split: one of ``benchmark.splits``.
        seed: seed of all random numbers.
        num_workers: number of worker processes; 0 steps in this process; None for one per usable
            core, minus one. Workers do not import the main module, so that scripts need no main
            guard, and benchmarks may be defined in notebooks.
        timeout: seconds to wait for a worker's response.
        max_restarts: number of times that groups of environments (one per worker, or all without
            workers) are rebuilt after one of them raised, returned a NaN or became unstable, or its
            worker died or hung; None raises at the first fault. Rebuilt environments start new
            episodes with new random numbers, and the step is not valid for them. Errors in an
            environment's first reset or step are always raised.
        on_restart: called with the reason of each restart.
        indices: each environment's global index over all processes, which together with ``seed``
            determines its random numbers; None for its index in this object.
        midway_starts: fraction of the episodes of a task that never succeeds that start midway in
            an earlier one, from 0 to 1: see ``MidwayStarts``.
        after_success: number of steps after its first success at which an episode is truncated;
            None for no truncation: see ``SuccessLimit``.
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
        indices: Sequence[int] | None = None,
        midway_starts: float = 0.0,
        after_success: int | None = None,
    ) -> None:
        if split not in benchmark.splits:
            raise ConfigurationError(
                f"unknown split {split!r}: use one of {', '.join(benchmark.splits)}"
            )
        at_least(0, num_workers=num_workers, hint=", 0 for this process")
        spec = check_spec(benchmark.spec)
        if not tasks or not all(0 <= task < spec.num_tasks for task in tasks):
            raise ConfigurationError(
                f"tasks are {list(tasks)}: give at least one, each from 0 to {spec.num_tasks - 1}"
            )
        self.spec_ = spec
        self.num_envs = len(tasks)
        self.task_E = np.asarray(tasks, np.int64)
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.observation_space = batch_space(spec.observation_space, self.num_envs)
        self.action_space = batch_space(spec.action_space, self.num_envs)

        self._benchmark = benchmark
        self._split = split
        self._seed = seed
        self._indices = list(range(self.num_envs) if indices is None else indices)
        self._timeout = timeout
        self.midway_starts = midway_starts
        """See the class arguments."""
        self._after_success = after_success
        self.max_restarts = max_restarts
        self._on_restart = on_restart
        self.num_restarts = 0
        """Number of restarts since this object was created."""
        self.fault: RestartsExhaustedError | None = None
        """The fault for which no restart was left; afterwards, environments cannot be stepped."""
        self._dead: set[int] = set()
        # The number of times an environment was reseeded, which determines its next seed.
        self._restarts_E = np.zeros(self.num_envs, np.int64)
        self._is_stepping = False  # between send() and receive()
        self._has_episode_E = np.zeros(self.num_envs, np.bool_)
        # Where a new episode has started whose observation the caller has not received.
        self._new_E = np.zeros(self.num_envs, np.bool_)
        self.builds_E = np.zeros(self.num_envs, np.int64)
        """Number of times this object has built each environment."""

        if num_workers is None:
            num_workers = default_num_workers(self.num_envs)
        self.num_workers = min(num_workers, self.num_envs)
        """Number of worker processes."""
        size = num_bytes(self.num_envs, spec)
        self._memory = SharedMemory(size) if self.num_workers else None
        self._buffer = bytearray(size) if self._memory is None else self._memory.buffer
        self._arrays = arrays_in(self._buffer, self.num_envs, spec)
        self._info_names = [field.name for field in spec.info_fields]
        self._info_columns = {key: info_column(key) for key in spec.info_keys}
        self._reported = [field.name for field in step_fields(spec) if field.name != "action"]
        parts = np.array_split(range(self.num_envs), self.num_workers or 1)
        self._slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
        self._groups = [self._start(i) for i in range(len(self._slices))]

    @property
    def worker_pids(self) -> list[int]:
        """Process IDs of the workers."""
        return [group.pid for group in self._groups if group.pid is not None]

    def send(self, action_EA: npt.NDArray, paused_E: npt.NDArray[np.bool_] | None = None) -> None:
        """Send actions to the workers, which start to step.

        Args:
            action_EA: the actions; those of paused environments are ignored.
            paused_E: environments to skip in this step; None to step all.

        Raises:
            ClosedEnvironmentError: after ``close``.
            AlreadyPendingCallError: if the last step has not been received.
            ResetNeeded: before the first ``reset``.
            PolicyFaultError: if an action is not finite; MuJoCo would silently reset the
                simulation.
            RestartsExhaustedError: if the restarts are used up.
        """
        self._check_is_idle()
        if self.fault is not None:
            raise self.fault
        if not self._has_episode_E.all():
            raise ResetNeeded("an environment has no episode: call reset() first")
        finite_E = np.isfinite(action_EA).all(-1)
        if not finite_E.all():
            names = ", ".join(
                dict.fromkeys(self.spec_.task_names[task] for task in self.task_E[~finite_E])
            )
            raise PolicyFaultError(
                f"the policy's actions for {names} are not finite, because its networks are not:"
                " resume from an earlier checkpoint (--ckpt_path PATH) with lower learning rates,"
                " or set model.init_args.actor_max_grad_norm and critic_max_grad_norm"
            )
        self._arrays["action"][:] = action_EA
        self._arrays["paused"][:] = False if paused_E is None else paused_E
        self._is_stepping = True
        for group in self._groups:
            group.ask("step")

    def receive(self) -> StepResult:
        """Wait for the step that ``send`` started.

        A faulty group is rebuilt: its rows are not valid, and its observations are the first of new
        episodes.

        Raises:
            EnvironmentFaultError: on a fault, if ``max_restarts`` is None. Once the restarts are
                used up, ``fault`` is set and raised by the next ``send``.
            NoAsyncCallError: if no step was sent.
        """
        if not self._is_stepping:
            raise NoAsyncCallError("no step is pending: call send() first", "receive")
        self._is_stepping = False
        arrays = self._arrays
        _, faults = self._answers(range(len(self._groups)))
        # report new episodes even in paused environments, because their observation is new
        paused_E = arrays["paused"] & ~self._new_E
        valid_E = ~(self._new_E | paused_E)
        self._reset_new(faults)
        for i, fault in faults.items():
            rows = self._slices[i]
            self._restart(i, fault)
            valid_E[rows] = False
            paused_E[rows] = False
            self._clear(rows)
        if paused_E.any():
            self._clear(paused_E)
            for column in self._info_columns.values():
                arrays[column][paused_E] = math.nan
        copies = {name: arrays[name].copy() for name in self._reported}
        return StepResult(
            observation_ED=copies["observation"],
            next_observation_ED=copies["next_observation"],
            reward_E=copies["reward"],
            terminated_E=copies["terminated"],
            truncated_E=copies["truncated"],
            success_E=copies["success"],
            midway_E=copies["midway"],
            valid_E=valid_E,
            paused_E=paused_E,
            extra={name: copies[name] for name in self._info_names},
            info={key: copies[column] for key, column in self._info_columns.items()},
        )

    def take_repeated_steps(self) -> int:
        """Return the number of steps that ``MidwayStarts`` has replayed since the last call."""
        assert not self._is_stepping, "workers write while they step"
        repeated_steps = int(self._arrays["repeated"].sum())
        self._arrays["repeated"][:] = 0
        return repeated_steps

    def _clear(self, rows: slice | npt.NDArray[np.bool_]) -> None:
        """Clear the results of some environments."""
        for name in self._reported:
            if name != "observation":
                self._arrays[name][rows] = 0
        self._arrays["next_observation"][rows] = self._arrays["observation"][rows]

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Start an episode in every environment.

        Args:
            seed: one seed per environment; with a single one, environment ``i`` gets ``seed + i``.
            options: passed to every environment's ``reset``, except for ``reset_mask``, an array
                with one boolean per environment that selects those to reset.
        """
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigurationError(
                f"got {len(seed)} seeds for {self.num_envs} environments: give one for each"
            )
        seeds = [None if one is None else int(one) for one in seed]
        reset_E = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            reset_E = self._checked_mask(options.pop("reset_mask"))
        self._each(
            "reset", [(seeds[rows], options, reset_E[rows].tolist()) for rows in self._slices]
        )
        self._has_episode_E |= reset_E
        self._new_E[reset_E] = False
        return self._arrays["observation"].copy(), {}

    def step(
        self, actions: npt.NDArray
    ) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray, npt.NDArray, dict[str, Any]]:
        """Step like Gymnasium's vector environments.

        The last observation of a finished episode is in ``info["final_obs"]``.
        """
        self.send(actions)
        result = self.receive()
        success_E = result.success_E.astype(np.float64)
        info: dict[str, Any] = {"success": success_E, "_success": np.ones(self.num_envs, np.bool_)}
        done_E = result.terminated_E | result.truncated_E
        if done_E.any():
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done_E):
                final[i] = result.next_observation_ED[i]
            info |= {"final_obs": final, "_final_obs": done_E, "_final_info": done_E}
            info["final_info"] = {"success": success_E, "_success": done_E}
        return result.observation_ED, result.reward_E, result.terminated_E, result.truncated_E, info

    def get_state(self) -> list[dict[str, Any]]:
        """Return the state of every environment as plain values.

        It consists of the seed of the current episode, its actions and its last observation. The
        ``state`` of a faulty environment is None. The ``options`` of a reset are not included.
        """
        parts = self._each("get_state", [()] * len(self._slices))
        return [
            {"state": state, "restarts": int(self._restarts_E[e]), "new": bool(self._new_E[e])}
            for e, state in enumerate(state for part in parts for state in part)
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> npt.NDArray | None:
        """Restore the state of every environment by replaying its episode.

        An environment that was faulty when it was saved starts a new episode with new random
        numbers. So does one whose replay leads to a different observation, with a warning. Its next
        step is not valid, because the caller has not received the new observation.

        Returns:
            The last observations; None if there is no episode yet.
        """
        if len(states) != self.num_envs:
            raise ConfigurationError(
                f"got {len(states)} states for {self.num_envs} environments: give one for each"
            )
        broken_E = np.array([state["state"] is None for state in states])
        self._restarts_E[:] = [state["restarts"] for state in states]
        self._restarts_E += broken_E
        self._new_E[:] = [state["new"] for state in states]
        parts = [
            {"seed": self._seed_of(e)} if broken_E[e] else state["state"]
            for e, state in enumerate(states)
        ]
        answers = self._each("set_state", [(parts[rows],) for rows in self._slices])
        continues_E = np.array([bool(one) for part in answers for one in part])
        self._new_E |= ~continues_E
        differs_E = ~(continues_E | broken_E)
        if differs_E.any():
            names = dict.fromkeys(self.spec_.task_names[task] for task in self.task_E[differs_E])
            warnings.warn(
                f"replaying the saved episode of {', '.join(names)} from its seed and actions leads"
                " to a different observation: new episodes start instead, and results differ from"
                " those of an uninterrupted run. Make reset(seed=...) determine all randomness, and"
                " keep no state between episodes",
                stacklevel=2,
            )
        self._has_episode_E[:] = [part.get("number", 0) >= 0 for part in parts]
        return self._arrays["observation"].copy() if self._has_episode_E.all() else None

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of every environment, or its result if it is callable."""
        parts = self._each("call", [(name, *args)] * len(self._slices), kwargs)
        return tuple(value for part in parts for value in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self.call(name)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The ``np_random`` of every environment; with workers, copies."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The ``np_random_seed`` of every environment; -1 if unknown."""
        return self.get_attr("np_random_seed")

    def close_extras(self, **kwargs: Any) -> None:
        """Shut down the workers; a second ``close`` has no effect, even if this one raises."""
        self.closed = True
        close_together(self._groups)

    def _check_is_idle(self) -> None:
        """Check that the environments are open and no step is pending."""
        if self.closed:
            raise ClosedEnvironmentError("the environments are closed: make a new VectorEnv")
        if self._is_stepping:
            raise AlreadyPendingCallError("a step is pending: call receive() first", "step")

    def _checked_mask(self, mask: Any) -> npt.NDArray[np.bool_]:
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if not is_mask or mask.shape != (self.num_envs,) or not mask.any():
            raise ConfigurationError(
                f"options['reset_mask'] is {mask!r}: give an array of {self.num_envs} booleans, one"
                " per environment, at least one of them true"
            )
        return mask

    def _seed_of(self, e: int) -> int:
        restarts = int(self._restarts_E[e])
        index = self._indices[e]
        key = (index, restarts) if restarts else (index,)
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])

    def _start(self, i: int, is_rebuilt: bool = False) -> LocalGroup | WorkerGroup:
        rows = self._slices[i]
        self.builds_E[rows] += 1
        plan = GroupPlan(
            benchmark=self._benchmark,
            tasks=self.task_E[rows].tolist(),
            split=self._split,
            seeds=[self._seed_of(e) for e in range(rows.start, rows.stop)],
            num_envs=self.num_envs,
            first=rows.start,
            midway_starts=self.midway_starts,
            after_success=self._after_success,
            is_rebuilt=is_rebuilt,
        )
        if self._memory is None:
            return LocalGroup(plan, self._arrays)
        return WorkerGroup(plan, self._arrays, self._memory, f"environments-{i}", self._timeout)

    def _each(
        self, method: str, arguments: list[tuple], keywords: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return every group's answer, and None for each environment of a dead group.

        A faulty group is rebuilt and receives the request again.
        """
        self._check_is_idle()
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
                if method != "set_state":  # set_state sets `_new_E` itself
                    self._new_E[self._slices[i]] = True
            if self.fault is not None and method != "get_state":
                raise self.fault
        return [
            answers.get(i, [None] * len(self.task_E[rows])) for i, rows in enumerate(self._slices)
        ]

    def _reset_new(self, faults: dict[int, EnvironmentFaultError]) -> None:
        """Reset where the first step of an episode used an action for another observation."""
        if not self._new_E.any():
            return
        asked = []
        for i, rows in enumerate(self._slices):
            if self._new_E[rows].any() and i not in faults and i not in self._dead:
                self._groups[i].ask("reset_some", np.flatnonzero(self._new_E[rows]).tolist())
                asked.append(i)
        self._new_E[:] = False
        faults |= self._answers(asked)[1]

    def _answers(
        self, which: Sequence[int]
    ) -> tuple[dict[int, Any], dict[int, EnvironmentFaultError]]:
        """Return answers and faults by group.

        Faults are raised once all groups have answered, so that no answers are left in pipes.
        """
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
        """Rebuild a group and reset it, or set ``fault`` if the restarts are used up."""
        assert self.max_restarts is not None
        group = self._groups[i]
        group.kill()
        while True:
            if self.num_restarts >= self.max_restarts:
                self.fault = RestartsExhaustedError(
                    f"{fault} (after {self.num_restarts} restarts, the maximum)"
                )
                self._dead.add(i)
                return
            self.num_restarts += 1
            self._restarts_E[self._slices[i]] += 1
            self._on_restart(str(fault))
            self._groups[i] = group = self._start(i, is_rebuilt=True)
            group.ask("reset", [None] * len(self.task_E[self._slices[i]]), None)
            try:
                group.answer()
                return
            except EnvironmentFaultError as next_fault:
                group.kill()
                fault = next_fault
