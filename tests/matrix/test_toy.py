"""Every network on toy tasks: who learns from what, precisions, exports, gradient methods."""

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export import ONNX, TORCH_EXPORT
from mtrl_lightning.export import policy as exporting
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.updates.update import without_gradients
from tests.helpers.algorithms import attach
from tests.helpers.gradients import METHODS
from tests.helpers.matrix import NETWORKS, batches, make

WAITING = {
    # an expert that the gate does not choose for any task learns nothing
    "mixture, gate": ("encoder.experts",),
    # auxiliaries alone train a context
    "context": ("encoder.context",),
}
OWN_OPERATIONS = (
    "care",
    "film",
    "language",
    "mixture, clusters",
    "mixture, gate",
    "mlp encoder",
    "mlp, residual",
    "moore",
    "multi-head, residual",
    "paco",
    "separate",
    "soft modularization",
    "standardize",
)
"""Networks with an operation of their own: ONNX translates operations one by one."""
FEW = ("famo", "pcgrad")
"""With the networks whose operations others have."""
WITHOUT_SHARED = ("famo", "mean")
"""Gradient methods that need no shared parameters."""


def check_update(model, gradient="mean", precision=torch.float32):
    """Make two updates as the trainer would; return how far each number of the networks moved."""
    given, steps = batches()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for transitions in steps:
        model.transforms.observe(transitions)
    model.transforms.begin_learning(np.ones(3))
    attach(model)
    for i, batch in enumerate(given):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            model.training_step(batch, i)
    metrics = model.drain_metrics()
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert (gradient == "mean") or "train/critic_weight_max" in metrics
    after = dict(model.named_parameters())
    moves = {name: (after[name] - value).detach() for name, value in before.items()}
    moved = {name.partition(".")[0] for name, move in moves.items() if move.any()}
    assert moved >= {"actor", "critic", "temperature"}
    step_P = torch.cat([move.flatten() for move in moves.values()])
    assert step_P.isfinite().all()
    return step_P


def parameters_with_gradient(module):
    return {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}


def check_each_loss_trains_its_own_networks(model, waiting):
    """Every parameter has a gradient from the loss that should train it, none from the other."""
    (batch, _), _ = batches()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    noise_RnA = torch.randn(batch.action_RnA.shape)
    model.critic_loss(batch, model.critic_target(batch, noise_RnA))[0].sum().backward()
    expected = {name for name in trained if name.startswith(("critic.", "encoder."))}
    got = parameters_with_gradient(model)
    assert got <= expected
    assert not {name for name in expected - got if not (waiting and name.startswith(waiting))}
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch, noise_RnA)[0].sum().backward()
    assert parameters_with_gradient(model) == {n for n in trained if n.startswith("actor.")}
    model.zero_grad()


def check_every_parameter_has_one_place(model):
    """One optimizer and one place in the gradient method."""
    optimizers = model.configure_optimizers()
    critic, actor, temperature = (
        {id(p) for g in made.param_groups for p in g["params"]} for made in optimizers
    )
    assert not critic & actor and not (critic | actor) & temperature
    for update, optimized in ((model.critic_update, critic), (model.actor_update, actor)):
        parameters = update.task_parameters
        shared, own = [{id(p) for p in part} for part in (parameters.shared, parameters.own)]
        frozen = {
            id(p)
            for p in (*model.encoder.parameters(), *model.critic.parameters())
            if not p.requires_grad
        }
        assert not shared & own and shared | own == optimized - frozen
        assert {id(p) for p in parameters.last_shared} <= shared
        assert len(parameters.shared) + len(parameters.own) == len(shared) + len(own), "none twice"


def check_exports(model, folder, format):
    """Compare the actions of the exported policy, whose weights are large enough to matter."""
    if format == ONNX:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    generator = torch.Generator().manual_seed(0)
    for module in model.acting_modules().values():
        for parameter in module.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim else 1.0
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    policy = LoadedPolicy(model)
    observation_ED, task_E = exporting.observations_of(model.spec, 40)
    assert policy.act(observation_ED, task_E).std(0).max() > 0.005
    _, difference = exporting.export_policy(policy, format, folder, num_observations=40)
    assert difference <= exporting.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_network_learns_in_each_way_and_exports(tmp_path, network):
    has_own = network in OWN_OPERATIONS
    model = make(network)
    check_each_loss_trains_its_own_networks(model, WAITING.get(network, ()))
    check_every_parameter_has_one_place(model)
    check_exports(model, tmp_path, ONNX if has_own else TORCH_EXPORT)
    for gradient in METHODS if has_own else FEW:
        if network == "separate" and gradient not in WITHOUT_SHARED:
            with pytest.raises((ConfigurationError, ValueError), match="parameter"):
                make(network, gradient)
        else:
            check_update(make(network, gradient), gradient)
    single, half = (
        check_update(make(network), precision=one) for one in (torch.float32, torch.bfloat16)
    )
    assert not torch.equal(single, half)
    assert torch.nn.functional.cosine_similarity(single, half, dim=0) > 0.6
