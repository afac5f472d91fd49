"""MetaWorld's environments at the speed of their physics: bit-exact, and cheaper in Python.

Each class here derives from MetaWorld's class of a task. The code that all tasks share is
reimplemented. A task's own methods, above all its reward, are used as they are, but the names in it
refer to positions that were looked up once and to the cheaper arithmetic of ``arithmetic``.
MetaWorld's own classes and modules are not changed.
"""

from __future__ import annotations

import math
import struct
import sys
import types
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.fast.arithmetic import length, long_tail, norm, replacements
from mtrl_lightning.envs.fast.metaworld_models import new_model
from mtrl_lightning.envs.render.renderer import check_drawable
from mtrl_lightning.errors import import_optional

Upstream: Any = object
"""MetaWorld's class of a task: the base class of ours after ``fast_class`` combines both."""

CHECKED = {"metaworld": ("3.1.1",), "mujoco": ("3.3.0",)}
"""Versions that this file's environments were compared with, observation by observation."""
CHECK_TASK = "pick-place-v3"
"""The task that is stepped beside MetaWorld's own at the first use in a process."""
CHECK_STEPS = 20
VIEWS = "_metaworld_views"
"""The attribute that is added to MetaWorld's."""
TASK_REWARD = "_metaworld_reward"
"""The name of a task's ``compute_reward``."""
RENAMED = {"data": VIEWS, "compute_reward": TASK_REWARD}
"""Attributes with other names in the copies of a task's methods."""
EVALUATING = (
    "evaluate_state",
    "compute_reward",
    "_get_pos_objects",
    "_get_quat_objects",
    "_get_id_main_object",
    "_gripper_caging_reward",
    "_reward_quat",
    "_reward_pos",
    "_reward_grab_effort",
    "_stick_is_inserted",
)
"""Methods of a task that read the simulation and do not change it."""
DOWN = np.array([1.0, 0.0, 1.0, 0.0])
"""The hand's orientation."""
SINGLE = np.dtype(np.float32)
THREE_SINGLES = struct.Struct("3f")

FIRST_RESET_MATTERS = ("SawyerPushEnvV3", "SawyerPushBackEnvV3")
"""Tasks whose second reset of the model depends on the simulation of the first."""


@cache
def steps_like_upstream() -> bool:
    """Return whether the steps of a task equal MetaWorld's own, bit for bit, in this process.

    Python's bytecode and NumPy's arithmetic, on which this file depends, differ between versions
    and machines.
    """
    kind = import_optional("metaworld", "metaworld").ALL_V3_ENVIRONMENTS[CHECK_TASK]
    upstream = kind()
    try:
        ours = _some_steps(fast_class(kind)())
    except Exception:  # whatever another version of Python makes of the copied methods
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
    """A body, site, geom or joint whose arrays, views of the simulation's memory, are cached."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._element, name)
        self.__dict__[name] = value
        return value


class _SimulationViews:
    """Cached views of the simulation's data, in its place where a task only reads."""

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
        self.center = None
        """The middle between the fingers, while a step is evaluated."""
        self.fixed_length = lru_cache(maxsize=8)(length)
        """Of vectors that stay the same from one reset to the next."""
        self.hamacher_product = replacements()["reward_utils"].hamacher_product
        self.single = cache(lambda number: float(np.float32(number)))
        self.still = False
        """Whether no time passes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def is_near_pad(self, geom_id: int) -> bool:
        """Return whether a geom and the left pad can be in contact: their spheres overlap."""
        place, pad, distance = self._reach(geom_id)
        return math.dist(place.tolist(), pad.tolist()) < distance

    def _reach_of(self, geom_id: int) -> tuple[npt.NDArray, npt.NDArray, float]:
        """Return the places of a geom and of the left pad, and how far apart they can touch."""
        data = self._data
        pad_id = self.pad_geoms[0]
        both = [geom_id, pad_id]
        radii = data.model.geom_rbound[both]
        reach = radii.sum() + data.model.geom_margin[both].sum()
        if not radii.all():  # a plane
            reach = math.inf
        return data.geom_xpos[geom_id], data.geom_xpos[pad_id], 1.01 * float(reach)


class _FastSawyer(Upstream):
    """Code of all tasks, before MetaWorld's class of a task."""

    static_names = (VIEWS,)
    is_drawable = False
    """Whether its model has what pictures need."""

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
        views.ctrl[0] = action[-1]
        views.ctrl[1] = -action[-1]
        mujoco.mj_step(model, data, self.frame_skip)
        mujoco.mj_rnePostConstraint(model, data)
        self.curr_path_length += 1
        mujoco.mj_forward(model, data)
        space = self.sawyer_observation_space
        observation = self._get_obs()
        np.maximum(observation, space.low, out=observation)
        np.minimum(observation, space.high, out=observation)
        self._last_stable_obs = observation
        views.center = self.tcp_center
        try:
            reward, info = self.evaluate_state(observation, action)
        finally:
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
        position = views.mocap_pos
        moves = [
            scale * (-1.0 if part < -1 else 1.0 if part > 1 else part) for part in action.tolist()
        ]
        # rounded to single precision, in which NumPy multiplies them
        moved = THREE_SINGLES.unpack(THREE_SINGLES.pack(*moves))
        lows = self.mocap_low.tolist()
        highs = self.mocap_high.tolist()
        for i, part in enumerate(position.tolist()):
            part += moved[i]
            position[i] = lows[i] if part < lows[i] else highs[i] if part > highs[i] else part
        views.mocap_quat[:] = DOWN

    def reset(
        self, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Reset the model twice, as MetaWorld does; the first time without simulating."""
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

    @property
    def compute_reward(self) -> Any:
        """Stable-Baselines3 takes an environment that has this method for one with goals.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"{type(self).__name__} of a fast MetaWorld has no compute_reward, which is the name of"
            " another method in environments with goals: call evaluate_state(observation, action),"
            " which returns reward and info, or set fast to false"
        )

    def get_endeff_pos(self) -> npt.NDArray[Any]:
        return self._metaworld_views.hand

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
        return (right + left) / 2.0

    def _get_obs(self) -> npt.NDArray[np.float64]:
        goal = self._get_pos_goal()
        if self._partially_observable:
            goal = np.zeros_like(goal)
        current = self._get_curr_obs_combined_no_goal()
        observation = np.concatenate((current, self._prev_obs, goal))
        self._prev_obs = current
        return observation

    def _get_curr_obs_combined_no_goal(self) -> npt.NDArray[np.float64]:
        position = self._get_pos_objects()
        turn = self._get_quat_objects()
        many = len(position) == 6
        if len(turn) != (8 if many else 4) or not (many or len(position) == 3):
            return super()._get_curr_obs_combined_no_goal()
        views = self._metaworld_views
        right, left = views.claws
        apart = norm(right - left) / 0.1
        observation = np.zeros(18)
        observation[:3] = views.hand
        observation[3] = apart if 0.0 < apart < 1.0 else np.clip(apart, 0.0, 1.0)
        if many:
            observation[4:7] = position[:3]
            observation[7:11] = turn[:4]
            observation[11:14] = position[3:]
            observation[14:] = turn[4:]
        else:
            observation[4:7] = position
            observation[7:11] = turn
        return observation

    def _get_id_main_object(self) -> int:
        return self._metaworld_views.geom("objGeom").id

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
        start = self.obj_init_pos
        assert start is not None, "`obj_init_pos` must be initialized before calling this function."
        if high_density and medium_density:
            raise ValueError("Can only be either high_density or medium_density")
        views = self._metaworld_views
        y = obj_pos.item(1)
        start_y = start.item(1)
        sides = []
        for pad in views.pads:
            pad_y = pad.item(1)
            margin = abs(abs(pad_y - start_y) - pad_success_thresh)
            sides.append(long_tail(abs(pad_y - y), obj_radius, pad_success_thresh, margin))
        product = views.hamacher_product
        caging = product(product(*sides), self._caging_xz(obj_pos, xz_thresh))
        closed = 0.0
        if caging > 0.97:
            closed = min(max(0, action[-1]), desired_gripper_effort) / desired_gripper_effort
        reward = product(caging, closed)
        if high_density:
            reward = (reward + caging) / 2
        if medium_density:
            x, y, z = (start - self.init_tcp).tolist()
            margin = abs(views.fixed_length(x, y, z) - object_reach_radius)
            distance = float(norm(obj_pos - self.tcp_center))
            reward = (reward + long_tail(distance, 0, object_reach_radius, margin)) / 2
        return reward

    def _caging_xz(self, obj_pos: npt.NDArray[Any], xz_thresh: float) -> float:
        """Return how near the hand is to an object in the plane of x and z, between 0 and 1."""
        views = self._metaworld_views
        start_x, _, start_z = self.obj_init_pos.tolist()
        init_x, _, init_z = self.init_tcp.tolist()
        margin = views.fixed_length(start_x - init_x, start_z - init_z) - xz_thresh
        x, _, z = obj_pos.tolist()
        tcp_x, _, tcp_z = self.tcp_center.tolist()
        return long_tail(length(tcp_x - x, tcp_z - z), 0, xz_thresh, margin)


def _caging_by_signed_distances(
    grip_margin: float | None, xz_thresh: float, fixed_radius: float | None = None
) -> Any:
    """Return the ``_gripper_caging_reward`` of tasks that have one of their own.

    Args:
        grip_margin: how near the pads grip, beyond the object's radius; None where a closing
            gripper is rewarded.
        xz_thresh: of the distance in the plane of x and z.
        fixed_radius: of the object, in place of the argument.
    """
    success_margin = 0.05

    def _gripper_caging_reward(
        self: Any,
        action: Any,
        obj_pos: npt.NDArray[Any],
        obj_radius: float = 0,
        *_: Any,
        **__: Any,
    ) -> Any:
        radius = obj_radius if fixed_radius is None else fixed_radius
        views = self._metaworld_views
        left_pad, right_pad = views.pads
        y = obj_pos.item(1)
        right = y - right_pad.item(1)
        left = left_pad.item(1) - y
        right_margin = abs(abs(y - self.init_right_pad.item(1)) - success_margin)
        left_margin = abs(abs(y - self.init_left_pad.item(1)) - success_margin)
        product = views.hamacher_product
        caging_y = product(
            long_tail(right, radius, success_margin, right_margin),
            long_tail(left, radius, success_margin, left_margin),
        )
        caging = product(caging_y, self._caging_xz(obj_pos, xz_thresh))
        if grip_margin is None:
            closed = min(max(0, action[-1]), 1) if caging > 0.97 else 0.0
            return (product(caging, closed) + caging) / 2
        gripping = 0.0
        if caging > 0.95:
            gripping = product(
                long_tail(right, radius, radius + grip_margin, right_margin),
                long_tail(left, radius, radius + grip_margin, left_margin),
            )
        return (caging + gripping) / 2

    return _gripper_caging_reward


OWN_CAGING = {
    "SawyerPickPlaceEnvV3": _caging_by_signed_distances(None, 0.005, 0.015),
    "SawyerPushBackEnvV3": _caging_by_signed_distances(0.003, 0.01),
    "SawyerSoccerEnvV3": _caging_by_signed_distances(0.01, 0.005),
    "SawyerSweepEnvV3": _caging_by_signed_distances(0.01, 0.005),
    "SawyerSweepIntoGoalEnvV3": _caging_by_signed_distances(0.005, 0.01),
}
"""By the name of MetaWorld's class."""


@cache
def fast_class(task_class: type, is_drawable: bool = False) -> type:
    """Return a class that behaves as MetaWorld's class of a task, and is one.

    Args:
        task_class: MetaWorld's.
        is_drawable: whether its environments can be drawn, for which they take more memory.
    """
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

    members: dict[str, Any] = {
        name: getattr(task_class, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    members["is_drawable"] = is_drawable
    kinds = task_class.__mro__
    scopes: dict[type, dict[str, Any]] = {}
    for kind in reversed(kinds[: kinds.index(SawyerXYZEnv)]):
        names = vars(sys.modules[kind.__module__])
        scopes[kind] = {
            **names,
            **{name: new for name, new in replacements().items() if name in names},
        }
        for name, value in vars(kind).items():
            if name == "_gripper_caging_reward" and kind.__name__ in OWN_CAGING:
                members[name] = OWN_CAGING[kind.__name__]
            elif name in EVALUATING:
                members[RENAMED.get(name, name)] = _reading(value, scopes[kind])
            elif name in vars(_FastSawyer) and not name.startswith("__"):
                members[name] = value
    made = type(task_class.__name__, (_FastSawyer, task_class), members)
    for kind, scope in scopes.items():
        scope[kind.__name__] = made  # a task calls its static methods by its class's name
    return made


def _reading(method: Any, scope: dict[str, Any]) -> Any:
    """Return a copy of a method that uses the views for the data, and ``scope`` for globals."""
    if isinstance(method, staticmethod):
        return staticmethod(_reading(method.__func__, scope))
    if method.__code__.co_freevars == ("func",):  # a decorator's check that `step` has already made
        return _reading(method.__closure__[0].cell_contents, scope)
    code = method.__code__
    code = code.replace(co_names=tuple(RENAMED.get(name, name) for name in code.co_names))
    reading = types.FunctionType(
        code, scope, method.__name__, method.__defaults__, method.__closure__
    )
    reading.__kwdefaults__ = method.__kwdefaults__
    return reading
