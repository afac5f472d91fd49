"""Every class path in a user's YAML keeps resolving: of all shipped files, and of former ones."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
import torch

from mtrl_lightning import callbacks
from tests.helpers.command_line import ROOT

CLASS_PATH = re.compile(
    r"(?<![\w./-])(?:mtrl_lightning|torch|lightning|gymnasium)(?:\.[a-z_]\w*)*\.[A-Z]\w*"
)
"""An import path whose last name is a class."""
FORMER = {
    "gymnasium.wrappers": "FlattenObservation FrameStackObservation",
    "lightning.pytorch.loggers": "TensorBoardLogger WandbLogger",
    "mtrl_lightning": "Temperature",
    "mtrl_lightning.algorithms": (
        "Algorithm ByHand ByTemperature Categorical ConstantRate Distral EqualWeights "
        "LearningRate LinearRate MeanReward NormalizeObservation NormalizeReward PPO PopArt "
        "RandomShift ReturnRange ReturnScale RewardScale SAC Scalar TD3 TaskWeighting "
        "Temperature Transform Update Value"
    ),
    "mtrl_lightning.auxiliaries": (
        "Auxiliary Deterministic HiPBMDP LatentDynamics LossInputs Reconstruction"
    ),
    "mtrl_lightning.callbacks": (
        "CheckpointCallback CurvesCallback EnvStepProgressBar EnvStepWandbLogger "
        "EvaluationCallback InterruptionCallback MetricsCSV MetricsCallback OptionsCallback "
        "PicturesCallback ReplayCallback ReportCallback ResetCallback RolloutCallback "
        "VideoCallback"
    ),
    "mtrl_lightning.envs": (
        "Benchmark DMControl DMControlFamily GymnasiumTasks MetaWorld Pixels ToyConflict "
        "ToyReach VectorEnv"
    ),
    "mtrl_lightning.gradients": (
        "AlignedMTL CAGrad FAMO FairGrad GradNorm GradientMethod Mean NashMTL PCGrad TaskParameters"
    ),
    "mtrl_lightning.learning.reward_scale": "MeanReward ReturnRange RewardScale",
    "mtrl_lightning.learning.temperature": "FixedTemperature Temperature",
    "mtrl_lightning.learning.values": "Categorical Scalar Value",
    "mtrl_lightning.learning.weighting": "ByHand ByTemperature EqualWeights TaskWeighting",
    "mtrl_lightning.networks": (
        "ActionDistribution AppendTask Assignment Attention Average CARE ClippedGaussian "
        "Clusters Embedding Encoder Ensemble Experts ExplorationNoise FiLM Gate Identity "
        "Language MLP MLPEncoder MOORE MixtureOfEncoders MultiHead Network NoConditioning "
        "OneHot OwnExpert PaCo PixelEncoder Separate SoftModularization SquashedGaussian "
        "Standardize StateNoise TaskConditioning TaskEncoder TaskModule TaskNoise"
    ),
    "mtrl_lightning.replay": "MultiTaskData RolloutBuffer",
    "mtrl_lightning.rollout": (
        "ActionNoise Collector EpisodeListener EpisodeWindows Evaluation Evaluator "
        "RunningEpisodes Sample"
    ),
    "torch.optim": "Adam AdamW",
}
"""Classes by module that versions 0.x export, or that a configuration has named."""


def shipped():
    """Return the class paths of the configurations, the policies and the runs of version 0.2."""
    rooms = ("configs", "tests", "mtrl_lightning/policies")
    texts = [file.read_text() for room in rooms for file in ROOT.glob(f"{room}/**/*.yaml")]
    checkpoints = [path for room in rooms for path in ROOT.glob(f"{room}/**/*.ckpt")]
    texts += [str(torch.load(path, weights_only=True)) for path in checkpoints]
    return set().union(*map(CLASS_PATH.findall, texts))


FORMER_PATHS = {f"{module}.{name}" for module, names in FORMER.items() for name in names.split()}
PATHS = sorted(shipped() | FORMER_PATHS)


def test_the_paths_are_found():
    assert len(shipped()) > 60 and len(PATHS) > 100
    assert {"torch.optim.Adam", "mtrl_lightning.networks.MLP"} < set(PATHS)


@pytest.mark.filterwarnings("ignore:.*former name:FutureWarning")
@pytest.mark.parametrize("path", PATHS)
def test_a_class_path_resolves(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("former", "now"),
    [("CurvesCallback", "ReportCallback"), ("PicturesCallback", "ImagesCallback")],
)
def test_a_callback_by_its_former_name_is_one_warning(monkeypatch, former, now):
    monkeypatch.delitem(vars(callbacks), former, raising=False)  # as before its first use
    with pytest.warns(FutureWarning, match=f"{former} is a former name.*give {now}"):
        found = getattr(callbacks, former)
    assert found is getattr(callbacks, now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(callbacks, former) is found


def test_a_callback_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'FilmsCallback'"):
        callbacks.FilmsCallback  # noqa: B018
