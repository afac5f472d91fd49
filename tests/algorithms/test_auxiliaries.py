"""A loss with a target encoder, a generator and a learned task context is one class."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.auxiliaries import Auxiliary
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.networks import Encoder
from tests.helpers.algorithms import changed, copy_of, make_sac, train
from tests.helpers.checkpoints import assert_continued_is_the_same
from tests.helpers.command_line import SHORT, config_args
from tests.helpers.runs import assert_continues_exactly, checkpoint
from tests.helpers.sac import FULL, still


class NextFeatures(Auxiliary):
    """Predict the target encoder's features of the next observation, from noisy features.

    Args:
        spec: the tasks.
        encoder: the encoder that it trains.
        noise: standard deviation of the noise.
        options: of every auxiliary.
    """

    def __init__(self, spec, encoder: Encoder, noise: float = 0.1, **options) -> None:
        super().__init__(spec, encoder, **options)
        feature_dim = encoder.out_dim
        self.noise = noise
        self.context_TZ = nn.Embedding(spec.num_tasks, feature_dim)
        self.predictor = nn.Linear(feature_dim, feature_dim)

    def loss(self, batch, inputs):
        z_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        noise_RnZ = torch.randn(z_RnZ.shape, generator=inputs.generator, device=z_RnZ.device)
        noisy_RnZ = z_RnZ + self.noise * noise_RnZ + self.context_TZ(batch.task_Rn)
        with torch.no_grad():
            target_RnZ = inputs.target_encoder(batch.next_observation_RnD, batch.task_Rn)
        return (self.predictor(noisy_RnZ) - target_RnZ).square().sum(-1).mean(1)


class Given(NextFeatures):
    """Its loss and its metric are a given number."""

    def __init__(self, spec, encoder: Encoder, value: float) -> None:
        super().__init__(spec, encoder)
        self.value = value

    def loss(self, batch, inputs):
        return super().loss(batch, inputs) * 0 + self.value

    def metrics(self):
        return {"given": torch.tensor(self.value)}


def test_metrics_of_two_of_one_class_have_names_of_their_own():
    sac = make_sac(auxiliaries=[partial(Given, value=2.0), partial(Given, value=5.0)], **FULL)
    train(sac, 2)
    metrics = sac.drain_metrics()
    assert {name: value for name, value in metrics.items() if "given" in name} == {
        "train/given_0_loss": 2.0,
        "train/given_0": 2.0,
        "train/given_1_loss": 5.0,
        "train/given_1": 5.0,
    }


def small_sac(learning_rate=1e-3, **options):
    auxiliary = partial(NextFeatures, learning_rate=learning_rate)
    return make_sac(auxiliaries=[auxiliary], tau=0.1, **{**FULL, **options})


def test_it_trains_the_encoder_and_its_own_task_context():
    sac = small_sac(critic_optimizer=still)
    encoder, auxiliary = copy_of(sac.encoder), copy_of(sac.auxiliaries)
    train(sac, 3)
    assert changed(sac.encoder, encoder) == set(encoder)
    assert changed(sac.auxiliaries, auxiliary) == set(auxiliary)
    assert all(p.grad is None for p in sac.target_encoder.parameters())


def test_its_loss_falls():
    sac = small_sac(learning_rate=0.02, critic_optimizer=still)
    first = train(sac, 5).drain_metrics()["train/nextfeatures_loss"]
    last = train(sac, 100).drain_metrics()["train/nextfeatures_loss"]
    assert last < 0.5 * first


def test_it_depends_on_the_target_encoder_and_draws_from_a_generator_of_its_own():
    states = []
    for auxiliaries in ([], [NextFeatures]):
        sac = train(make_sac(auxiliaries=auxiliaries, **FULL), 2)
        used = sac.generators.state_dict()["per_rank"][0]
        states.append(used)
    assert set(states[1]) - set(states[0]) == {"auxiliary_0"}
    assert torch.equal(states[0]["learn"]["state"], states[1]["learn"]["state"])
    one, other = small_sac(), small_sac()
    with torch.no_grad():
        other.target_encoder.linear.weight.add_(1.0)
    first, second = (train(sac, 1).drain_metrics() for sac in (one, other))
    assert first["train/nextfeatures_loss"] != second["train/nextfeatures_loss"]


def test_a_restored_run_is_the_same_run(tmp_path):
    assert_continued_is_the_same(small_sac, tmp_path, half=4)


@pytest.mark.slow
def test_it_is_continued_through_the_command_line(command_line):
    options = [
        *SHORT,
        *config_args("encoder/mlp_context"),
        "--model.init_args.auxiliaries=[mtrl_lightning.auxiliaries.HiPBMDP,"
        "mtrl_lightning.auxiliaries.Reconstruction]",
    ]
    assert_continues_exactly(command_line, partial(command_line, "fit", *options), 120, 180)
    weights = checkpoint(command_line, "parts")["state_dict"]
    assert "auxiliaries.0.transition.layers.0.weight" in weights
    assert "encoder.context.embedding.weight_TC" in weights
    curves = read_metrics(command_line.folder("parts"))
    names = ("embedding_distance", "transition_error", "reward_error", "reconstruction_error")
    assert all(curves[f"train/{name}"][1][-1] > 0 for name in names)
