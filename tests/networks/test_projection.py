"""Encoders with a projection of their own for the actor: states and images."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box

from mtrl_lightning import networks
from tests.helpers.specs import spec_of

VECTORS = Box(-np.inf, np.inf, (4,), np.float32)
PIXELS = Box(0, 255, (2, 3, 17, 19), np.uint8)
ENCODERS = {
    "mlp": (partial(networks.MLPEncoder, width=8, out_dim=5), VECTORS),
    "pixels": (partial(networks.PixelEncoder, channels=4, out_dim=5), PIXELS),
}
TASK_B = torch.tensor([0, 1, 2, 1])


def observations(space, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if space is PIXELS:
        return torch.randint(256, (4, *space.shape), generator=generator, dtype=torch.uint8)
    return torch.randn(4, *space.shape, generator=generator)


def test_the_layers_of_a_state_encoder():
    encoder = networks.MLPEncoder(spec_of(3, VECTORS), width=8, depth=2, out_dim=5)
    x_BD = observations(VECTORS)
    h_BH = x_BD
    for layer in list(encoder.hidden)[::2]:
        h_BH = F.relu(h_BH @ layer.weight.t() + layer.bias)
    linear, norm = encoder.projection.linear, encoder.projection.norm
    y_BZ = h_BH @ linear.weight.t() + linear.bias
    y_BZ = (y_BZ - y_BZ.mean(1, True)) / (y_BZ.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected_BZ = torch.tanh(y_BZ * norm.weight + norm.bias)
    torch.testing.assert_close(encoder(x_BD, TASK_B), expected_BZ)
    assert encoder.out_dim == encoder.latent_dim == 5


@pytest.mark.parametrize("strides", [(2, 1, 1, 1), (2, 2), (1,)])
def test_the_layers_of_an_image_encoder(strides):
    encoder = networks.PixelEncoder(spec_of(3, PIXELS), channels=4, strides=strides, out_dim=5)
    image_BD = observations(PIXELS)
    x_BCHW = image_BD.view(4, 6, 17, 19).double().float() / 255
    for layer, stride in zip(encoder.convolutions[::2], strides, strict=True):
        x_BCHW = F.relu(F.conv2d(x_BCHW, layer.weight, layer.bias, stride))
    linear = encoder.projection.linear
    y_BZ = F.layer_norm(x_BCHW.reshape(4, -1) @ linear.weight.t() + linear.bias, (5,))
    torch.testing.assert_close(encoder(image_BD, TASK_B), torch.tanh(y_BZ))
    assert encoder(image_BD[:0], TASK_B[:0]).shape == (0, 5)
    other = networks.PixelEncoder(
        spec_of(3, PIXELS), channels=4, strides=strides, out_dim=5, channels_last=True
    )
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(other(image_BD, TASK_B), encoder(image_BD, TASK_B))


@pytest.mark.parametrize("context", [None, partial(networks.Embedding, dim=2)])
@pytest.mark.parametrize("name", ENCODERS)
def test_groups_have_the_features_of_rows_in_any_order(name, context):
    make, space = ENCODERS[name]
    encoder = make(spec_of(3, space), context=context)
    x_RnD = observations(space).unflatten(0, (2, 2))
    task_Rn = torch.tensor([[0, 0], [2, 2]])
    order_B = torch.tensor([2, 0, 3, 1])
    x_BD = x_RnD.flatten(0, 1)[order_B]
    task_B = task_Rn.flatten()[order_B]
    for method in (encoder, encoder.latent, encoder.shared_features):
        found_RnZ = method(x_RnD, task_Rn)
        any_BZ = method(x_BD, task_B)
        assert found_RnZ.shape == (2, 2, any_BZ.shape[-1])
        in_order_RnZ = any_BZ[order_B.argsort()].view_as(found_RnZ)
        torch.testing.assert_close(found_RnZ, in_order_RnZ, rtol=1e-5, atol=1e-6)
    shared_RnF = encoder.shared_features(x_RnD, task_Rn)
    assert torch.equal(encoder.project(shared_RnF), encoder(x_RnD, task_Rn))
    projection = encoder.make_projection()
    projected_RnZ = projection(shared_RnF)
    projected_BZ = projection(shared_RnF.flatten(0, 1))
    torch.testing.assert_close(projected_RnZ.flatten(0, 1), projected_BZ, rtol=1e-5, atol=1e-6)
    decoder = encoder.make_decoder()
    z_RnZ = encoder.latent(x_RnD, task_Rn)
    decoded_RnD = decoder(z_RnZ)
    assert decoded_RnD.shape == x_RnD.shape
    decoded_BD = decoder(z_RnZ.flatten(0, 1))
    torch.testing.assert_close(decoded_RnD.flatten(0, 1), decoded_BD, rtol=1e-5, atol=1e-6)


def test_images_are_initialized_orthogonally():
    encoder = networks.PixelEncoder(
        spec_of(1, Box(0, 255, (1, 3, 17, 17), np.uint8)), channels=4, strides=(1, 1)
    )
    second = encoder.convolutions[2].weight
    center_OI = second[:, :, 1, 1]
    torch.testing.assert_close(center_OI @ center_OI.t(), 2 * torch.eye(4))  # ReLU's gain squared
    assert int((second != 0).sum()) == 16, "all but the center is zero"
    weight = encoder.projection.linear.weight
    torch.testing.assert_close(weight[:9] @ weight[:9].t(), torch.eye(9), atol=1e-5, rtol=0)
    assert not any(layer.bias.any() for layer in encoder.convolutions[::2])


@pytest.mark.parametrize("name", ENCODERS)
def test_the_context_is_appended_without_a_gradient(name):
    make, space = ENCODERS[name]
    encoder = make(spec_of(3, space), context=partial(networks.TaskEncoder, width=6, out_dim=2))
    assert (encoder.out_dim, encoder.latent_dim) == (7, 5)
    x_BD = observations(space)
    output_BZ = encoder(x_BD, TASK_B)
    torch.testing.assert_close(output_BZ[:, 5:], encoder.context(TASK_B))
    torch.testing.assert_close(output_BZ[:, :5], encoder.latent(x_BD, TASK_B))
    shared_BF = encoder.shared_features(x_BD, TASK_B)
    assert torch.equal(encoder.project(shared_BF), output_BZ)
    output_BZ.square().sum().backward()
    found = {name.split(".")[0] for name, p in encoder.named_parameters() if p.grad is not None}
    assert found == {"projection", "hidden" if space is VECTORS else "convolutions"}


@pytest.mark.parametrize("name", ENCODERS)
def test_actor_projection_is_its_own_and_keeps_the_context(name):
    make, space = ENCODERS[name]
    encoder = make(spec_of(3, space), context=partial(networks.Embedding, dim=2))
    projection = encoder.make_projection()
    assert not torch.equal(projection.linear.weight, encoder.projection.linear.weight)
    shared_BF = encoder.shared_features(observations(space), TASK_B)
    projected_BZ = projection(shared_BF)
    assert projected_BZ.shape == (4, encoder.out_dim)
    assert torch.equal(projected_BZ[:, 5:], encoder.context(TASK_B))
    projection.load_state_dict(encoder.projection.state_dict())
    assert torch.equal(projection(shared_BF), encoder.project(shared_BF))


@pytest.mark.parametrize("kind", [networks.MLP, networks.MultiHead, networks.Separate])
def test_a_projected_network_is_a_network_behind_a_projection(kind):
    network = kind(5, 2, spec_of(3), width=8, depth=1)
    projected = networks.ProjectedNetwork(networks.Projection(7, 5), network)
    x_BF = torch.randn(4, 7)
    torch.testing.assert_close(projected(x_BF, TASK_B), network(projected.projection(x_BF), TASK_B))
    x_RnF = torch.randn(2, 3, 7)
    task_Rn = torch.tensor([[0] * 3, [2] * 3])
    in_order_BO = projected(x_RnF.flatten(0, 1), task_Rn.flatten())
    torch.testing.assert_close(projected(x_RnF, task_Rn).flatten(0, 1), in_order_BO)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("strides", [(2, 1, 1, 1), (2, 2, 1), (3,)])
def test_a_decoder_gives_observations(name, strides):
    make, space = ENCODERS[name]
    if space is PIXELS:
        make = partial(make, strides=strides)
    encoder = make(spec_of(3, space))
    decoder = encoder.make_decoder()
    assert decoder(torch.randn(4, 5)).shape == (4, *space.shape)


def test_a_decoder_computes_in_float32_on_a_cpu_which_is_faster():
    decoder = networks.PixelEncoder(
        spec_of(1, Box(0, 255, (1, 3, 16, 16), np.uint8)), strides=(2, 1)
    ).make_decoder()
    z_BZ = torch.randn(2, 50)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoder(z_BZ)
        first = decoder.linear(z_BZ)
    assert first.dtype == torch.bfloat16 and found.dtype == torch.float32
    torch.testing.assert_close(found, decoder(z_BZ), atol=0.02, rtol=0.02)


def test_a_decoder_mirrors_the_convolutions():
    encoder = networks.PixelEncoder(spec_of(1, Box(0, 255, (3, 3, 84, 84), np.uint8)))
    assert encoder.projection.in_dim == 32 * 35 * 35
    decoder = encoder.make_decoder()
    kinds = [(m.in_channels, m.out_channels, m.stride[0]) for m in decoder.convolutions[1::2]]
    assert kinds == [(32, 32, 1), (32, 32, 1), (32, 32, 1), (32, 9, 2)]
    assert decoder.convolutions[-1].output_padding == (1, 1)
