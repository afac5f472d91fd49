"""A gradient that is not finite reaches no weight: the run stops, or the step is skipped."""

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from mtrl_lightning.errors import DivergenceError
from mtrl_lightning.networks import PaCo
from mtrl_lightning.updates import metrics, update
from tests.helpers.algorithms import attach, changed, copy_of, make_batch, make_sac
from tests.helpers.gradients import METHODS
from tests.helpers.runs import assert_same
from tests.helpers.tiers import slow_unless


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
        before, actor = critic_state(sac), copy_of(sac.actor)
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


def test_pending_results_are_read_at_their_limit_or_for_a_checkpoint(monkeypatch):
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
