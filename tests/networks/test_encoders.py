"""Encoders: statistics of observations against NumPy's, and projections of states and images."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box

from mtrl_lightning import networks
from mtrl_lightning.networks import Identity, Standardize
from mtrl_lightning.networks.standardize import ROUNDS
from tests.helpers.networks import randomize
from tests.helpers.specs import spec_of

DIM = 3
SPACE = Box(-np.inf, np.inf, (DIM,), np.float32)
TASK_N = np.array([0, 2, 2, 0, 2, 0, 2, 2])
"""Tasks of a batch's rows; task 1 is not trained."""
each_kind = pytest.mark.parametrize("per_task", [False, True])


def make(num_tasks=3, sizes=(), **options):
    return Standardize(spec_of(num_tasks, SPACE, observation_sizes=sizes), **options)


def batches(count, rows=8, seed=0):
    """Batches whose mean and scale differ from batch to batch and from feature to feature."""
    generator = np.random.default_rng(seed)
    scale, shift = np.array([1.0, 5.0, 0.3]), np.array([0.0, -7.0, 2.0])
    data = generator.normal(size=(count, rows, DIM)) * scale + shift
    return (data + generator.normal(size=(count, 1, DIM))).astype(np.float32)


def observe(encoder, data, task_N=None):
    for batch in data:
        task_B = np.zeros(len(batch), np.int64) if task_N is None else task_N
        encoder.observe(torch.from_numpy(batch), torch.from_numpy(task_B))
    return encoder


def standardized(encoder, rows, task=0):
    x_BD = torch.as_tensor(np.asarray(rows, np.float32))
    return encoder(x_BD, torch.full((len(x_BD),), task)).numpy()


def assert_statistics(mean_D, variance_D, rows):
    rows = rows.reshape(-1, DIM).astype(np.float64)
    np.testing.assert_allclose(mean_D, rows.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(variance_D, rows.var(0), rtol=1e-5)


@each_kind
def test_learning_batches_are_standardized_as_rows_in_any_order(per_task):
    grouped, any_order = (make(per_task=per_task) for _ in range(2))
    task_Rn = torch.tensor([[0] * 4, [2] * 4])
    order_B = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    for batch in batches(5):
        x_RnD = torch.from_numpy(batch).view(2, 4, DIM)
        assert grouped.observe(x_RnD, task_Rn)
        assert any_order.observe(x_RnD.flatten(0, 1)[order_B], task_Rn.flatten()[order_B])
    for name, value in grouped.state_dict().items():
        torch.testing.assert_close(value, any_order.state_dict()[name], rtol=1e-5, atol=1e-6)
    out_RnD = grouped(x_RnD, task_Rn)
    out_BD = grouped(x_RnD.flatten(0, 1)[order_B], task_Rn.flatten()[order_B])
    assert torch.equal(out_RnD, out_BD[order_B.argsort()].view(2, 4, DIM))
    assert not torch.allclose(out_RnD, x_RnD)
    assert torch.equal(Identity(spec_of(3, SPACE))(x_RnD, task_Rn), x_RnD)


@each_kind
@pytest.mark.parametrize("count", [1, 2, 40])
def test_statistics_and_outputs_are_those_of_all_rows(count, per_task):
    data, encoder = batches(count), make(per_task=per_task)
    assert (standardized(encoder, np.ones((1, DIM))) == 1).all(), "nothing was observed"
    observe(encoder, data, TASK_N)
    assert encoder.count.item() == count
    for task in (0, 2):
        own_N = task == TASK_N if per_task else slice(None)
        rows = data[:, own_N].reshape(-1, DIM).astype(np.float64)
        if per_task:
            assert_statistics(encoder.mean_TD[task], encoder.variance_TD[task], rows)
        else:
            assert_statistics(encoder.mean_D, encoder.variance_D, rows)
        wanted = (rows - rows.mean(0)) / rows.std(0)
        np.testing.assert_allclose(standardized(encoder, rows, task), wanted, rtol=1e-3, atol=1e-4)


def test_statistics_per_task_weight_all_rows_equally():
    data = 1e-3 * batches(1, rows=9)[0]  # far from the initial variances of 1
    encoder = observe(make(1, per_task=True), (data[:2], data[2:3], data[3:]))
    np.testing.assert_allclose(encoder.mean_TD[0], data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(encoder.variance_TD[0], data.var(0), rtol=1e-5)


def test_deviations_have_a_lower_bound_and_outputs_are_clipped():
    # deviations 0, 2, 0.1
    encoder = observe(make(min_std=0.5), np.float32([[[4.0, -2.0, 0.0], [4.0, 2.0, 0.2]]]))
    np.testing.assert_allclose(standardized(encoder, [[5.0, 6.0, 0.6]]), [[2.0, 3.0, 1.0]], 1e-6)
    encoder = observe(make(clip=2.5), np.float32([[[-1.0] * 3, [1.0] * 3]]))
    found = standardized(encoder, [[2.4, 2.6, -1e6]])
    np.testing.assert_allclose(found, [[2.4, 2.5, -2.5]], 1e-6)


@each_kind
def test_statistics_of_clipped_rows_are_those_of_a_loop(per_task):
    options = {"clip": 1.5, "min_std": 1e-3, "per_task": per_task}
    encoder = observe(make(1, **options), batches(1, rows=30))
    x_ND = batches(1, rows=30)[0].astype(np.float64)
    clipped_ND = x_ND
    for _ in range(ROUNDS):
        reach_D = 1.5 * clipped_ND.std(0)
        mean_D = clipped_ND.mean(0)
        clipped_ND = np.minimum(np.maximum(x_ND, mean_D - reach_D), mean_D + reach_D)
    assert (clipped_ND.std(0) < 0.95 * x_ND.std(0)).all()
    mean, variance = (
        (encoder.mean_TD[0], encoder.variance_TD[0])
        if per_task
        else (encoder.mean_D, encoder.variance_D)
    )
    np.testing.assert_allclose(mean, clipped_ND.mean(0), rtol=1e-4)
    np.testing.assert_allclose(variance.sqrt(), clipped_ND.std(0), rtol=1e-4)


@each_kind
@pytest.mark.parametrize("saved_after", [1, 9])
def test_restored_statistics_continue_and_freeze(saved_after, per_task):
    data = batches(10)
    before, after = (make(num_updates=6, per_task=per_task) for _ in range(2))
    observe(before, data[:saved_after], TASK_N)
    observe(after, batches(8, seed=5), TASK_N)
    after.load_state_dict(before.state_dict())
    for encoder in (before, after):
        observe(encoder, data[saved_after:], TASK_N)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name])
    if per_task:
        assert after.rows_T.tolist() == [18, 0, 30]
    else:
        assert_statistics(after.mean_D, after.variance_D, data[:6])


def test_untrained_task_has_the_statistics_of_its_size():
    encoder, data = make(5, sizes=[3, 3, 3, 2, 1]), batches(4)
    task_N = np.array([0, 2, 2, 0, 3, 0, 2, 3])
    data[:, task_N == 3, 2:] = 0
    observe(encoder, data, task_N)
    same = np.concatenate([data[:, task_N == task].reshape(-1, DIM) for task in (0, 2)])
    assert_statistics(encoder.mean_TD[1], encoder.variance_TD[1], same)  # 3 rows of each
    assert standardized(encoder, [[1.5, 0, 0]], 4).tolist() == [[1.5, 0, 0]], "none has its size"
    assert not standardized(encoder, np.zeros((1, DIM)), 3)[:, 2:].any()
    own = batches(2, seed=3)
    observe(encoder, own, np.full(8, 1))
    np.testing.assert_allclose(encoder.mean_TD[1], own.reshape(-1, DIM).mean(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "per_task", "is_per_task"),
    [([3, 3], None, False), ([3, 3], True, True), ([3, 2], None, True), ([3, 3], False, False)],
)
def test_tasks_are_separated_where_their_sizes_differ(sizes, per_task, is_per_task):
    names = make(2, sizes=sizes, per_task=per_task).state_dict().keys()
    assert ("mean_TD" in names, "mean_D" in names) == (is_per_task, not is_per_task)


VECTORS = Box(-np.inf, np.inf, (4,), np.float32)
PIXELS = Box(0, 255, (2, 3, 17, 19), np.uint8)
ENCODERS = {
    "mlp": (partial(networks.MLPEncoder, width=8, out_dim=5), VECTORS),
    "pixels": (partial(networks.PixelEncoder, channels=4, out_dim=5), PIXELS),
}
TASK_B = torch.tensor([0, 1, 2, 1])
CONTEXT = partial(networks.TaskEncoder, width=6, out_dim=2)
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def make_projected(name, **options):
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
    encoder, x_BD = make_projected("mlp", depth=2)
    randomize(encoder)
    h_BH = x_BD
    for layer in list(encoder.hidden)[::2]:
        h_BH = F.relu(h_BH @ layer.weight.t() + layer.bias)
    torch.testing.assert_close(encoder(x_BD, TASK_B), projected(encoder.projection, h_BH))
    assert encoder.out_dim == encoder.latent_dim == 5


@pytest.mark.parametrize("strides", [(2, 1, 1, 1), (2, 2)])
def test_the_layers_of_an_image_encoder(strides):
    encoder, image_BD = make_projected("pixels", strides=strides)
    randomize(encoder)
    x_BCHW = image_BD.view(4, 6, 17, 19).double().float() / 255
    for layer, stride in zip(encoder.convolutions[::2], strides, strict=True):
        x_BCHW = F.relu(F.conv2d(x_BCHW, layer.weight, layer.bias, stride))
    wanted_BZ = projected(encoder.projection, x_BCHW.reshape(4, -1))
    torch.testing.assert_close(encoder(image_BD, TASK_B), wanted_BZ)
    assert encoder(image_BD[:0], TASK_B[:0]).shape == (0, 5)
    other, _ = make_projected("pixels", strides=strides, channels_last=True)
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(other(image_BD, TASK_B), wanted_BZ)


@pytest.mark.parametrize("context", [None, CONTEXT])
@each_encoder
def test_groups_have_the_features_of_rows_in_any_order(name, context):
    encoder, observation_BD = make_projected(name, context=context)
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
    encoder, x_BD = make_projected(name, context=CONTEXT)
    assert (encoder.out_dim, encoder.latent_dim) == (7, 5)
    output_BZ = encoder(x_BD, TASK_B)
    torch.testing.assert_close(output_BZ[:, 5:], encoder.context(TASK_B))
    torch.testing.assert_close(output_BZ[:, :5], encoder.latent(x_BD, TASK_B))
    output_BZ.square().sum().backward()
    found = {name.split(".")[0] for name, p in encoder.named_parameters() if p.grad is not None}
    assert found == {"projection", "hidden" if name == "mlp" else "convolutions"}


@each_encoder
def test_actor_projection_is_its_own_and_keeps_the_context(name):
    encoder, x_BD = make_projected(name, context=CONTEXT)
    projection = encoder.make_projection()
    shared_BF = encoder.shared_features(x_BD, TASK_B)
    first_BZ = projection(shared_BF)
    assert not torch.allclose(first_BZ[:, :5], encoder(x_BD, TASK_B)[:, :5])
    projection.load_state_dict(encoder.projection.state_dict())
    assert torch.equal(projection(shared_BF), encoder(x_BD, TASK_B))
    network = networks.MultiHead(7, 2, spec_of(3), width=8, depth=1)
    actor = networks.ProjectedNetwork(projection, network)
    assert torch.equal(actor(shared_BF, TASK_B), network(encoder(x_BD, TASK_B), TASK_B))


@pytest.mark.parametrize("strides", [(2, 2, 1), (3,)])
def test_decoded_images_have_the_observations_size_in_float32(strides):
    encoder, image_BD = make_projected("pixels", strides=strides)
    decoder = encoder.make_decoder()
    z_BZ = torch.randn(4, 5)
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
