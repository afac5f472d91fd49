"""A collection on disk: written, read back, damaged, and compared with a benchmark."""

import json

import numpy as np
import pytest

from mtrl_lightning.demonstrations import check_collection, read_collection, write_collection
from mtrl_lightning.errors import ConfigurationError
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
        (change_file(lambda c: c["spec"].update(task_names=["only"])), "not from 0 to 0"),
        (change_file(lambda c: c["replay"].update(added=[9])), "list of replay files"),
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
