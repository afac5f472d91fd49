"""Batched perceptrons compared with single ones, and the contract of every architecture."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import TaskConditioning
from mtrl_lightning.networks.experts import Experts, TaskExperts
from tests.networks import uniform
from tests.specs import spec_of

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
    assert any(
        parameter is network.conditioning.table.weight for parameter in network.shared_parameters()
    )


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
    for tasks in (ORDERS[3], GROUPS[0]):
        task_B = torch.tensor(tasks)
        rows = uniform(*task_B.shape, IN_DIM), task_B
        both = torch.vmap(lambda p, rows=rows: torch.func.functional_call(first, p, rows))(stacked)
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


def assert_refused(architecture, **wrong):
    for name, value in wrong.items():
        with pytest.raises(ConfigurationError, match=name):
            architecture(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), **{name: value})


def num_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def perceptron(weights, biases, expert, x_D, relu_last=False):
    """One expert on one row."""
    for i, (weight_KDH, bias_K1H) in enumerate(zip(weights, biases, strict=True)):
        x_D = x_D @ weight_KDH[expert] + bias_K1H[expert, 0]
        if relu_last or i + 1 < len(weights):
            x_D = x_D.clamp(min=0)
    return x_D


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("own_inputs", [False, True])
def test_each_expert_is_a_perceptron(depth, relu_last, own_inputs):
    experts = randomized(Experts(3, 4, 2, width=5, depth=depth, relu_last=relu_last)).double()
    x_KBD = uniform(3, 6, 4).double() if own_inputs else uniform(6, 4).double().expand(3, 6, 4)
    out = experts(x_KBD if own_inputs else x_KBD[0])
    wanted = torch.stack(
        [
            torch.stack(
                [perceptron(experts.weights, experts.biases, k, x_D, relu_last) for x_D in x_KBD[k]]
            )
            for k in range(3)
        ]
    )
    assert out.shape == (3, 6, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    parameters = list(experts.parameters())
    ours = gradients(out, parameters, uniform(3, 6, 2))
    theirs = gradients(wanted, parameters, uniform(3, 6, 2))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_two_experts_by_hand():
    experts = Experts(2, 1, 1, width=1, depth=1)
    for parameter, numbers in zip(
        experts.parameters(), ([2, -3], [1, 10], [1, 0.5], [0, 1]), strict=True
    ):
        parameter.data.copy_(torch.tensor(numbers).view_as(parameter))
    # weights first, then biases: (2 x + 1) * 1 + 0 and relu(-3 x + 0.5) * 10 + 1
    assert experts(torch.tensor([[3.0], [-1.0]]))[..., 0].tolist() == [[7.0, 0.0], [1.0, 36.0]]


def test_experts_begin_he_uniform_with_zero_biases():
    torch.manual_seed(0)
    experts = Experts(3, 50, 40, width=200, depth=2)
    assert [tuple(w.shape) for w in experts.weights] == [(3, 50, 200), (3, 200, 200), (3, 200, 40)]
    for weight_KDH, bias_K1H in zip(experts.weights, experts.biases, strict=True):
        bound = math.sqrt(6 / weight_KDH.shape[1])
        assert weight_KDH.abs().amax().item() <= bound
        for weight_DH in weight_KDH.detach():
            assert weight_DH.var().item() == pytest.approx(bound**2 / 3, rel=0.05)
        assert not bias_K1H.any()
        assert not torch.equal(weight_KDH[0], weight_KDH[1])


@pytest.mark.parametrize("wrong", [{"num_experts": 0}, {"width": 0}, {"depth": -1}, {"in_dim": 0}])
def test_sizes_that_cannot_be_are_refused(wrong):
    sizes = {"num_experts": 2, "in_dim": 3, "out_dim": 1, "width": 4, "depth": 1}
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Experts(**{**sizes, **wrong})


@pytest.mark.parametrize("tasks", BATCHES)
def test_each_row_has_the_output_of_its_tasks_perceptron(tasks):
    task_B = torch.tensor(tasks)
    own = randomized(
        TaskExperts(NUM_TASKS, IN_DIM, OUT_DIM, width=6, depth=1, output_bound=1.0)
    ).double()
    x_BD = uniform(*task_B.shape, IN_DIM).double()
    weights, biases = own.experts.weights, own.experts.biases
    rows = zip(x_BD.view(-1, IN_DIM), task_B.flatten().tolist(), strict=True)
    wanted = torch.stack([perceptron(weights, biases, task, x_D) for x_D, task in rows])
    wanted = wanted.view(*task_B.shape, OUT_DIM)
    torch.testing.assert_close(own(x_BD, task_B), wanted, rtol=1e-12, atol=1e-12)
