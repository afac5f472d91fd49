"""Fused hidden layers beside PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks import hidden
from mtrl_lightning.networks.hidden import HiddenLayers
from tests.helpers.networks import ALWAYS_FUSED, uniform

ROWS, WIDTH = 320, 24
FUSED = "_FusedLayersBackward"


def is_fused(out):
    """Return whether the layers that gave an output were computed together."""
    return (
        out.grad_fn.name() == "ViewBackward0" and out.grad_fn.next_functions[0][0].name() == FUSED
    )


@pytest.fixture(params=[False, True], ids=["linear", "layer_norm"])
def layer_norm(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["onednn", "plain products"])
def layers(request, monkeypatch, layer_norm):
    if request.param and not hidden.HAS_ONEDNN:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(hidden, "HAS_ONEDNN", request.param)
    monkeypatch.setattr(hidden, "MIN_OUTPUTS", ALWAYS_FUSED)
    torch.manual_seed(0)
    network = HiddenLayers(7, WIDTH, 3, layer_norm)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def gradients(network, forward, given_BH, dtype):
    """Gradients of input and parameters for a given gradient of the output."""
    x_BD = uniform(ROWS, 7, seed=3).requires_grad_()
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out_BH = forward(x_BD)
    out_BH.backward(given_BH.to(out_BH.dtype))
    return out_BH.detach(), [x_BD.grad, *(parameter.grad for parameter in network.parameters())]


def with_rows(num_rows):
    """A gradient ``[B, H]`` that is zero but for some rows, spread over the batch."""
    given_BH = torch.zeros(ROWS, WIDTH)
    given_BH[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:num_rows]] = uniform(
        num_rows, WIDTH
    )
    return given_BH


@pytest.mark.parametrize("num_rows", [ROWS, 250, 130, 64, 1, 0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_are_those_of_pytorchs_layers(layers, num_rows, dtype, tolerance):
    given_BH = with_rows(num_rows)
    out_BH, own = gradients(layers, layers, given_BH, dtype)
    wanted_BH, wanted = gradients(layers, super(HiddenLayers, layers).forward, given_BH, dtype)
    torch.testing.assert_close(out_BH, wanted_BH, rtol=tolerance, atol=tolerance)
    for gradient, right in zip(own, wanted, strict=True):
        assert gradient.dtype == right.dtype == torch.float32
        scale = max(right.abs().max().item(), 1e-6)
        torch.testing.assert_close(gradient / scale, right / scale, rtol=0, atol=tolerance)


def test_rows_without_a_gradient_are_not_computed(layers, monkeypatch):
    seen = []
    product = hidden.input_gradient
    monkeypatch.setattr(hidden, "input_gradient", lambda g, w: seen.append(len(g)) or product(g, w))
    for num_rows in (1, 64, 65, 192, 193, ROWS):
        gradients(layers, layers, with_rows(num_rows), torch.float32)
    # whole multiples of 64; above three quarters, all
    assert seen == [64] * 6 + [128] * 3 + [192] * 3 + [ROWS] * 6


def test_a_gradient_too_small_for_its_square_counts(layers):
    given_BH = torch.zeros(ROWS, WIDTH)
    given_BH[5] = 1e-30
    _, own = gradients(layers, layers, given_BH, torch.float32)
    assert own[0][5].any() and not own[0][:5].any()


def test_nan_spreads(layers):
    given_BH = with_rows(10)
    given_BH[17, 0] = torch.nan
    _, own = gradients(layers, layers, given_BH, torch.float32)
    assert own[0][17].isnan().any() and all(gradient.isnan().any() for gradient in own[1:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_broken_observation_or_weight_is_not_hidden(layers, bad, autocast):
    x_BD = uniform(ROWS, 7)
    x_BD[3, 2] = bad
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out_BH, wanted_BH = layers(x_BD), super(HiddenLayers, layers).forward(x_BD)
        assert (
            torch.equal(out_BH.isfinite(), wanted_BH.isfinite()) and not out_BH[3].isfinite().all()
        )
    with torch.no_grad():
        layers[0].weight[0, 0] = torch.nan
    assert not layers(uniform(ROWS, 7)).isfinite().any()


def second_derivatives(network, forward):
    """Gradients of the squared norm of a loss's gradient, as in gradient penalties."""
    x_BD = uniform(ROWS, 7).to(next(network.parameters())).requires_grad_()
    loss = (forward(x_BD) * with_rows(100)).square().sum()
    first = torch.autograd.grad(loss, [x_BD, *network.parameters()], create_graph=True)
    return torch.autograd.grad(
        sum(g.square().sum() for g in first), [x_BD, *network.parameters()], allow_unused=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_can_be_differentiated_again(layers, layer_norm, dtype):
    # LayerNorm divides rows by their spread, and loses digits where it is small
    in_float32 = 1e-3 if layer_norm else 1e-4
    tolerance = in_float32 if dtype == torch.float32 else 1e-9
    layers.to(dtype)
    assert is_fused(layers(uniform(1, 7).to(dtype)))
    own = second_derivatives(layers, layers)
    wanted = second_derivatives(layers, super(HiddenLayers, layers).forward)
    assert any(gradient is not None and gradient.any() for gradient in wanted)
    torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


def test_gradients_of_many_losses_can_be_taken_at_once(layers):
    given_KBH = torch.stack([with_rows(64), uniform(ROWS, WIDTH, seed=2)])
    out_BH = layers(uniform(ROWS, 7))
    at_once = torch.autograd.grad(
        out_BH, list(layers.parameters()), given_KBH, is_grads_batched=True, retain_graph=True
    )
    for k, given_BH in enumerate(given_KBH):
        one = torch.autograd.grad(out_BH, list(layers.parameters()), given_BH, retain_graph=True)
        torch.testing.assert_close([g[k] for g in at_once], list(one), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (0, 7), (2, 0, 7)])
def test_inputs_of_any_shape(layers, shape):
    x, other = (uniform(*shape, seed=4).requires_grad_() for _ in range(2))
    out, wanted = layers(x), super(HiddenLayers, layers).forward(other)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_large_layers_are_fused(monkeypatch, layer_norm, dtype):
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    monkeypatch.setattr(hidden, "MIN_OUTPUTS", {dtype: 10 * 8, other: 10**9})
    torch.manual_seed(0)
    network = HiddenLayers(3, 8, 2, layer_norm)
    x_BD = uniform(10, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        small_BH, large_BH, groups_RnH = (
            network(x_BD[:9]),
            network(x_BD),
            network(x_BD.view(2, 5, 3)),
        )
    assert small_BH.dtype == large_BH.dtype == dtype
    assert small_BH.grad_fn.name() == "ReluBackward0"
    assert is_fused(large_BH) and is_fused(groups_RnH), "all rows count, of one task or of several"
    assert torch.equal(groups_RnH.flatten(0, 1), large_BH)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(small_BH, large_BH[:9], rtol=tolerance, atol=tolerance)


def test_only_wanted_gradients_are_computed(layers, monkeypatch):
    made = []
    product = hidden.weight_gradient
    monkeypatch.setattr(hidden, "weight_gradient", lambda g, x: made.append(1) or product(g, x))
    x_BD = uniform(ROWS, 7)
    layers(x_BD).sum().backward()
    wanted = [parameter.grad.clone() for parameter in layers.parameters()]
    assert len(made) == 3
    made.clear()
    layers.zero_grad()
    layers.requires_grad_(False)
    assert not layers(x_BD).requires_grad
    layers(x_BD.requires_grad_()).sum().backward()
    assert x_BD.grad is not None and made == []
    for trained, gradient in zip(layers.parameters(), wanted, strict=True):
        made.clear()
        trained.requires_grad_(True)
        layers(x_BD.detach()).sum().backward()
        torch.testing.assert_close(trained.grad, gradient)
        assert len(made) == (trained.ndim == 2)
        trained.requires_grad_(False)
        trained.grad = None
        assert all(parameter.grad is None for parameter in layers.parameters())
