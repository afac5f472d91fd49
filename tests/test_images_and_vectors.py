"""Gymnasium tasks with images, alone or in a dictionary with vectors."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import TimeLimit, TransformObservation

from mtrl_lightning import SAC
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import GymnasiumTasks, MetaWorld, Pixels, VectorEnv
from mtrl_lightning.envs.benchmarks.images import channels_first
from mtrl_lightning.envs.benchmarks.wrappers import WithWrappers
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, MultiInput, PixelEncoder
from mtrl_lightning.networks.multi_input import image_of, state_of
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.rollout import Collector
from mtrl_lightning.transitions import transition_fields
from mtrl_lightning.updates.augmentation import RandomShift
from tests.helpers.algorithms import make_batch
from tests.helpers.specs import packed_spec

SIZE = 16
VECTOR = Box(-np.inf, np.inf, (3,), np.float64)


class Camera(gym.Env):
    """Random images and vectors."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def camera(*shape, vectors=1):
    image = Box(0, 255, shape, np.uint8)
    spaces = {f"joints_{i}": VECTOR for i in range(vectors)}
    return partial(wrapped, Dict({"image": image, **spaces}) if vectors else image)


def wrapped(space):
    return TimeLimit(Camera(space), 5)


def encoder(spec):
    return MultiInput(spec, channels=4, strides=(2, 1), out_dim=6)


@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "channels"),
    [((SIZE, SIZE), 1), ((SIZE, SIZE, 3), 3), ((3, SIZE, SIZE), 3), ((4, SIZE, SIZE, 3), 12)],
    ids=["grey", "last", "first", "stack"],
)
def test_parts_are_those_of_the_dictionary(shape, channels, vectors):
    make = camera(*shape, vectors=vectors)
    benchmark = GymnasiumTasks({"task": make})
    spec = benchmark.spec
    assert spec == type(spec).from_dict(spec.to_dict())
    observed, _ = benchmark.make_env(0, "train", 0).reset(seed=7)
    expected, _ = make().reset(seed=7)
    assert spec.observation_space.contains(observed) and spec.frame_stack == 1
    image = channels_first(expected["image"] if vectors else expected)
    if shape[-1] == 3:  # the color of a pixel is in the channels' order
        color = (expected["image"] if vectors else expected)[..., 2, 5, :]
        assert image[:, 2, 5].tolist() == color.ravel().tolist()
    if not vectors:
        assert observed.shape == (1, channels, SIZE, SIZE)
        np.testing.assert_array_equal(observed[0], image)
        return
    rows = torch.from_numpy(observed)[None]
    got = image_of(rows, 3 * vectors, (channels, SIZE, SIZE))[0, 0]
    np.testing.assert_array_equal(got, image)
    joints = np.concatenate([expected[f"joints_{i}"] for i in range(vectors)])
    np.testing.assert_array_equal(state_of(rows, 3 * vectors)[0], joints.astype(np.float32))


def test_features_are_those_of_image_and_standardized_vector():
    benchmark = GymnasiumTasks({"task": camera(SIZE, SIZE, 3)})
    spec = benchmark.spec
    env = benchmark.make_env(0, "train", 0)
    torch.manual_seed(0)
    both = encoder(spec)
    torch.manual_seed(0)
    image_space = Box(0, 255, (1, 3, SIZE, SIZE), np.uint8)
    alone = PixelEncoder(
        spec._replace(observation_space=image_space), channels=4, strides=(2, 1), out_dim=6
    )
    observation_BD = torch.from_numpy(np.stack([env.reset(seed=seed)[0] for seed in range(40)]))
    task_B = torch.zeros(40, dtype=torch.int64)
    assert both.observe(observation_BD, task_B)
    features_BZ = both(observation_BD, task_B)
    image_B = image_of(observation_BD, 3, (3, SIZE, SIZE))
    torch.testing.assert_close(features_BZ[:, :6], alone(image_B, task_B))
    state_B3 = state_of(observation_BD, 3)
    standardized = (state_B3 - state_B3.mean(0)) / state_B3.std(0, correction=0)
    torch.testing.assert_close(features_BZ[:, 6:], standardized)
    # the actor's projection is its own, and the vector passes it unchanged
    actor = both.make_actor(partial(MLP, width=8, depth=1), both.out_dim, 2, spec)
    shared_BF = both.shared_features(observation_BD, task_B)
    torch.testing.assert_close(actor.projection(shared_BF)[:, 6:], standardized)


def test_a_shift_moves_the_image_alone():
    algorithm = SAC(packed_spec(size=3), encoder=encoder, transforms=[RandomShift])
    batch = make_batch(algorithm.spec)
    before_RnD = batch.observation_RnD.clone()
    shifted = algorithm.transforms(batch).observation_RnD
    assert torch.equal(batch.observation_RnD, before_RnD)
    assert torch.equal(shifted[..., :12], before_RnD[..., :12])  # 3 numbers of 4 bytes
    assert not torch.equal(shifted, before_RnD)


class Counted(gym.Env):
    """The image shows the number of the step, the vector has it, and so has the reward."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)
    observation_space = Dict({"image": Box(0, 255, (SIZE, SIZE), np.uint8), "step": VECTOR})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(100))
        return self._observed(), {}

    def step(self, action):
        self.number += 1
        return self._observed(), float(self.number - 1), False, False, {}

    def _observed(self):
        image = np.full((SIZE, SIZE), self.number, np.uint8)
        return {"image": image, "step": np.full(3, self.number + 0.5)}


def test_the_replay_keeps_a_frame_once_and_returns_it():
    benchmark = GymnasiumTasks({"task": lambda: TimeLimit(Counted(), 5)})
    spec = benchmark.spec
    collector = Collector(VectorEnv(benchmark, [0], num_workers=0), UniformPolicy(spec))
    buffer = ReplayBuffer(spec, 40)
    for _ in range(60):
        buffer.add(collector.step("random")[0])
    batch = buffer.sample(64)
    for observation_RnD, offset in ((batch.observation_RnD, 0), (batch.next_observation_RnD, 1)):
        number_Rn = batch.reward_Rn + offset
        image_RnCHW = image_of(observation_RnD, 3, (1, SIZE, SIZE)).flatten(2)
        assert torch.equal(image_RnCHW.float(), number_Rn[..., None].expand(image_RnCHW.shape))
        assert torch.equal(state_of(observation_RnD, 3)[..., 2], number_Rn + 0.5)
    fields = transition_fields(spec)
    assert replay_bytes(spec, fields, 1, 100) < 0.7 * bytes_needed(fields, 100)


IMAGE = Box(0, 255, (SIZE, SIZE, 3), np.uint8)


@pytest.mark.parametrize(
    ("spaces", "word"),
    [
        ([Dict(a=IMAGE, b=Box(0, 255, (8, 8, 3), np.uint8), c=VECTOR)], "ResizeObservation"),
        ([Dict(a=IMAGE, c=VECTOR), Dict(a=IMAGE, c=Box(-1, 1, (4,)))], "differ"),
        ([Dict(a=IMAGE, c=Discrete(3))], "Discrete"),
        ([Discrete(3)], "FlattenObservation"),
        ([Box(0, 255, (4800,), np.uint8)], "multi_input"),
    ],
    ids=["sizes", "tasks", "discrete part", "discrete", "flat"],
)
def test_other_observations_are_refused(spaces, word):
    tasks = {f"task-{i}": partial(wrapped, space) for i, space in enumerate(spaces)}
    with pytest.raises(ConfigurationError, match=word):
        GymnasiumTasks(tasks)


def test_joined_images_and_changed_observations_have_no_parts():
    spec = GymnasiumTasks({"task": partial(wrapped, Dict(left=IMAGE, right=IMAGE))}).spec
    assert (spec.observation_space.shape, spec.observation_parts) == ((1, 6, SIZE, SIZE), ())
    benchmark = GymnasiumTasks({"task": camera(SIZE, SIZE, 3)})
    shorter = Box(0, 255, (1, 4), np.uint8)
    cut = partial(TransformObservation, func=lambda row: row[:, :4], observation_space=shorter)
    assert WithWrappers(benchmark, [cut]).spec.observation_parts == ()
    assert WithWrappers(benchmark, [partial(TimeLimit, max_episode_steps=3)]).spec.observation_parts


def test_metaworld_from_a_camera_and_the_arms_state():
    state = MetaWorld(tasks=["reach"], horizon=10)
    benchmark = Pixels(state, size=32, frame_stack=2, state=[0, 1, 2, 3])
    spec = benchmark.spec
    assert spec.observation_space.shape == (2, 16 + 3 * 32 * 32)
    env, plain = benchmark.make_env(0, "train", 0), state.make_env(0, "train", 0)
    env.reset(seed=3)
    plain.reset(seed=3)
    action = np.float32([0.5, -0.5, 0.3, 1.0])
    observed, expected = env.step(action)[0], plain.step(action)[0]
    hand = state_of(torch.from_numpy(observed)[None], 4)[0]
    np.testing.assert_array_equal(hand, expected[:4].astype(np.float32))
    assert image_of(torch.from_numpy(observed)[None], 4, (3, 32, 32)).float().std() > 10
    assert encoder(spec)(torch.from_numpy(observed)[None], torch.tensor([0])).shape == (1, 10)
