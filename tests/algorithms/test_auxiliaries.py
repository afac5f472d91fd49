"""A loss with a target encoder, a generator and a learned task context is one class."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from mtrl_lightning.auxiliaries import Auxiliary
from mtrl_lightning.networks import Encoder
from tests.helpers.algorithms import make_sac, train
from tests.helpers.sac import FULL


class NextFeatures(Auxiliary):
    """Predict the target encoder's features of the next observation, from noisy features."""

    def __init__(self, spec, encoder: Encoder, **options) -> None:
        super().__init__(spec, encoder, **options)
        self.context_TZ = nn.Embedding(spec.num_tasks, encoder.out_dim)
        self.predictor = nn.Linear(encoder.out_dim, encoder.out_dim)

    def loss(self, batch, inputs):
        z_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        noise_RnZ = torch.randn(z_RnZ.shape, generator=inputs.generator)
        noisy_RnZ = z_RnZ + 0.1 * noise_RnZ + self.context_TZ(batch.task_Rn)
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


def test_auxiliary_uses_target_encoder_and_its_own_generator():
    plain, one, other = (
        make_sac(auxiliaries=auxiliaries, **FULL)
        for auxiliaries in ([], [NextFeatures], [NextFeatures])
    )
    with torch.no_grad():
        other.target_encoder.linear.weight.add_(1.0)
    first, second = (train(sac, 1).drain_metrics() for sac in (one, other))
    assert first["train/nextfeatures_loss"] != second["train/nextfeatures_loss"]
    without, used = (sac.generators.state_dict()["per_rank"][0] for sac in (train(plain, 1), one))
    assert used.keys() - without.keys() == {"auxiliary_0"}
    assert torch.equal(used["learn"]["state"], without["learn"]["state"])
