"""Fused hidden layers against PyTorch's."""

import pytest
import torch

from mtrl_lightning.networks import hidden
from mtrl_lightning.networks.hidden import HiddenLayers
from tests.helpers.networks import ALWAYS_FUSED, uniform

ROWS = 320
WIDTH = 24
X_BD = uniform(ROWS, 7)


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


def plain(layers):
    """Return the forward pass by PyTorch's layers."""
    return super(HiddenLayers, layers).forward


def with_rows(num_rows):
    """A gradient ``[B, H]`` that is zero except for some rows, spread over the batch."""
    given_BH = torch.zeros(ROWS, WIDTH)
    row_N = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:num_rows]
    given_BH[row_N] = uniform(num_rows, WIDTH)
    return given_BH


def gradients(network, forward, given_BH, dtype=torch.float32):
    """Return the output, and the gradients of input and parameters for that of the output."""
    x_BD = uniform(ROWS, 7, seed=3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out_BH = forward(x_BD)
    inputs = [x_BD, *network.parameters()]
    return out_BH.detach(), torch.autograd.grad(out_BH, inputs, given_BH.to(out_BH.dtype))


@pytest.mark.parametrize("num_rows", [ROWS, 250, 130, 1, 0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_are_those_of_pytorchs_layers(layers, num_rows, dtype, tolerance):
    given_BH = with_rows(num_rows)
    out_BH, found = gradients(layers, layers, given_BH, dtype)
    wanted_BH, wanted = gradients(layers, plain(layers), given_BH, dtype)
    torch.testing.assert_close(out_BH, wanted_BH, rtol=tolerance, atol=tolerance)
    for own, right in zip(found, wanted, strict=True):
        assert own.dtype == right.dtype == torch.float32
        scale = max(right.abs().max().item(), 1e-6)
        torch.testing.assert_close(own / scale, right / scale, rtol=0, atol=tolerance)


def test_rows_without_a_gradient_are_not_computed(layers, monkeypatch):
    seen = []
    product = hidden.input_gradient
    monkeypatch.setattr(hidden, "input_gradient", lambda g, w: seen.append(len(g)) or product(g, w))
    for num_rows in (1, 65, 192, 193):
        gradients(layers, layers, with_rows(num_rows))
    # multiples of 64; all rows above three quarters
    assert seen == [64] * 3 + [128] * 3 + [192] * 3 + [ROWS] * 3


def test_tiny_gradients_count_and_nan_spreads(layers):
    given_BH = torch.zeros(ROWS, WIDTH)
    given_BH[5] = 1e-30  # its square is 0
    _, (of_input, *_) = gradients(layers, layers, given_BH)
    assert of_input[5].any() and not of_input[:5].any()
    given_BH = with_rows(10)
    given_BH[17, 0] = torch.nan
    _, (of_input, *of_parameters) = gradients(layers, layers, given_BH)
    assert of_input[17].isnan().any()
    assert all(gradient.isnan().any() for gradient in of_parameters)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_broken_observation_or_weight_is_not_hidden(layers, bad, autocast):
    x_BD = X_BD.clone()
    x_BD[3, 2] = bad
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out_BH = layers(x_BD)
            wanted_BH = plain(layers)(x_BD)
        assert torch.equal(out_BH.isfinite(), wanted_BH.isfinite())
        assert not out_BH[3].isfinite().all()
    with torch.no_grad():
        layers[0].weight[0, 0] = torch.nan
    assert not layers(X_BD).isfinite().any()


def test_gradients_can_be_differentiated_again(layers):
    layers.double()

    def second_derivatives(forward):
        """Gradients of the squared norm of a loss's gradient, as in gradient penalties."""
        inputs = [X_BD.double().requires_grad_(), *layers.parameters()]
        loss = (forward(inputs[0]) * with_rows(100)).square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in first)
        return torch.autograd.grad(norm, inputs, allow_unused=True)

    assert "FusedLayers" in str(layers(X_BD.double()).grad_fn.next_functions)
    wanted = second_derivatives(plain(layers))
    assert any(gradient is not None and gradient.any() for gradient in wanted)
    torch.testing.assert_close(second_derivatives(layers), wanted, rtol=1e-9, atol=1e-9)


def test_gradients_of_many_losses_can_be_taken_at_once(layers):
    given_KBH = torch.stack([with_rows(64), uniform(ROWS, WIDTH, seed=2)])
    out_BH = layers(X_BD)
    parameters = list(layers.parameters())
    at_once = torch.autograd.grad(
        out_BH, parameters, given_KBH, is_grads_batched=True, retain_graph=True
    )
    for k, given_BH in enumerate(given_KBH):
        one = torch.autograd.grad(out_BH, parameters, given_BH, retain_graph=True)
        torch.testing.assert_close([g[k] for g in at_once], list(one), rtol=1e-4, atol=1e-4)


def test_inputs_may_be_single_rows_or_batches_of_vmap(layers):
    wanted = plain(layers)(X_BD)
    torch.testing.assert_close(layers(X_BD[0]), wanted[0], rtol=1e-5, atol=1e-6)
    found = torch.vmap(layers)(X_BD.view(2, -1, 7)).flatten(0, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_gradients_of_single_parameters_are_those_of_all(layers):
    parameters = list(layers.parameters())
    wanted = torch.autograd.grad(layers(X_BD).sum(), parameters)
    layers.requires_grad_(False)
    assert not layers(X_BD).requires_grad
    for trained, gradient in zip(parameters, wanted, strict=True):
        trained.requires_grad_(True)
        layers(X_BD).sum().backward()
        torch.testing.assert_close(trained.grad, gradient)
        trained.requires_grad_(False)
        trained.grad = None
        assert all(parameter.grad is None for parameter in parameters)
