"""Small networks, encoders and task conditionings, and their equations for one row."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from mtrl_lightning import networks
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.language import EMBEDDINGS, load_embeddings
from tests.helpers.specs import spec_of

ALWAYS_FUSED = {torch.float32: 0, torch.bfloat16: 0, torch.float64: 0}
"""Numbers of outputs from which hidden layers are fused."""
IN_DIM, OUT_DIM, NUM_TASKS = 4, 2, 3
SPEC = spec_of(["reach-v3", "door-open-v3", "push-v3"])


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between -1 and 1 from a generator of their own."""
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1


def randomize(module, seed=0):
    """Give every parameter numbers of its own, including parameters initialized with zeros."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(uniform(*parameter.shape, seed=seed + i))
    return module


def gradients_of(out, inputs, weights=None, retain_graph=True):
    """Gradients of the weighted sum of outputs; zeros for inputs that have no effect."""
    total = out.sum() if weights is None else (out * weights).sum()
    return torch.autograd.grad(
        total, inputs, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )


SMALL = {"width": 8, "depth": 2, "output_bound": 0.5}
SOFT = {"num_modules": 2, "embedding_dim": 5}
NETWORKS = {
    "mlp": partial(networks.MLP, **SMALL),
    "mlp, layer norm": partial(networks.MLP, layer_norm=True, **SMALL),
    "mlp, residual": partial(networks.MLP, residual=True, **SMALL),
    "multi-head": partial(networks.MultiHead, **SMALL),
    "multi-head of one output": lambda in_dim, _, spec, **options: networks.MultiHead(
        in_dim, 1, spec, **{**SMALL, **options}
    ),
    "multi-head, residual": partial(networks.MultiHead, head_width=6, residual=True, **SMALL),
    "film": partial(networks.FiLM, **SMALL),
    "film, scalar": partial(networks.FiLM, scalar=True, **SMALL),
    "moore": partial(networks.MOORE, width=12, depth=3, num_experts=4, output_bound=0.5),
    "moore, shallow": partial(networks.MOORE, width=12, depth=1, num_experts=2, output_bound=0.5),
    "paco": partial(networks.PaCo, num_sets=4, max_loss=None, **SMALL),
    "separate": partial(networks.Separate, **SMALL),
    "soft modularization": partial(networks.SoftModularization, **SMALL, **SOFT),
    "soft modularization, deep": partial(
        networks.SoftModularization, **{**SMALL, **SOFT, "depth": 4}
    ),
    "one per task": partial(networks.OnePerTask, make=partial(networks.MLP, **SMALL)),
}
STATES = partial(networks.MLPEncoder, width=8, out_dim=5)
STATES_CONTEXT = partial(STATES, context=partial(networks.TaskEncoder, width=6, depth=1, out_dim=3))
PIXELS = partial(networks.PixelEncoder, channels=3, out_dim=5)
EXPERTS = {"num_experts": 3, "width": 6, "depth": 1, "out_dim": 5}
BY_EMBEDDING = {"conditioning": partial(networks.Embedding, dim=3), "width": 6}
WORDS = [["reach"], ["push", "open"], ["door"]]
CLUSTERS = [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]]
"""Weights of the experts for each task by ``WORDS``."""
ENCODERS = {
    "care": partial(networks.CARE, **EXPERTS),
    "care of an embedding": partial(networks.CARE, conditioning=networks.Embedding, **EXPERTS),
    **{
        f"mixture, {name}": partial(networks.MixtureOfEncoders, assignment=assignment, **EXPERTS)
        for name, assignment in {
            "one-hot": networks.OneHotGate,
            "uniform": networks.UniformGate,
            "clusters": partial(networks.Clusters, words=WORDS),
            "gate": networks.TopKGate,
            "gate of an embedding": partial(networks.TopKGate, num_chosen=3, **BY_EMBEDDING),
            "attention": networks.Attention,
            "attention of an embedding": partial(
                networks.Attention, temperature=0.3, **BY_EMBEDDING
            ),
        }.items()
    },
}
CONDITIONINGS = {
    "one-hot": networks.OneHot,
    "none": networks.NoConditioning,
    "embedding, unit norm": partial(networks.Embedding, dim=6, unit_norm=True),
    "task encoder": partial(networks.TaskEncoder, width=7, out_dim=5),
    "task encoder of a one-hot": partial(
        networks.TaskEncoder, embedding=networks.OneHot, depth=1, out_dim=3
    ),
}
MODULES = {**NETWORKS, **ENCODERS, **CONDITIONINGS}
TAKE_CONDITIONING = [name for name in NETWORKS if name not in ("separate", "one per task")]


def make(name, seed=0, **options):
    """Return a module of ``MODULES`` with random parameters."""
    sizes = (IN_DIM, OUT_DIM) if name in NETWORKS else ()
    return randomize(MODULES[name](*sizes, SPEC, **options), seed)


# the equations, for the features ``x_D`` and the task of one row


def perceptron(experts, k, x_D):
    """Return the output of expert ``k``."""
    num_layers = len(experts.weights)
    for i, (weight_KDH, bias_K1H) in enumerate(zip(experts.weights, experts.biases, strict=True)):
        x_D = x_D @ weight_KDH[k] + bias_K1H[k, 0]
        x_D = x_D if i + 1 == num_layers else x_D.clamp(min=0)
    return x_D


def normalized(parameters, x_D):
    """Return ``LN(W x + b)``, or ``W x + b`` without the parameters of LayerNorm."""
    weight_HD, bias_H, *gain_and_shift = parameters
    h_H = F.linear(x_D, weight_HD, bias_H)
    return F.layer_norm(h_H, h_H.shape, *gain_and_shift) if gain_and_shift else h_H


def residual_layers(module, x_D):
    """Nauman et al. 2024, BroNet: a layer, and blocks ``h + LN(W2 relu(LN(W1 h)))``."""
    parameters = list(module.parameters())
    layer, *inner = [parameters[i : i + 4] for i in range(0, len(parameters), 4)]
    h_H = normalized(layer, x_D).clamp(min=0)
    for first, second in zip(inner[::2], inner[1::2], strict=True):
        h_H = h_H + normalized(second, normalized(first, h_H).clamp(min=0))
    return h_H


def task_input(network, task):
    """Return the features of the task."""
    return network.conditioning(torch.tensor([task]))[0]


def mlp(network, x_D, task):
    is_plain = isinstance(network.trunk, HiddenLayers)
    layers = nn.Sequential.forward if is_plain else residual_layers
    h_H = layers(network.trunk, torch.cat([x_D, task_input(network, task)]))
    if hasattr(network, "head"):
        return network.head(h_H)
    if isinstance(network.heads, nn.Linear):
        return head_of(network.heads, h_H, task)
    return perceptron(network.heads.experts, task, h_H)


def head_of(heads, h_H, task):
    rows = slice(task * heads.out_dim, (task + 1) * heads.out_dim)
    return heads.weight[rows] @ h_H + heads.bias[rows]


def film(network, x_D, task):
    """Perez et al. 2018: scale and shift of each feature, or one of each layer."""
    numbers = network.modulation.weight @ task_input(network, task)
    size = len(numbers) // (2 * SMALL["depth"])
    for layer in network.layers:
        delta_F, beta_F, numbers = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        x_D = ((1 + delta_F) * layer(x_D) + beta_F).clamp(min=0)
    assert len(numbers) == 0
    return network.head(x_D)


def moore(network, x_D, task):
    """Hendawy et al. 2024, with classical Gram-Schmidt."""
    basis = []
    for k in range(network.experts.num_experts):
        u_H = perceptron(network.experts, k, x_D)
        rest_H = u_H - sum((u_H @ v_H) / (v_H @ v_H) * v_H for v_H in basis)
        basis.append(rest_H / rest_H.norm())
    w_K = network.mixture.weight @ task_input(network, task)
    features_H = torch.tanh(sum(w * v_H for w, v_H in zip(w_K, basis, strict=True)))
    return head_of(network.heads, features_H, task)


def paco(network, x_D, task):
    """Sun et al. 2022: every parameter is a sum over the sets."""
    w_K = network.composition.weight @ task_input(network, task)
    last = len(network.weights) - 1
    for i, (weight_KDH, bias_KH) in enumerate(zip(network.weights, network.biases, strict=True)):
        weight_DH, bias_H = (
            sum(w * own for w, own in zip(w_K, of_sets, strict=True))
            for of_sets in (weight_KDH, bias_KH)
        )
        x_D = x_D @ weight_DH + bias_H
        x_D = x_D if i == last else x_D.clamp(min=0)
    return x_D


def soft_modularization(network, x_D, task):
    """Yang et al. 2020, module by module."""
    f_E = network.encoder[2](network.encoder[0](x_D).clamp(min=0))
    z_E = f_E * network.task_encoder(task_input(network, task))
    num_modules = SOFT["num_modules"]
    g = [f_E.clamp(min=0)] * num_modules
    p = network.routing[0](z_E.clamp(min=0))
    for layer, modules in enumerate(network.layers):
        outputs = [perceptron(modules, j, g[j]).clamp(min=0) for j in range(num_modules)]
        g = [p_M.softmax(-1) @ torch.stack(outputs) for p_M in p.split(num_modules)]
        if layer + 1 < len(network.layers):
            into_E = network.routing_inputs[layer](p)
            p = network.routing[layer + 1]((into_E * z_E).clamp(min=0))
    return network.head(g[0])


def encoded_task(encoder, embedding_C):
    return encoder.output(nn.Sequential.forward(encoder.hidden, embedding_C))


def care(encoder, x_D, task):
    """Sodhani et al. 2021, section 4: encoders, context, attention, and what the policy sees."""
    embedding = encoder.context.embedding
    table_TC = torch.from_numpy(load_embeddings(EMBEDDINGS, SPEC.task_names)).to(x_D)
    input_C = getattr(embedding, "weight_TC", table_TC)[task]
    context_C = encoded_task(encoder.context, input_C)
    z = [perceptron(encoder.experts, k, x_D) for k in range(3)]
    attention_K = torch.stack([z_Z @ context_C.detach() for z_Z in z]).softmax(-1)
    mixed_Z = sum(a * z_Z for a, z_Z in zip(attention_K, z, strict=True))
    return torch.cat([mixed_Z, context_C])


def mixture(encoder, x_D, task):
    weight_K = gate(encoder.assignment, task)
    return sum(weight_K[k] * perceptron(encoder.experts, k, x_D) for k in range(3))


def gate(assignment, task):
    """Return the weights of the experts from the definition of each assignment."""
    one_hot_T = torch.eye(NUM_TASKS)[task]
    if isinstance(assignment, networks.OneHotGate):
        return one_hot_T
    if isinstance(assignment, networks.UniformGate):
        return torch.full((3,), 1 / 3)
    if isinstance(assignment, networks.Clusters):
        return CLUSTERS[task]
    embedding = getattr(assignment.conditioning, "weight_TC", None)
    input_C = one_hot_T.double() if embedding is None else embedding[task].detach()
    score_K = encoded_task(assignment, input_C)
    if isinstance(assignment, networks.Attention):
        return (score_K / (1.0 if embedding is None else 0.3)).softmax(-1)
    num_chosen = 2 if embedding is None else 3
    best = sorted(range(3), key=lambda k: -score_K[k].item())[:num_chosen]
    shares = dict(zip(best, score_K[best].softmax(-1), strict=True))
    return [shares.get(k, 0.0) for k in range(3)]


def task_encoder(encoder, _, task):
    one_hot_T = torch.eye(NUM_TASKS).double()[task]
    return encoded_task(encoder, getattr(encoder.embedding, "weight_TC", {task: one_hot_T})[task])


EQUATIONS = {
    networks.MLP: mlp,
    networks.MultiHead: mlp,
    networks.FiLM: film,
    networks.MOORE: moore,
    networks.PaCo: paco,
    networks.Separate: lambda network, x_D, task: perceptron(network.own.experts, task, x_D),
    networks.SoftModularization: soft_modularization,
    networks.OnePerTask: lambda network, x_D, task: mlp(network.networks[task], x_D, 0),
    networks.CARE: care,
    networks.MixtureOfEncoders: mixture,
    networks.OneHot: lambda conditioning, x_D, task: torch.eye(NUM_TASKS).double()[task],
    networks.NoConditioning: lambda conditioning, x_D, task: torch.zeros(0).double(),
    networks.Embedding: lambda conditioning, x_D, task: F.normalize(
        conditioning.weight_TC[task], dim=0
    ),
    networks.TaskEncoder: task_encoder,
}
