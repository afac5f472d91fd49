"""How a policy is called.

Shapes: ``E`` environments, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Mode = Literal["explore", "exploit", "random"]
"""How a policy acts: sample from its distribution, take its mode, or sample uniformly."""

ActOutput: TypeAlias = (
    "npt.NDArray[np.float32] | tuple[npt.NDArray[np.float32], Mapping[str, npt.NDArray]]"
)
"""Actions ``[E, A]``, alone or with further fields of the transition by name, ``[E, ...]``."""


class Policy(Protocol):
    """Chooses actions."""

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> ActOutput:
        """Choose actions ``[E, A]`` between -1 and 1."""
        ...


class NoisyPolicy(Policy, Protocol):
    """A policy that makes its actions from given noise."""

    def act(
        self,
        observation_ED: npt.NDArray,
        task_E: npt.NDArray[np.int64],
        mode: Mode,
        noise_EA: npt.NDArray[np.float32] | None = None,
    ) -> ActOutput:
        """Choose actions; to explore, from standard normal noise ``[E, A]`` in place of its own."""
        ...


@runtime_checkable
class SeededPolicy(Policy, Protocol):
    """A policy whose random actions can be seeded."""

    def seed_actions(self, seed: int) -> None:
        """Seed the generator of random actions."""
        ...


@runtime_checkable
class WeightedPolicy(Policy, Protocol):
    """A policy with weights, which can be sent to the same policy in another process."""

    @property
    def weights_seq_no(self) -> int:
        """Number of updates of the weights so far."""
        ...

    def get_weights(self) -> dict[str, Any]:
        """Return copies of the weights that ``act`` needs, on the CPU, for ``torch.save``."""
        ...

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Act with the weights returned by ``get_weights``."""
        ...
