"""Base of on-policy algorithms.

Shapes: ``S`` steps of an iteration, ``E`` environments.
"""

from __future__ import annotations

from torch import Tensor

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.transitions import Rollout, RolloutConfig


class OnPolicyAlgorithm(Algorithm):
    """Alternate between collecting an iteration's rollout and learning from it."""

    kind = "on-policy"
    collection: RolloutConfig
    """Numbers of steps, epochs and minibatches of an iteration."""
    computed_columns: tuple[str, ...] = ()
    """Names of the columns that ``begin_iteration`` returns in every iteration, in addition to
    updated ``policy_fields``. If empty, the columns of a checkpoint are not checked."""

    def begin_iteration(self, collected: Rollout, progress: float) -> dict[str, Tensor]:
        """Prepare to learn from a new rollout.

        Args:
            collected: the transitions of the iteration. With ``PolicyReuse``, its column
                ``foreign`` marks those in which the policy of another task acted.
            progress: fraction of the run's environment steps made before them, from 0 to 1.

        Returns:
            Additional columns of its minibatches by name, ``[S, E]``, such as advantages.
        """
        raise NotImplementedError

    def is_iteration_over(self) -> bool:
        """Return whether to skip the remaining minibatches of the iteration."""
        return False

    def end_iteration(self, collected: Rollout) -> None:
        """Called with the transitions of an iteration after its last update."""
