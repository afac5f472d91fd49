"""Every class path in a user's YAML keeps resolving: of all shipped files, and of former ones."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from mtrl_lightning import callbacks
from mtrl_lightning.algorithms import Temperature
from mtrl_lightning.algorithms.state import restore_state, save_state
from mtrl_lightning.callbacks.options import _is_same
from mtrl_lightning.former_paths import FORMER_MODULES, with_present_paths
from mtrl_lightning.reports.methods import effective
from mtrl_lightning.reports.record import RunRecord
from tests.helpers.algorithms import make_sac, make_spec
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
        "PicturesCallback ReplayCallback ResetCallback RolloutCallback "
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
    [("PicturesCallback", "ImagesCallback")],
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


def test_every_former_module_has_the_classes_of_the_present_one():
    for former, present in FORMER_MODULES.items():
        module = importlib.import_module(former)
        for name in module.__all__:
            assert getattr(module, name) is getattr(importlib.import_module(present), name)
            assert with_present_paths(f"{former}.{name}") == f"{present}.{name}"


def test_described_options_get_present_paths_and_nothing_else_changes():
    former = "mtrl_lightning.learning.values.Scalar"
    present = "mtrl_lightning.learning.losses.Scalar"
    described = {"value": {"class_path": former}, "parts": [former], "pair": (1, former)}
    others = {"name": "values.Scalar", "lr": 1e-3, "file": "a.b.c", "text": "", "none": None}
    assert with_present_paths({**described, **others}) == {
        "value": {"class_path": present},
        "parts": [present],
        "pair": (1, present),
        **others,
    }


def with_former_paths(described):
    """Return described options as runs of before the classes were moved have them."""
    text = json.dumps(described)
    for former, present in FORMER_MODULES.items():
        text = text.replace(present, former)
    return json.loads(text)


def test_options_of_runs_before_and_after_the_move_are_the_same(monkeypatch):
    present = {
        "model.class_path": "mtrl_lightning.algorithms.SAC",
        "model.value": {"class_path": "mtrl_lightning.learning.losses.Scalar"},
        "model.temperature": {"class_path": "mtrl_lightning.learning.weighting.Temperature"},
    }
    former = with_former_paths(present)
    for module in FORMER_MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)

    assert former != present and _is_same(former, present)
    assert not _is_same(former, {**present, "model.value": {"class_path": "torch.nn.Linear"}})
    records = [RunRecord(Path("run"), options, {}, {}, {}) for options in (former, present)]
    assert effective(records[0]) == effective(records[1])
    assert not sys.modules.keys() & FORMER_MODULES.keys()


def test_an_algorithm_saved_with_former_paths_has_no_new_options():
    algorithm = make_sac(make_spec(), temperature=Temperature)
    checkpoint = {"state_dict": algorithm.state_dict(), "optimizer_states": []}
    save_state(algorithm, checkpoint)
    described = checkpoint["mtrl_lightning"]["algorithm"]
    assert with_former_paths(described) != described

    checkpoint["mtrl_lightning"]["algorithm"] = with_former_paths(described)
    assert not restore_state(algorithm, checkpoint).has_new_options
    checkpoint["mtrl_lightning"]["algorithm"] = {**described, "init_args": {"seed": 5}}
    assert restore_state(algorithm, checkpoint).has_new_options
