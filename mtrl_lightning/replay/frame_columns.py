"""The columns of deduplicated frames, in memory and in chunk files.

Shapes: ``E`` environments (rings), ``N`` transitions of a file, ``M`` frames of a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtrl_lightning.spec import Field

OBSERVATIONS = ("observation", "next_observation")
FRAME_INDEX = (Field("newest", (), "int64"), Field("before", (), "int16"))
"""Columns that identify a transition's frames, stored instead of its observations."""
FRAME_COLUMNS = (*(field.name for field in FRAME_INDEX), "first_frame", "num_frames", "frames")
"""Further columns of a chunk file: two per transition, two per ring, and the frames' bytes."""
COMPRESSION = 1
"""Compression level of zlib: the fastest, because frame differences are mostly zeros."""


def stack_of(fields: Sequence[Field]) -> Field:
    """Return the field of the observations."""
    return next(field for field in fields if field.name == OBSERVATIONS[0])


def other_fields_of(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Return the fields without the observations."""
    return tuple(field for field in fields if field.name not in OBSERVATIONS)


def compressed(frame_M: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Compress frames ``[M, ...]`` to bytes, as differences from the previous frame."""
    differences_M = frame_M.copy()
    differences_M[1:] ^= frame_M[:-1]
    return np.frombuffer(zlib.compress(differences_M.data, COMPRESSION), np.uint8)


def decompressed(content: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Decompress the frames of ``compressed``.

    Raises:
        ValueError: if the bytes do not contain frames of this shape.
    """
    num_bytes = int(np.prod(shape))
    try:
        raw = zlib.decompressobj().decompress(content.tobytes(), num_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"the frames cannot be decompressed: {error}") from error
    if len(raw) != num_bytes:
        raise ValueError(f"the frames do not have the expected {num_bytes:,} bytes")
    frame_M = np.frombuffer(raw, np.uint8).reshape(shape)
    return np.bitwise_xor.accumulate(frame_M, axis=0)
