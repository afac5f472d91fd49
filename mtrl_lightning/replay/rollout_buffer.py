"""The transitions of an on-policy iteration, and their minibatches.

Shapes: ``S`` steps of an iteration, ``E`` environments, ``N = S * E`` rows, ``R`` trained tasks,
``n`` rows of a task in a minibatch, ``B = R * n`` all rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl_lightning.checkpoints import PER_ENV, PER_RANK
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import (
    Rollout,
    RolloutConfig,
    TransitionBatch,
    Transitions,
    transition_fields,
)
from mtrl_lightning.utils.devices import CPU, to_device


class RolloutBuffer:
    """Store the transitions of one iteration, and return them in minibatches.

    An iteration has three phases: ``add`` until it ``is_full``; ``begin`` with columns that the
    algorithm computes, such as advantages; ``next_minibatch`` until it ``is_used_up``. Then the
    next iteration starts.

    A minibatch has ``n`` rows of every trained task. Each epoch has its own random order. A task
    with fewer transitions than rows in an epoch, because of faults or paused environments, repeats
    some; one with more omits some.

    Args:
        spec: the trained tasks, shapes and dtypes.
        tasks: the task of each environment.
        collection: steps, epochs and minibatches.
        policy_fields: further fields of a transition, returned by the policy's ``act``; with
            ``PolicyReuse`` also ``foreign``.
        seed: seed of the random orders, which differ between processes.
        device: device of the minibatches.
    """

    def __init__(
        self,
        spec: EnvSpec,
        tasks: Sequence[int],
        collection: RolloutConfig,
        policy_fields: Sequence[Field] = (),
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.collection = collection
        self.num_envs = len(tasks)
        self._task_E = np.asarray(tasks, np.int64)
        self._device = device
        rows_per_task(len(tasks), len(spec.train_tasks), collection)  # checks them
        in_order_E = np.repeat(spec.train_tasks, len(tasks) // len(spec.train_tasks))
        assert np.array_equal(self._task_E, in_order_E), "environments must be in task order"
        self._train_tasks = spec.train_tasks
        self._task_names = spec.task_names
        self._task_R = torch.tensor(spec.train_tasks, device=device)
        self._generator = torch.Generator().manual_seed(distributed.seed_of_rank(seed))
        if "foreign" in {field.name for field in spec.info_fields}:
            raise ConfigurationError(
                "the field name 'foreign' is reserved in on-policy iterations (PolicyReuse): rename"
                " the one in the spec's info_fields"
            )
        fields = (*transition_fields(spec, policy_fields), Field("truncated", (), "bool"))
        shape = (collection.num_steps, self.num_envs)
        self._arrays = {
            field.name: np.zeros((*shape, *field.shape), field.dtype) for field in fields
        }
        self._valid_SE = np.zeros(shape, np.bool_)
        self._num_steps = 0
        self._collected: Rollout | None = None
        """The full iteration on the device; None until ``collected`` is called."""
        self._rows: dict[str, Tensor] = {}
        """Columns ``[N, ...]`` on the device; empty while collecting."""
        self.computed_columns: tuple[str, ...] = ()
        """Names of the columns that ``begin`` received."""
        self._num_minibatches = 0
        """Number of minibatches of this iteration returned so far."""
        self._order_RM = torch.zeros(len(spec.train_tasks), 0, dtype=torch.int64)
        """Row indices of this epoch, ``[R, minibatches * n]``."""

    def __len__(self) -> int:
        """Return the number of stored transitions."""
        return int(self._valid_SE[: self._num_steps].sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of the transitions of an iteration."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def is_empty(self) -> bool:
        """Whether no step of the iteration has been collected."""
        return self._num_steps == 0

    @property
    def is_full(self) -> bool:
        """Whether all steps of the iteration have been collected."""
        return self._num_steps == self.collection.num_steps

    @property
    def has_begun(self) -> bool:
        """Whether ``begin`` has been called in this iteration."""
        return bool(self._rows)

    @property
    def is_used_up(self) -> bool:
        """Whether all minibatches of the iteration have been returned."""
        total = self.collection.num_epochs * self.collection.num_minibatches
        return self.has_begun and self._num_minibatches >= total

    def add(self, transitions: Transitions) -> None:
        """Add the transitions of one vector step; environments without one have no valid row."""
        assert not self.is_full, "the iteration is complete"
        columns = transitions.columns()
        for name, array in self._arrays.items():
            array[self._num_steps, transitions.env_E] = columns[name]
        self._valid_SE[self._num_steps] = False
        self._valid_SE[self._num_steps, transitions.env_E] = True
        self._num_steps += 1

    def collected(self) -> Rollout:
        """Return the transitions of the full iteration on the device, copied only once.

        Raises:
            EnvironmentFaultError: if a task has no transitions because of faults.
        """
        assert self.is_full, "the iteration is not complete"
        if self._collected is not None:
            return self._collected
        for task in self._train_tasks:
            if not self._valid_SE[:, self._task_E == task].any():
                raise EnvironmentFaultError(
                    f"{self._task_names[task]} has no transitions in this iteration because its"
                    " environments failed at every step: see the warnings above"
                )
        columns = {name: to_device(array, self._device) for name, array in self._arrays.items()}
        valid_SE = to_device(self._valid_SE, self._device)
        self._collected = Rollout(columns, valid_SE, to_device(self._task_E, self._device))
        return self._collected

    def begin(self, computed: Mapping[str, Tensor]) -> None:
        """Start the minibatches of the iteration.

        Args:
            computed: further columns by name, ``[S, E]``, which replace collected columns of the
                same name.
        """
        self.computed_columns = tuple(computed)
        columns = {**self.collected().columns, **computed}
        self._rows = {name: column.flatten(0, 1) for name, column in columns.items()}
        self._num_minibatches = 0

    def next_minibatch(self) -> TransitionBatch:
        """Return the next minibatch."""
        assert self.has_begun and not self.is_used_up, "no minibatches are left"
        num_minibatches = self.collection.num_minibatches
        index = self._num_minibatches % num_minibatches
        if index == 0:
            self._order_RM = self._draw_order()
        self._num_minibatches += 1
        row_Rn = self._order_RM.unflatten(1, (num_minibatches, -1))[:, index]
        row_B = to_device(row_Rn.flatten(), self._device)
        rows = {name: column.index_select(0, row_B) for name, column in self._rows.items()}
        return batch_of(rows, self._task_R)

    def skip_rest(self) -> None:
        """Skip the remaining minibatches of this iteration."""
        self._num_minibatches = self.collection.num_epochs * self.collection.num_minibatches

    def clear(self) -> None:
        """Clear the transitions to start the next iteration."""
        self._num_steps = 0
        self._num_minibatches = 0
        self._collected = None
        self._rows = {}
        self._order_RM = torch.zeros(len(self._train_tasks), 0, dtype=torch.int64)
        self.computed_columns = ()

    def _draw_order(self) -> Tensor:
        """Sample a random order of each trained task's rows for an epoch, ``[R, M]``."""
        num_rows = self._rows_per_epoch()
        orders = []
        for task in self._train_tasks:
            is_row_SE = self._valid_SE & (self._task_E == task)
            row_M = torch.from_numpy(np.flatnonzero(is_row_SE))
            order_M = row_M[torch.randperm(len(row_M), generator=self._generator)]
            num_copies = -(-num_rows // len(row_M))
            orders.append(order_M.repeat(num_copies)[:num_rows])
        return torch.stack(orders)

    def _rows_per_epoch(self) -> int:
        """Return the number of rows of each task in an epoch.

        It is the number of steps of ``sum m^2 / sum m`` environments, with ``m`` stepped
        environments of a task. With weights proportional to ``m``, the gradient then has the same
        variance as if each transition were used once: ``sum m^2 / n = sum m``, in rows of one
        environment.
        """
        stepped_R = self._valid_SE.any(0).reshape(len(self._train_tasks), -1).sum(1)
        num_minibatches = self.collection.num_minibatches
        num_steps = self.collection.num_steps * int(stepped_R @ stepped_R)
        return -(-num_steps // int(stepped_R.sum() * num_minibatches)) * num_minibatches

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions of this iteration, its progress, and the generator."""
        n = self._num_steps
        of_envs = {
            "arrays": {
                name: torch.tensor(array_SE[:n]).transpose(0, 1)
                for name, array_SE in self._arrays.items()
            },
            "valid": torch.tensor(self._valid_SE[:n]).transpose(0, 1),
            "computed": {
                name: self._rows[name].unflatten(0, (-1, self.num_envs)).transpose(0, 1).cpu()
                for name in self.computed_columns
            },
        }
        own = {"generator": self._generator.get_state(), "order": self._order_RM}
        return {
            "collection": list(self.collection),
            "num_minibatches": self._num_minibatches,
            "num_processes": distributed.world_size(),
            PER_ENV: of_envs,
            PER_RANK: {distributed.rank(): own},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        of_envs = state[PER_ENV]
        own = state[PER_RANK].get(distributed.rank())
        valid_SE = of_envs["valid"].transpose(0, 1).numpy()
        if own is not None:  # a new process has none to restore
            self._generator.set_state(own["generator"])
        self.clear()
        if len(valid_SE) == 0:
            return
        if list(self.collection) != state["collection"] or valid_SE.shape[1] != self.num_envs:
            was = dict(zip(RolloutConfig._fields, state["collection"], strict=True))
            raise ConfigurationError(
                "the checkpoint is in the middle of an iteration of"
                f" {valid_SE.shape[1]} environments with {was}, but this run has {self.num_envs}"
                f" with {self.collection._asdict()}: resume with the same numbers, or from a"
                " checkpoint between two iterations"
            )
        self._num_steps = len(valid_SE)
        self._valid_SE[: self._num_steps] = valid_SE
        for name, array in self._arrays.items():
            array[: self._num_steps] = of_envs["arrays"][name].transpose(0, 1).numpy()
        if not of_envs["computed"]:
            return
        if state["num_processes"] != distributed.world_size():
            raise ConfigurationError(
                "the checkpoint is in the middle of an iteration's updates, whose minibatches are"
                f" divided among {state['num_processes']} processes: resume with the same number"
                " of processes, or from another checkpoint"
            )
        assert own is not None
        self._order_RM = own["order"]
        computed = {
            name: column.transpose(0, 1).to(self._device)
            for name, column in of_envs["computed"].items()
        }
        self.begin(computed)
        self._num_minibatches = state["num_minibatches"]


def rows_per_task(num_envs: int, num_tasks: int, collection: RolloutConfig) -> int:
    """Return the number of rows of a trained task in an iteration.

    Args:
        num_envs: number of environments of all trained tasks, the same for each task.
        num_tasks: number of trained tasks, ``R``.
        collection: steps, epochs and minibatches.
    """
    envs_per_task = num_envs // num_tasks
    rows = collection.num_steps * envs_per_task
    num_minibatches = collection.num_minibatches
    if rows % num_minibatches:
        near = [n for n in range(1, rows + 1) if rows % n == 0]
        nearest = min(near, key=lambda n: abs(n - num_minibatches))
        raise ConfigurationError(
            f"an iteration has {rows} env steps per task and process (num_steps"
            f" {collection.num_steps}, {envs_per_task} environments from data.envs_per_task), which"
            f" cannot be divided equally among {num_minibatches} minibatches: set"
            f" model.init_args.num_minibatches to {nearest}, or to null to derive it from"
            " num_steps; or set model.init_args.num_steps to a multiple of"
            f" {num_minibatches}"
        )
    return rows
