"""A custom gradient method: rescale all task gradients to the same norm, then average them.

Shapes: ``R`` trained tasks.
"""

from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from mtrl_lightning import SAC, Temperature, ToyConflict, train
from mtrl_lightning.gradients import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_weights
from mtrl_lightning.networks import MultiHead
from mtrl_lightning.spec import EnvSpec


class EqualNorms(GradientMethod):
    """Average the tasks' gradients after bringing each to the mean norm.

    Args:
        spec: the tasks.
        power: 1 for equal norms, 0 for the plain mean.
    """

    def __init__(self, spec: EnvSpec, *, power: float = 1.0) -> None:
        super().__init__(spec)
        self.power = power  # register mutable state as buffers, which checkpoints contain

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``; task-specific ones get the mean loss's gradient."""
        gradients = TaskGradients.from_losses(loss_R, parameters)
        # these statistics are logged, for example as train/critic_conflicts
        _, self._statistics = gradients.combine_with(self._weights, equal_weights(len(loss_R)))

    def _weights(self, gram_RR: Tensor) -> Tensor:
        """Return the weight of each task's gradient, from the Gram matrix of the gradients."""
        norm_R = gram_RR.diagonal().sqrt().clamp(min=1e-8)
        return (norm_R.mean() / norm_R) ** self.power / len(norm_R)


if __name__ == "__main__":
    small = partial(MultiHead, width=64, depth=2)
    adam = partial(Adam, lr=1e-3)
    agent = partial(
        SAC,
        actor=small,
        critic=small,
        actor_gradient=EqualNorms,
        critic_gradient=partial(EqualNorms, power=0.5),
        temperature=partial(Temperature, initial=0.1),
        actor_optimizer=adam,
        critic_optimizer=adam,
    )
    run = train(
        ToyConflict(),
        agent,
        total_steps=6_000,
        data={"batch_size": 96},
        num_workers=0,
        name="equal_norms",
    )
    print(run.evaluation["eval/success"])
