"""Auxiliary losses by their equations, and when and what they train."""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.auxiliaries import (
    Deterministic,
    HiPBMDP,
    LatentDynamics,
    LossInputs,
    Reconstruction,
    TransitionEnsemble,
)
from mtrl_lightning.auxiliaries.reconstruction import preprocessed
from mtrl_lightning.auxiliaries.transitions import Gaussians
from mtrl_lightning.networks import CARE, Embedding
from tests.helpers.algorithms import (
    changed,
    copy_of,
    make_batch,
    make_sac,
    make_spec,
    pixel_spec,
    train,
)
from tests.helpers.networks import PIXELS, STATES, STATES_CONTEXT, uniform

SPEC = make_spec(4, train_tasks=[0, 2, 3])
BATCH = make_batch(SPEC, rows=3)
MODELS = {
    "deterministic": partial(Deterministic, width=6),
    "ensemble": partial(TransitionEnsemble, size=3, width=6),
}
each_model = pytest.mark.parametrize("model", MODELS)


def make_encoder(spec, make=STATES_CONTEXT):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make(spec)


def inputs(encoder, seed=0):
    return LossInputs(encoder, encoder, torch.Generator().manual_seed(seed))


def reached(loss, *modules):
    """Return the parameters, without their modules' last names, that a loss trains."""
    for module in modules:
        module.zero_grad()
    loss.backward()
    return {
        name.split(".")[0]
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }


def model_inputs(encoder, task_Rn=BATCH.task_Rn):
    """Return latent features, contexts of these tasks, and actions."""
    z_RnZ = encoder.latent(BATCH.observation_RnD, BATCH.task_Rn)
    context = [] if encoder.context is None else [encoder.context(task_Rn)]
    return torch.cat([z_RnZ, *context, BATCH.action_RnA], -1)


def model_losses(auxiliary, encoder):
    """Return each task's loss of both models."""
    x_RnI = model_inputs(encoder)
    next_z_RnZ = encoder.latent(BATCH.next_observation_RnD, BATCH.task_Rn).detach()
    mean_KRnZ, std_KRnZ = auxiliary.transition(x_RnI)
    members = [
        (((mean - next_z_RnZ) / std) ** 2 / 2 + std.log()).sum(-1) / 5
        for mean, std in zip(mean_KRnZ, std_KRnZ, strict=True)
    ]
    error_Rn = auxiliary.reward(x_RnI)[..., 0] - BATCH.reward_Rn
    return (sum(members) / len(members) + error_Rn**2).mean(1)


def assert_same(found_R, wanted_R, *modules):
    """Compare losses, and their gradients of all parameters."""
    torch.testing.assert_close(found_R, wanted_R)
    parameters = [p for module in modules for p in module.parameters()]
    torch.testing.assert_close(
        *(
            torch.autograd.grad(loss_R.sum(), parameters, materialize_grads=True)
            for loss_R in (found_R, wanted_R)
        )
    )


def test_predictions_of_an_ensemble():
    x_BI = uniform(5, 4)
    ensemble = TransitionEnsemble(4, 3, size=2, width=6)
    for member, mean_BZ, std_BZ in zip(ensemble.members, *ensemble(x_BI), strict=True):
        hidden_BH = member.hidden(x_BI)
        torch.testing.assert_close(mean_BZ, member.mean(hidden_BH))
        wanted_BZ = 1e-4 + (10 - 1e-4) / (1 + torch.exp(-member.std(hidden_BH)))
        torch.testing.assert_close(std_BZ, wanted_BZ)


@pytest.mark.parametrize("make", [STATES, STATES_CONTEXT])
@each_model
def test_the_loss_of_a_latent_model(make, model):
    encoder = make_encoder(SPEC, make)
    auxiliary = LatentDynamics(SPEC, encoder, transition=MODELS[model], width=6)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    assert_same(loss_R, model_losses(auxiliary, encoder), encoder, auxiliary)
    if model == "deterministic":  # whose standard deviations are 1
        found = auxiliary.metrics()
        total = found["transition_error"] / 2 + found["reward_error"]
        torch.testing.assert_close(total, loss_R.detach().mean())


@each_model
def test_the_reward_may_be_of_the_predicted_next_features(model):
    encoder = make_encoder(SPEC)
    options = {"transition": MODELS[model], "width": 6, "reward_from": "next_features"}
    auxiliary = LatentDynamics(SPEC, encoder, **options)
    first, again, other = (auxiliary.loss(BATCH, inputs(encoder, s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (model == "deterministic"), "only a distribution is drawn"
    predicted = auxiliary.transition(model_inputs(encoder))
    drawn_RnZ = auxiliary.transition.draw(predicted, torch.Generator().manual_seed(1))
    error_Rn = (auxiliary.reward(drawn_RnZ)[..., 0] - BATCH.reward_Rn) ** 2
    torch.testing.assert_close(auxiliary.metrics()["reward_error"], error_Rn.detach().mean())
    trained = reached(first.sum(), encoder, auxiliary)
    assert trained == {"hidden", "projection", "context", "transition", "reward"}


def test_samples_are_of_one_member_with_its_deviation():
    mean_KRnZ = torch.tensor([0.0, 100.0]).view(2, 1, 1, 1).expand(2, 1, 4000, 1)
    std_KRnZ = torch.tensor([1.0, 10.0]).view(2, 1, 1, 1).expand(2, 1, 4000, 1)
    drawn = set()
    for seed in range(8):
        sample_RnZ = Gaussians(mean_KRnZ, std_KRnZ).sample(torch.Generator().manual_seed(seed))
        member = int(sample_RnZ.mean() > 50)
        drawn.add(member)
        assert sample_RnZ.mean().item() == pytest.approx(100 * member, abs=1)
        assert sample_RnZ.std().item() == pytest.approx((1, 10)[member], rel=0.1)
    assert drawn == {0, 1}


@pytest.mark.parametrize("form", ["squared", "absolute"])
def test_the_distance_loss(form):
    encoder = make_encoder(SPEC)
    options = {"transition": MODELS["ensemble"], "width": 6, "distance_loss": form}
    auxiliary = HiPBMDP(SPEC, encoder, distance_weight=0.5, **options)
    theta_TC = encoder.context(torch.arange(4))
    expected_R, distances = [], []
    for row, own in enumerate(SPEC.train_tasks):
        losses = []
        for other in {0, 2, 3} - {own}:
            distances.append((theta_TC[own] - theta_TC[other]).square().sum().sqrt())
            of_own, of_other = (
                torch.cat(auxiliary.transition(model_inputs(encoder, torch.full((3, 3), task))), -1)
                for task in (own, other)
            )
            predicted_n = (of_own - of_other)[:, row].norm(dim=-1).mean(0).detach()
            difference_n = distances[-1] - predicted_n
            losses.append(difference_n.square() if form == "squared" else difference_n.abs())
        expected_R.append(torch.cat(losses).mean())
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    wanted_R = model_losses(auxiliary, encoder) + 0.5 * torch.stack(expected_R)
    assert_same(loss_R, wanted_R, encoder, auxiliary)
    distance = auxiliary.metrics()["embedding_distance"]
    torch.testing.assert_close(distance, torch.stack(distances).mean().detach())


def test_the_context_of_care_is_one():
    spec = SPEC._replace(task_names=("reach-v3", "push-v3", "door-open-v3", "window-open-v3"))
    sizes = {"num_experts": 2, "width": 6, "depth": 1, "out_dim": 5}
    encoder = make_encoder(spec, partial(CARE, conditioning=Embedding, **sizes))
    auxiliary = HiPBMDP(spec, encoder, width=6)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    assert {"experts", "context"} <= reached(loss_R.sum(), encoder, auxiliary)


IMAGES = pixel_spec()
IMAGE_BATCH = make_batch(IMAGES, rows=3)


def test_bytes_are_reduced_to_five_bits_with_noise():
    byte_B = torch.arange(256, dtype=torch.uint8)
    noise_B = torch.rand(256, generator=torch.Generator().manual_seed(4))
    found_B = preprocessed(byte_B, torch.Generator().manual_seed(4))
    expected_B = np.arange(256) // 8 / 32 + noise_B.numpy() / 32 - 0.5
    np.testing.assert_allclose(found_B, expected_B, atol=1e-7)


def test_the_loss_of_images():
    encoder = make_encoder(IMAGES, PIXELS)
    auxiliary = Reconstruction(IMAGES, encoder, latent_weight=0.3)
    z_RnZ = encoder(IMAGE_BATCH.observation_RnD, IMAGE_BATCH.task_Rn)
    target = preprocessed(IMAGE_BATCH.observation_RnD, torch.Generator().manual_seed(0))
    error_Rn = ((auxiliary.decoder(z_RnZ) - target) ** 2).mean((2, 3, 4, 5))
    expected = (error_Rn + 0.3 * (z_RnZ**2).sum(2) / 2).mean(1)
    loss_R = auxiliary.loss(IMAGE_BATCH, inputs(encoder))
    torch.testing.assert_close(loss_R, expected)
    found = auxiliary.metrics()["reconstruction_error"]
    torch.testing.assert_close(found, error_Rn.detach().mean())
    trained = reached(loss_R.sum(), encoder, auxiliary)
    assert trained == {"convolutions", "projection", "decoder"}


@pytest.mark.parametrize("make", [STATES, STATES_CONTEXT])
def test_the_loss_of_states_leaves_padding_out(make):
    spec = make_spec()._replace(observation_sizes=(4, 2, 3))
    encoder = make_encoder(spec, make)
    auxiliary = Reconstruction(spec, encoder, latent_weight=0.0)
    batch = make_batch(spec, rows=2)
    mask_RnD = torch.from_numpy(spec.observation_mask_TD)[batch.task_Rn]
    batch = batch._replace(observation_RnD=batch.observation_RnD * mask_RnD)
    decoded = auxiliary.decoder(encoder.latent(batch.observation_RnD, batch.task_Rn))
    error = (decoded - batch.observation_RnD) ** 2
    expected = [error[task, :, :size].mean() for task, size in enumerate((4, 2, 3))]
    torch.testing.assert_close(auxiliary.loss(batch, inputs(encoder)), torch.stack(expected))
    assert auxiliary.images(encoder) == {}


def test_images_show_the_newest_frame_and_what_is_decoded():
    sac = train(make_sac(IMAGES, encoder=PIXELS, auxiliaries=[Reconstruction]), 1)
    encoder, decoder = sac.encoder, sac.auxiliaries[0].decoder
    image = sac.images()["reconstruction"]
    assert image.dtype == np.uint8 and image.shape == (2 * 17, 3 * 19, 3)
    batch = make_batch(IMAGES)
    for task in range(3):
        columns = slice(19 * task, 19 * (task + 1))
        newest = batch.observation_RnD[task, 0, -1].numpy().transpose(1, 2, 0)
        assert np.array_equal(image[:17, columns], newest)
        z_BZ = encoder(batch.observation_RnD[task, :1], batch.task_Rn[task, :1])
        decoded = decoder(z_BZ)[0, -1].detach().numpy().transpose(1, 2, 0)
        shown = np.clip((decoded + 0.5) * 255, 0, 255)
        np.testing.assert_allclose(image[17:, columns], shown, atol=0.51)


DEEPMDP = partial(LatentDynamics, width=8)


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (DEEPMDP, "critic"),
        (partial(DEEPMDP, after="targets"), "targets"),  # mtrl's order
        (Reconstruction, "targets"),
    ],
)
def test_auxiliary_follows_the_critics_or_the_targets(make, after):
    sac = make_sac(encoder=STATES, auxiliaries=[make], tau=1.0)
    order = []
    for update in sac.updates:
        update.call_hook = lambda hook, *_, name=update.name: order.append((hook, name))
    train(sac, 1)
    steps = [name for hook, name in order if hook == "on_before_optimizer_step"]
    assert steps.pop(1 if after == "critic" else 3) == type(sac.auxiliaries[0]).__name__.lower()
    assert steps == ["critic", "actor", "temperature"]
    # the targets are the networks that their step has found
    assert (changed(sac.target_encoder, copy_of(sac.encoder)) == set()) == (after == "critic")


def test_only_the_decoders_weights_decay():
    sac = make_sac(pixel_spec(), encoder=PIXELS, auxiliaries=[Reconstruction])
    of_encoder, of_decoder = sac.auxiliary_updates[0].configure_optimizer().param_groups
    assert list(map(id, of_encoder["params"])) == list(map(id, sac.encoder.parameters()))
    assert list(map(id, of_decoder["params"])) == list(map(id, sac.auxiliaries.parameters()))
    assert (of_encoder["weight_decay"], of_decoder["weight_decay"]) == (0.0, 1e-7)


def test_reset_clears_the_encoders_moments_and_keeps_auxiliaries():
    sac = train(make_sac(encoder=STATES, auxiliaries=[DEEPMDP]), 2)
    (auxiliary,), (update,) = sac.auxiliaries, sac.auxiliary_updates
    before = copy_of(auxiliary)
    sac.reset_networks()
    assert not changed(auxiliary, before)
    train(sac, 1)
    steps = {parameter: int(state["step"]) for parameter, state in update.optimizer.state.items()}
    assert {steps[parameter] for parameter in sac.encoder.parameters()} == {1}
    assert {steps[parameter] for parameter in auxiliary.parameters()} == {3}
    of_temperature = sac.temperature_update.optimizer.state[sac.temperature.log_alpha]
    assert of_temperature["step"] == 3
