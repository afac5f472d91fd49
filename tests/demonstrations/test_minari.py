"""Collections as Minari data sets: read back as they were, and what they lack is named."""

import json
import sys

import numpy as np
import pytest

from mtrl_lightning.demonstrations import (
    UniformPolicy,
    collect,
    read_collection,
    write_collection,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import export_to_minari
from tests.export.test_replay import Recorded
from tests.helpers.fakes import Costly, Scripted

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")


@pytest.fixture
def benchmark():
    return Costly(2)


@pytest.fixture
def written(tmp_path, benchmark):
    """Write the same episodes in both formats; return the folders."""
    collected = collect(
        UniformPolicy(benchmark.spec), benchmark, 3, split="eval", noise=0.1, num_workers=0
    )
    for to in ("replay", "minari"):
        facts = {"policy": "random", "seeds": collected.seeds}
        write_collection(tmp_path / to, benchmark.spec, collected.columns, facts, to)
    return tmp_path


def test_minari_and_we_read_what_was_written(written, monkeypatch):
    expected = read_collection(written / "replay")
    read = read_collection(written / "minari")
    assert read.spec == expected.spec and read.facts == expected.facts
    assert read.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        assert read.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(read.columns[name], column)

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(written / "minari"))
    assert sorted(minari.list_local_datasets()) == ["task-0-v0", "task-1-v0"]
    data = minari.load_dataset("task-1-v0")
    episodes = list(data.iterate_episodes())
    assert [len(one) for one in episodes] == [1, 4, 2]
    rows = expected.columns["task"] == 1
    actions = np.concatenate([one.actions for one in episodes])
    np.testing.assert_array_equal(actions, expected.columns["action"][rows])
    success = np.concatenate([one.infos["success"][1:] for one in episodes])
    np.testing.assert_array_equal(success, expected.columns["success"][rows])
    assert [one["seed"] for one in data.storage.get_episode_metadata(range(3))] == [0, 1, 2]

    # the folder of one task alone
    alone = read_collection(written / "minari" / "task-1-v0")
    np.testing.assert_array_equal(alone.columns["action"], expected.columns["action"][rows])
    assert alone.columns["episode"].tolist() == [0, 1, 1, 1, 1, 2, 2]


def test_an_exported_replay_is_a_collection_without_success(tmp_path):
    recorded = Recorded(Scripted(2), [0, 1], 12, 50)
    recorded.spec = recorded.spec._replace(observation_sizes=(4, 3), action_sizes=(1, 2))
    folder, _ = export_to_minari(recorded.save(tmp_path))
    collection = read_collection(folder)
    assert collection.spec == recorded.spec and "success" not in collection.columns
    assert collection.facts["policy"] == "SAC"
    storage = recorded.buffer.storage
    for task in range(2):
        rows = storage.take(*storage.numbers(task, 0, int(storage.added_E[task])))
        of_task = collection.columns["task"] == task
        mask_D = collection.spec.observation_mask_TD[task]
        mask_A = collection.spec.action_mask_TA[task]
        for name, mask in (("next_observation", mask_D), ("action", mask_A)):
            # zeros behind the task's own size
            given = np.where(mask, rows[name].numpy(), 0)
            np.testing.assert_array_equal(collection.columns[name][of_task], given)


def data_of(folder):
    return folder / "minari" / "task-0-v0" / "data"


def without(name):
    def damage(folder):
        with h5py.File(data_of(folder) / "main_data.hdf5", "a") as file:
            del file["episode_1"][name]

    return damage


def without_spec(folder):
    path = data_of(folder) / "metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["mtrl_lightning"]["spec"]
    path.write_text(json.dumps(metadata))


def with_other_protocol(folder):
    path = data_of(folder) / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["mtrl_lightning"]["spec"]["protocol"]["benchmark"] = "another"
    path.write_text(json.dumps(metadata))


def with_texts(folder):
    with h5py.File(data_of(folder) / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
        file["episode_1"].create_dataset("rewards", data=[b"1"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("truncations"), "episode_1 of .* has no truncations"),
        (without("observations"), "episode_1 of .* has no observations"),
        (with_texts, r"reward in episode_1 of .* is object \[1\], not 1 numbers"),
        (without_spec, r"metadata\.json has no mtrl_lightning\.spec, which collect --to minari"),
        (with_other_protocol, "has data sets of several collections"),
        (lambda folder: (data_of(folder) / "metadata.json").unlink(), "is missing"),
        (
            lambda folder: (data_of(folder) / "main_data.hdf5").write_bytes(b"no file"),
            "cannot be read",
        ),
    ],
)
def test_what_a_file_lacks_is_named(written, damage, message):
    damage(written)
    with pytest.raises(ConfigurationError, match=message):
        read_collection(written / "minari")


def test_the_extra_is_named_where_it_is_missing(written, benchmark, monkeypatch):
    columns = read_collection(written / "replay").columns
    monkeypatch.setitem(sys.modules, "h5py", None)
    for call in (
        lambda: read_collection(written / "minari"),
        lambda: write_collection(written / "new", benchmark.spec, columns, {}, "minari"),
    ):
        with pytest.raises(ConfigurationError, match=r'pip install "mtrl_lightning\[minari\]"'):
            call()
