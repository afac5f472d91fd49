"""Base of on-policy algorithms.

Shapes: ``S`` steps of an iteration, ``E`` environments.
"""

from __future__ import annotations

from torch import Tensor

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.transitions import Rollout, RolloutConfig


class OnPolicyAlgorithm(Algorithm):
    """Learn from the steps of one iteration after another; options are those of ``Algorithm``."""

    kind = "on-policy"
    collection: RolloutConfig
    """Numbers of steps, epochs and minibatches of an iteration."""
    computed_columns: tuple[str, ...] = ()
    """Names of the columns returned by ``begin_iteration`` in every iteration, in addition to new
    values of ``policy_fields``. If empty, the columns of a checkpoint are not checked."""

    def begin_iteration(self, collected: Rollout, progress: float) -> dict[str, Tensor]:
        """Receive the rollout that is learned from next.

        Args:
            collected: the transitions of the iteration. With ``PolicyReuse`` its column
                ``foreign`` says in which of them the policy of another task acted.
            progress: fraction of the run's environment steps made before them, from 0 to 1.

        Returns:
            Further columns of its minibatches by name, ``[S, E]``, such as advantages.
        """
        raise NotImplementedError

    def is_iteration_over(self) -> bool:
        """Return whether the rest of an iteration's minibatches is left out."""
        return False

    def end_iteration(self, collected: Rollout) -> None:
        """Receive the transitions of an iteration after its last update."""
