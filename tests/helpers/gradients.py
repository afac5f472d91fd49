"""Small multi-task problems whose gradients are known."""

import torch
from torch.nn import Parameter

from mtrl_lightning import gradients
from mtrl_lightning.gradients import TaskParameters


class Problem:
    """Losses with known gradients: one shared vector in two parameters, ``own[i]`` for task ``i``.

    A third shared parameter, ``unused``, has no effect on any loss.
    """

    def __init__(self, gradient_RD, offset=1.0):
        self.gradient_RD = torch.as_tensor(gradient_RD, dtype=torch.float32)
        num_tasks, size = self.gradient_RD.shape
        self.offset = offset
        self.shared = [Parameter(torch.zeros(size - 1, 1)), Parameter(torch.zeros(1))]
        self.own = [Parameter(torch.zeros(num_tasks))]
        self.unused = Parameter(torch.ones(3))
        self.slope_R = torch.arange(1.0, num_tasks + 1)

    @property
    def parameters(self):
        return TaskParameters([*self.shared, self.unused], self.own, self.shared)

    @property
    def theta_D(self):
        return torch.cat([parameter.flatten() for parameter in self.shared])

    def losses(self):
        """Linear: their gradients are the given rows and the slopes."""
        return self.gradient_RD @ self.theta_D + self.slope_R * self.own[0] + self.offset

    def update(self, method, generator=None, lr=0.0):
        """One update; return the gradient of what is shared."""
        every = [*self.shared, *self.own, self.unused]
        for parameter in every:
            parameter.grad = None
        method.backward(
            self.losses(), self.parameters, generator or torch.Generator().manual_seed(0)
        )
        found_D = torch.cat([parameter.grad.flatten() for parameter in self.shared])
        with torch.no_grad():
            for parameter in every[:-1]:
                parameter -= lr * parameter.grad
        method.after_step(lambda: self.losses().detach())
        return found_D


class Quadratic(Problem):
    """Quadratic losses: the gradients change with each update, and losses can be negative."""

    def losses(self):
        distance_RD = self.theta_D - self.gradient_RD
        return (
            self.slope_R * distance_RD.square().sum(1) / 2
            + self.own[0].square()
            + self.own[0]
            + self.offset
        )


def update(method, gradient_RD, generator=None):
    return Problem(gradient_RD).update(method, generator)


def random_gradients(num_tasks, size=6, seed=0):
    return torch.randn(num_tasks, size, generator=torch.Generator().manual_seed(seed))


def assert_near(found, expected, atol=1e-6, rtol=1e-5):
    expected = torch.as_tensor(expected).to(found.dtype)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


METHODS = {
    "mean": gradients.Mean,
    "pcgrad": gradients.PCGrad,
    "gradnorm": gradients.GradNorm,
    "cagrad": gradients.CAGrad,
    "cagrad_fast": lambda spec: gradients.CAGrad(spec, num_sampled=2),
    "famo": gradients.FAMO,
    "nash_mtl": gradients.NashMTL,
    "nash_mtl_kept": lambda spec: gradients.NashMTL(spec, max_norm=1.0, update_every=2),
    "aligned_mtl": gradients.AlignedMTL,
    "fairgrad": gradients.FairGrad,
}
