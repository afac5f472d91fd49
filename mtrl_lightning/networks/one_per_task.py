"""Any architecture as one network per task, or as one network for all tasks without task input.

Both build the architecture for a single task, so that no network is conditioned on the task.

Shapes: ``B`` rows of any tasks, ``n`` rows of a task, ``D`` input features, ``O`` outputs, ``R``
tasks with a network, ``T`` tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.network import Network, TaskAxis, is_captured
from mtrl_lightning.spec import EnvSpec


class OnePerTask(Network):
    """Train one network of any architecture per task, without shared parameters.

    For plain MLPs, ``Separate`` is faster, since it computes them together. Rows of any tasks
    ``[B, D]`` are sorted by task, which synchronizes with a GPU; compiled and exported code cannot
    sort them and computes all networks for all rows.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        make: builds one network, ``(in_dim, out_dim, spec) -> Network``, with its task's spec.
        tasks: the tasks that have a network, the trained ones in the order of a batch; None for
            all. The outputs for other tasks are undefined.
    """

    index_T: Tensor
    """Index of each task's network; 0 for tasks that have none."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        make: Callable[[int, int, EnvSpec], Network],
        tasks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        owners = list(range(spec.num_tasks) if tasks is None else tasks)
        self._names = [spec.task_names[task] for task in owners]
        self.members = nn.ModuleDict(
            {
                member_name(spec.task_names[task]): OneForAll(
                    in_dim, out_dim, spec.of_task(task), make=make
                )
                for task in owners
            }
        )
        index_T = torch.zeros(spec.num_tasks, dtype=torch.int64)
        index_T[owners] = torch.arange(len(owners))
        self.register_buffer("index_T", index_T, persistent=False)
        self._trained = [owners.index(task) for task in spec.train_tasks if task in owners]
        """Indices of the trained tasks' networks, in the order of the losses."""

    @property
    def networks(self) -> list[Network]:
        """The networks of the tasks that have one, in the order of the tasks."""
        return [member.network for member in self.members.values()]  # type: ignore[misc]

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs: ``[B, out_dim]``, or ``[R, n, out_dim]``."""
        members = list(self.members.values())
        if x_BD.ndim == 3:
            if len(x_BD) != len(members):
                members = [members[index] for index in self.index_T[task_B[:, 0]].tolist()]
            pairs = zip(members, x_BD.split(1), strict=True)
            return torch.cat([member(x_1nD) for member, x_1nD in pairs])
        if is_captured():
            # compute all rows with every network: operations must not depend on the tasks' values
            output_RBO = torch.stack([member(x_BD) for member in members])
            row_B = torch.arange(task_B.shape[0], device=task_B.device)
            return output_RBO[self.index_T[task_B], row_B]
        return self._compute_in_any_order(x_BD, task_B)

    def _compute_in_any_order(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Compute each network's rows, and restore the order of the rows."""
        index_B = self.index_T[task_B]
        outputs = []
        rows = []
        for index, member in enumerate(self.members.values()):
            row_N = (index_B == index).nonzero()[:, 0]
            if len(row_N) > 0 or len(task_B) == 0:
                outputs.append(member(x_BD[row_N]))
                rows.append(row_N)
        return torch.cat(outputs)[torch.cat(rows).argsort()]

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the task of each network's tensors."""
        return {
            f"members.{name}.{tensor}": TaskAxis(has_mean=False, task=task)
            for task, (name, member) in zip(self._names, self.members.items(), strict=True)
            for tensor in tensor_names(member)
        }

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the losses ``[R]``, each masked by its task's network."""
        pairs = zip(self._trained_networks(), loss_R.split(1), strict=True)
        return torch.cat([network.mask_losses(loss_1) for network, loss_1 in pairs])

    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Call ``after_step`` of each network with its own loss."""
        for network, loss_1 in zip(self._trained_networks(), loss_R.split(1), strict=True):
            network.after_step(loss_1, torch.zeros_like(task_R[:1]), generator)

    def _trained_networks(self) -> list[Network]:
        networks = self.networks
        return [networks[index] for index in self._trained]


def member_name(task: str) -> str:
    """Return a task's name as a module name, without dots."""
    return task.replace(".", "_")


def tensor_names(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters and buffers."""
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]


class OneForAll(nn.Module):
    """Apply one network to the rows of all tasks; its outputs do not depend on the task.

    It is not a ``TaskModule``: all of its parameters are shared, including heads.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        make: builds the network, ``(in_dim, out_dim, spec) -> Network``, with the spec of one task.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        make: Callable[[int, int, EnvSpec], Network],
    ) -> None:
        super().__init__()
        self.network = make(in_dim, out_dim, spec.of_task(0))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map features to outputs: ``[B, out_dim]``, or ``[R, n, out_dim]``."""
        x_1ND = x_BD.flatten(0, -2)[None]
        task_1N = torch.zeros(x_1ND.shape[:2], dtype=torch.int64, device=x_BD.device)
        output_1NO = self.network(x_1ND, task_1N)
        return output_1NO.view(*x_BD.shape[:-1], output_1NO.shape[-1])  # type: ignore[no-any-return]

    def task_axes(self) -> Mapping[str, None]:
        """Withdraw the network's axes, which refer to a single task."""
        return dict.fromkeys(tensor_names(self))
