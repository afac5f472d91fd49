"""The launches of an update on a GPU do not grow unnoticed; counted without one."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.launches import launches
from mtrl_lightning.networks import MLP, MultiHead
from tests.helpers.algorithms import make_batch, make_ppo, make_sac, make_spec

NUM_TASKS = 10


def ppo_batch(ppo):
    batch = make_batch(ppo.spec)
    names = ("log_prob", "advantage", "value", "target")
    extra = {name: torch.zeros_like(batch.reward_Rn) for name in names}
    return batch._replace(extra={**extra, "unclipped_action": batch.action_RnA})


def test_sac_of_metaworld_plus():
    network = partial(MultiHead, width=16, depth=3)
    sac = make_sac(make_spec(NUM_TASKS), actor=network, critic=network)
    found = launches(sac, make_batch(sac.spec))
    assert sum(found.values()) <= 290, found


def test_ppos_minibatch():
    network = partial(MLP, width=16, depth=3)
    ppo = make_ppo(make_spec(NUM_TASKS), actor=network, critic=network, max_kl=None)
    found = launches(ppo, ppo_batch(ppo))
    assert sum(found.values()) <= 185, found
