"""Further fields of a transition, from where they are made to the batch."""

import numpy as np
import pytest
import torch

from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.rollout import Collector
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import STORED, transition_fields
from tests.helpers.fakes import INFO_FIELDS, Informed, Numbering
from tests.helpers.replay import ROW_BYTES, assert_same_batch, make_spec

POLICY_FIELDS = (Field("log_prob", (), "float64"),)
EXTRA = {
    "energy": torch.float32,
    "place": torch.float32,
    "count": torch.int64,
    "log_prob": torch.float32,
}


class Confident(Numbering):
    """Returns log-probabilities with its actions."""

    def act(self, observation_ED, task_E, mode):
        action_EA = super().act(observation_ED, task_E, mode)
        return action_EA, {"log_prob": -action_EA[:, 0].astype(np.float64)}


def test_fields_are_the_core_then_the_others_in_float32():
    fields = transition_fields(make_spec(2, info_fields=INFO_FIELDS), POLICY_FIELDS)
    assert [field.name for field in fields] == [*STORED, *EXTRA]
    assert [field.dtype for field in fields[-4:]] == ["float32", "float32", "int64", "float32"]
    assert bytes_needed(fields, 10) == 10 * (ROW_BYTES + 4 + 2 * 4 + 8 + 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fields_pass_from_workers_to_files_and_batches(tmp_path, num_workers):
    benchmark = Informed()
    tasks = [0, 1, 2, 1]
    envs = VectorEnv(benchmark, tasks, num_workers=num_workers)
    collector = Collector(envs, Confident())
    given = {"tasks": tasks, "policy_fields": POLICY_FIELDS}
    buffer, restored = (ReplayBuffer(benchmark.spec, 200, seed, **given) for seed in (0, 9))
    snapshots = ReplaySnapshots(tmp_path, chunk_mebibytes=1e-3)
    for _ in range(70):  # a ring has 50 places
        transitions, _ = collector.step("explore")
        buffer.add(transitions)
        snapshots.write_full_chunk(buffer.storage)
    envs.close()
    batch = buffer.sample(150)
    assert {name: column.dtype for name, column in batch.extra.items()} == EXTRA
    number_Rn = batch.action_RnA[..., 0]
    assert number_Rn.unique().numel() > 50
    assert (batch.extra["energy"] == 0.25).all()
    assert torch.equal(batch.extra["place"], 2 * batch.action_RnA)
    assert torch.equal(batch.extra["count"], batch.next_observation_RnD[..., 2].long())
    assert torch.equal(batch.extra["log_prob"], -number_Rn)

    manifest = snapshots.save(buffer.storage)
    assert len(manifest["all_ranks"]["chunks"]) > 3
    restored.load_state_dict(buffer.state_dict())
    ReplaySnapshots(tmp_path).load(manifest, restored.storage)
    assert_same_batch(restored.sample(150), buffer.sample(150))
