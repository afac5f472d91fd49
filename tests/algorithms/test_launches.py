"""The launches of an update on a GPU do not grow unnoticed; counted without one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import updates
from benchmarks.updates import launches
from tests.helpers.algorithms import make_batch, make_bc

MOST = {"SAC": 184, "PPO": 120}


def test_the_updates_of_metaworlds_protocols_launch_no_more_than_now():
    table = updates.launches_table(updates.Work(tasks=10, batch_size=20, width=16, depth=3))
    found = {row["variant"]: row["all"] for row in table["rows"]}
    assert found.keys() == MOST.keys()
    for name, number in found.items():
        assert number <= MOST[name], table["rows"]


@pytest.mark.parametrize("more", [0, 3])
def test_each_operation_that_computes_is_counted_and_no_view(monkeypatch, more):
    def count(num_more):
        bc = make_bc()
        make = bc.actor_loss

        def with_more(batch):
            for _ in range(num_more):
                torch.relu(batch.reward_Rn.flatten().view_as(batch.reward_Rn).detach())
            return make(batch)

        monkeypatch.setattr(bc, "_actor_loss", with_more)
        return launches(bc, make_batch(bc.spec))

    found = count(more)
    assert found["actor"] == count(0)["actor"] + more
    assert found["optimizers"] == 3 and found["guard and metrics"] == 4
