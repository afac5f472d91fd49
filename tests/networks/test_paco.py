"""PaCo's exploding tasks; its equation is in the contract."""

import math

import pytest
import torch

from mtrl_lightning.networks.paco import PaCo
from tests.helpers.specs import spec_of

INF, NAN = math.inf, math.nan


def make(num_tasks=3, max_loss=10.0):
    torch.manual_seed(1)
    return PaCo(4, 2, spec_of(num_tasks), width=4, depth=1, num_sets=6, max_loss=max_loss)


def table(network):
    return network.composition.weight.detach().clone().t()


def step(network, losses, tasks=(0, 1, 2), seed=7):
    """Return ``w`` after a step, and the state of the generator."""
    generator = torch.Generator().manual_seed(seed)
    network.after_step(torch.tensor(losses), torch.tensor(tasks), generator)
    return table(network), generator.get_state()


def test_losses_that_explode_are_masked_and_give_no_gradient():
    loss_T = torch.tensor([3.0, 10.0, 10.5, INF, NAN, -INF, -50.0], requires_grad=True)
    masked_T = make().mask_losses(loss_T)
    assert masked_T.tolist() == [3, 10, 0, 0, 0, 0, -50]
    masked_T.sum().backward()
    assert loss_T.grad.tolist() == [1, 1, 0, 0, 0, 0, 1]
    by_default = PaCo(4, 2, spec_of(2), width=4)
    assert by_default.mask_losses(torch.tensor([2999.0, 3001.0])).tolist() == [2999, 0]
    assert make(max_loss=None).mask_losses(torch.tensor([1e9])).tolist() == [1e9]


def test_exploding_tasks_restart_between_the_healthy_ones():
    network = make(num_tasks=5)
    before_TK = table(network)
    after_TK, _ = step(network, [1.0, 11.0, 2.0, NAN], (4, 1, 2, 0))  # task 3 is not trained
    assert torch.equal(after_TK[[2, 3, 4]], before_TK[[2, 3, 4]])
    share_RR = 1 - torch.rand(4, 4, generator=torch.Generator().manual_seed(7))
    for task, row in ((1, 1), (0, 3)):
        of_4, of_2 = share_RR[row, [0, 2]]
        wanted_K = (of_4 * before_TK[4] + of_2 * before_TK[2]) / (of_4 + of_2)
        torch.testing.assert_close(after_TK[task], wanted_K, rtol=1e-6, atol=1e-7)


def test_a_w_that_is_no_number_does_not_spread():
    network = make()
    network.composition.weight.data[:, 0] = NAN
    before_TK = table(network)
    after_TK, _ = step(network, [NAN, 11.0, 1.0])
    torch.testing.assert_close(after_TK, before_TK[[2, 2, 2]])


@pytest.mark.parametrize(
    ("losses", "max_loss"),
    [([1.0, 10.0, -5.0], 10.0), ([11.0, NAN, INF], 10.0), ([1.0, 1e9, NAN], None)],
)
def test_nothing_changes_if_none_explodes_or_all_do(losses, max_loss):
    network = make(max_loss=max_loss)
    before_TK = table(network)
    assert torch.equal(step(network, losses)[0], before_TK)


def test_draws_do_not_depend_on_exploding_tasks():
    states = [step(make(), [1.0, loss, 1.0])[1] for loss in (1.0, 11.0)]
    assert torch.equal(*states)
