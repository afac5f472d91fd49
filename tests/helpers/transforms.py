"""Action transforms; apart from ``fakes``, so that environment workers start without PyTorch."""

from mtrl_lightning.rollout import ActionTransform


class Scale(ActionTransform):
    """Multiplies the actions that are sent."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def transform(self, action_EA, task_E, is_training):
        return self._factor * action_EA
