"""Compiled models of MetaWorld's tasks: without textures and visual meshes, 1 instead of 20 MiB.

Textures and meshes without collisions are most of a model, and are only needed for rendering. A
model without them gives the same results, because everything else is copied from the full model.
"""

from __future__ import annotations

import copy
import ctypes
import platform
from functools import lru_cache
from typing import Any

from mtrl_lightning.envs.simulator import arrays_of, release

VISUAL_ARRAYS = ("geom_type", "geom_dataid", "mat_texid")
"""Arrays that assign meshes and textures to geoms and materials."""
VOLUMES = ("bvh_aabb", "bvh_child", "bvh_nodeid", "bvh_depth")
"""Arrays of bounding volumes, those of bodies first; those of meshes are only used by rays."""


def new_model(path: str, is_drawable: bool) -> Any:
    """Return a copy of a task's model, which is compiled only once.

    Args:
        path: path of the task's XML.
        is_drawable: whether it can be rendered.
    """
    model = copy.copy(_compiled(path, is_drawable))
    if not is_drawable:
        num_of_bodies = (model.body_bvhadr + model.body_bvhnum).max()
        for name in VOLUMES:
            release(getattr(model, name)[num_of_bodies:])
    return model


@lru_cache(maxsize=2)
def _compiled(path: str, is_drawable: bool) -> Any:
    """Compile a model.

    The last two are cached, because a task's environments are made consecutively. The second one
    saves 6 of MT50's 44 compilations, where another task is between two with the same XML file.
    """
    import mujoco

    model = mujoco.MjModel.from_xml_path(path)
    if not is_drawable:
        model = _without_visuals(path, model)
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # free the 50 MiB used for compiling
    return model


def _without_visuals(path: str, whole: Any) -> Any:
    """Compile a model without textures and visual meshes."""
    import mujoco

    spec = mujoco.MjSpec.from_file(path)
    colliding = set()
    for geom in spec.geoms:
        if geom.type != mujoco.mjtGeom.mjGEOM_MESH:
            continue
        if geom.contype or geom.conaffinity:
            colliding.add(geom.meshname)
        else:
            # any shape without a mesh: a step only uses its position, which is copied below
            geom.type = mujoco.mjtGeom.mjGEOM_SPHERE
            geom.size = [1, 1, 1]
            geom.meshname = ""
    for mesh in list(spec.meshes):
        if mesh.name not in colliding:
            mesh.delete()
    for material in spec.materials:
        material.textures = [""] * len(mujoco.mjtTextureRole.__members__)
    for texture in list(spec.textures):
        texture.delete()
    model = spec.compile()
    for name, array in arrays_of(whole):
        if name not in VISUAL_ARRAYS:
            getattr(model, name)[...] = array
    for name in ("center", "extent", "meaninertia", "meanmass", "meansize"):
        setattr(model.stat, name, getattr(whole.stat, name))
    return model
