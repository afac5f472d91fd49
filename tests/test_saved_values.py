"""What a checkpoint names, counts or sizes is checked where it is restored."""

import io
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtrl_lightning import checks
from mtrl_lightning.algorithms import SAC
from mtrl_lightning.algorithms.allocation import AllocationLimit
from mtrl_lightning.algorithms.state import global_generators, restore_global_generators
from mtrl_lightning.callbacks import (
    CheckpointCallback,
    MetricsCallback,
    OptionsCallback,
)
from mtrl_lightning.callbacks.checkpoint import _check_counts
from mtrl_lightning.counters import Counters
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.learning.metrics import MeanMetrics
from mtrl_lightning.loading import load_policy
from mtrl_lightning.replay.snapshot import _load_array
from mtrl_lightning.schedules import Every, Until, UpdateRatio

NO_COUNTS = [-1, 1.0, "3", None, True, 2**60, 10**30, [3], float("nan")]


@pytest.mark.parametrize("value", NO_COUNTS)
def test_counts_are_whole_numbers(value):
    with pytest.raises(ConfigurationError, match=r"checkpoint's steps is .*, not a whole number"):
        checks.count(value, "steps")
    state = Counters().state_dict() | {"updates": value}
    with pytest.raises(ConfigurationError, match=r"counters\.updates"):
        Counters().load_state_dict(state)
    with pytest.raises(ConfigurationError, match="step of a schedule"):
        Every(5).load_state_dict({"last": value})
    with pytest.raises(ConfigurationError, match=r"ratio\.vector_steps"):
        UpdateRatio(1).load_state_dict({"vector_steps": value, "updates": 0})


def test_numbers_at_the_bounds_are_read():
    assert checks.count(checks.LARGEST_COUNT, "steps") == 2**53
    assert checks.integer(-5, "updates") == -5
    assert checks.number(3, "best") == 3.0 and np.isnan(checks.number(float("nan"), "best"))
    assert checks.numbers({"a": 1, "b": 0.5}, "results") == {"a": 1.0, "b": 0.5}
    assert checks.flag(False, "over") is False


@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_switches_are_true_or_false(value):
    with pytest.raises(ConfigurationError, match=r"warm-up is .*, not true or false"):
        Until(3).load_state_dict({"over": value})


@pytest.mark.parametrize("values", [[1.0], {"a": "1"}, {1: 1.0}, {"a": None}, {"a": 10**40}, None])
def test_results_are_numbers_by_name(values):
    with pytest.raises(ConfigurationError, match="results"):
        checks.numbers(values, "results")


def test_any_error_of_damaged_values_names_the_part():
    for error in (
        KeyError("a"),
        RecursionError(),
        OverflowError(),
        AttributeError("b"),
        MemoryError(),
    ):
        refused = pytest.raises(
            ConfigurationError, match="checkpoint's counters cannot be restored"
        )
        with refused, checks.restoring("counters"):
            raise error
    with pytest.raises(OSError, match="full"), checks.restoring("counters"):
        raise OSError("the disk is full")
    with pytest.raises(ConfigurationError, match=r"^own$"), checks.restoring("counters"):
        raise ConfigurationError("own")


FILES = [
    "../../other.ckpt",
    "/etc/passwd",
    "best.ckpt",
    "step_1.ckpt",
    "step_000000000001.ckpt/",
    "",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["saved", "best"])
def test_checkpoints_that_are_deleted_are_those_of_the_run(name, where):
    state = {"every": {"last": 0}, "saved": ["step_000000000001.ckpt"], "best": []}
    CheckpointCallback().load_state_dict(state)
    state[where] = [name] if where == "saved" else [1.0, name]
    with pytest.raises(ConfigurationError, match="no name of a checkpoint"):
        CheckpointCallback().load_state_dict(state)


@pytest.mark.parametrize("wandb_id", ["../x", "a/b", "", "x" * 200, 3, "a\nb"])
def test_the_id_of_a_wandb_run_is_no_path(wandb_id):
    state = {"every": {"last": 0}, "wandb_id": "abc-123_x", "metrics_csv": None}
    MetricsCallback().load_state_dict(state)
    with pytest.raises(ConfigurationError, match="id of a W&B run"):
        MetricsCallback().load_state_dict(state | {"wandb_id": wandb_id})


def test_lightnings_counts_have_their_own_names_and_types():
    own = {"total": {"ready": 0, "done": False}}
    _check_counts({"total": {"ready": 7, "done": True}}, own, is_same_version=True)
    for found in ({}, {"total": {"ready": 7}}, {"total": {"ready": 7, "new": 1}}):
        _check_counts(found, own, is_same_version=False)
    for found in (
        {},
        {"total": {"ready": 7}},
        {"total": {"ready": 7, "done": 1}},
        {"total": {"ready": -1, "done": True}},
        {"total": {"ready": "7", "done": True}},
        {"total": {"ready": 7, "done": True, "increment_ready": 3}},
    ):
        with pytest.raises((ValueError, ConfigurationError)):
            _check_counts(found, own, is_same_version=True)
    with pytest.raises(ConfigurationError):
        _check_counts({"total": {"ready": -1}}, own, is_same_version=False)


def test_numpys_generator_is_not_read_outside_its_buffer():
    state = global_generators()
    for position in (625, -1, 10**6):
        state["numpy"][2] = position
        with pytest.raises(ConfigurationError, match="position in NumPy's generator"):
            restore_global_generators(state)
    random.seed(1)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(5056),
        torch.full((5056,), 255).byte(),
        3,
        None,
    ],
)
def test_a_generators_state_is_tried_when_it_is_restored(value):
    generators = Generators(1)
    generators.get("act", torch.device("cpu"))
    state = generators.state_dict()
    generators.load_state_dict(state)
    state["used"]["act"] = {"device": "cpu", "state": value}
    with pytest.raises((RuntimeError, TypeError, AttributeError)):
        Generators(1).load_state_dict(state)


def test_metrics_have_a_sum_and_a_count():
    metrics = MeanMetrics()
    metrics.add({"a": torch.tensor(1.0)})
    state = metrics.state_dict()
    for counts in ({}, {"a": 0}, {"a": -1}, {"a": 1, "b": 1}):
        with pytest.raises((ValueError, ConfigurationError)):
            MeanMetrics().load_state_dict(state | {"counts": counts})
    for shape in ((2, 3), (0,)):
        with pytest.raises(ValueError, match="neither a number nor one for each task"):
            MeanMetrics().load_state_dict(state | {"sums": {"a": torch.zeros(shape)}})


def test_sums_of_tasks_go_on_exactly_and_after_one_sum_for_all():
    value_R = torch.tensor([0.1, 0.2, 0.7])
    metrics = MeanMetrics()
    metrics.add({"a": value_R})
    restored = MeanMetrics()
    restored.load_state_dict(metrics.state_dict())
    assert torch.equal(restored.state_dict()["sums"]["a"], value_R)
    restored.load_state_dict({"sums": {"a": torch.tensor(5.0)}, "counts": {"a": 2}})
    restored.add({"a": value_R})
    assert restored.drain()["a"] == pytest.approx((5.0 + 1 / 3) / 3)
    former = MeanMetrics()
    former.load_state_dict({"sums": {"a": torch.tensor(5.0)}, "counts": {"a": 2}})
    former.add({"a": value_R})
    assert former.drain()["a"] == pytest.approx((5.0 + 1 / 3) / 3)


def test_a_metric_of_another_shape_is_refused_when_it_is_added():
    with pytest.raises(ValueError, match=r"a has the shape \[2, 3\]"):
        MeanMetrics().add({"a": torch.ones(2, 3)})


def npy(header):
    text = header.encode().ljust(117) + b"\n"
    return io.BytesIO(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("'<f8'", "(99999999999,)"),
        ("'<f8'", "(9,)"),
        ("'|O'", "(1,)"),
        ("[('a', '|O')]", "(1,)"),
        ("'<f8'", "(-1,)"),
        ("'<f8'", "(4294967296, 4294967296)"),
    ],
)
def test_the_header_of_an_array_asks_for_no_more_than_the_file_holds(dtype, shape):
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
    with pytest.raises(ValueError, match=r"an array of|negative"):
        _load_array(npy(header))


def test_an_array_that_fills_its_file_is_read():
    found = _load_array(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (8,), }"))
    np.testing.assert_array_equal(found, np.zeros(8))


def test_networks_that_a_file_describes_take_no_more_than_its_weights_explain(monkeypatch):
    with AllocationLimit.of_file(1000):
        torch.nn.Linear(300, 300)
    for make in [
        lambda: torch.empty(100_000, 100_000),
        lambda: torch.empty(1_000_000, 1_000_000),
        lambda: torch.zeros(1).new_zeros(1 << 40),
        lambda: torch.zeros(1 << 40),
        lambda: torch.randn(1 << 40, generator=torch.Generator()),
        lambda: torch.eye(1 << 20),
        lambda: torch.arange(1 << 40),
        lambda: torch.nn.BatchNorm1d(1 << 40, affine=False),
    ]:
        limit = AllocationLimit.of_file(1000)
        with pytest.raises(ConfigurationError, match="far more memory"), limit:
            make()
    for size in [(-1,), (1 << 40, 1 << 40)]:
        limit = AllocationLimit.of_file(1000)
        with pytest.raises(ConfigurationError, match="networks cannot be built"), limit:
            torch.empty(size)
    # no layer is too small to count
    monkeypatch.setattr("mtrl_lightning.algorithms.allocation.FREE_BYTES", 1 << 20)
    limit = AllocationLimit.of_file(1000)
    with pytest.raises(ConfigurationError, match="far more memory"), limit:
        while True:
            torch.nn.Linear(1, 1)


def test_networks_beyond_the_free_memory_are_refused_before_they_fill_it(monkeypatch):
    monkeypatch.setattr("mtrl_lightning.algorithms.allocation.free_memory", lambda: 1 << 20)
    with AllocationLimit.of_machine():
        layer = torch.nn.Linear(300, 300)
        for _ in range(5):  # what is no new tensor takes no memory
            layer.weight.detach().mul_(2)
    limit = AllocationLimit.of_machine()
    with pytest.raises(ConfigurationError, match=r"\(0.0 GiB are free\): choose smaller"), limit:
        torch.nn.Linear(300, 3_000)


@pytest.mark.parametrize("change", [{"width": 300_000}, {"depth": 10**9}, {"width": 10**12}])
def test_a_policy_of_a_file_with_enormous_networks_is_refused(tmp_path, change):
    spec = ToyReach().spec
    algorithm = SAC(spec)
    checkpoint = {"state_dict": algorithm.state_dict()}
    algorithm.on_save_checkpoint(checkpoint)
    init_args = checkpoint["mtrl_lightning"]["algorithm"]["init_args"]
    init_args["actor"].setdefault("init_args", {}).update(change)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="far more memory"):
        load_policy(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "space",
    [{"shape": [10**9]}, {"shape": [1 << 20, 1 << 20]}, {"shape": [-1]}, {"dtype": "object"}],
)
def test_a_space_of_a_file_is_of_a_size_that_observations_have(tmp_path, space):
    algorithm = SAC(ToyReach().spec)
    checkpoint = {"state_dict": algorithm.state_dict()}
    algorithm.on_save_checkpoint(checkpoint)
    checkpoint["mtrl_lightning"]["spec"]["observation_space"].update(space)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError):
        load_policy(tmp_path / "a.ckpt")


def test_options_of_a_checkpoint_are_compared_as_plain_values(tmp_path):
    callback = OptionsCallback({"model": {"lr": 0.1}}, ["model"])
    callback.session = SimpleNamespace(folder=tmp_path)
    callback.load_state_dict({"model.lr": torch.zeros(3)})
    assert callback._changes() == {"model.lr": "model.lr torch.Tensor there and 0.1 here"}
