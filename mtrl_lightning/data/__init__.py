"""The training data of a run: one data module for each kind of algorithm."""

from mtrl_lightning.data.demonstration_data import DemonstrationData
from mtrl_lightning.data.env_data import EnvData
from mtrl_lightning.data.replay_data import ReplayData
from mtrl_lightning.data.rollout_data import RolloutData
from mtrl_lightning.data.task_data import TaskData
from mtrl_lightning.transitions import Kind

DATA: dict[Kind, type[TaskData]] = {
    "off-policy": ReplayData,
    "on-policy": RolloutData,
    "offline": DemonstrationData,
}
"""The data module of each kind of algorithm."""

__all__ = ["DATA", "DemonstrationData", "EnvData", "ReplayData", "RolloutData", "TaskData"]
