"""Transforms: what they are called with, in which order, and what they change."""

from __future__ import annotations

import numpy as np
import torch

from mtrl_lightning.algorithms import MeanReward, ReturnRange, Transform
from tests.helpers.algorithms import attach, changed, copy_of, make_batch, make_sac


class Shift(Transform):
    """Add a number to observations."""

    def forward(self, batch):
        amount_R11 = 3 * (1 + batch.task_R1[..., None])
        return batch._replace(
            observation_RnD=batch.observation_RnD + amount_R11,
            next_observation_RnD=batch.next_observation_RnD + amount_R11,
        )


class Double(Transform):
    """Multiply observations by 2; remember what it received."""

    def __init__(self, spec):
        super().__init__(spec)
        self.received = []

    def observe(self, transitions):
        self.received.append(transitions)

    def begin_learning(self, mean_reward_R):
        self.received.append(mean_reward_R)

    def forward(self, batch):
        return batch._replace(
            observation_RnD=2 * batch.observation_RnD,
            next_observation_RnD=2 * batch.next_observation_RnD,
        )


def test_an_update_learns_from_the_batch_after_all_transforms():
    one, other = make_sac(transforms=[Shift, Double]), make_sac()
    batch = make_batch(one.spec)
    found = one.transforms(batch)
    shift_Rn1 = 3 * (1 + batch.task_Rn[..., None])
    assert torch.equal(found.observation_RnD, 2 * (batch.observation_RnD + shift_Rn1))
    assert torch.equal(found.next_observation_RnD, 2 * (batch.next_observation_RnD + shift_Rn1))
    assert torch.equal(found.reward_Rn, batch.reward_Rn)
    for sac, given in ((one, batch), (other, found)):
        attach(sac)
        sac.training_step(given, 0)
    assert changed(one, copy_of(other)) == set()


def test_each_transform_receives_transitions_and_mean_rewards():
    sac = make_sac(reward_scale=MeanReward, transforms=[Double, Shift])
    scale, double, _ = sac.transforms
    mean_reward_R = np.array([1.0, 2.0, 4.0])
    sac.transforms.observe("transitions")
    sac.transforms.begin_learning(mean_reward_R)
    assert double.received == ["transitions", mean_reward_R]
    assert scale.factor_T.tolist() == [4, 2, 1]


def test_a_slice_makes_the_changes_of_its_transforms():
    sac = make_sac(reward_scale=ReturnRange, transforms=[Shift, Double])
    batch = make_batch(sac.spec)
    scaled = sac.transforms[:1](batch)
    assert torch.equal(scaled.reward_Rn, sac.transforms(batch).reward_Rn)
    assert not torch.equal(scaled.reward_Rn, batch.reward_Rn)
    assert torch.equal(scaled.observation_RnD, batch.observation_RnD)
    doubled = sac.transforms[-1:](batch)
    assert torch.equal(doubled.observation_RnD, 2 * batch.observation_RnD)
