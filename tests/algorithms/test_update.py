"""One optimizer step: what it changes, in which precision, task by task; and the targets' step."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mtrl_lightning.gradients import FAMO, Mean, PCGrad, per_task_forward
from mtrl_lightning.networks import MLP, MOORE, FiLM, MultiHead, PaCo, SoftModularization
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics
from mtrl_lightning.updates.targets import PolyakAverage
from mtrl_lightning.updates.update import Update
from mtrl_lightning.utils.counters import Counters
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_sac,
    make_spec,
    train,
)
from tests.helpers.networks import uniform
from tests.helpers.specs import spec_of
from tests.helpers.tiers import slow_unless


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, -2.0]))


def make_update(module, **options):
    metrics = MeanMetrics()
    update = Update(
        "thing",
        [module],
        partial(SGD, lr=0.5),
        generators=Generators(0),
        metrics=metrics,
        guard=DivergenceGuard("stop", 0, ["a", "b"], Counters()),
        spec=spec_of(2),
        **options,
    )
    update.configure_optimizer()
    return update, metrics


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # the mean's gradient is x, the step half of it
        ({}, [0.5, -1.0]),
        ({"weights": lambda: torch.tensor([0.0, 2.0])}, [1.0, 0.0]),
    ],
)
def test_step_follows_the_weighted_mean_and_logs_the_plain_loss(options, wanted):
    module = Numbers()
    update, metrics = make_update(module, **options)
    assert update(lambda: (module.x.square(), "extra")) == "extra"
    assert module.x.tolist() == wanted
    assert metrics.drain() == {"thing_loss": 2.5}


def test_losses_that_are_not_one_per_task_are_refused():
    module = Numbers()
    update, _ = make_update(module)
    with pytest.raises(ValueError, match="shape"):
        update(lambda: (module.x[:, None].expand(-1, 3), None))
    assert module.x.tolist() == [1.0, -2.0]


def test_losses_use_autocast_and_new_weights_but_gradients_do_not():
    module, seen, backward = nn.Linear(2, 2), [], []
    module.weight.register_hook(lambda _: backward.append(torch.is_autocast_enabled("cpu")))
    update, _ = make_update(module, method=FAMO(spec_of(2)))

    def losses():
        loss_R = module(torch.ones(2, 2)).float().square().mean(1)
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), loss_R))
        return loss_R, None

    with torch.autocast("cpu", dtype=torch.bfloat16):
        update(losses)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # without weights that were rounded before
        wanted, _ = losses()
    assert [kind for *kind, _ in seen[:2]] == [[True, True], [True, False]]
    assert torch.equal(seen[1][2], wanted) and not torch.equal(seen[1][2], seen[0][2])
    assert backward == [False]


def test_a_task_whose_loss_explodes_changes_no_weight():
    network = partial(PaCo, num_sets=2, width=8, depth=1, max_loss=1e3)
    critics = []
    for reward in (1e4, 2e4):
        algorithm = make_sac(actor=network, critic=network)
        attach(algorithm)
        batch = make_batch(algorithm.spec)
        batch.reward_Rn[1] = reward
        algorithm.training_step(batch, 0)
        critics.append(algorithm.critic)
    assert changed(critics[0], copy_of(critics[1])) == set()


class Toy(nn.Module):
    def __init__(self, weights, mean=0.0, count=0):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(weights))
        self.b = nn.Parameter(torch.tensor([weights[0]]))
        self.register_buffer("mean", torch.tensor([mean]))
        self.register_buffer("count", torch.tensor(count))


def test_parameters_move_by_their_tau_and_buffers_are_copied():
    sources = [Toy([5.0, -3.0], mean=3.5, count=7), Toy([2.0, 2.0])]
    targets = [Toy([1.0, 1.0]), Toy([0.0, 0.0])]
    average = PolyakAverage(sources, targets, [0.25, 0.5])
    for module in (*sources, *targets):
        module.double()  # as a move to another device does, it replaces the buffers
    average.step()
    assert [target.a.tolist() for target in targets] == [[2, 0], [1, 1]]
    assert [target.b.tolist() for target in targets] == [[2], [1]]
    average.step()
    assert [target.a.tolist() for target in targets] == [[2.75, -0.75], [1.5, 1.5]]
    assert sources[0].a.tolist() == [5, -3]
    assert (targets[0].mean.item(), targets[0].count.item()) == (3.5, 7)
    assert targets[0].mean.dtype == torch.float64
    sources[0].mean.fill_(9)
    assert targets[0].mean.item() == 3.5, "the target has memory of its own"
    average.copy()
    assert targets[0].a.tolist() == [5, -3] and targets[0].mean.item() == 9


T, ROWS = 3, 4


@pytest.mark.parametrize(
    ("method", "device", "calls"),
    [
        (PCGrad(spec_of(T)), "cpu", [(1, ROWS)] * T),
        (None, "cpu", [(1, ROWS)] * T),
        (Mean(spec_of(T)), "cpu", [(T, ROWS)]),
        (FAMO(spec_of(T)), "cpu", [(T, ROWS)]),
        (PCGrad(spec_of(T)), "meta", [(T, ROWS)]),
        (None, "meta", [(T, ROWS)]),
    ],
)
def test_each_task_has_a_graph_where_losses_are_differentiated_one_by_one(method, device, calls):
    network, found, entered = nn.Linear(2, 2, device=device), [], []

    def note(module, given, output):
        found.append(given[0].shape[:2])
        output.register_hook(lambda gradient: (gradient is not None and entered.append(1)) or None)

    network.register_forward_hook(note)
    output_RnD = per_task_forward(method, network, 0, uniform(T, ROWS, 2).to(device))
    assert found == calls
    for number, loss in enumerate(output_RnD.sum((1, 2)), 1):
        torch.autograd.grad(loss, network.weight, retain_graph=True)
        assert len(entered) == number, "a pass enters the graph of its own task alone"


class Apart(Mean):
    """The mean, by a method that says that it takes the tasks one by one."""

    is_one_pass = False


NORMALIZED = partial(MLP, layer_norm=True)
NETWORKS = [NORMALIZED, MultiHead, FiLM, PaCo, MOORE, SoftModularization]


@pytest.mark.parametrize("network", slow_unless((NORMALIZED, MultiHead), NETWORKS))
def test_an_update_is_the_same_task_by_task(network):
    small = partial(network, width=16, depth=2, output_bound=0.3)
    make = partial(make_sac, make_spec(4, train_tasks=(0, 1, 3)), actor=small, critic=small)
    whole, apart = make(), make(actor_gradient=Apart, critic_gradient=Apart)
    before = copy_of(whole)
    for sac in (whole, apart):
        train(sac, 2)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert changed(whole, before) >= {name for name in before if name.startswith("actor.")}
