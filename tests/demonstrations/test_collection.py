"""A collection on disk: written, read back, damaged, and compared with a benchmark."""

import itertools
import json
import os

import numpy as np
import pytest

from mtrl_lightning.demonstrations import (
    check_collection,
    minari_files,
    read_collection,
    write_collection,
)
from mtrl_lightning.demonstrations.collection import _EpisodeCounts
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import Field
from tests.helpers.fakes import Costly, Scripted

LENGTHS = [3, 1, 4]
TASKS = [0, 1, 1]
"""Of the episodes."""


def columns_of(spec):
    num_rows = sum(LENGTHS)
    generator = np.random.default_rng(0)
    is_last_N = np.zeros(num_rows, np.bool_)
    is_last_N[np.cumsum(LENGTHS) - 1] = True
    task_N = np.repeat(TASKS, LENGTHS)
    columns = {
        "observation": generator.normal(size=(num_rows, *spec.observation_space.shape)),
        "action": generator.uniform(-1, 1, (num_rows, *spec.action_space.shape)),
        "reward": generator.normal(size=num_rows),
        "next_observation": generator.normal(size=(num_rows, *spec.observation_space.shape)),
        "terminated": is_last_N & (task_N == 1),
        "truncated": is_last_N & (task_N == 0),
        "success": np.arange(num_rows) == 5,
        "task": task_N,
        "episode": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }
    for field in spec.info_fields:
        columns[field.name] = np.arange(num_rows * field.num_bytes).reshape(num_rows, -1)
        columns[field.name] = np.resize(columns[field.name], (num_rows, *field.shape))
    return columns


@pytest.fixture
def written(tmp_path):
    spec = Scripted(3).spec
    folder = tmp_path / "new" / "experts"
    write_collection(folder, spec, columns_of(spec), {"policy": "by hand", "seed": 4})
    return folder


@pytest.mark.parametrize("benchmark", [Scripted(3), Costly(3)])
def test_a_collection_is_read_as_it_was_written(benchmark, tmp_path):
    spec = benchmark.spec
    columns = columns_of(spec) | {"chosen": np.ones((8, 2))}
    facts = write_collection(tmp_path / "one", spec, columns, {"policy": "by hand"})
    read = read_collection(tmp_path / "one")
    assert read.spec == spec and read.num_transitions == 8
    assert read.columns.keys() == columns.keys()
    for name, column in read.columns.items():
        given = columns[name]
        is_float = given.dtype.kind == "f" or name == "cost"
        assert column.dtype == (np.float32 if is_float else given.dtype), name
        np.testing.assert_array_equal(column, given.astype(column.dtype))
    assert read.facts == facts
    assert read.facts["policy"] == "by hand"
    assert read.facts["episodes"] == {"task-0": 1, "task-1": 2, "task-2": 0}
    assert read.facts["successes"] == {"task-0": 0, "task-1": 1, "task-2": 0}
    assert read.facts["versions"]["numpy"] == np.__version__


def test_a_collection_is_not_overwritten(written):
    spec = Scripted(3).spec
    before = (written / "collection.json").read_text()
    with pytest.raises(ConfigurationError, match="holds another collection: delete it, or give"):
        write_collection(written, spec, columns_of(spec), {})
    (written / "collection.json").unlink()
    with pytest.raises(ConfigurationError, match="is not empty: delete it"):
        write_collection(written, spec, columns_of(spec), {})
    assert before and [path.name for path in written.parent.iterdir()] == ["experts"]


def test_folders_that_a_finished_collection_cannot_replace(tmp_path, monkeypatch):
    spec = Scripted(3).spec
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    monkeypatch.chdir(empty)
    for folder, what in ((".", "the working directory"), (tmp_path / "link", "a symbolic link")):
        with pytest.raises(ConfigurationError, match=f"is {what}.*: give a new folder"):
            write_collection(folder, spec, columns_of(spec), {})
    assert not list(empty.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == empty)
    with pytest.raises(ConfigurationError, match="or a mount point"):
        write_collection(empty, spec, columns_of(spec), {})


def test_a_finished_collection_that_cannot_be_moved_is_kept(tmp_path, monkeypatch):
    spec = Scripted(3).spec

    replace = os.replace

    def busy(source, target):
        if target == tmp_path / "one":
            raise OSError("it is busy")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("mtrl_lightning.demonstrations.collection.os.replace", busy)
        with pytest.raises(ConfigurationError, match="complete but cannot be moved") as raised:
            write_collection(tmp_path / "one", spec, columns_of(spec), {})
    (kept,) = tmp_path.glob(".unfinished_*/collection")
    assert f"it is in {kept};" in str(raised.value)
    assert read_collection(kept).num_transitions == 8


def test_nothing_is_left_of_a_collection_that_was_not_finished(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr("mtrl_lightning.demonstrations.collection.describe_spec", full)
    spec = Scripted(3).spec
    with pytest.raises(OSError, match="is full"):
        write_collection(tmp_path / "one", spec, columns_of(spec), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.r_[1.0, np.nan, np.ones(6)]}, "column reward has numbers that are not"),
        ({"action": np.full((8, 2), np.inf)}, "column action has numbers that are not finite"),
        ({"policy_action": np.zeros(8)}, r"policy_action is float32 \[8\], not float32 \[8, 2\]"),
        ({"policy_action": np.ones((8, 2), bool)}, "policy_action is bool"),
        ({"episode": np.repeat([0, 2, 3], LENGTHS)}, "no whole episodes"),
        ({"truncated": np.zeros(8, np.bool_)}, "no whole episodes"),
        ({"task": np.array([0, 0, 1, 1, 1, 1, 1, 1])}, "several tasks"),
        ({"task": np.full(8, 3)}, "not from 0 to 2"),
    ],
)
def test_rows_that_are_no_whole_episodes_are_refused(tmp_path, change, message):
    spec = Scripted(3).spec
    with pytest.raises(ValueError, match=message):
        write_collection(tmp_path / "one", spec, columns_of(spec) | change, {})


def change_file(change):
    def damage(folder):
        content = json.loads((folder / "collection.json").read_text())
        change(content)
        (folder / "collection.json").write_text(json.dumps(content))

    return damage


def change_shape(*shape):
    return change_file(lambda content: content["replay"]["fields"][0].__setitem__(1, list(shape)))


def flip_a_byte(folder):
    (path,) = (folder / "replay").iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def delete_the_rows(folder):
    (path,) = (folder / "replay").iterdir()
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, r"the replay file .* is damaged\): copy it again"),
        (delete_the_rows, r"the replay file .* is missing\): copy it again"),
        (lambda folder: (folder / "collection.json").write_text("{"), "cannot be read"),
        (change_file(lambda c: c.update(format=2)), "has the format 2, and this version reads 1"),
        (change_file(lambda c: c.pop("replay")), "'replay'"),
        (change_file(lambda c: c["spec"].pop("horizon")), "its tasks cannot be read"),
        (change_file(lambda c: c["spec"].update(action_sizes={"0": 1})), "action_sizes is no list"),
        (change_file(lambda c: c["spec"].update(info_fields="x" * 9)), "info_fields is no list"),
        (change_file(lambda c: c["spec"].update(task_names=["only"])), "not from 0 to 0"),
        (change_file(lambda c: c["replay"].update(added=[9])), "list of replay files"),
        (change_file(lambda c: c["replay"].update(added=[-5])), "list of replay files"),
        (change_file(lambda c: c["replay"].update(oldest=[8])), r"from number \[8\] on"),
        (change_file(lambda c: c["replay"].update(added=[], oldest=[])), "list of replay files"),
        (
            change_file(lambda c: c["replay"].update(added=[0], chunks=[])),
            r"has 0 transitions from number \[0\] on",
        ),
        (change_shape(-1), "size of observation is -1"),
        (change_shape(2**40), r"8 rows of [\d,]+ bytes in [\d,]+ bytes"),
        (change_shape(2**40, 2**40), r"8 rows of [\d,]+ bytes in [\d,]+ bytes"),
        (change_file(lambda c: c["replay"]["fields"][0].__setitem__(2, "S9")), "not numbers"),
        (
            change_file(lambda c: c["spec"].update(info_fields=[["cost", [], "float32"]])),
            "it has no column cost",
        ),
    ],
)
def test_what_is_damaged_is_named(written, damage, message):
    damage(written)
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_collection(written)
    assert "continue from another checkpoint" not in str(raised.value)


def test_damaged_numbers_that_are_not_finite_are_named(written, monkeypatch):
    """Collections of earlier versions may have them."""
    spec = Scripted(3).spec
    columns = columns_of(spec)
    columns["next_observation"][3] = np.nan
    with monkeypatch.context() as patched:
        patched.setattr("mtrl_lightning.demonstrations.collection._check_numbers", print)
        write_collection(written.parent / "two", spec, columns, {})
    with pytest.raises(ConfigurationError, match="column next_observation has numbers that are"):
        read_collection(written.parent / "two")


def test_a_shortage_of_memory_is_no_damage(written, monkeypatch):
    monkeypatch.setattr(minari_files, "free_memory", lambda: 100)
    message = r"does not fit into memory \(.* are free\): free memory, or collect fewer episodes"
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_collection(written)
    assert "capacity" not in str(raised.value) and "copy it again" not in str(raised.value)


def test_what_is_no_collection(tmp_path):
    with pytest.raises(ConfigurationError, match=r"it has no collection\.json"):
        read_collection(tmp_path / "nothing")


def test_a_collection_is_compared_with_the_benchmark_that_is_trained_on(written):
    collection = read_collection(written)
    spec = collection.spec._replace(train_tasks=(0, 1))
    check_collection(collection, spec)
    reordered = spec._replace(
        task_names=("task-1", "new", "task-0"), train_tasks=(0, 2), protocol={**spec.protocol}
    )
    check_collection(collection, reordered)
    check_collection(collection, spec._replace(protocol={**spec.protocol, "horizon": 9}))
    for changed, message in (
        ({"train_tasks": (0, 2)}, "has no episode of task-2, and it has those of task-0, task-1"),
        (
            {"protocol": {"benchmark": "metaworld", "metaworld": "3.1.1"}},
            "has benchmark scripted, and the benchmark that is trained on metaworld",
        ),
        (
            {"protocol": {**spec.protocol, "reward_version": "v1"}},
            "has reward_version none, and the benchmark that is trained on v1",
        ),
        (
            {"observation_sizes": (4, 3, 4)},
            r"the observation of task-1 has the shape \(4,\) in the collection .* and \(3,\) in",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_collection(collection, spec._replace(**changed))


def test_a_collection_without_the_stored_info_is_refused(written):
    collection = read_collection(written)
    spec = collection.spec._replace(train_tasks=(0, 1))
    stored = spec._replace(info_fields=(Field("near"), Field("grasp")), info_keys=("near", "grasp"))
    message = (
        r"has no near, grasp of .* collect \.\.\. -- --data.info_keys \[near,grasp\]"
        r" --data.store_info true, or train without"
    )
    with pytest.raises(ConfigurationError, match=message):
        check_collection(collection, stored)
    with pytest.raises(ConfigurationError, match=r"has no cost of .* again in this benchmark"):
        check_collection(collection, spec._replace(info_fields=(Field("cost"),)))


def parts_of(columns, borders):
    """Return the columns in pieces that begin at the borders."""
    num_rows = len(columns["task"])
    edges = [0, *borders, num_rows]
    for first, end in itertools.pairwise(edges):
        yield {name: column[first:end] for name, column in columns.items()}


@pytest.mark.parametrize("seed", range(20))
def test_episodes_are_counted_across_the_borders_of_files(seed):
    spec = Scripted(3).spec
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 6, 12)
    tasks = generator.integers(0, 3, 12)
    columns = {
        "task": np.repeat(tasks, lengths),
        "episode": np.repeat(np.arange(12), lengths),
        "terminated": np.zeros(lengths.sum(), np.bool_),
        "truncated": np.zeros(lengths.sum(), np.bool_),
        "success": generator.random(lengths.sum()) < 0.2,
    }
    ends = np.cumsum(lengths)
    columns["truncated"][ends - 1] = True
    counts = _EpisodeCounts(spec)
    for part in parts_of(columns, sorted(generator.integers(0, lengths.sum(), 6))):
        counts.add(part)
    counts.check_end()
    succeeds = [columns["success"][columns["episode"] == k].any() for k in range(12)]
    for task in range(3):
        of_task = [k for k in range(12) if tasks[k] == task]
        assert counts.episodes_T[task] == len(of_task)
        assert counts.rows_T[task] == sum(lengths[k] for k in of_task)
        assert counts.successes_T[task] == sum(succeeds[k] for k in of_task)
        if of_task:
            assert counts.shortest_T[task] == min(lengths[k] for k in of_task)


def test_an_episode_keeps_its_task_across_the_border_of_two_files():
    counts = _EpisodeCounts(Scripted(3).spec)
    columns = {
        "task": np.array([0, 0, 1, 1]),
        "episode": np.zeros(4, np.int64),
        "terminated": np.array([False, False, False, True]),
        "truncated": np.zeros(4, np.bool_),
    }
    first, second = parts_of(columns, [2])
    counts.add(first)
    with pytest.raises(ValueError, match="an episode of it has several tasks"):
        counts.add(second)
