"""DeepMDP's and HiP-BMDP's losses by loops over rows, and what they train."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

from mtrl_lightning.auxiliaries import (
    Deterministic,
    HiPBMDP,
    LatentDynamics,
    Probabilistic,
    TransitionEnsemble,
)
from mtrl_lightning.networks import CARE, Embedding
from tests.helpers.algorithms import make_batch, make_spec
from tests.helpers.auxiliaries import STATES, STATES_CONTEXT, inputs, make_encoder, reached

SPEC = make_spec(4, train_tasks=[0, 2, 3])
ROWS = 3
BATCH = make_batch(SPEC, ROWS)
MODELS = {
    "deterministic": partial(Deterministic, width=6),
    "probabilistic": partial(Probabilistic, width=6, max_std=2.0),
    "ensemble": partial(TransitionEnsemble, size=3, width=6),
}


class Row(NamedTuple):
    """One transition of the batch, as tensors of one row."""

    observation_BD: torch.Tensor
    action_BA: torch.Tensor
    reward_B: torch.Tensor
    next_observation_BD: torch.Tensor
    task_B: torch.Tensor


def all_rows():
    columns = (
        BATCH.observation_RnD,
        BATCH.action_RnA,
        BATCH.reward_Rn,
        BATCH.next_observation_RnD,
        BATCH.task_Rn,
    )
    parts = zip(*(column.flatten(0, 1).split(1) for column in columns), strict=True)
    return [Row(*part) for part in parts]


def features(encoder, transition):
    z = encoder.latent(transition.observation_BD, transition.task_B)
    next_z = encoder.latent(transition.next_observation_BD, transition.task_B)
    return z, next_z


def members_of(model):
    """Return the mean and the standard deviation of each member for one input."""
    if isinstance(model, TransitionEnsemble):
        return [pair for member in model.members for pair in members_of(member)]
    if isinstance(model, Deterministic):
        return [lambda x: (model.layers(x), torch.ones(1))]

    def member(x):
        hidden = model.hidden(x)
        low, high = model._min_std, model._max_std
        return model.mean(hidden), low + (high - low) / (1 + torch.exp(-model.std(hidden)))

    return [member]


def naive_losses(auxiliary, encoder):
    """Return the models' loss of each trained task, row after row."""
    losses = []
    for transition in all_rows():
        z, next_z = features(encoder, transition)
        parts = [z, transition.action_BA]
        if encoder.context is not None:
            parts.insert(1, encoder.context(transition.task_B))
        x = torch.cat(parts, 1)
        total = (auxiliary.reward(x)[0, 0] - transition.reward_B[0]) ** 2
        members = members_of(auxiliary.transition)
        for member in members:
            mean, std = member(x)
            for i in range(5):
                s = std.flatten()[i % std.numel()]
                nll = ((mean[0, i] - next_z[0, i]) / s) ** 2 / 2 + torch.log(s)
                total = total + nll / 5 / len(members)
        losses.append(total)
    return torch.stack(losses).view(3, ROWS).mean(1)


@pytest.mark.parametrize("make", [STATES, STATES_CONTEXT])
@pytest.mark.parametrize("model", MODELS)
def test_the_loss_of_a_latent_model(make, model):
    encoder = make_encoder(SPEC, make)
    auxiliary = LatentDynamics(SPEC, encoder, transition=MODELS[model], width=6)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    torch.testing.assert_close(loss_R, naive_losses(auxiliary, encoder))
    if model == "deterministic":
        found = auxiliary.metrics()
        total = found["transition_error"] / 2 + found["reward_error"]
        torch.testing.assert_close(total, loss_R.detach().mean())
    wanted = {"hidden", "projection", "transition", "reward"}
    wanted |= {"context"} if encoder.context is not None else set()
    assert reached(loss_R.sum(), encoder, auxiliary) == wanted
    still = BATCH._replace(observation_RnD=torch.zeros_like(BATCH.observation_RnD))
    encoder.zero_grad()
    auxiliary.loss(still, inputs(encoder)).sum().backward()
    # the first layer multiplies zeros in the observation: a gradient would be the target's
    assert not encoder.hidden[0].weight.grad.any()


@pytest.mark.parametrize("model", MODELS)
def test_the_reward_may_be_of_the_predicted_next_features(model):
    encoder = make_encoder(SPEC)
    auxiliary = LatentDynamics(
        SPEC, encoder, transition=MODELS[model], width=6, reward_from="next_features"
    )
    assert auxiliary.reward[0].in_features == 5
    first, again, other = (auxiliary.loss(BATCH, inputs(encoder, s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (model == "deterministic"), "only a distribution is drawn"
    z_RnZ = encoder.latent(BATCH.observation_RnD, BATCH.task_Rn)
    x_RnI = torch.cat([z_RnZ, encoder.context(BATCH.task_Rn), BATCH.action_RnA], -1)
    if model == "deterministic":
        reward_Rn = auxiliary.reward(auxiliary.transition.layers(x_RnI))[..., 0]
        error_Rn = (reward_Rn - BATCH.reward_Rn) ** 2
        torch.testing.assert_close(auxiliary.metrics()["reward_error"], error_Rn.detach().mean())
    trained = reached(first.sum(), encoder, auxiliary)
    assert trained == {"hidden", "projection", "context", "transition", "reward"}


def test_the_standard_deviations_stay_in_their_bounds():
    model = Probabilistic(2, 3, width=4, min_std=0.5, max_std=2.0)
    with torch.no_grad():
        model.std.weight *= 1e3
    std = model(torch.randn(5, 10, 2)).std_KRnZ
    assert std.shape == (1, 5, 10, 3)
    assert 0.5 <= std.min() < 0.51 and 1.99 < std.max() <= 2.0


@pytest.mark.parametrize("form", ["squared", "absolute"])
@pytest.mark.parametrize("model", MODELS)
def test_the_distance_loss(form, model):
    encoder = make_encoder(SPEC)
    options = {"transition": MODELS[model], "width": 6, "distance_loss": form}
    auxiliary = HiPBMDP(SPEC, encoder, distance_weight=0.5, **options)
    plain = naive_losses(auxiliary, encoder)
    theta = {task: encoder.context(torch.tensor([task]))[0] for task in (0, 2, 3)}
    members = members_of(auxiliary.transition)
    expected, distances = [], []
    for transition in all_rows():
        z, _ = features(encoder, transition)
        own = int(transition.task_B[0])
        for other in {0, 2, 3} - {own}:
            distance = math.dist(theta[own].tolist(), theta[other].tolist())
            distances.append(distance)
            predicted = 0.0
            for member in members:
                (mean, std), (other_mean, other_std) = (
                    member(torch.cat([z[0], theta[task], transition.action_BA[0]])[None])
                    for task in (own, other)
                )
                square = ((mean - other_mean) ** 2).sum() + ((std - other_std) ** 2).sum()
                predicted += math.sqrt(square) / len(members)
            difference = distance - predicted
            expected.append(difference**2 if form == "squared" else abs(difference))
    by_task = torch.tensor(expected).view(3, -1).mean(1)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    torch.testing.assert_close(loss_R, plain + 0.5 * by_task)
    found = float(auxiliary.metrics()["embedding_distance"])
    assert found == pytest.approx(sum(distances) / len(distances))


def test_the_distance_loss_moves_the_context_alone():
    encoder = make_encoder(SPEC)
    options = {"transition": MODELS["probabilistic"], "width": 6}
    plain = HiPBMDP(SPEC, encoder, distance_weight=0.0, **options)
    weighted = HiPBMDP(SPEC, encoder, distance_weight=0.3, **options)
    weighted.load_state_dict(plain.state_dict())
    difference = weighted.loss(BATCH, inputs(encoder)) - plain.loss(BATCH, inputs(encoder))
    parts = reached(difference.sum(), encoder.context)
    assert parts == {"embedding", "hidden", "output"}
    others = [*encoder.hidden.parameters(), *encoder.projection.parameters()]
    others += [*weighted.parameters()]
    for module in (weighted, encoder):
        module.zero_grad()
    weighted.loss(BATCH, inputs(encoder)).sum().backward()
    gradients = [p.grad.clone() for p in others]
    weighted._distance_weight = 0.0
    for module in (weighted, encoder):
        module.zero_grad()
    weighted.loss(BATCH, inputs(encoder)).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, others, strict=True))


def test_other_tasks_may_be_drawn():
    encoder = make_encoder(SPEC)
    auxiliary = HiPBMDP(SPEC, encoder, num_others=1, width=6)
    generator = torch.Generator().manual_seed(0)
    pairs = set()
    for _ in range(20):
        own_Rn, other_RnM = auxiliary._pairs(ROWS, generator)
        assert other_RnM.shape == (3, ROWS, 1)
        assert own_Rn.tolist() == [[0] * ROWS, [1] * ROWS, [2] * ROWS]
        pairs |= set(zip(own_Rn.flatten().tolist(), other_RnM.flatten().tolist(), strict=True))
    assert pairs == {(i, j) for i in range(3) for j in range(3) if i != j}
    both = HiPBMDP(SPEC, encoder, num_others=2, width=6)
    _, drawn_RnM = both._pairs(ROWS, generator)
    _, all_RnM = HiPBMDP(SPEC, encoder, width=6)._pairs(ROWS, generator)
    assert all_RnM.shape == (3, ROWS, 2)
    assert torch.equal(drawn_RnM.sort().values, all_RnM.sort().values)


def test_the_context_of_care_is_one():
    spec = SPEC._replace(task_names=("reach-v3", "push-v3", "door-open-v3", "window-open-v3"))
    sizes = {"num_experts": 2, "width": 6, "depth": 1, "out_dim": 5, "context_dim": 5}
    encoder = make_encoder(spec, partial(CARE, conditioning=Embedding, **sizes))
    auxiliary = HiPBMDP(spec, encoder, width=6)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    assert {"experts", "context"} <= reached(loss_R.sum(), encoder, auxiliary)
