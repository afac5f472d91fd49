"""Collections as Minari data sets: read back as they were, and what they lack is named."""

import json
import sys

import numpy as np
import pytest

from mtrl_lightning.demonstrations import (
    UniformPolicy,
    collect,
    minari_files,
    read_collection,
    write_collection,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import export_to_minari
from tests.helpers.fakes import Costly, Scripted
from tests.helpers.recorded import Recorded

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


def changed(change):
    """Return what changes the second episode of a file, by its group."""

    def damage(folder):
        with h5py.File(data_of(folder) / "main_data.hdf5", "a") as file:
            change(file["episode_1"])

    return damage


def replaced(name, **options):
    """Return what puts another dataset in the place of one."""

    def change(group):
        del group[name]
        group.create_dataset(name, **options)

    return changed(change)


def linked(name, link):
    def change(group):
        del group[name]
        group[name] = link

    return changed(change)


def made_virtual(group):
    del group["rewards"]
    layout = h5py.VirtualLayout((1,), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.hdf5", "rewards", (1,))
    group.create_virtual_dataset("rewards", layout)


def linked_often(group):
    for number in range(2_000):
        group[f"infos/own_{number}"] = group["infos/large"]


def test_a_recompressed_file_is_read(written):
    """A constant image takes a hundredth of its bytes in a compressed file."""
    expected = read_collection(written / "replay").columns
    changed(
        lambda group: group.create_dataset(
            "infos/image", data=np.zeros((2, 2_000_000), np.uint8), compression="gzip"
        )
    )(written)
    with h5py.File(data_of(written) / "main_data.hdf5") as file:
        image = file["episode_1/infos/image"]
        assert image.id.get_storage_size() < image.nbytes / 100
        assert (data_of(written) / "main_data.hdf5").stat().st_size < image.nbytes / 16
    found = read_collection(written / "minari").columns
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            replaced("rewards", shape=(10**13,), dtype="f4", chunks=(1024,)),
            "has 40,000,000,000,000 bytes in chunks of 4,096, too many",
        ),
        (
            replaced("rewards", shape=(1,), maxshape=(None,), dtype="f4", chunks=(10**8,)),
            "has 4 bytes in chunks of 400,000,000, too many",
        ),
        (
            changed(
                lambda group: (
                    group.create_dataset("infos/large", data=np.zeros((2, 10_000))),
                    linked_often(group),
                )
            ),
            "too many for a file of this size",
        ),
        (
            replaced("rewards", shape=(1,), dtype="f4", external=[("/dev/zero", 0, 4)]),
            "reward in episode_1 of .* is stored in another file",
        ),
        (changed(made_virtual), "reward in episode_1 of .* is stored in another file"),
        (linked("rewards", h5py.ExternalLink("other.hdf5", "x")), "rewards in .* is a link"),
        (linked("rewards", h5py.SoftLink("/episode_0/rewards")), "rewards in .* is a link"),
        (linked("infos", h5py.ExternalLink("other.hdf5", "x")), "infos in .* is a link"),
        (linked("infos/success", h5py.SoftLink("/x")), "success in infos of .* is a link"),
        (
            changed(lambda group: group["infos"].create_group("deep")),
            "deep in episode_1 of .* is no array",
        ),
        (
            changed(lambda group: group.create_dataset("infos/observation", data=np.zeros((2, 4)))),
            "infos/observation in .* has the name of another column",
        ),
        (
            replaced("infos/policy_action", data=np.zeros(2, np.float32)),
            r"policy_action in .* is float32 \[1\], not float32 \[1, 2\]",
        ),
        (
            replaced("infos/policy_action", data=np.zeros((2, 2), np.bool_)),
            r"policy_action in .* is bool \[1, 2\], not float32 \[1, 2\]",
        ),
        (
            replaced("infos/policy_action", data=np.zeros((2, 3), np.float32)),
            r"policy_action in .* is float32 \[1, 3\], not float32 \[1, 2\]",
        ),
        (
            replaced("actions", data=np.full((1, 2), np.nan, np.float32)),
            "column action has numbers that are not finite",
        ),
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


def test_data_sets_that_do_not_fit_into_memory(written, monkeypatch):
    monkeypatch.setattr(minari_files, "free_memory", lambda: 10)
    with pytest.raises(ConfigurationError, match=r"does not fit into memory \(it needs"):
        read_collection(written / "minari")
