"""Nothing shared: one network a task."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.experts import TaskExperts, require_at_least_one
from mtrl_lightning.networks.network import Network


class Separate(Network):
    """A multi-layer perceptron for each task, told nothing of the task: as many single-task networks at once.

    This is "one SAC a task" in mtrl's tables (Sodhani et al. 2021), an upper bound for what sharing
    may cost.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers; 3 in MetaWorld's protocols.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).

    Raises:
        ConfigurationError: if there would be no layer or no feature.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 400,
        depth: int = 3,
        output_bound: float = 3e-3,
    ) -> None:
        super().__init__()
        require_at_least_one(depth=depth)
        self.own = TaskExperts(
            num_tasks, in_dim, out_dim, width=width, depth=depth, output_bound=output_bound
        )

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        return self.own(x_BD, task_B)  # type: ignore[no-any-return]

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield nothing."""
        yield from ()

    def last_shared_weight(self) -> Parameter:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "Separate shares no layer between tasks: set the gradient method to the mean"
        )
