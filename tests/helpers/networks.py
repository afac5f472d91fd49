"""Slow references of networks, and comparisons with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.networks import MLP, Encoder, MultiHead
from mtrl_lightning.networks.conditioning import (
    TaskConditioning,
)

ALWAYS_FUSED = {torch.float32: 0, torch.bfloat16: 0, torch.float64: 0}
"""Numbers of outputs from which hidden layers are fused."""
ARCHITECTURES = [pytest.param(MLP, id="mlp"), pytest.param(MultiHead, id="multi_head")]


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between -1 and 1 from a generator of their own."""
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1


class Convolutions(Encoder):
    """The smallest encoder of stacked frames."""

    def __init__(self, spec):
        super().__init__(spec)
        num_frames, num_colors, *_ = spec.observation_space.shape
        self.layers = nn.Sequential(
            nn.Conv2d(num_frames * num_colors, 4, 5, stride=4), nn.ReLU(), nn.Flatten()
        )
        frames = torch.zeros(1, *spec.observation_space.shape)
        self.out_dim = self.layers(frames.flatten(1, 2)).shape[1]

    def forward(self, observation_BD, task_B):
        picture_BCHW = observation_BD.flatten(0, -5).flatten(1, 2)
        return self.layers(picture_BCHW / 255).view(*task_B.shape, self.out_dim)


IN_DIM = 4
OUT_DIM = 2
NUM_TASKS = 3
ORDERS = [[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2], [2, 1, 0], [0, 2, 1, 1, 2, 0, 0], [1, 1, 1]]
"""Tasks of rows ``[B]``: in order with three rows and with one, backwards, mixed, one alone."""
GROUPS = [
    [[0, 0, 0], [1, 1, 1], [2, 2, 2]],
    [[0], [1], [2]],
    [[0, 0, 0, 0], [2, 2, 2, 2]],
    [[1, 1], [2, 2]],
    [[1, 1, 1]],
]
"""Tasks of learning batches ``[R, n]``: of all tasks, of two of them, of one alone."""
BATCHES = [*ORDERS, *GROUPS]


class Dense(TaskConditioning):
    """A learned vector for each task."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.out_dim = 5
        self.table = nn.Embedding(spec.num_tasks, 5)

    def forward(self, task_B: torch.Tensor) -> torch.Tensor:
        return self.table(task_B)


def randomize(module, seed=0):
    """Give every parameter numbers of its own, also those that begin as zeros."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(uniform(*parameter.shape, seed=seed + i))
    return module


def gradients(out, inputs, weights):
    return torch.autograd.grad(
        (out * weights).sum(), inputs, allow_unused=True, materialize_grads=True
    )


def assert_equals_row_by_row(network, slow, tolerance=1e-11):
    """Outputs and all gradients are those of ``slow(network, x_D, task)`` for each row.

    Shapes: ``B`` rows of any tasks ``[B]`` or of a learning batch ``[R, n]``.
    """
    network = randomize(network).double()
    for i, tasks in enumerate(BATCHES):
        task_B = torch.tensor(tasks)
        x_BD = uniform(*task_B.shape, IN_DIM, seed=50 + i).double().requires_grad_()
        fast = network(x_BD, task_B)
        rows = zip(x_BD.view(-1, IN_DIM), task_B.flatten().tolist(), strict=True)
        wanted = torch.stack([slow(network, x_D, task) for x_D, task in rows])
        wanted = wanted.view(*task_B.shape, OUT_DIM)
        torch.testing.assert_close(fast, wanted, rtol=tolerance, atol=tolerance)
        weights, inputs = uniform(*fast.shape, seed=80).double(), [x_BD, *network.parameters()]
        for ours, theirs in zip(
            gradients(fast, inputs, weights), gradients(wanted, inputs, weights), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def num_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def perceptron(experts, k, x_D, relu_last=False):
    """Return the output of expert ``k`` for one row."""
    num_layers = len(experts.weights)
    for i, (weight_KDH, bias_K1H) in enumerate(zip(experts.weights, experts.biases, strict=True)):
        x_D = x_D @ weight_KDH[k] + bias_K1H[k, 0]
        x_D = x_D.clamp(min=0) if relu_last or i + 1 < num_layers else x_D
    return x_D


def layers(x_D, linears):
    """Return the output of linear layers with ReLU between them for one row."""
    for i, linear in enumerate(linears):
        x_D = linear.weight @ x_D + linear.bias
        x_D = x_D if i + 1 == len(linears) else x_D.clamp(min=0)
    return x_D


DTYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.float64, 1e-11, id="float64"),
]


def assert_same_output_and_gradients(module, out_BC, wanted_BC, tolerance):
    """Compare outputs, and the gradients of all parameters for a gradient of the output."""
    torch.testing.assert_close(out_BC, wanted_BC, rtol=tolerance, atol=tolerance)
    given_BC = uniform(*out_BC.shape, seed=77).to(out_BC)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found, wanted = (
        torch.autograd.grad((output_BC * given_BC).sum(), parameters)
        for output_BC in (out_BC, wanted_BC)
    )
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert all(gradient.any() for gradient in wanted), "a gradient of 0 compares nothing"
