"""A storage of single frames, from which stacks are built when sampled, instead of ``RingStorage``.

It shows what another way of storing observations takes: this class, and nothing else.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.memory import CPU
from mtrl_lightning.replay import FrameStorage, ReplayBuffer
from mtrl_lightning.replay.storage import RingStorage, Storage
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.types import Transitions
from tests.replay import assert_same_batch, assert_same_columns, make_snapshots, make_spec, newest

STACK, PIXELS = 3, (2, 2)
TASKS = [0, 0, 1, 0]
"""Of the environments: one task has three, the other one."""
CAPACITY = 4 * 12


class NaiveFrames(Storage):
    """Keep each frame once; an observation is a stack of the ``STACK`` newest frames of an episode.

    At the beginning of an episode the first frame is repeated. A transition that does not continue
    the one before (a new episode, a rebuilt environment, transitions that were not restored) begins
    a new run of frames. If frames run out before transitions do, the oldest transitions are given
    up: ``size_E`` is smaller.

    Args:
        fields: the schema of a transition; observations are stacks.
        num_envs: number of rings, ``E``.
        capacity: transitions in a ring, ``C``.
        folder: not used.
        device: not used.
        num_frames: frames in a ring, ``F``; None for as many as could ever be needed.
    """

    def __init__(self, fields, num_envs, capacity, folder=None, device=CPU, num_frames=None):
        super().__init__(fields, num_envs, capacity)
        by_name = {field.name: field for field in fields}
        stack = by_name.pop("observation")
        del by_name["next_observation"]
        self._num_frames = (STACK + 1) * capacity if num_frames is None else num_frames
        self._frame_EF = np.zeros((num_envs, self._num_frames, *stack.shape[1:]), stack.dtype)
        self._frames_added_E = np.zeros(num_envs, np.int64)
        self._newest_EC = np.zeros((num_envs, capacity), np.int64)
        """Number of the newest frame of a transition's observation; its successor's is the next."""
        self._before_EC = np.zeros((num_envs, capacity), np.int64)
        """How many frames before that one belong to the observation."""
        self._first_E = np.zeros(num_envs, np.int64)
        """Transitions with smaller numbers have lost frames."""
        self._rest = RingStorage(tuple(by_name.values()), num_envs, capacity)

    @property
    def device(self):
        return CPU

    @property
    def size_E(self):
        return np.minimum(super().size_E, self.added_E - self._first_E)

    def restore_from(self, first_E):
        super().restore_from(first_E)
        self._rest.restore_from(first_E)

    def add(self, env_N, columns):
        stacks_N = np.asarray(columns["observation"])
        next_stacks_N = np.asarray(columns["next_observation"])
        for env, stack, next_stack in zip(env_N, stacks_N, next_stacks_N, strict=True):
            assert np.array_equal(stack[1:], next_stack[:-1]), "observations have to be stacks"
            self._add_frames(env, stack, next_stack)
            self.added_E[env] += 1
            self._forget_lost(env)
        self._rest.add(env_N, {field.name: columns[field.name] for field in self._rest.fields})

    def _add_frames(self, env, stack, next_stack):
        frames = [next_stack[-1]]
        before = self._frames_before_successor(env, stack)
        if before is None:
            begin = without_repeated_beginning(stack)
            before = len(begin) - 1
            frames = [*begin, *frames]
        for frame in frames:
            self._frame_EF[env, self._frames_added_E[env] % self._num_frames] = frame
            self._frames_added_E[env] += 1
        place = self.added_E[env] % self.capacity
        self._newest_EC[env, place] = self._frames_added_E[env] - 2
        self._before_EC[env, place] = before

    def _frames_before_successor(self, env, stack):
        """Return how many frames before its newest one an observation shares with the former
        transition, whose successor it is; None if it is not."""
        if self._frames_added_E[env] == 0:
            return None
        place = (self.added_E[env] - 1) % self.capacity
        newest = self._frames_added_E[env] - 1
        before = min(self._before_EC[env, place] + 1, STACK - 1)
        follows = np.array_equal(self._stacks(env, newest, before), stack)
        return before if follows else None

    def _forget_lost(self, env):
        kept_from = self._frames_added_E[env] - self._num_frames
        first = max(self._first_E[env], self.added_E[env] - self.capacity)
        while first < self.added_E[env]:
            place = first % self.capacity
            if self._newest_EC[env, place] - self._before_EC[env, place] >= kept_from:
                break
            first += 1
        self._first_E[env] = first

    def _stacks(self, env_N, newest_N, before_N):
        back_S = np.arange(STACK - 1, -1, -1)
        number_NS = np.expand_dims(newest_N, -1) - np.minimum(back_S, np.expand_dims(before_N, -1))
        return self._frame_EF[np.expand_dims(env_N, -1), number_NS % self._num_frames]

    def take(self, env_N, number_N):
        env, place = env_N.numpy(), number_N.numpy() % self.capacity
        newest, before = self._newest_EC[env, place], self._before_EC[env, place]
        next_before = np.minimum(before + 1, STACK - 1)
        stacks = {
            "observation": torch.from_numpy(self._stacks(env, newest, before)),
            "next_observation": torch.from_numpy(self._stacks(env, newest + 1, next_before)),
        }
        columns = stacks | self._rest.take(env_N, number_N)
        return {field.name: columns[field.name] for field in self.fields}


def without_repeated_beginning(stack):
    first = 0
    while first < STACK - 1 and np.array_equal(stack[first], stack[first + 1]):
        first += 1
    return stack[first:]


class Stacks:
    """An endless source of transitions with stacked frames, episodes of any length, and faults."""

    def __init__(self, seed=0, longest=9):
        self._generator = np.random.default_rng(seed)
        self._longest = longest
        self._stacks = [self._reset() for _ in TASKS]
        self._left = [self._length() for _ in TASKS]
        self.episodes = [1] * len(TASKS)

    def _frame(self):
        return self._generator.integers(0, 256, PIXELS, np.uint8)

    def _reset(self):
        return np.repeat(self._frame()[None], STACK, axis=0)

    def _length(self):
        return int(self._generator.integers(1, self._longest + 1))

    def step(self):
        """Make a transition in every environment but those that are rebuilt."""
        rows = []
        for env, task in enumerate(TASKS):
            if self._generator.random() < 0.05:  # rebuilt: the transition never happened
                self._begin(env)
                continue
            successor = np.concatenate([self._stacks[env][1:], self._frame()[None]])
            self._left[env] -= 1
            is_over = self._left[env] == 0
            terminated = is_over and env % 2 == 0
            action, reward = self._generator.uniform(-1, 1, 2), self._generator.normal()
            stack = self._stacks[env]
            rows.append((stack, action, reward, successor, terminated, is_over, task, env))
            self._stacks[env] = successor
            if is_over:
                self._begin(env)
        if not rows:
            return self.step()
        return Transitions(*(np.array(column) for column in zip(*rows, strict=True)))

    def _begin(self, env):
        self._stacks[env] = self._reset()
        self._left[env] = self._length()
        self.episodes[env] += 1


SPEC = make_spec(2, dtype=np.uint8, shape=(STACK, *PIXELS))


def make_buffer(storage, seed=3):
    return ReplayBuffer(SPEC, CAPACITY, seed, tasks=TASKS, storage=storage)


def sizes(buffer):
    return buffer.storage.size_E.tolist()


@pytest.mark.parametrize("longest", [1, 2, 3, 9, 40])
def test_batches_from_single_frames_are_those_from_stacks(longest):
    frames, stacks = make_buffer(FrameStorage), make_buffer(RingStorage)
    source = Stacks(longest, longest)
    for _ in range(5 * 12):
        transitions = source.step()
        for buffer in (frames, stacks):
            buffer.add(transitions)
        assert sizes(frames) == sizes(stacks)
        if (stacks.storage.size_E[[0, 2]] > 0).all():
            for _ in range(3):
                assert_same_batch(frames.sample(32), stacks.sample(32))
    assert stacks.storage.added_E.min() > 3 * stacks.storage.capacity, "every ring goes round"
    assert frames.mean_rewards().tolist() == stacks.mean_rewards().tolist()


def test_an_episode_takes_one_frame_more_than_it_has_steps():
    storage = FrameStorage(transition_fields(SPEC), 1, 50)
    frame_N = np.arange(12 * 4, dtype=np.uint8).reshape(12, *PIXELS)
    padded = np.concatenate([frame_N[:1], frame_N[:1], frame_N])
    stack_N = np.stack([padded[i : i + STACK] for i in range(12)])
    columns = {
        "observation": stack_N[:-1],
        "next_observation": stack_N[1:],
        "action": np.zeros((11, 2)),
        "reward": np.zeros(11),
        "terminated": np.zeros(11, bool),
    }
    storage.add(np.zeros(11, np.int64), columns)
    assert storage._frames_added_E.tolist() == [12]
    storage.add(np.zeros(11, np.int64), columns)
    assert storage._frames_added_E.tolist() == [24], "the next episode begins with its own frame"
    rows = newest(storage, 0)
    assert np.array_equal(rows["observation"], np.concatenate([stack_N[:-1]] * 2))
    assert np.array_equal(rows["next_observation"], np.concatenate([stack_N[1:]] * 2))


@pytest.mark.parametrize("num_frames", [4, 7, 13, 20])
def test_transitions_whose_frames_are_gone_are_not_sampled_and_the_others_are_whole(num_frames):
    few = make_buffer(partial(FrameStorage, num_frames=num_frames))
    stacks = make_buffer(RingStorage)
    source = Stacks(1, longest=4)
    shorter = 0
    for _ in range(60):
        transitions = source.step()
        for buffer in (few, stacks):
            buffer.add(transitions)
        assert (few.storage.size_E <= stacks.storage.size_E).all()
        assert (few.storage.size_E[stacks.storage.size_E > 0] > 0).all()
        shorter += (few.storage.size_E < stacks.storage.size_E).any()
        for ring in range(len(TASKS)):
            found = newest(few.storage, ring)
            size = len(found["reward"])
            wanted = newest(stacks.storage, ring)
            first = len(wanted["reward"]) - size
            assert_same_columns(found, {name: rows[first:] for name, rows in wanted.items()})
    assert shorter > 10
    assert len(few.sample(64).reward_B) == 64


@pytest.mark.parametrize("save_last", [None, 20])
@pytest.mark.parametrize("chunk_rows", [4, 17, 1_000])
@pytest.mark.parametrize("source", ["frames", "stacks"])
def test_saves_are_read_by_both_storages_and_continue_with_the_same_batches(
    tmp_path, chunk_rows, save_last, source
):
    """Saved, restored into fresh storages of either kind, and continued, over and over."""
    kinds = {"frames": FrameStorage, "stacks": RingStorage}
    buffers = {name: make_buffer(kind) for name, kind in kinds.items()}
    stepped = Stacks(7, longest=6)
    snapshots = make_snapshots(tmp_path, chunk_rows, save_last)
    for step in range(1, 91):
        transitions = stepped.step()
        for buffer in buffers.values():
            buffer.add(transitions)
        snapshots.write_ahead(buffers[source].storage)
        if step % 9 == 0:
            manifest = snapshots.save(buffers[source].storage)
            state = buffers[source].state_dict()
        if step % 20 == 0:
            manifest = snapshots.save(buffers[source].storage)
            state = buffers[source].state_dict()
            buffers = {name: make_buffer(kind, seed=99) for name, kind in kinds.items()}
            snapshots = make_snapshots(tmp_path, chunk_rows, save_last)
            for buffer in buffers.values():
                snapshots.load(manifest, buffer.storage)
                buffer.load_state_dict(state)
        assert sizes(buffers["frames"]) == sizes(buffers["stacks"])
        if step > 3:
            assert_same_batch(buffers["frames"].sample(32), buffers["stacks"].sample(32))
    assert min(len(buffer) for buffer in buffers.values()) > 20
