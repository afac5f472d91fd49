"""Slowly moving copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtrl_lightning.updates.targets import PolyakAverage, frozen_copy


class Toy(nn.Module):
    def __init__(self, weights, buffer=0.0, count=0):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(weights))
        self.b = nn.Parameter(torch.tensor([10.0]))
        self.register_buffer("mean", torch.tensor([buffer]))
        self.register_buffer("count", torch.tensor(count))


def follow(source, target, tau):
    PolyakAverage([source], [target], tau).step()


def test_parameters_move_by_tau_of_the_difference():
    source, target = Toy([5.0, -3.0]), Toy([1.0, 1.0])
    with torch.no_grad():
        target.b.fill_(0)
    follow(source, target, 0.25)
    assert target.a.tolist() == [2, 0]
    assert target.b.tolist() == [2.5]
    follow(source, target, 0.25)
    assert target.a.tolist() == [2.75, -0.75]
    assert source.a.tolist() == [5, -3]


def test_buffers_are_copied_whole():
    source, target = Toy([0.0, 0.0], buffer=3.5, count=7), Toy([0.0, 0.0])
    follow(source, target, 0.01)
    assert target.mean.tolist() == [3.5]
    assert target.count.item() == 7
    source.mean.fill_(9)
    assert target.mean.tolist() == [3.5], "the target has memory of its own"


def test_frozen_copy_leaves_the_original_trainable():
    original = nn.Linear(2, 1)
    frozen = frozen_copy(original)
    assert [p.requires_grad for p in frozen.parameters()] == [False, False]
    assert [p.requires_grad for p in original.parameters()] == [True, True]
    (original(torch.ones(1, 2)) - frozen(torch.ones(1, 2))).sum().backward()
    assert [p.grad for p in frozen.parameters()] == [None, None]
    assert torch.equal(frozen.weight, original.weight)
    with torch.no_grad():
        original.weight.add_(1)
    assert not torch.equal(frozen.weight, original.weight)


def test_several_modules_move_after_they_were_converted():
    sources = [Toy([1.0, 1.0]), Toy([2.0, 2.0], buffer=3.0)]
    targets = [Toy([0.0, 0.0]), Toy([0.0, 0.0])]
    average = PolyakAverage(sources, targets, 0.5)
    for module in (*sources, *targets):
        module.double()  # as a move to another device does, it replaces the buffers
    average.step()
    average.step()
    assert [target.a.tolist() for target in targets] == [[0.75, 0.75], [1.5, 1.5]]
    assert targets[1].mean.tolist() == [3] and targets[1].mean.dtype == torch.float64


def test_modules_of_different_size_are_refused():
    with pytest.raises(AssertionError):
        follow(nn.Linear(2, 1), nn.Linear(2, 1, bias=False), 0.5)
