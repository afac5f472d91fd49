"""Generators and running means, and that a checkpoint can hold them."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.algorithms.state import global_generators, restore_global_generators
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import MeanMetrics

CPU = torch.device("cpu")


def draw(generators, name, count=5):
    return torch.rand(count, generator=generators.get(name, CPU)).tolist()


def test_the_same_seed_gives_the_same_stream_and_another_does_not():
    assert draw(Generators(3), "act") == draw(Generators(3), "act")
    assert draw(Generators(3), "act") != draw(Generators(4), "act")


def test_each_name_has_a_stream_of_its_own():
    generators = Generators(3)
    first = draw(generators, "act")
    assert draw(generators, "learn") != first
    other = Generators(3)
    draw(other, "learn", 1000)
    assert draw(other, "act") == first


def test_a_name_gives_the_same_generator_again():
    generators = Generators(3)
    assert generators.get("act", CPU) is generators.get("act", CPU)
    assert draw(generators, "act") != draw(generators, "act")


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32, 2**63])
def test_any_seed_is_taken(seed):
    draw(Generators(seed), "act")


def test_seeds_near_each_other_give_streams_that_have_nothing_in_common():
    streams = torch.tensor(
        [draw(Generators(seed), name, 1000) for seed in range(4) for name in ("act", "learn")]
    )
    correlation = torch.corrcoef(streams)
    # five standard deviations
    assert correlation[~torch.eye(8, dtype=torch.bool)].abs().max() < 0.16


def test_restored_generators_go_on_bit_for_bit(tmp_path):
    before, after = Generators(3), Generators(99)
    draw(before, "act", 7)
    draw(before, "learn", 3)
    draw(after, "act", 1)
    torch.save(before.state_dict(), tmp_path / "state")
    after.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for name in ("act", "learn"):
        assert draw(after, name) == draw(before, name)


def test_a_saved_state_does_not_move_with_the_generators():
    generators = Generators(3)
    draw(generators, "act")
    state = generators.state_dict()
    wanted = draw(generators, "act")
    generators.load_state_dict(state)
    assert draw(generators, "act") == wanted


def test_a_restored_generator_that_was_not_used_since_is_saved_again():
    first = Generators(3)
    second = Generators(3)
    third = Generators(3)
    draw(first, "act", 11)
    second.load_state_dict(first.state_dict())
    draw(second, "learn")
    third.load_state_dict(second.state_dict())
    assert draw(third, "act") == draw(first, "act")


def test_a_generator_that_was_not_used_before_the_save_goes_on_with_the_seed_of_the_run():
    before, after = Generators(3), Generators(99)
    draw(before, "act")
    after.load_state_dict(before.state_dict())
    assert draw(after, "learn") == draw(before, "learn")


def test_a_generator_saved_on_another_device_begins_with_the_seed():
    state = {
        "seed": 3,
        "used": {"act": {"device": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}},
        "per_rank": {},
    }
    generators = Generators(3)
    generators.load_state_dict(state)
    assert draw(generators, "act") == draw(Generators(3), "act")


def test_generators_leave_the_global_one_alone():
    before = torch.get_rng_state()
    draw(Generators(3), "act")
    assert torch.equal(torch.get_rng_state(), before)


def test_means_by_hand_with_counts_of_their_own():
    metrics = MeanMetrics()
    metrics.add({"q": torch.tensor(1.0), "loss": torch.tensor(5.0)})
    metrics.add({"q": torch.tensor(2.0)})
    metrics.add({"q": torch.tensor(6.0)})
    assert metrics.drain() == {"q": 3.0, "loss": 5.0}


def test_draining_begins_anew():
    metrics = MeanMetrics()
    metrics.add({"q": torch.tensor(1.0)})
    metrics.drain()
    assert metrics.drain() == {}
    metrics.add({"q": torch.tensor(4.0)})
    assert metrics.drain() == {"q": 4.0}


def test_means_hold_no_graph():
    metrics, weight = MeanMetrics(), torch.tensor(2.0, requires_grad=True)
    metrics.add({"loss": weight * 3})
    ((_, _, sum_, _),) = metrics.state_dict()["all_ranks"]["sums"]
    assert not sum_.requires_grad


def test_half_precision_is_summed_in_single_precision():
    metrics = MeanMetrics()
    for _ in range(1000):
        metrics.add({"q": torch.tensor(1.0, dtype=torch.bfloat16)})
    assert metrics.drain() == {"q": 1.0}


def test_a_value_that_changes_after_it_was_added_does_not_change_the_mean():
    metrics, weight = MeanMetrics(), torch.tensor(1.0)
    metrics.add({"weight": weight})
    weight.fill_(100)  # as a method's own state does, which moves in place
    assert metrics.drain() == {"weight": 1.0}


def test_in_an_update_each_value_of_a_name_counts_whether_it_is_a_number_or_a_row_of_one():
    metrics = MeanMetrics()
    with metrics.added_at_end():
        metrics.add({"q": torch.tensor([1.0]), "loss": torch.tensor(5.0)})
        metrics.add({"q": torch.tensor(2.0)})
    assert metrics.drain() == {"q": 1.5, "loss": 5.0}


def test_restored_sums_go_on(tmp_path):
    before, after = MeanMetrics(), MeanMetrics()
    after.add({"stale": torch.tensor(1.0)})
    before.add({"q": torch.tensor(1.0)})
    before.add({"q": torch.tensor(2.0)})
    torch.save(before.state_dict(), tmp_path / "state")
    after.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    before.add({"q": torch.tensor(9.0)})
    after.add({"q": torch.tensor(9.0)})
    assert after.drain() == before.drain() == {"q": 4.0}


def test_a_saved_state_does_not_move_with_the_sums():
    metrics = MeanMetrics()
    metrics.add({"q": torch.tensor(1.0)})
    state = metrics.state_dict()
    metrics.add({"q": torch.tensor(5.0), "loss": torch.tensor(1.0)})
    assert state["all_ranks"]["sums"] == [(0, "q", torch.tensor(1.0), 1)]


def test_sums_of_tasks_continue_exactly():
    value_R = torch.tensor([0.1, 0.2, 0.7])
    metrics, restored = MeanMetrics(), MeanMetrics()
    metrics.add({"a": value_R})
    restored.load_state_dict(metrics.state_dict())
    ((_, _, sum_, _),) = restored.state_dict()["all_ranks"]["sums"]
    assert torch.equal(sum_, value_R)
    restored.add({"a": 3 * value_R})
    assert restored.drain()["a"] == pytest.approx(2 / 3)


def test_metric_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        MeanMetrics().add({"a": torch.ones(2, 3)})


def test_numpys_generator_is_not_read_outside_its_buffer():
    state = global_generators()
    for position in (625, -1, 10**6):
        state["numpy"][2] = position
        with pytest.raises(ValueError, match="position"):
            restore_global_generators(state)
