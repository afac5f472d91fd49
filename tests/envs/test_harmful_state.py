"""A state is data: what it says of types, shapes, places and indices is checked.

Each case reads or writes memory outside an array, or takes the machine's memory, if it is believed.
"""

import math

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

from mtrl_lightning.envs.state.codec import MAX_DEPTH, StateDecoder, check_bits
from mtrl_lightning.envs.state.simulator import ModelEdits, MujocoState, from_text, to_text
from mtrl_lightning.envs.state.state import EnvState
from mtrl_lightning.errors import ConfigurationError

POINTERS = to_text(np.arange(8, dtype=np.uint8))
NUMBERS = ["array", "<f8", [4], to_text(np.arange(4.0))]


def decode(state, present=None):
    return StateDecoder([], {}).decode(state, present, "attribute")


@pytest.mark.parametrize("dtype", ["|O", "O8", "<m8", "|V8", "(2,)f8", "f8,O", "int64, O", "no"])
def test_only_types_of_numbers_and_texts_are_read(dtype):
    for state in (
        ["array", dtype, [1], POINTERS],
        ["number", dtype, POINTERS],
        ["window", ["array", "<u8", [1], POINTERS], 0, dtype, [1], [8]],
    ):
        with pytest.raises(ValueError, match="no type of numbers"):
            decode(state)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, [5], [8]),
        (8, [4], [8]),
        (-8, [1], [8]),
        (0, [4], [-8]),
        (0, [2], [1 << 62]),
        (1 << 63, [1], [8]),
        (0, [-1], [8]),
        (0, [1 << 40], [0]),
        (0, [1 << 31, 1 << 31], [0, 0]),
        (0, [4], [8, 8]),
        (0, [1.0], [8]),
        (False, [1], [8]),
    ],
)
def test_a_window_stays_inside_its_array(offset, shape, strides):
    with pytest.raises(ValueError, match=r"\w"):
        decode(["window", NUMBERS, offset, "<f8", shape, strides])


def test_a_window_inside_its_array_is_read():
    window = decode(["window", NUMBERS, 24, "<f8", [2, 2], [-8, -16]])
    np.testing.assert_array_equal(window, [[3, 1], [2, 0]])


@pytest.mark.parametrize("base", [None, 3, "text", ["list", [1], None]])
def test_a_window_is_of_an_array(base):
    with pytest.raises(ValueError, match="of no array"):
        decode(["window", base, 0, "<f8", [1], [8]])


def test_booleans_are_0_or_1():
    assert from_text("\x00\x01", "|b1").tolist() == [False, True]
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        from_text("\x00\x02", "|b1")
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        decode(["window", NUMBERS, 0, "|b1", [32], [1]])


def test_containers_in_one_another_are_limited():
    state = 0
    for _ in range(MAX_DEPTH + 1):
        state = ["list", [state], None]
    with pytest.raises(ValueError, match="too many"):
        decode(state)


def test_values_are_limited(monkeypatch):
    monkeypatch.setattr("mtrl_lightning.envs.state.codec.MOST_VALUES", 1000)
    state = ["list", [0] * 9, None]
    for _ in range(3):
        state = ["list", [state] * 10, None]  # small in a file
    with pytest.raises(ValueError, match="too many"):
        decode(state)


@pytest.mark.parametrize("kind", ["attributes", "made", "", "_view", 3, None])
def test_a_kind_that_does_not_exist_is_refused(kind):
    with pytest.raises(ValueError, match="no kind of value"):
        decode([kind, []])


def test_a_property_is_not_run_to_find_out_that_it_is_no_method():
    class Owner:
        was_run = False

        def step(self):
            pass

        @property
        def model(self):
            Owner.was_run = True

    owner = Owner()
    decoder = StateDecoder([], {})
    assert decoder.decode(["method", "step"], None, "env.x", owner) == owner.step
    for name in ("model", "was_run", "none", 3):
        with pytest.raises((ValueError, AttributeError, TypeError)):
            decoder.decode(["method", name], None, "env.x", owner)
    assert not Owner.was_run


def test_a_method_is_a_method():
    class Owner:
        def step(self):
            pass

        def choose(self):
            return 3

    owner = Owner()
    owner.other = print
    decoder = StateDecoder([], {})
    assert decoder.decode(["method", "choose"], owner.step, "attribute", owner) == owner.choose
    for name in ("other", "__class__", "__init__subclass__"):
        with pytest.raises((ValueError, AttributeError)):
            decoder.decode(["method", name], owner.step, "attribute", owner)


@pytest.mark.parametrize("position", [-1, 625, 10**6, 10**30, 1.0, None, True])
def test_a_position_outside_a_generators_buffer_is_refused(position):
    legacy = list(np.random.RandomState(0).get_state(legacy=True))
    legacy[2] = position
    keys = ["array", "<u4", [624], to_text(legacy[1])]
    encoded = ["tuple", [legacy[0], keys, position, *legacy[3:]], None]
    with pytest.raises(ValueError, match="not in its buffer"):
        decode(["random_state", encoded])
    state = np.random.MT19937(0).state
    state["state"]["pos"] = position
    with pytest.raises(ValueError, match="not in its buffer"):
        check_bits(state)
    state = np.random.Philox(0).state
    state["buffer_pos"] = position
    with pytest.raises(ValueError, match="not in its buffer"):
        check_bits(state)


def test_every_generator_as_it_is_saved_is_accepted():
    for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        bits = getattr(np.random, kind)(3)
        np.random.Generator(bits).integers(9, size=5, dtype=np.int32)
        check_bits(bits.state)


def test_generators_that_an_environment_restores_itself_are_checked_before():
    state = np.random.MT19937(0).state
    key = ["array", "<u4", [624], to_text(state["state"]["key"])]
    inner = ["dict", "dict", [["key", key], ["pos", 10**6]]]
    with pytest.raises(ValueError, match="not in its buffer"):
        decode(["dict", "dict", [["bit_generator", "MT19937"], ["state", inner]]])


@pytest.mark.parametrize("pool", [1 << 40, 0, -4])
def test_the_pool_of_seeds_is_limited(pool):
    bits = np.random.PCG64(0)
    content = ["dict", "dict", [[k, v] for k, v in bits.state.items() if k != "state"]]
    inner = ["dict", "dict", [[k, v] for k, v in bits.state["state"].items()]]
    content[2].append(["state", inner])
    with pytest.raises(ValueError, match="pool"):
        decode(["generator", content, ["list", [0, ["tuple", [], None], pool, 0], None]])


@pytest.fixture
def cheetah():
    env = HalfCheetahEnv()
    env.reset(seed=0)
    yield env
    env.close()


INDICES = ["jnt_qposadr", "dof_jntid", "body_parentid", "geom_bodyid", "geom_type", "geom_condim"]


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_a_model_are_neither_saved_nor_restored(cheetah, name):
    edits = ModelEdits(cheetah.model)
    former = getattr(cheetah.model, name).copy()
    size = former.dtype.itemsize
    harmful = {"arrays": {name: [[0], to_text(np.array([1 << 20], f"i{size}"))]}, "options": {}}
    with pytest.raises(ConfigurationError, match=f"{name} was edited"):
        edits.set(harmful)
    np.testing.assert_array_equal(getattr(cheetah.model, name), former)
    getattr(cheetah.model, name)[0] += 1
    with pytest.raises(ConfigurationError, match=f"{name} was edited"):
        edits.get()


def test_a_float_that_mujoco_uses_as_an_index_is_not_restored():
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><site name="a"/><body pos="0 0 -1"><joint type="slide"/>
        <geom name="g" type="sphere" size=".1"/><site name="b"/></body></worldbody>
        <tendon><spatial><site site="a"/><geom geom="g"/><site site="b"/></spatial></tendon>
        </mujoco>"""
    )
    harmful = {"arrays": {"wrap_prm": [[1], to_text(np.array([1e9]))]}, "options": {}}
    with pytest.raises(ConfigurationError, match="wrap_prm"):
        ModelEdits(model).set(harmful)


def test_what_environments_edit_is_restored(cheetah):
    edits = ModelEdits(cheetah.model)
    cheetah.model.body_mass[2] *= 1.5
    cheetah.model.geom_friction[1, 0] = 0.3
    cheetah.model.geom_contype[2] = 4
    cheetah.model.opt.gravity[2] = -3.0
    cheetah.model.opt.integrator = mujoco.mjtIntegrator.mjINT_RK4
    saved = edits.get()
    edits.set({"arrays": {}, "options": {}})
    assert cheetah.model.opt.gravity[2] == -9.81 and cheetah.model.geom_contype[2] == 1
    edits.set(saved)
    assert edits.get() == saved
    assert cheetah.model.geom_contype[2] == 4 and cheetah.model.opt.integrator == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("integrator", 77),
        ("solver", -1),
        ("cone", 2),
        ("iterations", 1 << 30),
        ("disableflags", 1 << 40),
        ("sdf_initpoints", 1 << 30),
    ],
)
def test_options_that_mujoco_does_not_know_are_refused(cheetah, name, value):
    harmful = {"arrays": {}, "options": {name: ["<i8", [], to_text(np.array(value))]}}
    with pytest.raises(ConfigurationError, match=f"option {name} is {value}"):
        ModelEdits(cheetah.model).set(harmful)


@pytest.mark.parametrize("section", ["arrays", "options"])
def test_a_name_that_no_model_has_is_refused_before_anything_is_changed(cheetah, section):
    edits = ModelEdits(cheetah.model)
    harmful = {"arrays": {"body_mass": [[1], to_text(np.array([7.0]))]}, "options": {}}
    harmful[section]["opt"] = [[0], "\x00"] if section == "arrays" else ["<f8", [], "\x00" * 8]
    mass = cheetah.model.body_mass.copy()
    with pytest.raises(ConfigurationError, match="'opt'"):
        edits.set(harmful)
    np.testing.assert_array_equal(cheetah.model.body_mass, mass)


@pytest.mark.parametrize(
    "elements", [to_text(np.zeros(2)), to_text(np.zeros(0)), "abc", "\u2603" * 8]
)
def test_as_many_numbers_are_restored_as_places(cheetah, elements):
    with pytest.raises(ValueError, match=r"\w"):
        ModelEdits(cheetah.model).set({"arrays": {"body_mass": [[1], elements]}, "options": {}})


def test_a_simulations_indices_and_memory_of_the_solver_are_not_restored(cheetah):
    simulation = MujocoState(cheetah.model, cheetah.data)
    for name in ("efc_J", "D_rowadr", "mapM2D", "qLD_diag", "no_such_array"):
        state = simulation.get()
        state["computed"][name] = ["<f8", "\x00" * 8]
        with pytest.raises((ConfigurationError, ValueError), match=r"\w"):
            simulation.set(state)


@pytest.mark.parametrize("name", ["jnt_qposadr", "geom_type"])
def test_a_view_of_indices_cannot_be_written(cheetah, name):
    decoder = StateDecoder([cheetah.model, cheetah.data], {})
    array = getattr(cheetah.model, name)
    layout = [0, array.dtype.str, list(array.shape), list(array.strides)]
    view = decoder.decode(["view", 0, name, *layout], None, "attribute")
    np.testing.assert_array_equal(view, array)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_view_of_another_type_cannot_be_written(cheetah):
    decoder = StateDecoder([cheetah.model, cheetah.data], {})
    view = decoder.decode(["view", 1, "qpos", 0, "<i4", [2], [4]], None, "attribute")
    assert not view.flags.writeable
    view = decoder.decode(["view", 1, "qpos", 8, "<f8", [2], [8]], None, "attribute")
    view[0] = 0.25
    assert cheetah.data.qpos[1] == 0.25


@pytest.mark.parametrize("view", [[5, "qpos"], [0, "names"], [1, "model"], [-9, "qpos"]])
def test_a_view_is_of_an_array_of_the_simulation(cheetah, view):
    state = EnvState(cheetah)
    saved = state.get()
    saved[1][1]["made_up"] = ["view", *view, 0, "<f8", [1], [8]]
    with pytest.raises(ConfigurationError, match="cannot be restored"):
        state.set(saved)


class Counting(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.steps = 0

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = math.floor(state["steps"])


@pytest.mark.parametrize(
    "state",
    [None, [], [[]], [[], ["Counting", {}]], [[], ["Counting", {"steps": "x"}]], 7, {"a": 1}],
)
def test_whatever_is_damaged_gives_one_error_that_names_the_environment(state):
    with pytest.raises(
        ConfigurationError, match=r"Counting cannot be restored|of another environment"
    ):
        EnvState(Counting()).set(state)
