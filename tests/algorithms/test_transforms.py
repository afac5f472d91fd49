"""Transforms: what they are called with, in which order, and what they change."""

import torch

from mtrl_lightning.algorithms import RewardScale, Transform
from tests.helpers.algorithms import attach, changed, copy_of, make_batch, make_sac


class Tenfold(RewardScale):
    def factors(self):
        assert self.quantities["temperature_T"]().tolist() == [1, 1, 1]
        assert self.quantities["target_entropy_T"]().tolist() == [-2, -2, -2]
        return torch.full((3,), 10.0)


class Shift(Transform):
    """Add a number to rewards; remember what it received."""

    def __init__(self, spec):
        super().__init__(spec)
        self.received = []
        self.observe = self.begin_learning = self.received.append

    def forward(self, batch):
        return batch._replace(reward_Rn=batch.reward_Rn + 3 * (1 + batch.task_R1))


def test_an_update_learns_from_the_batch_after_all_transforms():
    one, other = make_sac(reward_scale=Tenfold, transforms=[Shift]), make_sac()
    batch = make_batch(one.spec)
    found = batch._replace(reward_Rn=10 * batch.reward_Rn + 3 * (1 + batch.task_Rn))
    for sac, given in ((one, batch), (other, found)):
        attach(sac)
        sac.training_step(given, 0)
    assert changed(one, copy_of(other)) == set()
    one.transforms.observe("transitions")
    one.transforms.begin_learning("means")
    _, shift = one.transforms
    assert shift.received == ["transitions", "means"]
