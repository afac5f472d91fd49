"""Stacked networks beside the same ones, one after the other."""

from functools import partial

import pytest
import torch

from mtrl_lightning.networks import MLP, Embedding, MultiHead, NoConditioning
from mtrl_lightning.networks.stacked import can_be_stacked, stacked_outputs
from tests.helpers.algorithms import make_spec

SPEC = make_spec(3)
KNOWN = {
    "MLP": MLP,
    "no task": partial(MLP, conditioning=NoConditioning),
    "heads": MultiHead,
}
OTHERS = {
    "LayerNorm": partial(MLP, layer_norm=True),
    "residual": partial(MLP, residual=True),
    "a learned task input": partial(MLP, conditioning=Embedding),
    "heads with a hidden layer": partial(MultiHead, head_width=4),
}


def members_of(make, out_dim=2, number=2):
    return [make(5, out_dim, SPEC, width=8, depth=3, output_bound=0.3) for _ in range(number)]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("out_dim", [1, 4])
@pytest.mark.parametrize("number", [2, 3])
def test_outputs_and_gradients_are_the_same(name, out_dim, number):
    """In double precision: which products single precision rounds how differs by processor."""
    torch.manual_seed(0)
    members = [member.double() for member in members_of(KNOWN[name], out_dim, number)]
    x_RnD = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    assert can_be_stacked(members, x_RnD)
    task_Rn = torch.arange(3)[:, None].expand(3, 6)
    weight_QRnO = torch.randn(number, 3, 6, out_dim, dtype=torch.float64)
    inputs = [x_RnD, *(p for member in members for p in member.parameters())]
    one_by_one = torch.stack([member(x_RnD, task_Rn) for member in members])
    stacked = stacked_outputs(members, x_RnD, task_Rn)
    expected, found = (
        [outputs, *torch.autograd.grad((outputs * weight_QRnO).sum(), inputs)]
        for outputs in (one_by_one, stacked)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_computed_one_after_the_other(name):
    assert not can_be_stacked(members_of(OTHERS[name]), torch.zeros(3, 6, 5))


@pytest.mark.parametrize("place", ["", "trunk.0"])
@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_neither_are_networks_with_hooks(hook, place):
    members = members_of(MLP)
    module = members[1].get_submodule(place)
    handle = getattr(module, f"register_{hook}_hook")(lambda *_: None)
    assert not can_be_stacked(members, torch.zeros(3, 6, 5))
    handle.remove()
    assert can_be_stacked(members, torch.zeros(3, 6, 5))


def test_neither_are_one_network_rows_of_any_tasks_and_rows_of_some_tasks():
    for members, shape, is_known in (
        (members_of(MLP, number=1), (3, 6, 5), False),
        (members_of(MLP), (18, 5), False),
        (members_of(MultiHead), (2, 6, 5), False),
        (members_of(MLP), (2, 6, 5), True),
    ):
        assert can_be_stacked(members, torch.zeros(shape)) == is_known
