"""A further field of a transition, by its way from where it is made to the batch."""

import numpy as np
import pytest
import torch

from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.rollout import Collector
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import STORED, transition_fields
from tests.helpers.fakes import (
    INFO_FIELDS,
    Constant,
    Costly,
    ReplayedEnvs,
    extra_of,
    number_of,
    step_result,
)
from tests.helpers.replay import ROW_BYTES, assert_same_batch, make_spec

POLICY_FIELDS = (Field("log_prob", (), "float64"),)
EXTRA = ["cost", "contacts", "log_prob"]


class Confident(Constant):
    """Returns its log-probability beside the action."""

    def act(self, observation_ED, task_E, mode):
        action_EA = super().act(observation_ED, task_E, mode)
        return action_EA, {"log_prob": extra_of(number_of(observation_ED))["log_prob"]}


def test_fields_are_the_core_then_the_others_in_float32():
    fields = transition_fields(make_spec(2, info_fields=INFO_FIELDS), POLICY_FIELDS)
    assert [field.name for field in fields] == [*STORED, *EXTRA]
    assert fields[-3:] == (*INFO_FIELDS, Field("log_prob", (), "float32"))
    assert [field.name for field in transition_fields(make_spec(2))] == list(STORED)
    assert bytes_needed(fields, 10) == 10 * (ROW_BYTES + 4 + 4 * 8 + 4)


def test_collector_passes_fields_and_drops_faults():
    def result(values, valid):
        plain = step_result(values, [False] * 2, [False] * 2, [False] * 2, valid)
        extra = extra_of(plain.next_observation_ED[:, 0])
        return plain._replace(extra={name: extra[name] for name in ("cost", "contacts")})

    results = [result([1, 5], [True, True]), result([2, 6], [True, False])]
    collector = Collector(ReplayedEnvs([0, 1], results), Confident())
    for kept in ([0, 1], [0]):
        transitions, _ = collector.step("explore")
        assert list(transitions.extra) == EXTRA
        wanted = extra_of(transitions.next_observation_ED[:, 0])
        for name in ("cost", "contacts"):
            assert np.array_equal(transitions.extra[name], wanted[name])
        number_N = number_of(transitions.observation_ED)
        assert np.array_equal(transitions.extra["log_prob"], extra_of(number_N)["log_prob"])
        assert transitions.env_E.tolist() == kept


@pytest.mark.parametrize("num_workers", [0, 2])
def test_field_passes_from_workers_to_files_and_batches(tmp_path, num_workers):
    benchmark, tasks = Costly(3), [0, 1, 2, 1]
    envs = VectorEnv(benchmark, tasks, num_workers=num_workers)
    collector = Collector(envs, Confident())
    given = {"tasks": tasks, "policy_fields": POLICY_FIELDS}
    buffer = ReplayBuffer(benchmark.spec, 200, **given)
    snapshots = ReplaySnapshots(tmp_path, chunk_mebibytes=1e-3)
    for _ in range(70):  # a ring has 50 places
        transitions, _ = collector.step("explore")
        buffer.add(transitions)
        snapshots.write_full_chunk(buffer.storage)
    envs.close()
    batch = buffer.sample(150)
    wanted = extra_of(number_of(batch.observation_RnD.numpy()))
    assert list(batch.extra) == EXTRA
    types = {"cost": torch.float32, "contacts": torch.int64, "log_prob": torch.float32}
    for name, column in batch.extra.items():
        assert np.array_equal(column.numpy(), wanted[name]), name
        assert column.dtype == types[name]
    assert len(set(batch.extra["cost"].flatten().tolist())) > 50

    restored = ReplayBuffer(benchmark.spec, 200, 9, **given)
    manifest = snapshots.save(buffer.storage)
    restored.load_state_dict(buffer.state_dict())
    assert len(manifest["all_ranks"]["chunks"]) > 3
    ReplaySnapshots(tmp_path).load(manifest, restored.storage)
    assert_same_batch(restored.sample(150), buffer.sample(150))
