"""Initial weights, and the default sizes of the papers."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning import networks
from tests.helpers.specs import spec_of

SPEC = spec_of(10)
IN_DIM, OUT_DIM, WIDTH, BOUND = 90, 30, 256, 0.25


def he(num_inputs):
    return math.sqrt(6 / num_inputs)


def stack(prefix, *inputs):
    """Return the bounds of the layers of MLPs with these numbers of inputs, in one tensor each."""
    hidden = {f"{prefix}weights.{i}": he(num_inputs) for i, num_inputs in enumerate(inputs)}
    last = len(inputs)
    return {**hidden, f"{prefix}weights.{last}": BOUND, f"{prefix}biases.{last}": BOUND}


HEAD = {"head.weight": BOUND, "head.bias": BOUND}
HEADS = {"heads.weight": BOUND, "heads.bias": BOUND}
TRUNK = {"trunk.0.weight": he(100), "trunk.2.weight": he(WIDTH)}
NORMALIZED = {"trunk.0.weight": he(100), "trunk.3.weight": he(WIDTH)}
BLOCKS = {f"trunk.{block}.{layer}.weight": he(WIDTH) for block in (3, 4) for layer in (0, 3)}
HIDDEN_HEADS = stack("heads.experts.", WIDTH)
FILM = {"layers.0.weight": he(IN_DIM), "layers.1.weight": he(WIDTH), "modulation.weight": 0}
MIXTURE = {
    "experts.weights.0": he(IN_DIM),
    "experts.weights.1": he(WIDTH),
    "mixture.weight": he(10 + 4),  # Glorot's bound
}
MODULES = {
    "routing.0.weight": 3e-3,
    "routing.1.weight": 3e-3,
    "encoder.0.weight": he(IN_DIM),
    "encoder.2.weight": he(200),
    "layers.0.weights.0": he(200),
    "layers.1.weights.0": he(WIDTH),
}
INITIAL = [
    (networks.MLP, {}, TRUNK | HEAD),
    (networks.MLP, {"layer_norm": True}, NORMALIZED | HEAD),
    (networks.MLP, {"residual": True}, {"trunk.0.weight": he(100), **BLOCKS, **HEAD}),
    (networks.MultiHead, {}, TRUNK | HEADS),
    (networks.MultiHead, {"head_width": 100}, TRUNK | HIDDEN_HEADS),
    (networks.FiLM, {}, FILM | HEAD),
    (networks.FiLM, {"scalar": True}, FILM | HEAD),
    (networks.MOORE, {}, MIXTURE | HEADS),
    (networks.PaCo, {}, stack("", IN_DIM, WIDTH)),
    (networks.Separate, {}, stack("own.experts.", IN_DIM, WIDTH)),
    (networks.SoftModularization, {"embedding_dim": 200}, MODULES | HEAD),
]
OTHERS = ("composition.", "task_encoder.", "routing")
"""Initialized otherwise."""


def assert_uniform(values, bound):
    """Check that numbers fill the interval between the bounds evenly."""
    values = values.detach()
    assert 0.85 * bound <= values.max() <= bound and 0.85 * bound <= -values.min() <= bound
    count = values.numel()
    assert values.mean().item() == pytest.approx(0, abs=4 * bound / math.sqrt(3 * count))
    assert values.var().item() == pytest.approx(bound**2 / 3, rel=max(0.02, 4 / math.sqrt(count)))


@pytest.mark.parametrize(("kind", "options", "bounds"), INITIAL)
def test_weights_are_uniform_within_their_bounds_and_biases_zero(kind, options, bounds):
    torch.manual_seed(0)
    network = kind(IN_DIM, OUT_DIM, SPEC, width=WIDTH, depth=2, output_bound=BOUND, **options)
    parameters = dict(network.named_parameters())
    for parameter, bound in bounds.items():
        assert_uniform(parameters.pop(parameter), bound)
    for rest, values in parameters.items():
        if not rest.startswith(OTHERS):
            assert "bias" in rest or {"layer_norm", "residual"} & options.keys()
            assert (values == (0 if "bias" in rest else 1)).all()


def test_an_output_bound_of_zero_is_that_of_pytorch():
    torch.manual_seed(0)
    for network in (
        networks.MLP(IN_DIM, OUT_DIM, SPEC, width=WIDTH, depth=1, output_bound=0),
        networks.MultiHead(IN_DIM, OUT_DIM, SPEC, width=WIDTH, depth=1, output_bound=0),
        networks.PaCo(IN_DIM, OUT_DIM, SPEC, width=WIDTH, depth=1, output_bound=0),
    ):
        *_, weight, bias = sorted(network.parameters(), key=lambda p: OUT_DIM in p.shape)
        assert_uniform(weight, 1 / math.sqrt(WIDTH))
        assert bias.abs().max() <= 1 / math.sqrt(WIDTH)


@pytest.mark.parametrize(
    "conditioning", [networks.OneHot, networks.TaskEncoder, networks.Embedding]
)
def test_composed_weights_begin_with_the_variance_of_one_set(conditioning):
    torch.manual_seed(0)
    options = {"width": 200, "depth": 2, "max_loss": None, "conditioning": conditioning}
    network = networks.PaCo(4, 2, spec_of(6), **options)
    w_TK = network.composition(network.conditioning(torch.arange(6)))
    assert w_TK.square().sum(1).mean().item() == pytest.approx(1, rel=1e-5)
    assert w_TK.min() < 0 and not torch.equal(network.weights[1][0], network.weights[1][1])
    if conditioning is networks.OneHot:
        torch.testing.assert_close(w_TK.square().sum(1), torch.ones(6))
        composed_DH = torch.einsum("k,kdh->dh", w_TK[1], network.weights[1])
        assert composed_DH.var().item() == pytest.approx(2 / 200, rel=0.05)


def test_an_embedding_begins_normal():
    torch.manual_seed(0)
    embedding = networks.Embedding(spec_of(500))
    assert embedding.weight_TC.mean().item() == pytest.approx(0, abs=0.03)
    assert embedding.weight_TC.std().item() == pytest.approx(1, abs=0.03)


def test_images_are_encoded_by_orthogonal_maps():
    space = Box(0, 255, (1, 3, 17, 17), np.uint8)
    encoder = networks.PixelEncoder(spec_of(1, space), channels=4, strides=(1, 1))
    second = encoder.convolutions[2].weight
    center_OI = second[:, :, 1, 1]
    torch.testing.assert_close(center_OI @ center_OI.t(), 2 * torch.eye(4))  # ReLU's gain squared
    assert int((second != 0).sum()) == 16, "zero except for the center"
    weight = encoder.projection.linear.weight
    torch.testing.assert_close(weight[:9] @ weight[:9].t(), torch.eye(9), atol=1e-5, rtol=0)
    assert not any(layer.bias.any() for layer in encoder.convolutions[::2])


def test_default_sizes_are_those_of_the_papers():
    spec = spec_of(["reach-v3", "push-v3"], Box(-1, 1, (5,), np.float32))
    care, mixture = networks.CARE(spec), networks.MixtureOfEncoders(spec)
    assert [tuple(w.shape) for w in care.experts.weights] == [(6, 5, 50), *[(6, 50, 50)] * 2]
    assert [tuple(w.shape) for w in mixture.experts.weights] == [(10, 5, 50), *[(10, 50, 50)] * 2]
    assert [tuple(w.shape) for w in care.context.parameters()][::2] == [(50, 384), *[(50, 50)] * 2]
    of_tasks = networks.TaskEncoder(spec)
    assert [p.numel() for p in of_tasks.parameters()] == [100, *[2500, 50] * 3]
    assert networks.Embedding(spec).out_dim == 32
    assert (networks.TopKGate(3, spec)(torch.arange(2)) > 0).sum(-1).tolist() == [2, 2]
