"""Episodes as Minari data sets: read back as they were written, complete or absent."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning.demonstrations import RecordedEpisode, open_data_sets, write_data_sets
from tests.helpers.algorithms import make_spec
from tests.helpers.demonstrations import read_episodes
from tests.helpers.properties import given, settings, st

pytest.importorskip("minari")
pytest.importorskip("h5py")

FLOATS = st.sampled_from(["float32", "float64"])
OBSERVATIONS = st.one_of(
    st.tuples(st.sampled_from([(3,), (5,)]), FLOATS, st.none()),
    st.tuples(st.just((5,)), FLOATS, st.tuples(st.integers(1, 5), st.integers(1, 5))),
    # Minari takes uint8 of the last shape as an image
    st.tuples(st.sampled_from([(2, 4, 4), (3, 40, 40)]), st.just("uint8"), st.none()),
)
"""Shape, type, and sizes of the two tasks' own observations."""
COLUMNS = {
    "success": ((), "bool"),
    "policy_action": ((2,), "float32"),
    "cost": ((), "float64"),
    "grid": ((2, 3), "int64"),
}
"""Shape and type of columns of ``infos``."""
EPISODES = st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=4)
"""Length of each episode of a task, and whether it terminates."""


def random_rows(rng, num_rows, shape, dtype):
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=(num_rows, *shape)).astype(dtype)
    return rng.integers(0, 2 if dtype == "bool" else 256, (num_rows, *shape)).astype(dtype)


def random_episode(num_steps, terminates, shape=(4,), dtype="float32", reward="float32", infos=()):
    rng = np.random.default_rng(num_steps)
    is_last_N = np.arange(num_steps) == num_steps - 1
    return RecordedEpisode(
        random_rows(rng, num_steps + 1, shape, dtype),
        random_rows(rng, num_steps, (2,), "float32"),
        random_rows(rng, num_steps, (), reward),
        is_last_N & terminates,
        is_last_N & (not terminates),
        {name: random_rows(rng, num_steps, *COLUMNS[name]) for name in infos},
        int(rng.integers(2**31)),
    )


def assert_equal(found, expected):
    """Compare two episodes bit by bit."""
    assert found.seed == expected.seed and found.infos.keys() == expected.infos.keys()
    columns = [[*one[:5], *(one.infos[name] for name in found.infos)] for one in (found, expected)]
    for one, other in zip(*columns, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@settings(max_examples=20)
@given(OBSERVATIONS, FLOATS, st.sets(st.sampled_from([*COLUMNS])), st.tuples(EPISODES, EPISODES))
def test_episodes_are_read_as_they_were_written(observations, reward, infos, episodes):
    shape, dtype, sizes = observations
    limits = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
    spec = make_spec(3)._replace(observation_space=Box(*limits, shape, np.dtype(dtype).type))
    if sizes is not None:
        spec = spec._replace(observation_sizes=(*sizes, 5), action_sizes=(1, 2, 2))
    written = {
        name: [random_episode(*one, shape, dtype, reward, infos) for one in of_task]
        for name, of_task in zip(spec.task_names, episodes, strict=False)
    }
    facts = {"policy": "by hand", "attempts": {"task-0": 3}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "new" / "sets"
        write_data_sets(folder, spec, {**written, spec.task_names[2]: []}, facts)
        data_sets = open_data_sets(folder)
        assert data_sets.keys() == written.keys(), "a task without an episode has no data set"
        assert [path.name for path in folder.parent.iterdir()] == ["sets"]
        for task, (name, data_set) in enumerate(data_sets.items()):
            assert data_set.spec == spec and facts.items() <= data_set.facts.items()
            assert data_set.facts["versions"]["numpy"] == np.__version__
            assert data_set.lengths == [one.num_steps for one in written[name]]
            size, action_size = (spec.shape_of(kind, task)[0] for kind in ("observation", "action"))
            shapes = {info: COLUMNS[info][0] for info in infos}
            shapes |= {"policy_action": (action_size,)} if "policy_action" in infos else {}
            assert data_set.info_shapes == shapes
            for found, expected in zip(data_set.episodes(), written[name], strict=True):
                if "policy_action" in infos:
                    expected.infos["policy_action"] = expected.infos["policy_action"][
                        :, :action_size
                    ]
                observations = expected.observations[:, :size]
                actions = expected.actions[:, :action_size]
                assert_equal(found, expected._replace(observations=observations, actions=actions))


NAMES = ("walk 0.5", "walk_0_5", "walk")
SPEC = make_spec(3)._replace(task_names=NAMES)
EPISODE_OF = {name: [random_episode(number, True)] for number, name in enumerate(NAMES, 1)}


def test_equal_minari_names_get_separate_data_sets(tmp_path):
    write_data_sets(tmp_path / "sets", SPEC, EPISODE_OF, {})
    folders = {path.name for path in (tmp_path / "sets").iterdir()}
    assert folders == {"walk_0_5-v0", "walk_0_5-v1", "walk-v0"}
    for name, (episode,) in read_episodes(tmp_path / "sets").items():
        assert_equal(episode, EPISODE_OF[name][0])


def test_nothing_is_left_of_an_unfinished_write(tmp_path):
    with pytest.raises(AttributeError):
        write_data_sets(tmp_path / "new", SPEC, {**EPISODE_OF, NAMES[2]: [None]}, {})
    assert list(tmp_path.iterdir()) == []
