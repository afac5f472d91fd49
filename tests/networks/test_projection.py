"""Encoders with a projection of their own for the actor: states and images."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box

from mtrl_lightning import networks
from tests.helpers.networks import randomize
from tests.helpers.specs import spec_of

VECTORS = Box(-np.inf, np.inf, (4,), np.float32)
PIXELS = Box(0, 255, (2, 3, 17, 19), np.uint8)
ENCODERS = {
    "mlp": (partial(networks.MLPEncoder, width=8, out_dim=5), VECTORS),
    "pixels": (partial(networks.PixelEncoder, channels=4, out_dim=5), PIXELS),
}
TASK_B = torch.tensor([0, 1, 2, 1])
CONTEXT = partial(networks.TaskEncoder, width=6, out_dim=2)
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def make(name, **options):
    """Return an encoder and observations."""
    factory, space = ENCODERS[name]
    generator = torch.Generator().manual_seed(0)
    if space is PIXELS:
        x_BD = torch.randint(256, (4, *space.shape), generator=generator, dtype=torch.uint8)
    else:
        x_BD = torch.randn(4, *space.shape, generator=generator)
    return factory(spec_of(3, space), **options), x_BD


def projected(projection, h_BH):
    y_BZ = projection.linear(h_BH)
    gain_and_shift = projection.norm.parameters()
    return torch.tanh(F.layer_norm(y_BZ, y_BZ.shape[1:], *gain_and_shift))


def test_the_layers_of_a_state_encoder():
    encoder, x_BD = make("mlp", depth=2)
    randomize(encoder)
    h_BH = x_BD
    for layer in list(encoder.hidden)[::2]:
        h_BH = F.relu(h_BH @ layer.weight.t() + layer.bias)
    torch.testing.assert_close(encoder(x_BD, TASK_B), projected(encoder.projection, h_BH))
    assert encoder.out_dim == encoder.latent_dim == 5


@pytest.mark.parametrize("strides", [(2, 1, 1, 1), (2, 2)])
def test_the_layers_of_an_image_encoder(strides):
    encoder, image_BD = make("pixels", strides=strides)
    randomize(encoder)
    x_BCHW = image_BD.view(4, 6, 17, 19).double().float() / 255
    for layer, stride in zip(encoder.convolutions[::2], strides, strict=True):
        x_BCHW = F.relu(F.conv2d(x_BCHW, layer.weight, layer.bias, stride))
    wanted_BZ = projected(encoder.projection, x_BCHW.reshape(4, -1))
    torch.testing.assert_close(encoder(image_BD, TASK_B), wanted_BZ)
    assert encoder(image_BD[:0], TASK_B[:0]).shape == (0, 5)
    other, _ = make("pixels", strides=strides, channels_last=True)
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(other(image_BD, TASK_B), wanted_BZ)


@pytest.mark.parametrize("context", [None, CONTEXT])
@each_encoder
def test_groups_have_the_features_of_rows_in_any_order(name, context):
    encoder, observation_BD = make(name, context=context)
    x_RnD = observation_BD.unflatten(0, (2, 2))
    task_Rn, order_B = torch.tensor([[0, 0], [2, 2]]), torch.tensor([2, 0, 3, 1])
    x_BD, task_B = observation_BD[order_B], task_Rn.flatten()[order_B]
    decoder = encoder.make_decoder()
    for function in (
        encoder,
        encoder.shared_features,
        lambda x, task: decoder(encoder.latent(x, task)),
    ):
        found_RnZ, any_BZ = function(x_RnD, task_Rn), function(x_BD, task_B)
        assert found_RnZ.shape == (2, 2, *any_BZ.shape[1:])
        in_order_RnZ = any_BZ[order_B.argsort()].view_as(found_RnZ)
        torch.testing.assert_close(found_RnZ, in_order_RnZ, rtol=1e-5, atol=1e-6)
    assert found_RnZ.shape == x_RnD.shape, "of the decoder"


@each_encoder
def test_the_context_is_appended_without_a_gradient(name):
    encoder, x_BD = make(name, context=CONTEXT)
    assert (encoder.out_dim, encoder.latent_dim) == (7, 5)
    output_BZ = encoder(x_BD, TASK_B)
    torch.testing.assert_close(output_BZ[:, 5:], encoder.context(TASK_B))
    torch.testing.assert_close(output_BZ[:, :5], encoder.latent(x_BD, TASK_B))
    output_BZ.square().sum().backward()
    found = {name.split(".")[0] for name, p in encoder.named_parameters() if p.grad is not None}
    assert found == {"projection", "hidden" if name == "mlp" else "convolutions"}


@each_encoder
def test_actor_projection_is_its_own_and_keeps_the_context(name):
    encoder, x_BD = make(name, context=CONTEXT)
    projection, shared_BF = encoder.make_projection(), encoder.shared_features(x_BD, TASK_B)
    first_BZ = projection(shared_BF)
    assert not torch.allclose(first_BZ[:, :5], encoder(x_BD, TASK_B)[:, :5])
    projection.load_state_dict(encoder.projection.state_dict())
    assert torch.equal(projection(shared_BF), encoder(x_BD, TASK_B))
    network = networks.MultiHead(7, 2, spec_of(3), width=8, depth=1)
    actor = networks.ProjectedNetwork(projection, network)
    assert torch.equal(actor(shared_BF, TASK_B), network(encoder(x_BD, TASK_B), TASK_B))


@pytest.mark.parametrize("strides", [(2, 2, 1), (3,)])
def test_a_decoder_gives_images_of_the_observations_size_in_float32(strides):
    encoder, image_BD = make("pixels", strides=strides)
    decoder, z_BZ = encoder.make_decoder(), torch.randn(4, 5)
    wanted_BD = decoder(z_BZ)
    assert wanted_BD.shape == image_BD.shape
    with torch.autocast("cpu", torch.bfloat16):  # which is slower on a CPU
        found_BD = decoder(z_BZ)
    torch.testing.assert_close(found_BD, wanted_BD, atol=0.02, rtol=0.02)


def test_a_decoder_mirrors_the_convolutions():
    encoder = networks.PixelEncoder(spec_of(1, Box(0, 255, (3, 3, 84, 84), np.uint8)))
    assert encoder.projection.in_dim == 32 * 35 * 35
    convolutions = encoder.make_decoder().convolutions
    kinds = [(m.in_channels, m.out_channels, m.stride[0]) for m in convolutions[1::2]]
    assert kinds == [(32, 32, 1), (32, 32, 1), (32, 32, 1), (32, 9, 2)]
    assert convolutions[-1].output_padding == (1, 1)
