"""Encoders of state vectors: statistics against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from mtrl_lightning.networks import Identity, Standardize
from mtrl_lightning.networks.standardize import ROUNDS
from tests.helpers.specs import spec_of

DIM = 3
SPACE = Box(-np.inf, np.inf, (DIM,), np.float32)
NO_TASK = torch.zeros(1, dtype=torch.int64)


def batches(count, rows=8, seed=0):
    """Batches whose mean and scale differ from batch to batch and from feature to feature."""
    generator = np.random.default_rng(seed)
    scale, shift = np.array([1.0, 5.0, 0.3]), np.array([0.0, -7.0, 2.0])
    data = (
        generator.normal(size=(count, rows, DIM)) * scale
        + shift
        + generator.normal(size=(count, 1, DIM))
    )
    return data.astype(np.float32)


def observe(encoder, data):
    for batch in data:
        encoder.observe(torch.from_numpy(batch), torch.zeros(len(batch), dtype=torch.int64))
    return encoder


def assert_statistics_are_of(encoder, data):
    rows = data.reshape(-1, DIM).astype(np.float64)
    np.testing.assert_allclose(encoder.mean_D.numpy(), rows.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(encoder.variance_D.numpy(), rows.var(0), rtol=1e-5)


@pytest.mark.parametrize("per_task", [False, True])
def test_learning_batches_are_standardized_as_rows_in_any_order(per_task):
    grouped, any_order = (Standardize(spec_of(3, SPACE), per_task=per_task) for _ in range(2))
    task_Rn = torch.tensor([[0] * 4, [2] * 4])
    order_B = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    for batch in batches(5):
        x_RnD = torch.from_numpy(batch).view(2, 4, DIM)
        assert grouped.observe(x_RnD, task_Rn)
        assert any_order.observe(x_RnD.flatten(0, 1)[order_B], task_Rn.flatten()[order_B])
    for name, value in grouped.state_dict().items():
        torch.testing.assert_close(value, any_order.state_dict()[name], rtol=1e-5, atol=1e-6)
    out_RnD = grouped(x_RnD, task_Rn)
    out_BD = grouped(x_RnD.flatten(0, 1)[order_B], task_Rn.flatten()[order_B])
    assert torch.equal(out_RnD, out_BD[order_B.argsort()].view(2, 4, DIM))
    assert not torch.allclose(out_RnD, x_RnD)
    assert torch.equal(Identity(spec_of(3, SPACE))(x_RnD, task_Rn), x_RnD)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_statistics_and_outputs_are_those_of_all_rows(count):
    data, encoder = batches(count), Standardize(spec_of(2, SPACE))
    rows = data.reshape(-1, DIM)
    x_BD = torch.from_numpy(rows)
    before_BD = encoder(torch.ones(1, DIM), NO_TASK)
    assert torch.equal(before_BD, torch.ones(1, DIM)), "before anything was observed"
    observe(encoder, data)
    assert_statistics_are_of(encoder, data)
    wanted = (rows - rows.mean(0, dtype=np.float64)) / rows.std(0, dtype=np.float64)
    np.testing.assert_allclose(encoder(x_BD, NO_TASK).numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert encoder.count.item() == count


def test_constant_features_are_divided_by_the_smallest_std():
    encoder = Standardize(spec_of(2, SPACE), min_std=0.5)
    # deviations 0, 2, 0.1
    encoder.observe(torch.tensor([[4.0, -2.0, 0.0], [4.0, 2.0, 0.2]]), NO_TASK.expand(2))
    out = encoder(torch.tensor([[5.0, 6.0, 0.6]]), NO_TASK)
    torch.testing.assert_close(out, torch.tensor([[2.0, 3.0, 1.0]]))


def test_outliers_are_clipped_on_both_sides():
    encoder = Standardize(spec_of(2, SPACE), clip=2.5)
    encoder.observe(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]), NO_TASK.expand(2))
    out = encoder(torch.tensor([[2.4, 2.6, -1e6]]), NO_TASK)
    torch.testing.assert_close(out, torch.tensor([[2.4, 2.5, -2.5]]))


def test_clipped_rows_make_the_statistics_that_a_loop_finds():
    encoder = observe(Standardize(spec_of(2, SPACE), clip=1.5, min_std=1e-3), batches(1, rows=30))
    x_ND = batches(1, rows=30)[0].astype(np.float64)
    clipped_ND = x_ND
    for _ in range(ROUNDS):
        reach_D = 1.5 * clipped_ND.std(0)
        mean_D = clipped_ND.mean(0)
        clipped_ND = np.minimum(np.maximum(x_ND, mean_D - reach_D), mean_D + reach_D)
    assert (clipped_ND.std(0) < 0.95 * x_ND.std(0)).all()
    assert encoder.mean_D.tolist() == pytest.approx(clipped_ND.mean(0).tolist(), rel=1e-4)
    assert encoder.variance_D.sqrt().tolist() == pytest.approx(clipped_ND.std(0).tolist(), rel=1e-4)


@pytest.mark.parametrize("per_task", [False, True])
@pytest.mark.parametrize("number", [1, 2, 20])
def test_rare_outliers_do_not_decide_the_deviation(number, per_task):
    encoder = Standardize(spec_of(2, SPACE), per_task=per_task)
    plain = torch.from_numpy(batches(number, rows=4_000))
    falling = plain.clone()
    falling[:, [0, 2], 0] = torch.tensor([-100.0, -190.0])  # of the first task, each second row's
    task_B = torch.tensor([0, 1]).repeat(2_000)
    for x_BD in falling:
        encoder.observe(x_BD, task_B)
    step = 2 if per_task else 1
    wanted_D = plain[:, ::step].flatten(0, 1).std(0)
    assert falling[:, ::step, 0].std() > 2 * wanted_D[0]
    variance_D = encoder.variance_TD[0] if per_task else encoder.variance_D
    assert variance_D.sqrt().tolist() == pytest.approx(wanted_D.tolist(), rel=0.1)


@pytest.mark.parametrize("per_task", [False, True])
@pytest.mark.parametrize("saved_after", [0, 1, 6, 9])
def test_restored_statistics_continue_and_freeze(saved_after, per_task):
    data = batches(10)
    options = {"num_updates": 6, "per_task": per_task}
    before, after = (Standardize(spec_of(3, SPACE), **options) for _ in range(2))
    observe_tasks(before, data[:saved_after])
    observe_tasks(after, batches(8, seed=5))
    after.load_state_dict(before.state_dict())
    for encoder in (before, after):
        observe_tasks(encoder, data[saved_after:])
    if per_task:
        assert after.rows_T.tolist() == [18, 0, 30]
    else:
        assert_statistics_are_of(after, data[:6])
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name])


TASK_N = np.array([0, 2, 2, 0, 2, 0, 2, 2])
"""Tasks of a batch's rows; task 1 is not trained."""


def observe_tasks(encoder, data, task_N=TASK_N):
    for batch in data:
        encoder.observe(torch.from_numpy(batch), torch.from_numpy(task_N))
    return encoder


@pytest.mark.parametrize("count", [1, 5])
def test_statistics_per_task_are_those_of_the_tasks_rows(count):
    data = batches(count)
    encoder = observe_tasks(Standardize(spec_of(3, SPACE), per_task=True), data)
    for task in (0, 2):
        rows = data[:, task == TASK_N].reshape(-1, DIM).astype(np.float64)
        np.testing.assert_allclose(encoder.mean_TD[task], rows.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(encoder.variance_TD[task], rows.var(0), rtol=1e-5)
        wanted = (rows - rows.mean(0)) / rows.std(0)
        out = encoder(torch.from_numpy(rows).float(), torch.full((len(rows),), task))
        np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-3, atol=1e-4)


def test_statistics_per_task_weigh_every_row_alike():
    encoder = Standardize(spec_of(1, SPACE), per_task=True)
    data = 1e-3 * batches(1, rows=9)[0]  # far from the variances of 1 at the start
    for rows in (data[:2], data[2:3], data[3:]):
        encoder.observe(torch.from_numpy(rows), torch.zeros(len(rows), dtype=torch.int64))
    np.testing.assert_allclose(encoder.mean_TD[0], data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(encoder.variance_TD[0], data.var(0), rtol=1e-5)


def test_untrained_task_has_the_statistics_of_its_size():
    encoder = Standardize(spec_of(5, SPACE, observation_sizes=[3, 3, 3, 2, 1]))
    data = batches(4)
    task_N = np.array([0, 2, 2, 0, 3, 0, 2, 3])
    data[:, task_N == 3, 2:] = 0
    observe_tasks(encoder, data, task_N)
    parts = [data[:, task_N == task].reshape(-1, DIM) for task in (0, 2)]
    same = np.concatenate(parts).astype(np.float64)  # as many rows of each
    np.testing.assert_allclose(encoder.mean_TD[1], same.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(encoder.variance_TD[1], same.var(0), rtol=1e-5)
    x_BD = torch.tensor([[1.5, 0, 0]])
    assert torch.equal(encoder(x_BD, torch.tensor([4])), x_BD)  # there is none of its size
    assert not encoder(torch.zeros(1, DIM), torch.tensor([3]))[:, 2:].any()
    observe_tasks(encoder, batches(2, seed=3), np.full(8, 1))
    own = batches(2, seed=3).reshape(-1, DIM)
    np.testing.assert_allclose(encoder.mean_TD[1], own.mean(0), rtol=1e-4)


def test_tasks_are_separated_where_their_sizes_differ():
    same = spec_of(2, SPACE, observation_sizes=[3, 3])
    different = spec_of(2, SPACE, observation_sizes=[3, 2])
    pooled = {"mean_D", "variance_D", "count"}
    apart = {"mean_TD", "variance_TD", "rows_T", "count"}
    assert set(Standardize(same).state_dict()) == pooled
    assert set(Standardize(same, per_task=True).state_dict()) == apart
    assert set(Standardize(different).state_dict()) == apart
    assert set(Standardize(same, per_task=False).state_dict()) == pooled
