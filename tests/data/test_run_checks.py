import pytest
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from mtrl_lightning.data.run_checks import check_callbacks
from mtrl_lightning.errors import ConfigurationError


@pytest.mark.parametrize(
    "callback",
    [
        BatchSizeFinder(),
        EarlyStopping("eval/success/reach", mode="min"),
        GradientAccumulationScheduler({0: 2}),
        LearningRateFinder(),
        ModelCheckpoint(monitor="eval_base/return", mode="min"),
        StochasticWeightAveraging(0.1),
    ],
)
def test_callbacks_with_a_wrong_result_are_refused(callback):
    with pytest.raises(ConfigurationError, match=type(callback).__name__):
        check_callbacks([callback])


def test_other_callbacks_are_accepted():
    check_callbacks(
        [
            EarlyStopping("eval/success", mode="max"),
            EarlyStopping("train/critic_loss", mode="min"),
            ModelCheckpoint(),
            ModelCheckpoint(monitor="eval/length", mode="min"),
        ]
    )
