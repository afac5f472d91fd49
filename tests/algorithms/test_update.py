"""One optimizer step: what it changes, in which precision; and the step of the targets."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mtrl_lightning.gradients import FAMO
from mtrl_lightning.networks import PaCo
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics
from mtrl_lightning.updates.targets import PolyakAverage
from mtrl_lightning.updates.update import Update
from mtrl_lightning.utils.counters import Counters
from tests.helpers.algorithms import attach, changed, copy_of, make_batch, make_sac
from tests.helpers.specs import spec_of


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
