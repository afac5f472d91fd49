"""MetaWorld's environments with less Python overhead and bit-identical results.

Each class derives from MetaWorld's class of a task and overrides the methods that all tasks share.
A task's own methods, such as its reward, are MetaWorld's, with the faster functions of
``arithmetic`` as globals. While observation and reward are computed, ``data`` is a view of the
simulation that looks up each name once. MetaWorld's own classes and modules are not modified.
"""

from __future__ import annotations

import math
import struct
import sys
import types
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.fast.arithmetic import length, long_tail, replacements
from mtrl_lightning.envs.fast.metaworld_models import new_model
from mtrl_lightning.envs.render.renderer import check_drawable
from mtrl_lightning.errors import import_optional

Upstream: Any = object
"""MetaWorld's class of a task, which becomes the base class of ours in ``fast_class``."""

CHECKED = {"metaworld": ("3.1.1",), "mujoco": ("3.3.0",)}
"""Versions against which this file's environments were verified, observation by observation."""
CHECK_TASK = "pick-place-v3"
"""The task whose steps are compared with MetaWorld's own on first use in a process."""
CHECK_STEPS = 20
VIEWS = "_metaworld_views"
"""The attribute added to MetaWorld's attributes."""
EVALUATING = (
    "evaluate_state",
    "compute_reward",
    "_get_pos_objects",
    "_get_quat_objects",
    "_gripper_caging_reward",
    "_reward_quat",
    "_reward_pos",
    "_reward_grab_effort",
    "_stick_is_inserted",
)
"""Methods of a task that read the simulation at every step."""
DOWN = (1.0, 0.0, 1.0, 0.0)
"""The hand's orientation."""
SINGLE = np.dtype(np.float32)
THREE_SINGLES = struct.Struct("3f")
TWO_DOUBLES = struct.Struct("2d")
THREE_DOUBLES = struct.Struct("3d")
FOUR_DOUBLES = struct.Struct("4d")
FRAME = struct.Struct("18d")
"""A frame: hand (3), gripper (1), and objects' positions and orientations (14)."""
NO_SECOND_OBJECT = (0.0,) * 7

FIRST_RESET_MATTERS = ("SawyerPushEnvV3", "SawyerPushBackEnvV3")
"""Tasks whose second reset of the model depends on the simulation of the first."""


@cache
def steps_like_upstream() -> bool:
    """Return whether the steps of a task equal MetaWorld's own, bit for bit, in this process.

    NumPy's arithmetic differs between versions and machines.
    """
    kind = import_optional("metaworld", "metaworld").ALL_V3_ENVIRONMENTS[CHECK_TASK]
    upstream = kind()
    try:
        ours = _some_steps(fast_class(kind)())
    except Exception:  # anything may happen with other versions of Python
        return False
    return ours == _some_steps(upstream)


def _some_steps(env: Any) -> list[tuple[bytes, Any, dict[str, Any]]]:
    """Return observations, rewards and infos of the first steps with given actions."""
    env._set_task_called = True
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env.seed(0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (CHECK_STEPS, 4)).astype(np.float32)
    steps = [env.step(action) for action in actions]
    env.close()
    return [(observation.tobytes(), reward, info) for observation, reward, _, _, info in steps]


class _CachedViews:
    """A body, site, geom or joint with cached views of the simulation's memory."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._element, name)
        self.__dict__[name] = value
        return value


class _SimulationViews:
    """The simulation's data with cached views, for tasks that only read it."""

    def __init__(self, data: Any) -> None:
        import mujoco

        self.mujoco = mujoco
        self._data = data
        self.body = cache(lambda name: _CachedViews(data.body(name)))
        self.site = cache(lambda name: _CachedViews(data.site(name)))
        self.geom = cache(lambda name: _CachedViews(data.geom(name)))
        self.joint = cache(lambda name: _CachedViews(data.joint(name)))
        self.hand = data.body("hand").xpos
        self.claws = data.body("rightclaw").xpos, data.body("leftclaw").xpos
        self.fingers = data.site("rightEndEffector").xpos, data.site("leftEndEffector").xpos
        self.pads = data.body("leftpad").xpos, data.body("rightpad").xpos
        self.pad_geoms = data.geom("leftpad_geom").id, data.geom("rightpad_geom").id
        self._reach = cache(self._reach_of)
        self.mocap_pos = data.mocap_pos[0]
        self.mocap_quat = data.mocap_quat[0]
        self.ctrl = data.ctrl
        self.center: npt.NDArray | None = None
        """The center between the fingers, cached after its first use in a step."""
        self.hamacher_product = replacements()["reward_utils"].hamacher_product
        self.single = cache(lambda number: float(np.float32(number)))
        self.still = False
        """Whether simulation is disabled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def is_near_pad(self, geom_id: int) -> bool:
        """Return whether a geom and the left pad can be in contact: their spheres overlap."""
        place, pad, distance = self._reach(geom_id)
        return math.dist(place.tolist(), pad.tolist()) < distance

    def _reach_of(self, geom_id: int) -> tuple[npt.NDArray, npt.NDArray, float]:
        """Return the positions of a geom and the left pad, and their maximum contact distance."""
        data = self._data
        pad_id = self.pad_geoms[0]
        both = [geom_id, pad_id]
        radii = data.model.geom_rbound[both]
        reach = radii.sum() + data.model.geom_margin[both].sum()
        return data.geom_xpos[geom_id], data.geom_xpos[pad_id], 1.01 * float(reach)


class _FastSawyer(Upstream):
    """Code of all tasks, preceding MetaWorld's class of a task in the method resolution order."""

    data: Any
    """MuJoCo's data; during a step, cached views of it."""
    is_drawable = False
    """Whether its model has the textures and meshes that rendering needs."""

    def _initialize_simulation(self) -> tuple[Any, Any]:
        import mujoco

        model = new_model(self.fullpath, self.is_drawable)
        screen = model.vis.global_
        screen.offwidth = max(screen.offwidth, self.width)
        screen.offheight = max(screen.offheight, self.height)
        data = mujoco.MjData(model)
        setattr(self, VIEWS, _SimulationViews(data))
        return model, data

    def render(self) -> Any:
        check_drawable(self)
        return super().render()

    def step(self, action: Any) -> tuple[npt.NDArray[np.float64], Any, bool, bool, dict[str, Any]]:
        if not self._set_task_called or self._did_see_sim_exception:
            return super().step(action)
        assert len(action) == 4, f"Actions should be size 4, got {len(action)}"
        self.set_xyz_action(action[:3])
        if self.curr_path_length >= self.max_path_length:
            raise ValueError("You must reset the env manually once truncate==True")
        views = self._metaworld_views
        model = self.model
        data = self.data
        mujoco = views.mujoco
        closing = action[-1]
        TWO_DOUBLES.pack_into(views.ctrl, 0, closing, -closing)
        mujoco.mj_step(model, data, self.frame_skip)
        mujoco.mj_rnePostConstraint(model, data)
        self.curr_path_length += 1
        mujoco.mj_forward(model, data)
        space = self.sawyer_observation_space
        self.data = views
        try:
            observation = self._get_obs()
            np.maximum(observation, space.low, out=observation)
            np.minimum(observation, space.high, out=observation)
            self._last_stable_obs = observation
            reward, info = self.evaluate_state(observation, action)
        finally:
            self.data = data
            views.center = None
        return (
            observation.copy(),
            reward,
            False,
            self.curr_path_length == self.max_path_length,
            info,
        )

    def set_xyz_action(self, action: Any) -> None:
        if type(action) is not np.ndarray or action.dtype != SINGLE:
            return super().set_xyz_action(action)
        views = self._metaworld_views
        scale = views.single(self.action_scale)
        x, y, z = action.tolist()
        # rounded to single precision, like NumPy's product
        moves = THREE_SINGLES.pack(
            scale * (-1.0 if x < -1 else 1.0 if x > 1 else x),
            scale * (-1.0 if y < -1 else 1.0 if y > 1 else y),
            scale * (-1.0 if z < -1 else 1.0 if z > 1 else z),
        )
        move_x, move_y, move_z = THREE_SINGLES.unpack(moves)
        low_x, low_y, low_z = self.mocap_low.tolist()
        high_x, high_y, high_z = self.mocap_high.tolist()
        x, y, z = views.mocap_pos.tolist()
        x += move_x
        y += move_y
        z += move_z
        THREE_DOUBLES.pack_into(
            views.mocap_pos,
            0,
            low_x if x < low_x else high_x if x > high_x else x,
            low_y if y < low_y else high_y if y > high_y else y,
            low_z if z < low_z else high_z if z > high_z else z,
        )
        FOUR_DOUBLES.pack_into(views.mocap_quat, 0, *DOWN)

    def reset(
        self, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Reset the model twice like MetaWorld, the first time without simulating."""
        from gymnasium.envs.mujoco import MujocoEnv

        views = self._metaworld_views
        self.curr_path_length = 0
        views.still = type(self).__name__ not in FIRST_RESET_MATTERS
        try:
            self.reset_model()
        finally:
            views.still = False
        observation, info = MujocoEnv.reset(self)
        self._prev_obs = observation[:18].copy()
        observation[18:36] = self._prev_obs
        return observation.astype(np.float64), info

    def do_simulation(self, ctrl: Any, n_frames: int) -> None:
        if not self._metaworld_views.still:
            super().do_simulation(ctrl, n_frames)

    def _reset_hand(self, steps: int = 50) -> None:
        views = self._metaworld_views
        views.mocap_pos[:] = self.hand_init_pos
        views.mocap_quat[:] = DOWN
        if not views.still:
            views.ctrl[:] = -1.0, 1.0
            views.mujoco.mj_step(self.model, self.data, steps * self.frame_skip)
            views.mujoco.mj_rnePostConstraint(self.model, self.data)
        self.init_tcp = self.tcp_center

    def get_body_com(self, body_name: str) -> npt.NDArray[Any]:
        return self._metaworld_views.body(body_name).xpos

    def _get_site_pos(self, site_name: str) -> npt.NDArray[np.float64]:
        return self._metaworld_views.site(site_name).xpos.copy()

    @property
    def tcp_center(self) -> npt.NDArray[Any]:
        views = self._metaworld_views
        if views.center is not None:
            return views.center
        right, left = views.fingers
        x, y, z = right.tolist()
        left_x, left_y, left_z = left.tolist()
        center = np.array(((x + left_x) / 2.0, (y + left_y) / 2.0, (z + left_z) / 2.0))
        if self.data is views:
            views.center = center
        return center

    def _get_obs(self) -> npt.NDArray[np.float64]:
        goal = self._target_pos
        assert isinstance(goal, np.ndarray) and goal.ndim == 1
        if self._partially_observable:
            goal = np.zeros_like(goal)
        current = self._get_curr_obs_combined_no_goal()
        observation = np.empty(39)
        observation[:18] = current
        observation[18:36] = self._prev_obs
        observation[36:] = goal
        self._prev_obs = current
        return observation

    def _get_curr_obs_combined_no_goal(self) -> npt.NDArray[np.float64]:
        position = self._get_pos_objects().tolist()
        turn = self._get_quat_objects().tolist()
        if len(position) == 3 and len(turn) == 4:
            objects = (*position, *turn, *NO_SECOND_OBJECT)
        else:
            objects = (*position[:3], *turn[:4], *position[3:], *turn[4:])
        views = self._metaworld_views
        right, left = views.claws
        between = right - left
        apart = math.sqrt(between.dot(between)) / 0.1
        frame: Any = np.empty(18)
        x, y, z = views.hand.tolist()
        FRAME.pack_into(frame, 0, x, y, z, 1.0 if apart > 1.0 else apart, *objects)
        return frame

    def touching_object(self, object_geom_id: int) -> bool:
        views = self._metaworld_views
        if not views.is_near_pad(object_geom_id):
            return False
        contacts = self.data.contact
        left_pad, right_pad = views.pad_geoms
        left: list[int] = []
        right: list[int] = []
        for contact, pair in enumerate(contacts.geom.tolist()):
            if object_geom_id in pair:
                if left_pad in pair:
                    left.append(contact)
                elif right_pad in pair:
                    right.append(contact)
        if not (left and right):
            return False
        address = contacts.efc_address
        force = self.data.efc_force
        of_left, of_right = [sum([force[address[i]] for i in one]) for one in (left, right)]
        return of_left > 0 and of_right > 0

    def _gripper_caging_reward(
        self,
        action: Any,
        obj_pos: npt.NDArray[Any],
        obj_radius: float,
        pad_success_thresh: float,
        object_reach_radius: float,
        xz_thresh: float,
        desired_gripper_effort: float = 1.0,
        high_density: bool = False,
        medium_density: bool = False,
    ) -> Any:
        views = self._metaworld_views
        x, y, z = obj_pos.tolist()
        start_x, start_y, start_z = self.obj_init_pos.tolist()
        tcp_x, tcp_y, tcp_z = self.tcp_center.tolist()
        init_x, init_y, init_z = self.init_tcp.tolist()
        left, right = (pad.item(1) for pad in views.pads)
        left_margin = abs(abs(left - start_y) - pad_success_thresh)
        right_margin = abs(abs(right - start_y) - pad_success_thresh)
        xz_margin = length(start_x - init_x, start_z - init_z) - xz_thresh
        caging_y = views.hamacher_product(
            long_tail(abs(left - y), obj_radius, pad_success_thresh, left_margin),
            long_tail(abs(right - y), obj_radius, pad_success_thresh, right_margin),
        )
        caging_xz = long_tail(length(tcp_x - x, tcp_z - z), 0, xz_thresh, xz_margin)
        caging = views.hamacher_product(caging_y, caging_xz)
        closed = min(max(0, action[-1]), desired_gripper_effort) / desired_gripper_effort
        reward = views.hamacher_product(caging, closed if caging > 0.97 else 0.0)
        if high_density:
            reward = (reward + caging) / 2
        if medium_density:
            margin = length(start_x - init_x, start_y - init_y, start_z - init_z)
            reach = long_tail(
                length(x - tcp_x, y - tcp_y, z - tcp_z),
                0,
                object_reach_radius,
                abs(margin - object_reach_radius),
            )
            reward = (reward + reach) / 2
        return reward


def _pick_place_caging(
    self: Any, action: Any, obj_pos: npt.NDArray[Any], *_: Any, **__: Any
) -> Any:
    """``_gripper_caging_reward`` of pick-place, which ignores all further arguments."""
    views = self._metaworld_views
    x, y, z = obj_pos.tolist()
    start_x, _, start_z = self.obj_init_pos.tolist()
    tcp_x, _, tcp_z = self.tcp_center.tolist()
    init_x, _, init_z = self.init_tcp.tolist()
    left, right = (pad.item(1) for pad in views.pads)
    left_margin = abs(abs(y - self.init_left_pad.item(1)) - 0.05)
    right_margin = abs(abs(y - self.init_right_pad.item(1)) - 0.05)
    xz_margin = length(start_x - init_x, 0.0, start_z - init_z) - 0.005
    caging_y = views.hamacher_product(
        long_tail(left - y, 0.015, 0.05, left_margin),
        long_tail(y - right, 0.015, 0.05, right_margin),
    )
    caging_xz = long_tail(length(tcp_x - x, 0.0, tcp_z - z), 0, 0.005, xz_margin)
    caging = views.hamacher_product(caging_y, caging_xz)
    closed = min(max(0, action[-1]), 1)
    return (views.hamacher_product(caging, closed if caging > 0.97 else 0.0) + caging) / 2


@cache
def fast_class(task_class: type, is_drawable: bool = False) -> type:
    """Return a fast subclass of MetaWorld's class of a task, with equal behavior.

    Args:
        task_class: MetaWorld's class.
        is_drawable: whether its environments can be rendered, which takes more memory.
    """
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

    members: dict[str, Any] = {
        name: getattr(task_class, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    members["is_drawable"] = is_drawable
    kinds = task_class.__mro__
    scopes: dict[str, dict[str, Any]] = {}
    for kind in reversed(kinds[: kinds.index(SawyerXYZEnv)]):
        names = vars(sys.modules[kind.__module__])
        cheaper = {name: new for name, new in replacements().items() if name in names}
        scope = scopes[kind.__name__] = {**names, **cheaper}
        for name, value in vars(kind).items():
            if name in EVALUATING:
                members[name] = _with_globals(value, scope)
            elif name in vars(_FastSawyer) and not name.startswith("__"):
                members[name] = value
    if "SawyerPickPlaceEnvV3" in scopes:
        members["_gripper_caging_reward"] = _pick_place_caging
    made = type(task_class.__name__, (_FastSawyer, task_class), members)
    for name, scope in scopes.items():
        scope[name] = made  # tasks call their static methods by class name
    return made


def _with_globals(method: Any, scope: dict[str, Any]) -> Any:
    """Return a copy of a method with ``scope`` as globals."""
    if isinstance(method, staticmethod):
        return staticmethod(_with_globals(method.__func__, scope))
    if method.__code__.co_freevars == ("func",):  # a decorator's check that `step` has already made
        return _with_globals(method.__closure__[0].cell_contents, scope)
    return types.FunctionType(
        method.__code__, scope, method.__name__, method.__defaults__, method.__closure__
    )
