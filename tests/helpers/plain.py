"""Updates of actor-critics in plain PyTorch, on copies of their networks."""

import copy
from functools import partial

import torch
from torch.distributions import Normal
from torch.optim import SGD

from mtrl_lightning.networks import UniformGate
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.utils.devices import CPU
from tests.helpers.algorithms import MIXTURE, attach

LEARNING_RATE, DISCOUNT, TAU, SEED = 0.1, 0.9, 0.25, 5
sgd = partial(SGD, lr=LEARNING_RATE)
OPTIONS = {
    "encoder": partial(MIXTURE, assignment=UniformGate),
    "discount": DISCOUNT,
    "tau": TAU,
    "actor_max_grad_norm": None,
    "critic_max_grad_norm": None,
    "actor_optimizer": sgd,
    "critic_optimizer": sgd,
    "seed": SEED,
}


def prepared(make, **options):
    """Return an algorithm whose target networks differ from the others, and copies of all."""
    algorithm = make(**{**OPTIONS, **options})
    attach(algorithm)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in algorithm.named_parameters():
        if name.startswith("target_"):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return algorithm, {name: copy.deepcopy(part) for name, part in algorithm.named_children()}


def noises(action_RnA):
    """Return the numbers that an update draws for the next actions, and for those of the actor."""
    stream = Generators(SEED).get("learn", CPU)
    return [torch.randn(action_RnA.shape, generator=stream) for _ in range(2)]


def squashed(output_BO, noise_BA):
    """Return actions ``tanh(mean + std noise)`` and their log densities."""
    mean_BA, log_std_BA = output_BO.chunk(2, -1)
    normal = Normal(mean_BA, log_std_BA.exp())
    u_BA = mean_BA + log_std_BA.exp() * noise_BA
    action_BA = u_BA.tanh()
    return action_BA, (normal.log_prob(u_BA) - torch.log(1 - action_BA**2)).sum(-1)


def values(critics, z_BZ, action_BA, task_B):
    """Return the values of critics ``[Q, B]``."""
    x_BD = torch.cat([z_BZ, action_BA], -1)
    return torch.stack([critic(x_BD, task_B)[..., 0] for critic in critics])


def descend(loss, *modules):
    """Make a step of gradient descent, and return the norm of the gradient."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= LEARNING_RATE * gradient
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def move_targets(parts, encoder_tau=TAU):
    for name in ("actor", "critic", "encoder"):
        if target := parts.get(f"target_{name}"):
            for own, source in zip(target.parameters(), parts[name].parameters(), strict=True):
                own.lerp_(source.detach(), encoder_tau if name == "encoder" else TAU)


def assert_same_weights(algorithm, parts):
    for name, part in parts.items():
        found, wanted = algorithm.get_submodule(name).state_dict(), part.state_dict()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
