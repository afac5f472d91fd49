"""Slowly moving copies."""

from __future__ import annotations

import torch
from torch import nn

from mtrl_lightning.updates.targets import PolyakAverage


class Toy(nn.Module):
    def __init__(self, weights, mean=0.0, count=0):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(weights))
        self.b = nn.Parameter(torch.tensor([weights[0]]))
        self.register_buffer("mean", torch.tensor([mean]))
        self.register_buffer("count", torch.tensor(count))


def test_parameters_move_by_their_tau_and_buffers_are_copied():
    sources = [Toy([5.0, -3.0], mean=3.5, count=7), Toy([2.0, 2.0])]
    targets = [Toy([1.0, 1.0]), Toy([0.0, 0.0])]
    average = PolyakAverage(sources, targets, [0.25, 0.5])
    for module in (*sources, *targets):
        module.double()  # as a move to another device does, it replaces the buffers
    average.step()
    assert [target.a.tolist() for target in targets] == [[2, 0], [1, 1]]
    assert [target.b.tolist() for target in targets] == [[2], [1]]
    average.step()
    assert [target.a.tolist() for target in targets] == [[2.75, -0.75], [1.5, 1.5]]
    assert sources[0].a.tolist() == [5, -3]
    assert (targets[0].mean.item(), targets[0].count.item()) == (3.5, 7)
    assert targets[0].mean.dtype == torch.float64
    sources[0].mean.fill_(9)
    assert targets[0].mean.item() == 3.5, "the target has memory of its own"
    average.copy()
    assert targets[0].a.tolist() == [5, -3] and targets[0].mean.item() == 9
