"""The replay from which a device draws by itself; the CPU stands for the device.

What it has in common with the host's is tested in ``test_buffer.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.device import DeviceReplay, PackedStorage
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.spec import Field
from tests.helpers.recorder import CPURecorder
from tests.helpers.replay import columns_in, ids_of, make_spec, make_transitions


def filled(num_steps, made=None, first=0, **options):
    buffer = DeviceReplay(make_spec(3), 24, 12, **options) if made is None else made
    for step in range(first, first + num_steps):
        buffer.add(make_transitions([step, 1000 + step, 2000 + step], [0, 1, 2]))
    return buffer


def test_it_draws_what_the_host_would_draw_on_that_device():
    one = filled(30, seed=3)
    other = filled(30, ReplayBuffer(make_spec(3), 24, 3))
    for _ in range(3):
        found = columns_in(one.sample(12))
        wanted = columns_in(other.sample(12))
        assert found.keys() == wanted.keys()
        for name, column in wanted.items():
            assert found[name].dtype == column.dtype and torch.equal(found[name], column), name


def test_a_recorded_draw_sees_the_transitions_that_came_later():
    buffer, twin = filled(2, seed=1), filled(2, seed=1)
    drawn = []
    buffer.prepare(1)
    kept = torch.empty(12)

    def draw():
        kept.copy_(buffer.take(0).observation_RnD[..., 0].flatten())

    replay = CPURecorder().record(draw, buffer.random_generators())
    for step in range(12):
        for each in (buffer, twin):
            filled(step % 3, each, 10 * step)
        buffer.prepare(1)
        replay()
        drawn.append(kept.clone())
        assert torch.equal(drawn[-1], twin.sample(12).observation_RnD[..., 0].flatten())
    assert len(torch.stack(drawn).unique()) > 12


def test_rows_are_written_as_a_gpu_has_them_also_none_of_a_step_that_failed_everywhere():
    wanted, written = filled(0), filled(0)
    written.storage._arrays = None
    some = make_transitions([0, 1000, 2000], [0, 1, 2])
    columns = {name: column[:0] for name, column in some._asdict().items() if name != "extra"}
    for buffer in (wanted, written):
        filled(10, buffer)
        buffer.add(some._replace(**columns))
        filled(2, buffer, 10)
    assert torch.equal(written.storage._row_NW, wanted.storage._row_NW)


def test_a_transition_is_one_row():
    storage = filled(1).storage
    assert isinstance(storage, PackedStorage)
    assert storage._row_NW.shape == (24, 3 + 2 + 1 + 3 + 1)
    operations = CPURecorder()
    operations.record(lambda: storage.take(torch.tensor([0]), torch.tensor([0])), ())
    gathers = [
        name
        for func, *_ in operations.recordings[0]._operations
        if "index" in (name := func.name())
    ]
    assert gathers == ["aten::index_select"]


def test_what_a_row_cannot_hold_exactly_is_kept_in_columns():
    buffer = DeviceReplay(make_spec(1), 4, 2, policy_fields=[Field("number", (), "int64")])
    assert type(buffer.storage) is RingStorage
    big = 2**53 + 1
    row = make_transitions([7], [0])
    buffer.add(row._replace(extra={"number": np.array([big])}))
    batch = buffer.sample(2)
    assert batch.extra["number"].tolist() == [[big, big]]
    assert ids_of(batch).tolist() == [7, 7]


def test_sizes_that_a_checkpoint_restores_are_sent():
    saved, buffer = filled(5).storage, filled(0)
    columns = saved.to_columns(np.zeros(3, np.int64), saved.added_E)
    assert columns["terminated"].dtype == np.bool_
    buffer.storage.from_columns(columns, np.zeros(3, np.int64), saved.added_E, np.arange(3))
    ids = ids_of(buffer.sample(300)).reshape(3, 100) % 1000
    assert set(ids.flatten().tolist()) == set(range(5))


def test_a_generator_of_another_kind_of_device_is_not_restored():
    buffer, twin = filled(5, seed=4), filled(5, seed=4)
    state = buffer.state_dict()
    assert state["device"] == "cpu"
    buffer.load_state_dict({"generator": torch.zeros(16, dtype=torch.uint8), "device": "cuda"})
    assert ids_of(buffer.sample(12)).tolist() == ids_of(twin.sample(12)).tolist()


@pytest.mark.parametrize("num_steps", [0])
def test_an_empty_replay_is_refused_before_anything_is_recorded(num_steps):
    with pytest.raises(ConfigurationError, match=r"rollout\.warmup_steps"):
        filled(num_steps).prepare(1)
