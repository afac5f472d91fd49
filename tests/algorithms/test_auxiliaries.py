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

    def __init__(self, spec, encoder: Encoder, given: float = 1.0) -> None:
        super().__init__(spec, encoder)
        self.given = given
        self.context_TZ = nn.Embedding(spec.num_tasks, encoder.out_dim)

    def loss(self, batch, inputs):
        z_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        noise_RnZ = torch.randn(z_RnZ.shape, generator=inputs.generator)
        noisy_RnZ = z_RnZ + 0.1 * noise_RnZ + self.context_TZ(batch.task_Rn)
        with torch.no_grad():
            target_RnZ = inputs.target_encoder(batch.next_observation_RnD, batch.task_Rn)
        return (noisy_RnZ - target_RnZ).square().sum(-1).mean(1)

    def metrics(self):
        return {"given": torch.tensor(self.given)}


def test_metrics_of_two_of_one_class_have_names_of_their_own():
    sac = make_sac(auxiliaries=[NextFeatures, partial(NextFeatures, given=5.0)], **FULL)
    metrics = train(sac, 2).drain_metrics()
    assert (metrics["train/given_0"], metrics["train/given_1"]) == (1.0, 5.0)
    assert {"train/nextfeatures_0_loss", "train/nextfeatures_1_loss"} <= metrics.keys()


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
