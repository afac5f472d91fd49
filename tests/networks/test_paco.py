"""Composed parameters beside weights composed one task at a time."""

from __future__ import annotations

import math

import pytest
import torch

from mtrl_lightning.networks.conditioning import (
    Embedding,
    OneHot,
    TaskEncoder,
)
from mtrl_lightning.networks.paco import PaCo
from tests.helpers.networks import (
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    Dense,
    assert_equals_row_by_row,
)
from tests.helpers.specs import spec_of

INF, NAN = math.inf, math.nan


def make(**options):
    torch.manual_seed(0)
    sizes = {"width": 8, "depth": 2, "num_sets": 4, "output_bound": 0.5}
    if "conditioning" in options:
        sizes["max_loss"] = None
    return PaCo(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), **{**sizes, **options})


@pytest.mark.parametrize("options", [{}, {"conditioning": Dense}, {"depth": 1, "num_sets": 1}])
def test_every_parameter_is_a_sum_over_the_sets(options):
    def slow(network, x_D, task):
        w_K = network.composition.weight @ network.conditioning(torch.tensor([task]))[0]
        for i, (weight_KDH, bias_KH) in enumerate(
            zip(network.weights, network.biases, strict=True)
        ):
            weight_DH = sum(w * of_set for w, of_set in zip(w_K, weight_KDH, strict=True))
            x_D = x_D @ weight_DH + sum(w * of_set for w, of_set in zip(w_K, bias_KH, strict=True))
            x_D = x_D if i == len(network.weights) - 1 else x_D.clamp(min=0)
        return x_D

    assert_equals_row_by_row(make(**options), slow)


def test_initial_sets_are_he_uniform_with_a_bounded_output():
    network = make(width=200, num_sets=5)
    torch.testing.assert_close(network.composition.weight.square().sum(0), torch.ones(NUM_TASKS))
    assert network.composition.weight.min() < 0
    for weight_DH in network.weights[1]:
        assert weight_DH.var().item() == pytest.approx(2 / 200, rel=0.05)
    composed_DH = torch.einsum("k,kdh->dh", network.composition.weight[:, 1], network.weights[1])
    assert composed_DH.var().item() == pytest.approx(2 / 200, rel=0.05)
    assert not torch.equal(network.weights[1][0], network.weights[1][1])
    assert not any(bias.any() for bias in network.biases[:-1])
    for parameter in (network.weights[-1], network.biases[-1]):
        assert 0.3 < parameter.abs().max().item() <= 0.5


def test_losses_that_explode_are_masked_and_give_no_gradient():
    network = make(max_loss=10.0)
    loss_T = torch.tensor([3.0, 10.0, 10.5, INF, NAN, -INF, -50.0], requires_grad=True)
    masked_T = network.mask_losses(loss_T)
    assert masked_T.tolist() == [3, 10, 0, 0, 0, 0, -50]
    masked_T.sum().backward()
    assert loss_T.grad.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert make().mask_losses(torch.tensor([2999.0, 3001.0])).tolist() == [2999, 0]
    assert make(max_loss=None).mask_losses(torch.tensor([1e9])).tolist() == [1e9]


def table(network):
    return network.composition.weight.detach().clone().t()


def step(network, losses, tasks, seed=0):
    network.after_step(
        torch.tensor(losses), torch.tensor(tasks), torch.Generator().manual_seed(seed)
    )
    return table(network)


def test_an_exploding_task_begins_again_between_the_others():
    torch.manual_seed(1)
    network = PaCo(IN_DIM, OUT_DIM, spec_of(5), width=4, depth=1, num_sets=6, max_loss=10.0)
    before_TK = table(network)
    after_TK = step(network, [1.0, 11.0, 2.0, NAN], [4, 1, 2, 0])
    assert torch.equal(after_TK[[2, 3, 4]], before_TK[[2, 3, 4]])
    for task in (0, 1):  # of the healthy trained tasks 4 and 2; task 3 is not trained
        share = torch.linalg.lstsq(before_TK[[4, 2]].t(), after_TK[task][:, None]).solution[:, 0]
        torch.testing.assert_close(share @ before_TK[[4, 2]], after_TK[task], rtol=1e-4, atol=1e-5)
        assert share.min() > 0
        assert share.sum().item() == pytest.approx(1, abs=1e-5)
    assert not torch.equal(after_TK[0], after_TK[1])


def test_the_combination_is_that_of_the_generators_numbers():
    network = make(max_loss=10.0)
    before_TK = table(network)
    after_TK = step(network, [1.0, 1.0, 11.0], [0, 1, 2], seed=7)
    share = 1 - torch.rand(3, 3, generator=torch.Generator().manual_seed(7))[2]
    wanted_K = (share[0] * before_TK[0] + share[1] * before_TK[1]) / (share[0] + share[1])
    torch.testing.assert_close(after_TK[2], wanted_K, rtol=1e-6, atol=1e-7)


def test_a_w_that_is_no_number_does_not_spread():
    network = make(max_loss=10.0)
    network.composition.weight.data[:, 0] = NAN
    before_TK = table(network)
    after_TK = step(network, [NAN, 11.0, 1.0], [0, 1, 2])
    torch.testing.assert_close(after_TK, before_TK[[2, 2, 2]])


@pytest.mark.parametrize(
    ("losses", "max_loss"),
    [([1.0, 10.0, -5.0], 10.0), ([11.0, NAN, INF], 10.0), ([1.0, 1e9, NAN], None)],
)
def test_nothing_changes_if_none_explodes_or_all_do(losses, max_loss):
    network = make(max_loss=max_loss)
    before_TK = table(network)
    assert torch.equal(step(network, losses, [0, 1, 2]), before_TK)


def test_draws_do_not_depend_on_exploding_tasks():
    states = []
    for loss in (1.0, 11.0):
        generator = torch.Generator().manual_seed(0)
        make(max_loss=10.0).after_step(torch.tensor([1.0, loss, 1.0]), torch.arange(3), generator)
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("conditioning", [OneHot, TaskEncoder, Embedding])
def test_composed_weights_begin_with_the_variance_of_one_set(conditioning):
    torch.manual_seed(0)
    network = PaCo(4, 2, spec_of(6), width=8, max_loss=None, conditioning=conditioning)
    w_TK = network.composition(network.conditioning(torch.arange(6)))
    assert w_TK.square().sum(1).mean().item() == pytest.approx(1, rel=1e-5)
