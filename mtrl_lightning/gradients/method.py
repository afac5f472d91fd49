"""What every gradient method is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import Parameter


class GradientMethod(nn.Module):
    """Turn one loss a task into gradients; built by a factory ``(num_tasks) -> GradientMethod``.

    A module, so that its state moves with the device and is in the checkpoint.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks

    def backward(self, loss_T: Tensor, shared: Sequence[Parameter]) -> None:
        """Set ``.grad`` of everything that the losses depend on; gradients must be cleared before.

        Args:
            loss_T: one loss a task.
            shared: the parameters on which tasks may conflict; all others get the gradient of the mean loss.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, Tensor]:
        """Return statistics of the last call as scalar tensors."""
        return {}
