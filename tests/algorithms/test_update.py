"""One optimizer step: what it changes, in which precision, task by task; and the targets' step.

A gradient that is not finite reaches no weight: the run stops, or the step is skipped.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from mtrl_lightning.errors import DivergenceError
from mtrl_lightning.gradients import FAMO, Mean, PCGrad, per_task_forward
from mtrl_lightning.networks import MLP, MOORE, FiLM, MultiHead, PaCo, SoftModularization
from mtrl_lightning.updates import metrics, update
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
from tests.helpers.gradients import METHODS
from tests.helpers.networks import uniform
from tests.helpers.runs import assert_same
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


def test_only_losses_use_autocast_and_new_weights():
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
def test_losses_differentiated_one_by_one_have_separate_graphs(method, device, calls):
    network = nn.Linear(2, 2, device=device)
    found = []
    entered = []

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


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def where(request, monkeypatch):
    """Decide on the CPU, or as on a GPU, where fused optimizers get the flag as a tensor."""
    monkeypatch.setattr(update, "decides_on_device", lambda device: request.param)


def skipping(**options):
    sac = make_sac(on_nonfinite="skip", **options)
    attach(sac)
    return sac


def learn(sac, updates, broken=(2,), value=math.nan):
    """Make updates; in the broken ones, the rewards of task 1 have this value."""
    for i in updates:
        batch = make_batch(sac.spec, seed=i)
        if i in broken:
            batch.reward_Rn[1] = value
        sac.training_step(batch, i)
    return sac


def critic_state(sac):
    """Everything that a step of the critics may change."""
    return {
        "weights": copy_of(sac.critic),
        "method": copy_of(sac.critic_gradient),
        "optimizer": {
            i: {name: torch.as_tensor(value).clone() for name, value in state.items()}
            for i, state in enumerate(sac.critic_update.optimizer.state.values())
        },
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_stops_and_names_the_task(where, value):
    sac = make_sac()
    attach(sac)
    learn(sac, range(2))
    before = critic_state(sac)
    with pytest.raises(DivergenceError, match=rf"for task-1 \({value}\) in update 3"):
        learn(sac, [2], value=value)
        sac.guard.read()
    assert_same(critic_state(sac), before)


@pytest.mark.parametrize("name", slow_unless(("mean", "famo", "nash_mtl_kept"), METHODS))
def test_skipped_step_changes_nothing_and_learning_continues(monkeypatch, name):
    ends = []
    for decides_on_device in (False, True):
        monkeypatch.setattr(update, "decides_on_device", lambda _, is_on=decides_on_device: is_on)
        sac = skipping(actor_gradient=METHODS[name], critic_gradient=METHODS[name])
        learn(sac, range(2))
        before = critic_state(sac)
        actor = copy_of(sac.actor)
        learn(sac, range(2, 4), broken=(2, 3))
        assert_same(critic_state(sac), before)
        assert changed(sac.actor, actor) == set(actor), "the actor's own loss is finite"
        assert sac.counters.skipped_updates == (0 if decides_on_device else 2), "not read yet"
        learn(sac, range(4, 7))
        assert changed(sac.critic, before["weights"]) == set(before["weights"])
        assert all(value.isfinite().all() for value in sac.state_dict().values())
        sac.drain_metrics()
        assert (sac.counters.updates, sac.counters.skipped_updates) == (7, 2)
        ends.append(sac)
    assert changed(ends[0], copy_of(ends[1])) == set(), "both make the same steps"


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=1e-3)])
def test_an_optimizer_without_a_flag_skips_too(where, optimizer):
    sac = learn(skipping(critic_optimizer=optimizer), range(2))
    before = critic_state(sac)
    learn(sac, [2])
    assert_same(critic_state(sac), before)
    assert sac.counters.skipped_updates == 1, "such an optimizer is waited for"


def test_more_steps_than_may_be_skipped_end_the_run(where):
    sac = learn(skipping(max_skipped_updates=3), range(4), broken=range(1, 9))
    sac.guard.read()
    assert sac.counters.skipped_updates == 3
    with pytest.raises(DivergenceError, match="4 updates"):
        learn(sac, [4], broken=[4])
        sac.guard.read()


def test_pending_results_are_read_at_the_limit_or_checkpoint(monkeypatch):
    monkeypatch.setattr(update, "decides_on_device", lambda device: True)
    monkeypatch.setattr(metrics, "MAX_PENDING", 8)
    sac = skipping(actor_every=10_000)  # 3 steps in the first update, then 1 in each
    for last, num_read in ((4, 0), (5, 1)):
        learn(sac, range(sac.counters.updates, last + 1))
        assert sac.counters.skipped_updates == num_read
    learn(sac, [6], broken=[6])
    checkpoint = {}
    sac.on_save_checkpoint(checkpoint)
    assert checkpoint["mtrl_lightning"]["counters"]["skipped_updates"] == 2


def test_nonfinite_gradient_of_finite_losses_ends_the_run(where):
    sac = make_sac()
    attach(sac)
    sac.critic.members[0].trunk[0].weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DivergenceError, match="gradient"):
        learn(sac, [0])
        sac.guard.read()
    sac.guard.read()  # all were read


def test_networks_are_repaired_also_where_the_step_is_skipped(where):
    sac = skipping(critic=partial(PaCo, width=8, depth=1, num_sets=2, max_loss=1000.0))
    before = copy_of(learn(sac, range(2)).critic)
    learn(sac, [2])
    assert changed(sac.critic, before) == {f"members.{i}.composition.weight" for i in range(2)}
    for member in sac.critic.members:
        columns = (member.composition.weight != before["members.0.composition.weight"]).any(0)
        assert member.composition.weight.isfinite().all() and columns[1]
