"""MetaWorld's rewards for grasping in plain numbers: bit-exact, without an array for each vector.

``caging_reward`` is in place of the ``_gripper_caging_reward`` of most tasks, ``OWN_CAGING`` of
tasks that have one of their own. ``DENSE`` has whole rewards, of the tasks whose Python takes
longest. Numbers without a name are MetaWorld's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.fast.arithmetic import (
    DOUBLE,
    FLOAT64,
    length,
    long_tail,
    rect_prism_tolerance,
)

CLOSED_FROM = 0.97
"""The least caging from which a closing gripper is rewarded."""
PEG_SITES = (
    "pegHead",
    "bottom_right_corner_collision_box_1",
    "top_left_corner_collision_box_1",
    "bottom_right_corner_collision_box_2",
    "top_left_corner_collision_box_2",
)


# ---- Caging: how well the fingers are around an object ----


def caging_xz(env: Any, distance: float, xz_thresh: float) -> float:
    """Return how near the hand is to an object in the plane of x and z, between 0 and 1.

    Args:
        env: the environment.
        distance: of the hand from the object in this plane.
        xz_thresh: up to which distance it is 1.
    """
    start_x, _, start_z = env.obj_init_pos.tolist()
    init_x, _, init_z = env.init_tcp.tolist()
    views = env._metaworld_views
    margin = views.fixed_length(start_x - init_x, start_z - init_z) - xz_thresh
    return long_tail(distance, 0, xz_thresh, margin)


def caging(
    env: Any,
    y: float,
    xz_distance: float,
    obj_radius: float,
    pad_success_thresh: float,
    xz_thresh: float,
) -> float:
    """Return how well the pads are around an object, between 0 and 1.

    Args:
        env: the environment.
        y: of the object.
        xz_distance: of the hand from the object, in the plane of x and z.
        obj_radius: see MetaWorld's ``_gripper_caging_reward``, as the two others.
        pad_success_thresh: of the distance of a pad from the object in y.
        xz_thresh: of ``xz_distance``.
    """
    views = env._metaworld_views
    left_pad, right_pad = views.pads
    left = left_pad.item(1)
    right = right_pad.item(1)
    start = env.obj_init_pos.item(1)
    left_margin = abs(abs(left - start) - pad_success_thresh)
    right_margin = abs(abs(right - start) - pad_success_thresh)
    product = views.hamacher_product
    caging_y = product(
        long_tail(abs(left - y), obj_radius, pad_success_thresh, left_margin),
        long_tail(abs(right - y), obj_radius, pad_success_thresh, right_margin),
    )
    return product(caging_y, caging_xz(env, xz_distance, xz_thresh))


def with_closing(
    env: Any, action: Any, caged: float, effort: float = 1.0, mean: bool = True
) -> Any:
    """Return the product of a closing gripper and ``caging``, where that is nearly 1.

    Args:
        env: the environment.
        action: its last number closes the gripper.
        caged: of ``caging``.
        effort: the closing that is enough.
        mean: whether to return the mean of the product and of ``caged``.
    """
    if mean and caged <= CLOSED_FROM:
        return caged / 2  # the product is 0
    closed = min(max(0, action[-1]), effort) / effort if caged > CLOSED_FROM else 0.0
    product = env._metaworld_views.hamacher_product(caged, closed)
    return (product + caged) / 2 if mean else product


def with_reaching(env: Any, reward: Any, tcp_to_obj: float, reach_radius: float) -> Any:
    """Return the mean of a reward and of how near the hand is to an object."""
    init_x, init_y, init_z = env.init_tcp.tolist()
    x, y, z = env.obj_init_pos.tolist()
    margin = env._metaworld_views.fixed_length(x - init_x, y - init_y, z - init_z)
    return (reward + long_tail(tcp_to_obj, 0, reach_radius, abs(margin - reach_radius))) / 2


def caging_reward(
    self: Any,
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
    """MetaWorld's ``SawyerXYZEnv._gripper_caging_reward``.

    Raises:
        ValueError: with both densities.
    """
    message = "`obj_init_pos` must be initialized before calling this function."
    assert self.obj_init_pos is not None, message
    if high_density and medium_density:
        raise ValueError("Can only be either high_density or medium_density")
    x, y, z = obj_pos.tolist()
    hand_x, hand_y, hand_z = self.tcp_center.tolist()
    xz_distance = length(hand_x - x, hand_z - z)
    caged = caging(self, y, xz_distance, obj_radius, pad_success_thresh, xz_thresh)
    reward = with_closing(self, action, caged, desired_gripper_effort, mean=high_density)
    if medium_density:
        tcp_to_obj = length(x - hand_x, y - hand_y, z - hand_z)
        return with_reaching(self, reward, tcp_to_obj, object_reach_radius)
    return reward


def _caging_by_signed_distances(
    grip_margin: float | None, xz_thresh: float, fixed_radius: float | None = None
) -> Callable[..., Any]:
    """Return the ``_gripper_caging_reward`` of tasks that have one of their own.

    Args:
        grip_margin: how near the pads grip, beyond the object's radius; None where a closing
            gripper is rewarded.
        xz_thresh: of the distance in the plane of x and z.
        fixed_radius: of the object, in place of the argument.
    """
    success_margin = 0.05

    def by_signed_distances(
        env: Any, action: Any, y: float, xz_distance: float, obj_radius: float
    ) -> Any:
        radius = obj_radius if fixed_radius is None else fixed_radius
        views = env._metaworld_views
        left_pad, right_pad = views.pads
        right = y - right_pad.item(1)
        left = left_pad.item(1) - y
        right_margin = abs(abs(y - env.init_right_pad.item(1)) - success_margin)
        left_margin = abs(abs(y - env.init_left_pad.item(1)) - success_margin)
        product = views.hamacher_product
        caging_y = product(
            long_tail(left, radius, success_margin, left_margin),
            long_tail(right, radius, success_margin, right_margin),
        )
        caged = product(caging_y, caging_xz(env, xz_distance, xz_thresh))
        if grip_margin is None:
            return with_closing(env, action, caged)
        gripping = 0.0
        if caged > 0.95:
            gripping = product(
                long_tail(left, radius, radius + grip_margin, left_margin),
                long_tail(right, radius, radius + grip_margin, right_margin),
            )
        return (caged + gripping) / 2

    return by_signed_distances


def _as_method(caging_of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_gripper_caging_reward`` that takes an object's position (3)."""

    def _gripper_caging_reward(
        self: Any,
        action: Any,
        obj_pos: npt.NDArray[Any],
        obj_radius: float = 0,
        *_: Any,
        **__: Any,
    ) -> Any:
        x, y, z = obj_pos.tolist()
        hand_x, _, hand_z = self.tcp_center.tolist()
        xz_distance = length(hand_x - x, hand_z - z)
        return caging_of_numbers(self, action, y, xz_distance, obj_radius)

    return _gripper_caging_reward


PICK_PLACE_CAGING = _caging_by_signed_distances(None, 0.005, 0.015)
OWN_CAGING = {
    "SawyerPickPlaceEnvV3": _as_method(PICK_PLACE_CAGING),
    "SawyerPushBackEnvV3": _as_method(_caging_by_signed_distances(0.003, 0.01)),
    "SawyerSoccerEnvV3": _as_method(_caging_by_signed_distances(0.01, 0.005)),
    "SawyerSweepEnvV3": _as_method(_caging_by_signed_distances(0.01, 0.005)),
    "SawyerSweepIntoGoalEnvV3": _as_method(_caging_by_signed_distances(0.005, 0.01)),
}
"""``_gripper_caging_reward`` by the name of MetaWorld's class."""


# ---- Whole rewards: each is MetaWorld's ``evaluate_state`` with the reward version v2 ----


def _reward_and_info(
    reward: Any,
    success: float,
    near_object: float,
    grasp_success: Any,
    grasp_reward: Any,
    in_place_reward: Any,
    obj_to_target: float,
) -> tuple[Any, dict[str, Any]]:
    return reward, {
        "success": success,
        "near_object": near_object,
        "grasp_success": grasp_success,
        "grasp_reward": grasp_reward,
        "in_place_reward": in_place_reward,
        "obj_to_target": obj_to_target,
        "unscaled_reward": reward,
    }


def pick_place(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Bring a puck to a point in the air."""
    views = env._metaworld_views
    opened, x, y, z = obs[3:7].tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    start_x, start_y, start_z = env.obj_init_pos.tolist()
    hand_x, hand_y, hand_z = views.middle()
    obj_to_target, tcp_to_obj, xz_distance = views.lengths(
        (x - target_x, y - target_y, z - target_z),
        (x - hand_x, y - hand_y, z - hand_z),
        (hand_x - x, 0.0, hand_z - z),
    )
    margin = views.fixed_length(start_x - target_x, start_y - target_y, start_z - target_z)
    in_place = long_tail(obj_to_target, 0, 0.05, margin)
    grasped = PICK_PLACE_CAGING(env, action, y, xz_distance, 0.0)
    reward = views.hamacher_product(grasped, in_place)
    if tcp_to_obj < 0.02 and opened > 0 and z - 0.01 > start_z:
        reward += 1.0 + 5.0 * in_place
    if obj_to_target < 0.05:
        reward = 10.0
    return _reward_and_info(
        reward,
        float(obj_to_target <= 0.07),
        float(tcp_to_obj <= 0.03),
        float(opened > 0 and z - 0.02 > start_z and env.touching_main_object),
        grasped,
        in_place,
        obj_to_target,
    )


def push(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Push a puck to a point on the table."""
    views = env._metaworld_views
    opened, x, y, z = obs[3:7].tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    start_x, start_y, start_z = env.obj_init_pos.tolist()
    hand_x, hand_y, hand_z = views.middle()
    obj_to_target, tcp_to_obj, xz_distance = views.lengths(
        (x - target_x, y - target_y, z - target_z),
        (x - hand_x, y - hand_y, z - hand_z),
        (hand_x - x, 0.0, hand_z - z),
    )
    margin = views.fixed_length(start_x - target_x, start_y - target_y, start_z - target_z)
    in_place = long_tail(obj_to_target, 0, env.TARGET_RADIUS, margin)
    grasped = with_closing(env, action, caging(env, y, xz_distance, 0.015, 0.05, 0.005))
    reward = 2 * grasped
    if tcp_to_obj < 0.02 and opened > 0:
        reward += 1.0 + reward + 5.0 * in_place
    if obj_to_target < env.TARGET_RADIUS:
        reward = 10.0
    return _reward_and_info(
        reward,
        float(obj_to_target <= env.TARGET_RADIUS),
        float(tcp_to_obj <= 0.03),
        float(opened > 0 and z - 0.02 > start_z and env.touching_main_object),
        grasped,
        in_place,
        obj_to_target,
    )


def basketball(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Put a ball into a basket."""
    views = env._metaworld_views
    opened, x, y, z = obs[3:7].tolist()
    target_x, target_y, _ = env._target_pos.tolist()
    target_z = 0.3  # above the hoop
    start_x, start_y, start_z = env.obj_init_pos.tolist()
    hand_x, hand_y, hand_z = views.middle()
    obj_to_target, tcp_to_obj, xz_distance = views.lengths(
        (x - target_x, y - target_y, (z - target_z) * 2.0),
        (x - hand_x, y - hand_y, z - hand_z),
        (hand_x - x, 0.0, hand_z - z),
    )
    margin = views.fixed_length(start_x - target_x, start_y - target_y, (start_z - target_z) * 2.0)
    in_place = long_tail(obj_to_target, 0, env.TARGET_RADIUS, margin)
    grasped = with_closing(env, action, caging(env, y, xz_distance, 0.025, 0.06, 0.005))
    is_lifted = tcp_to_obj < 0.035 and opened > 0 and z - 0.01 > start_z
    if is_lifted:
        grasped = 1.0
    reward = views.hamacher_product(grasped, in_place)
    if is_lifted:
        reward += 1.0 + 5.0 * in_place
    if obj_to_target < env.TARGET_RADIUS:
        reward = 10.0
    return _reward_and_info(
        reward,
        float(obj_to_target <= env.TARGET_RADIUS),
        float(tcp_to_obj <= 0.05),
        float(opened > 0 and z - 0.03 > start_z),
        grasped,
        in_place,
        obj_to_target,
    )


def peg_insert_side(
    env: Any, action: Any, obs: npt.NDArray[np.float64]
) -> tuple[Any, dict[str, Any]]:
    """Insert a peg into the side of a box."""
    views = env._metaworld_views
    opened, x, y, z = obs[3:7].tolist()
    head, from_1, to_1, from_2, to_2 = views.sites(PEG_SITES)
    head_x, head_y, head_z = head.tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    init_x, init_y, init_z = env.peg_head_pos_init.tolist()
    hand_x, hand_y, hand_z = views.middle()
    obj_to_target, tcp_to_obj, xz_distance = views.lengths(
        (head_x - target_x, (head_y - target_y) * 2.0, (head_z - target_z) * 2.0),
        (x - hand_x, y - hand_y, z - hand_z),
        (hand_x - x, 0.0, hand_z - z),
    )
    margin = views.fixed_length(
        init_x - target_x, (init_y - target_y) * 2.0, (init_z - target_z) * 2.0
    )
    collisions = views.hamacher_product(
        rect_prism_tolerance(head, from_2, to_2), rect_prism_tolerance(head, from_1, to_1)
    )
    in_place = views.hamacher_product(
        long_tail(obj_to_target, 0, env.TARGET_RADIUS, margin), collisions
    )
    grasped = with_closing(env, action, caging(env, y, xz_distance, 0.0075, 0.03, 0.005))
    is_open_and_lifted = opened > 0 and z - 0.01 > env.obj_init_pos.item(2)
    if tcp_to_obj < 0.08 and is_open_and_lifted:
        grasped = 1.0
    reward = views.hamacher_product(grasped, in_place)
    if tcp_to_obj < 0.08 and is_open_and_lifted:
        reward += 1.0 + 5 * in_place
    if obj_to_target <= 0.07:
        reward = 10.0
    return _reward_and_info(
        reward,
        float(obj_to_target <= 0.07),
        float(tcp_to_obj <= 0.03),
        float(tcp_to_obj < 0.02 and is_open_and_lifted),
        grasped,
        in_place,
        obj_to_target,
    )


def bin_picking(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Bring a puck from one bin to the other."""
    views = env._metaworld_views
    palm_x, palm_y, palm_z, opened, x, y, z = obs[:7].tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    start_x, start_y, start_z = env.obj_init_pos.tolist()
    hand_x, _, hand_z = views.middle()
    obj_to_target, palm_to_obj, xz_distance = views.lengths(
        (x - target_x, y - target_y, z - target_z),
        (x - palm_x, y - palm_y, z - palm_z),
        (hand_x - x, 0.0, hand_z - z),
    )
    if env._target_to_obj_init is None:
        env._target_to_obj_init = obj_to_target
    in_place = long_tail(obj_to_target, 0, env.TARGET_RADIUS, env._target_to_obj_init)
    caged = caging(env, y, xz_distance, 0.015, 0.05, 0.01)
    grasped = with_closing(env, action, caged, effort=0.7)
    reward = views.hamacher_product(grasped, in_place)
    near_object = palm_to_obj < 0.04
    grasp_success = near_object and z - 0.02 > start_z and not opened < 0.43
    if grasp_success:
        # the hand shall stay above two funnels, around the object's start and around its target
        radii = (
            length(palm_x - start_x, palm_y - start_y),
            length(palm_x - target_x, palm_y - target_y),
        )
        floor = min(
            0.02 * float(np.log(FLOAT64(radius - 0.03))) + 0.2 if radius > 0.03 else 0.0
            for radius in radii
        )
        above_floor = 1.0 if palm_z >= floor else long_tail(floor - palm_z, 0.0, 0.01, 0.05)
        reward += 1.0 + 5.0 * views.hamacher_product(above_floor, in_place)
    if obj_to_target < env.TARGET_RADIUS:
        reward = 10.0
    return _reward_and_info(
        reward,
        float(obj_to_target <= 0.05),
        float(near_object),
        float(grasp_success),
        grasped,
        in_place,
        obj_to_target,
    )


def hammer(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Drive a nail into a wall."""
    views = env._metaworld_views
    palm_x, _, _, _, x, y, z, *turn = obs[:11].tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    gripped_x = palm_x if abs(x - palm_x) < env.HAMMER_HANDLE_LENGTH / 2.0 else x
    hand_x, _, hand_z = views.middle()
    head_to_target, xz_distance, _ = views.lengths(
        (target_x - (x + 0.16), target_y - (y + 0.06), target_z - z),
        (hand_x - gripped_x, 0.0, hand_z - z),
    )
    grasped = with_closing(env, action, caging(env, y, xz_distance, 0.015, 0.02, 0.01))
    in_place = 0.1 * float(z > 0.02) + 0.9 * long_tail(head_to_target, 0, 0.02, 0.2)
    upright = _upright(turn, 1.0, 0.0)
    reward = (2.0 * grasped + 6.0 * in_place) * upright
    success = views.joint("NailSlideJoint").qpos.item() > 0.09
    if success and reward > 5.0:
        reward = 10.0
    return _reward_and_info(reward, float(success), upright, grasped >= 0.5, grasped, in_place, 0)


def assembly(env: Any, action: Any, obs: npt.NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
    """Put a wrench's ring over a peg."""
    views = env._metaworld_views
    palm_x, _, _, _, x, y, z, *turn = obs[:11].tolist()
    target_x, target_y, target_z = env._target_pos.tolist()
    center_x, center_y, center_z = views.site("RoundNut").xpos.tolist()
    gripped_x = palm_x if abs(x - palm_x) < env.WRENCH_HANDLE_LENGTH / 2.0 else x
    hand_x, hand_y, hand_z = views.middle()
    error_x = target_x - center_x
    error_y = target_y - center_y
    tcp_to_obj, xz_distance, radius = views.lengths(
        (gripped_x - hand_x, y - hand_y, z - hand_z),
        (hand_x - gripped_x, 0.0, hand_z - z),
        (error_x, error_y, 0.0),
    )
    caged = caging(env, y, xz_distance, 0.015, 0.02, 0.01)
    grasped = with_reaching(env, with_closing(env, action, caged, mean=False), tcp_to_obj, 0.01)
    success = radius < 0.02 and target_z - center_z > 0.0
    # the target's height is a funnel around the peg, with a wider neck after success
    neck = 0.02 if success else 0.01
    height = 0.0
    if radius > neck:
        height = 0.02 * float(np.log(FLOAT64(radius - neck))) + 0.2
    error = length(error_x, error_y, (height - center_z) * 3.0)
    is_lifted = center_z > 0.02 or radius < neck
    in_place = 0.1 * float(is_lifted) + 0.9 * long_tail(error, 0, 0.02, 0.4)
    upright = _upright(turn, 0.707, 0.707)
    reward = (2.0 * grasped + 6.0 * in_place) * upright
    if success:
        reward = 10.0
    return _reward_and_info(reward, float(success), upright, grasped >= 0.5, grasped, in_place, 0)


def _upright(turn: Sequence[float], first: float, last: float) -> float:
    """Return 1 for the orientation ``(first, 0, 0, last)``, and less for others, at least 0."""
    return max(1.0 - length(turn[0] - first, turn[1], turn[2], turn[3] - last) / 0.4, 0.0)


DENSE = {
    "SawyerPickPlaceEnvV3": pick_place,
    "SawyerPushEnvV3": push,
    "SawyerBasketballEnvV3": basketball,
    "SawyerPegInsertionSideEnvV3": peg_insert_side,
    "SawyerBinPickingEnvV3": bin_picking,
    "SawyerHammerEnvV3": hammer,
    "SawyerNutAssemblyEnvV3": assembly,
}
"""By the name of MetaWorld's class."""


def dense_or(
    dense: Callable[..., tuple[Any, dict[str, Any]]],
    metaworlds: Callable[..., tuple[Any, dict[str, Any]]],
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return an ``evaluate_state``.

    Args:
        dense: of ``DENSE``, for v2 and observations in double precision.
        metaworlds: MetaWorld's, for all others.
    """

    def evaluate_state(self: Any, obs: Any, action: Any) -> tuple[Any, dict[str, Any]]:
        if self.reward_function_version == "v2" and obs.dtype is DOUBLE:
            return dense(self, action, obs)
        return metaworlds(self, obs, action)

    return evaluate_state
