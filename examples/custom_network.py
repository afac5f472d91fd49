"""A custom network: each task gates the shared hidden features."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adam

from mtrl_lightning import SAC, Temperature, ToyReach, train
from mtrl_lightning.networks import Network, TaskAxis
from mtrl_lightning.spec import EnvSpec


class GatedMLP(Network):
    """Share the layers between all tasks, and multiply the hidden features by the task's gates.

    Shapes: ``B`` batch, ``T`` tasks, ``H`` hidden features.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of the hidden layers, ``H``.
    """

    def __init__(self, in_dim: int, out_dim: int, spec: EnvSpec, *, width: int = 400) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(in_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        # random, so that tasks differ from the start: the layers do not receive the task
        self.gate_TH = Parameter(torch.randn(spec.num_tasks, width))
        self.head = nn.Linear(width, out_dim)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features ``[B, in_dim]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        return self.head(self.trunk(x_BD) * self.gate_TH[task_B].sigmoid())

    def task_axes(self) -> dict[str, TaskAxis]:
        """Return the tensors with a task axis: here the rows of the gates."""
        return {"gate_TH": TaskAxis()}


if __name__ == "__main__":
    gated = partial(GatedMLP, width=64)
    adam = partial(Adam, lr=1e-3)
    agent = partial(
        SAC,
        actor=gated,
        critic=gated,
        temperature=partial(Temperature, initial=0.1),
        actor_optimizer=adam,
        critic_optimizer=adam,
    )
    run = train(
        ToyReach(), agent, total_steps=6_000, data={"batch_size": 96}, num_workers=0, name="gated"
    )
    print(run.evaluation["eval/success"])
