"""MetaWorld's own scripted policies, one for each of its 50 tasks.

Shapes: ``E`` environments, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Mode

OBSERVATION_SHAPE = (39,)
"""Shape of MetaWorld's own observations."""


class ScriptedPolicy:
    """The experts of ``metaworld.policies``, which control the arm by rules.

    They are deterministic in every mode, and stateless.

    Args:
        spec: spec of a benchmark with MetaWorld tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        experts: dict[str, Any] = {}
        if spec.protocol.get("benchmark") == "metaworld":
            experts = import_optional("metaworld.policies", "metaworld").ENV_POLICY_MAP
        missing = [name for name in spec.task_names if name not in experts]
        if missing:
            raise ConfigurationError(
                f"there is no scripted policy for {', '.join(missing)}: only MetaWorld's tasks have"
                " one. Use --env env/metaworld_mt10 or other MetaWorld tasks, or another policy,"
                " such as a run folder"
            )
        if spec.observation_space.shape != OBSERVATION_SHAPE:
            raise ConfigurationError(
                f"observations have shape {spec.observation_space.shape}, but scripted policies"
                f" need MetaWorld's own, {OBSERVATION_SHAPE}: remove wrappers (data.wrappers) and"
                " pixels (data.pixels)"
            )
        self.spec = spec
        self._policies = [experts[name]() for name in spec.task_names]

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode = "exploit"
    ) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]``, clipped to [-1, 1] as MetaWorld does."""
        action_EA = np.zeros((len(task_E), *self.spec.action_space.shape), np.float32)
        with warnings.catch_warnings():
            # "Constant(s) may be too high. Environments clip response to [-1, 1]"
            warnings.filterwarnings("ignore", "Constant")
            for env, task in enumerate(task_E):
                # a copy, because the policy of door-open writes into its argument
                action_EA[env] = self._policies[task].get_action(observation_ED[env].copy())
        return action_EA.clip(-1.0, 1.0)
