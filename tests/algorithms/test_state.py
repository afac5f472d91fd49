"""Generators, running means and options of optimizers: what a checkpoint holds of them."""

import pytest
import torch
from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.updates.generators import (
    Generators,
    global_generators,
    restore_global_generators,
)
from mtrl_lightning.updates.metrics import MeanMetrics
from mtrl_lightning.updates.update import check_fused_state, replace_options
from tests.helpers.algorithms import checkpoint_of, make_sac, make_spec


def draw(generators, name, count=5):
    return torch.rand(count, generator=generators.get(name, torch.device("cpu"))).tolist()


def test_names_and_neighbouring_seeds_have_streams_of_their_own():
    other = Generators(3)
    draw(other, "learn", 1000)
    assert draw(other, "act") == draw(Generators(3), "act")
    streams = torch.tensor(
        [draw(Generators(seed), name, 1000) for seed in range(4) for name in ("act", "learn")]
    )
    correlation = torch.corrcoef(streams)
    # five standard deviations
    assert correlation[~torch.eye(8, dtype=torch.bool)].abs().max() < 0.16


def test_restored_generators_continue_used_or_not(tmp_path):
    before, between, after = Generators(3), Generators(50), Generators(99)
    assert draw(before, "act", 7) != draw(before, "act", 7)
    draw(before, "learn", 3)
    draw(between, "act", 1)
    torch.save(before.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    between.load_state_dict(state)
    draw(between, "other")
    after.load_state_dict(between.state_dict())
    for name in ("act", "learn", "unused before"):
        assert draw(after, name) == draw(before, name)
    before.load_state_dict(state)
    assert draw(before, "act") == draw(between, "act"), "a saved state does not move"


def test_generator_of_another_device_begins_with_the_seed():
    saved = {"device": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
    generators = Generators(5)
    generators.load_state_dict({"seed": 3, "used": {"act": saved}, "per_rank": {}})
    assert draw(generators, "act") == draw(Generators(3), "act")


@pytest.mark.parametrize("position", [625, -1])
def test_numpys_generator_is_not_read_outside_its_buffer(position):
    state = global_generators()
    state["numpy"][2] = position
    with pytest.raises(ValueError, match="position"):
        restore_global_generators(state)


def test_means_by_hand_have_counts_of_their_own_and_begin_anew():
    metrics, weight = MeanMetrics(), torch.tensor(1.0, requires_grad=True)
    metrics.add({"q": weight, "loss": torch.tensor(5.0)})
    with torch.no_grad():
        weight.fill_(100)  # as the state of a gradient method, which changes in place
    metrics.add({"q": torch.tensor(2.0)})
    state = metrics.state_dict()["all_ranks"]["sums"]
    assert state == [(0, "q", torch.tensor(3.0), 2), (0, "loss", torch.tensor(5.0), 1)]
    assert not any(sum_.requires_grad for _, _, sum_, _ in state)
    metrics.add({"q": torch.tensor(6.0)})
    assert state[0][2] == 3, "a saved state does not move"
    assert metrics.drain() == {"q": 3.0, "loss": 5.0}
    assert metrics.drain() == {}


def test_means_of_an_update_are_in_single_precision():
    metrics = MeanMetrics()
    for _ in range(1000):
        with metrics.added_at_end():
            metrics.add({"q": torch.ones(1, dtype=torch.bfloat16), "loss": torch.tensor(5.0)})
            metrics.add({"q": torch.tensor(2.0)})
    assert metrics.drain() == {"q": 1.5, "loss": 5.0}
    with pytest.raises(ValueError, match="shape"):
        metrics.add({"a": torch.ones(2, 3)})


def of_tasks(*names):
    return make_spec(len(names))._replace(task_names=names)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (of_tasks("task-0", "task-1", "push"), "push"),
        (of_tasks("task-0", "task-1"), "task-2"),
        (of_tasks("task-1", "task-0", "task-2"), "task-1"),
        (make_spec()._replace(action_sizes=(2, 2, 1)), "action"),
    ],
)
def test_a_checkpoint_of_other_tasks_is_refused(spec, word):
    with pytest.raises(ConfigurationError, match=word):
        make_sac(spec).on_load_checkpoint(checkpoint_of(make_sac()))


def test_fused_kernels_get_no_state_of_another_shape():
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    check_fused_state(saved, optimizer)
    saved["state"][0]["exp_avg"] = torch.zeros(6)
    with pytest.raises(ConfigurationError, match="exp_avg"):
        check_fused_state(saved, optimizer)


def test_new_options_keep_the_factor_of_a_schedule():
    parameters = [nn.Parameter(torch.zeros(2))]
    state = torch.optim.Adam(parameters, lr=0.1, eps=1e-5).state_dict()
    state["param_groups"][0] |= {"initial_lr": 0.1, "lr": 0.025}
    replace_options(state, torch.optim.Adam(parameters, lr=0.2, eps=1e-3))
    group = state["param_groups"][0]
    assert (group["initial_lr"], group["lr"], group["eps"]) == (0.2, 0.05, 1e-3)
