"""Architectures that several tests share, and the contract that each of them has to keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.networks import MLP, Encoder, MultiHead
from mtrl_lightning.networks.conditioning import (
    TaskConditioning,
)
from mtrl_lightning.networks.task_axes import shared_parameters

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


def randomized(network, scale=1.0):
    """Fill all parameters, also those that begin as zeros."""
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            parameter.copy_(scale * uniform(*parameter.shape, seed=i))
    return network


def gradients(out, inputs, weights):
    return torch.autograd.grad(
        (out * weights).sum(), inputs, allow_unused=True, materialize_grads=True
    )


def assert_equals_row_by_row(network, slow, tolerance=1e-11):
    """Outputs and all gradients are those of ``slow(network, x_D, task)`` for each row.

    Shapes: ``B`` rows of any tasks ``[B]`` or of a learning batch ``[R, n]``.
    """
    network = randomized(network).double()
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


def losses(network, x_BD, task_B):
    """Return one loss for each third of the rows ``[B]``, or for each task of ``[R, n]``."""
    output_BO = network(x_BD, task_B)
    return output_BO.square().view(NUM_TASKS, -1).mean(1)


def assert_all_learn(network):
    randomized(network)(uniform(30, IN_DIM), torch.arange(30) % NUM_TASKS).square().sum().backward()
    assert [
        name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()
    ] == []


def every_parameter_learns(make):
    assert_all_learn(make())


def another_conditioning_takes_the_place_of_the_one_hot(make):
    network = make(conditioning=Dense)
    assert_all_learn(network)
    assert any(p is network.conditioning.table.weight for p in shared_parameters(network))


def empty_batches_pass(make):
    out = make()(torch.empty(0, IN_DIM), torch.empty(0, dtype=torch.int64))
    assert out.shape == (0, OUT_DIM)


def groups_of_tasks_have_the_outputs_and_gradients_of_the_same_rows_in_any_order(make):
    network = randomized(make()).double()
    for i, tasks in enumerate(GROUPS):
        task_Rn = torch.tensor(tasks)
        x_RnD = uniform(*task_Rn.shape, IN_DIM, seed=30 + i).double().requires_grad_()
        weight_RnO = uniform(*task_Rn.shape, OUT_DIM, seed=40 + i).double()
        inputs = [x_RnD, *network.parameters()]
        grouped_RnO = network(x_RnD, task_Rn)
        ours = gradients(grouped_RnO, inputs, weight_RnO)
        in_order_B = torch.arange(task_Rn.numel())
        shuffled_B = torch.randperm(len(in_order_B), generator=torch.Generator().manual_seed(i))
        for order_B in (in_order_B, in_order_B.flip(0), shuffled_B):
            any_BO = network(x_RnD.flatten(0, 1)[order_B], task_Rn.flatten()[order_B])
            any_RnO = any_BO[order_B.argsort()].view_as(grouped_RnO)
            torch.testing.assert_close(grouped_RnO, any_RnO, rtol=1e-9, atol=1e-10)
            theirs = gradients(any_RnO, inputs, weight_RnO)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def half_precision_is_close(make):
    network = randomized(make(), scale=0.5)
    for tasks in (*ORDERS[:4], *GROUPS[:2]):
        task_B = torch.tensor(tasks)
        x_BD = uniform(*task_B.shape, IN_DIM, seed=3)
        exact = network(x_BD, task_B)
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = network(x_BD, task_B)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(
            out.float(), exact, rtol=0.1, atol=0.05 * exact.abs().max().item()
        )
        out.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in network.parameters())


def many_gradients_at_once_equal_one_after_another(make):
    network = randomized(make()).double()
    for tasks in (ORDERS[0], [2, 2, 2, 0, 0, 0, 1, 1, 1], GROUPS[0]):
        task_B = torch.tensor(tasks)
        loss_T = losses(network, uniform(*task_B.shape, IN_DIM).double(), task_B)
        parameters, each = list(network.parameters()), torch.eye(NUM_TASKS, dtype=torch.float64)
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        at_once = torch.autograd.grad(loss_T, parameters, each, is_grads_batched=True, **options)
        for task in range(NUM_TASKS):
            alone = torch.autograd.grad(loss_T[task], parameters, **options)
            for ours, theirs in zip(at_once, alone, strict=True):
                torch.testing.assert_close(ours[task], theirs, rtol=1e-11, atol=1e-11)


def it_can_be_vectorized_over_parameters(make):
    first, second = randomized(make()), randomized(make(), scale=0.5)
    stacked = {
        name: torch.stack([a, b])
        for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True)
    }
    task_Rn = torch.tensor(GROUPS[0])
    rows = uniform(*task_Rn.shape, IN_DIM), task_Rn
    both = torch.vmap(lambda p: torch.func.functional_call(first, p, rows))(stacked)
    wanted = torch.stack([first(*rows), second(*rows)])
    torch.testing.assert_close(both, wanted, rtol=1e-4, atol=1e-5)


def it_can_be_compiled_whole(make):
    network = randomized(make())
    torch.compiler.reset()  # compilations of other networks count towards the same limit
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    parameters = list(network.parameters())
    for tasks in (ORDERS[0], GROUPS[0]):
        task_B = torch.tensor(tasks)
        rows = uniform(*task_B.shape, IN_DIM), task_B
        torch.testing.assert_close(compiled(*rows), network(*rows), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(
            torch.autograd.grad(losses(compiled, *rows).sum(), parameters, allow_unused=True),
            torch.autograd.grad(losses(network, *rows).sum(), parameters, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


CONTRACT = [
    another_conditioning_takes_the_place_of_the_one_hot,
    every_parameter_learns,
    empty_batches_pass,
    groups_of_tasks_have_the_outputs_and_gradients_of_the_same_rows_in_any_order,
    half_precision_is_close,
    many_gradients_at_once_equal_one_after_another,
    it_can_be_vectorized_over_parameters,
    it_can_be_compiled_whole,
]
"""The contract of every architecture; each check takes ``make(**options)``, a factory."""


def num_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def perceptron(weights, biases, expert, x_D, relu_last=False):
    """One expert on one row."""
    for i, (weight_KDH, bias_K1H) in enumerate(zip(weights, biases, strict=True)):
        x_D = x_D @ weight_KDH[expert] + bias_K1H[expert, 0]
        if relu_last or i + 1 < len(weights):
            x_D = x_D.clamp(min=0)
    return x_D


GROUPED_TASKS = [
    [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]],
    [[0], [1], [2], [3]],
    [[1, 1], [3, 3]],
]
"""Tasks of learning batches ``[R, n]``: of all tasks, and of two of them."""
DTYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.float64, 1e-11, id="float64"),
]


def randomize(module, seed=0):
    """Give every parameter numbers of its own, biases too."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(uniform(*parameter.shape, seed=seed + i))
    return module


def trained(module):
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def assert_same_output_and_gradients(module, out_BC, wanted_BC, tolerance):
    """Compare outputs, and the gradients of all parameters for a gradient of the output."""
    torch.testing.assert_close(out_BC, wanted_BC, rtol=tolerance, atol=tolerance)
    given_BC, parameters = uniform(*out_BC.shape, seed=77).to(out_BC), trained(module)
    own = torch.autograd.grad((out_BC * given_BC).sum(), list(parameters.values()))
    wanted = torch.autograd.grad((wanted_BC * given_BC).sum(), list(parameters.values()))
    for name, gradient, right in zip(parameters, own, wanted, strict=True):
        torch.testing.assert_close(
            gradient, right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert right.any(), f"{name} gets no gradient: nothing was compared"


def assert_gradients_of_many_losses_at_once(module, out_BC):
    """Compare gradients of each row's loss in one batched pass with one pass per row."""
    loss_B, parameters = out_BC.square().sum(-1), list(trained(module).values())
    each_BB = torch.eye(len(loss_B), dtype=loss_B.dtype)
    settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    at_once = torch.autograd.grad(loss_B, parameters, each_BB, is_grads_batched=True, **settings)
    for i in range(len(loss_B)):
        for gradient, right in zip(
            at_once, torch.autograd.grad(loss_B[i], parameters, **settings), strict=True
        ):
            torch.testing.assert_close(gradient[i], right, rtol=1e-5, atol=1e-6)


def assert_groups_equal_rows(module, tasks, make_input=None):
    """Compare groups of tasks ``[R, n]`` with the same rows in their order, and in others.

    Args:
        module: maps tasks, or an input and tasks, to a row for each.
        tasks: ``[R, n]``.
        make_input: takes ``R`` and ``n`` and returns the input ``[R, n, ...]``.
    """
    task_Rn = torch.tensor(tasks)
    inputs = [] if make_input is None else [make_input(*task_Rn.shape)]
    parameters = list(trained(module).values())
    options = {"allow_unused": True, "materialize_grads": True}

    def gradients(out_RnC):
        if not parameters:
            return []
        weight_RnC = uniform(*out_RnC.shape, seed=77).to(out_RnC)
        return torch.autograd.grad((out_RnC * weight_RnC).sum(), parameters, **options)

    grouped_RnC = module(*inputs, task_Rn)
    assert grouped_RnC.shape[:2] == task_Rn.shape
    in_order_B = torch.arange(task_Rn.numel())
    shuffled_B = torch.randperm(len(in_order_B), generator=torch.Generator().manual_seed(0))
    wanted = gradients(grouped_RnC)
    for order_B in (in_order_B, in_order_B.flip(0), shuffled_B):
        rows = [x_Rn.flatten(0, 1)[order_B] for x_Rn in (*inputs, task_Rn)]
        any_RnC = module(*rows)[order_B.argsort()].view_as(grouped_RnC)
        tolerance = 1e-9 if grouped_RnC.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(grouped_RnC, any_RnC, rtol=tolerance, atol=tolerance)
        found = gradients(any_RnC)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def layers(x_D, linears):
    """Linear maps with ReLU between them, by sums over single features."""
    for i, linear in enumerate(linears):
        x_D = torch.stack(
            [
                (row_D * x_D).sum() + bias
                for row_D, bias in zip(linear.weight, linear.bias, strict=True)
            ]
        )
        x_D = x_D if i + 1 == len(linears) else x_D.clamp(min=0)
    return x_D


def one_expert(experts, k, x_D):
    """``z_k(x)``: linear maps with ReLU between them, by sums over single features."""
    pairs = list(zip(experts.weights, experts.biases, strict=True))
    for i, (weight_KDH, bias_K1H) in enumerate(pairs):
        x_D = torch.stack([(column_D * x_D).sum() for column_D in weight_KDH[k].T]) + bias_K1H[k, 0]
        x_D = x_D if i + 1 == len(pairs) else x_D.clamp(min=0)
    return x_D
