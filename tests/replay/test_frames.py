"""Single frames against a plain buffer of stacks: the same batches, draw by draw."""

from functools import partial

import numpy as np
import pytest

from mtrl_lightning.checkpoints import of_envs
from mtrl_lightning.envs import Pixels, ToyReach
from mtrl_lightning.envs.benchmarks.wrappers import WithWrappers
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import FrameStorage, ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.frame_columns import compressed, decompressed
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.replay.storage import RingStorage, bytes_needed
from mtrl_lightning.rollout.sample import concatenated
from mtrl_lightning.transitions import Transitions, transition_fields
from tests.helpers.replay import (
    TENSORS,
    assert_same_batch,
    assert_same_columns,
    make_snapshots,
    make_spec,
    newest,
)

STACK, PIXELS = 3, (2, 2)
TASKS = [0, 0, 1, 0]
"""Of the environments: one task has three, the other one."""
CAPACITY = 4 * 12
SPEC = make_spec(2, dtype=np.uint8, shape=(STACK, *PIXELS))._replace(frame_stack=STACK)


def steps_of(seed, longest=9, shades=256):
    """Yield transitions with stacked frames, of episodes of any length, and with faults.

    With two shades many frames are equal: scenes stand still, and episodes begin where the one
    before ended.
    """
    rng = np.random.default_rng(seed)
    pixels = PIXELS if shades > 2 else (1, 1)  # the latter are often equal by chance

    def frame():
        return np.broadcast_to(rng.integers(0, shades, pixels, np.uint8), PIXELS)

    def begin():
        return np.repeat(frame()[None], STACK, axis=0), int(rng.integers(1, longest + 1))

    running = [begin() for _ in TASKS]
    while True:
        rows = []
        for env, task in enumerate(TASKS):
            if rng.random() < 0.05:  # rebuilt: the transition never happened
                running[env] = begin()
                continue
            stack, left = running[env]
            successor, is_over = np.concatenate([stack[1:], frame()[None]]), left == 1
            ends = is_over and env % 2 == 0, is_over
            rows.append((stack, rng.uniform(-1, 1, 2), rng.normal(), successor, *ends, task, env))
            running[env] = begin() if is_over else (successor, left - 1)
        if rows:
            yield Transitions(*(np.array(column) for column in zip(*rows, strict=True)))


def make_buffer(horizon=None, seed=3, **options):
    """Make a buffer of frames for episodes of so many steps; None for one of stacks."""
    storage = RingStorage if horizon is None else partial(FrameStorage, horizon=horizon)
    return ReplayBuffer(SPEC, CAPACITY, seed, tasks=TASKS, storage=storage, **options)


@pytest.mark.parametrize(
    ("longest", "shades", "horizon", "chunk_rows", "save_last"),
    [
        (1, 256, 1, 4, None),
        (3, 2, 1, 1_000, None),
        (40, 2, 1, 17, None),
        (4, 256, 6, 17, None),
        (4, 2, 100, 4, None),
        (6, 2, 100, 17, 20),
    ],
)
def test_frames_give_the_batches_of_uninterrupted_stacks(
    tmp_path, longest, shades, horizon, chunk_rows, save_last
):
    """Saved, restored into fresh files, and continued; or in tensors.

    With a horizon of one step there is room for the frames of any episodes.
    """
    mapped = {"folder": tmp_path / "mapped"}
    mapped["folder"].mkdir()
    resumed, stacks = make_buffer(horizon, **mapped), make_buffer()
    uninterrupted = make_buffer(horizon, device=TENSORS)
    source = steps_of(longest, longest, shades)
    folder = tmp_path / "replay"
    snapshots = make_snapshots(folder, chunk_rows, save_last)
    shorter = 0
    for step in range(1, 61):
        transitions = next(source)
        for buffer in (resumed, uninterrupted, stacks):
            buffer.add(transitions)
        none = {name: column[:0] for name, column in transitions.columns().items()}
        uninterrupted.storage.add(none["env"], none)
        snapshots.write_full_chunk(resumed.storage)
        if step % 9 == 0 or step % 20 == 0:
            manifest = snapshots.save(resumed.storage)
        if step % 20 == 0:
            state = resumed.state_dict()
            resumed = make_buffer(horizon, seed=99, **mapped)
            snapshots = make_snapshots(folder, chunk_rows, save_last)
            snapshots.load(manifest, resumed.storage)
            resumed.load_state_dict(state)
        size_E, most_E = resumed.storage.size_E, stacks.storage.size_E
        shorter += (size_E < most_E).any()
        assert (size_E <= most_E).all()
        for ring in range(len(TASKS)):
            found, wanted = newest(resumed.storage, ring), newest(stacks.storage, ring)
            first = len(wanted["reward"]) - len(found["reward"])
            assert_same_columns(found, {name: rows[first:] for name, rows in wanted.items()})
        if save_last is None:
            assert size_E.tolist() == uninterrupted.storage.size_E.tolist()
            assert (size_E >= np.minimum(most_E, resumed.storage.guaranteed_size)).all()
            assert not resumed.storage.oldest_E.any()
        if save_last is None and step > 3:
            batch = resumed.sample(32)
            assert_same_batch(batch, uninterrupted.sample(32))
            if horizon == 1:
                assert_same_batch(batch, stacks.sample(32))
    assert not any(mapped["folder"].iterdir()), "the files have no names"
    assert shorter == 0 if horizon == 1 else shorter > 5
    assert stacks.storage.added_E.min() > 3 * stacks.storage.capacity, "every ring goes round"
    if horizon == 1:
        assert resumed.mean_rewards().tolist() == stacks.mean_rewards().tolist()


@pytest.mark.parametrize("horizon", [1, 4, 1_000])
def test_adding_many_rows_equals_adding_single_ones(horizon):
    """Also of more frames than fit."""
    source = steps_of(5, longest=2)
    steps = [next(source) for _ in range(48)]
    single = FrameStorage(transition_fields(SPEC), len(TASKS), 12, horizon=horizon)
    many = FrameStorage(transition_fields(SPEC), len(TASKS), 12, horizon=horizon)
    for first in range(0, 48, 12):
        some = steps[first : first + 12]
        for step in some:
            single.add(step.env_E, step.columns())
        columns = concatenated(some).columns()
        many.add(columns["env"], columns)
        assert many.size_E.tolist() == single.size_E.tolist()
        for ring in range(len(TASKS)):
            assert_same_columns(newest(many, ring), newest(single, ring))


def episode(num_steps):
    """Return the columns of an episode whose frames are all different, and its stacks."""
    frame_N = np.arange((num_steps + 1) * 4, dtype=np.uint8).reshape(-1, *PIXELS)
    padded = np.concatenate([frame_N[:1], frame_N[:1], frame_N])
    stack_N = np.stack([padded[i : i + STACK] for i in range(num_steps + 1)])
    columns = {
        "observation": stack_N[:-1],
        "next_observation": stack_N[1:],
        "action": np.zeros((num_steps, 2)),
        "reward": np.zeros(num_steps),
        "terminated": np.zeros(num_steps, bool),
    }
    return columns, stack_N


@pytest.mark.parametrize("horizon", [8, 10])
def test_no_frame_is_kept_twice_in_full_episodes(horizon):
    storage = FrameStorage(transition_fields(SPEC), 1, 30, horizon=horizon)
    columns, stack_N = episode(horizon)
    for number in range(7 * horizon):
        row = slice(number % horizon, number % horizon + 1)
        storage.add(np.zeros(1, np.int64), {name: column[row] for name, column in columns.items()})
        # it has room for a frame of each transition, one more of each episode, and one stack
        assert storage.size_E.tolist() == [min(30, number + 1)]
    rows = newest(storage, 0)
    assert np.array_equal(rows["observation"], np.concatenate([stack_N[:-1]] * 4)[-30:])
    assert np.array_equal(rows["next_observation"], np.concatenate([stack_N[1:]] * 4)[-30:])


def test_transitions_that_were_skipped_are_not_there():
    storage = FrameStorage(transition_fields(SPEC), 1, 12, horizon=12)
    storage.restore_from(np.array([5]))
    columns, stack_N = episode(3)
    storage.add(np.zeros(3, np.int64), columns)
    assert np.array_equal(newest(storage, 0)["observation"], stack_N[:-1])


def test_rings_move_to_other_processes_with_their_frames(tmp_path):
    whole = make_buffer(3)
    source = steps_of(3, longest=5)
    for _ in range(40):
        whole.add(next(source))
    manifest = make_snapshots(tmp_path, 9).save(whole.storage)
    rings = [[2, 0], [0, 1]]
    part = FrameStorage(transition_fields(SPEC), 2, 12, horizon=3)
    ReplaySnapshots(tmp_path, envs=[2, 0]).load(of_envs(manifest, [2, 0], 4), part)
    for was, now in rings:
        assert part.size_E[now] == whole.storage.size_E[was]
        assert_same_columns(newest(part, now), newest(whole.storage, was))
    step = next(source)
    while not {0, 2} <= set(step.env_E.tolist()):
        step = next(source)
    for was, now in rings:
        moved = {name: column[step.env_E == was] for name, column in step.columns().items()}
        part.add(np.array([now]), moved)
        assert newest(part, now)["observation"][-1].tolist() == moved["observation"][0].tolist()


def test_a_replay_of_another_layout_is_refused(tmp_path):
    buffer = make_buffer(1)
    buffer.add(next(steps_of(2)))
    snapshots = ReplaySnapshots(tmp_path)
    manifest = snapshots.save(buffer.storage)
    for other in (5, None):
        with pytest.raises(ConfigurationError, match="layout"):
            snapshots.load(manifest, make_buffer(other).storage)


def test_compression_is_lossless_and_small_for_still_scenes():
    frame_N = np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8), np.uint8)
    content = compressed(frame_N)
    assert np.array_equal(decompressed(content, frame_N.shape), frame_N)
    for number in (49, 51):
        with pytest.raises(ValueError, match="frames"):
            decompressed(content, (number, 3, 8, 8))
    still_N = frame_N[:1].repeat(50, axis=0)
    assert len(compressed(still_N)) < 2 * frame_N[0].size


def test_observations_that_are_no_stacks_are_refused():
    columns, _ = episode(3)
    columns["next_observation"] = columns["next_observation"][:, ::-1]
    storage = FrameStorage(transition_fields(SPEC), 1, 5, horizon=5)
    with pytest.raises(ConfigurationError, match="to 0"):
        storage.add(np.zeros(3, np.int64), columns)
    assert storage.size_E.tolist() == [0]


def test_a_million_frames_of_84_pixels_need_20_gib():
    shape = (3, 3, 84, 84)
    spec = make_spec(1, dtype=np.uint8, shape=shape)._replace(frame_stack=3, horizon=500)
    fields = transition_fields(spec)
    assert 19.7 < replay_bytes(spec, fields, 1, 1_000_000) / 2**30 < 19.9
    assert replay_bytes(spec._replace(frame_stack=0), fields, 1, 10) == bytes_needed(fields, 10)
    with pytest.raises(ConfigurationError, match="memory"):
        FrameStorage(fields, 1, 10**9, horizon=500)


def test_stacked_frames_are_kept_once_without_being_asked():
    pixels = Pixels(ToyReach(2, horizon=10), size=8)
    assert isinstance(ReplayBuffer(pixels.spec, 256).storage, FrameStorage)
    changed = WithWrappers(pixels, [lambda env: env])
    assert isinstance(ReplayBuffer(changed.spec, 10).storage, RingStorage)
    assert isinstance(ReplayBuffer(make_spec(1), 10).storage, RingStorage)
