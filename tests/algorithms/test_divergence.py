"""A gradient that is not finite reaches no weight: the run stops, or the step is skipped."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from mtrl_lightning.algorithms import RewardScale
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import DivergenceError
from mtrl_lightning.networks import PaCo
from mtrl_lightning.updates import metrics, update
from tests.helpers.algorithms import changed, copy_of, make_sac, train
from tests.helpers.command_line import SHORT
from tests.helpers.gradients import METHODS
from tests.helpers.runs import assert_same
from tests.helpers.tiers import slow_unless


class BrokenReward(RewardScale):
    """Rewards of task 1 that are no numbers in some batches.

    Args:
        spec: the tasks.
        updates: which batches, counted from 0.
        value: the rewards there.
    """

    def __init__(self, spec, updates=(2,), value=math.nan) -> None:
        super().__init__(spec)
        self.updates = set(updates)
        self.value = value
        self.count = 0

    def forward(self, batch, **quantities):
        is_broken = self.count in self.updates
        self.count += 1
        if not is_broken:
            return batch
        reward_Rn = torch.where(batch.task_R1 == 1, self.value, batch.reward_Rn)
        return batch._replace(reward_Rn=reward_Rn)


def on_device(monkeypatch):
    """Let fused optimizers get the flag as a tensor, as on a GPU."""
    monkeypatch.setattr(update, "decides_on_device", lambda device: True)


@pytest.fixture(params=["cpu", "device"])
def where(request, monkeypatch):
    """Decide on the CPU, or as on a GPU."""
    if request.param == "device":
        on_device(monkeypatch)
    return request.param


def broken_sac(on_nonfinite="skip", gradient="mean", updates=(2,), value=math.nan, **options):
    return make_sac(
        actor_gradient=METHODS[gradient],
        critic_gradient=METHODS[gradient],
        reward_scale=partial(BrokenReward, updates=updates, value=value),
        on_nonfinite=on_nonfinite,
        **options,
    )


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
    sac = train(broken_sac("stop", value=value), 2)
    sac.counters.env_steps = 1234
    before = critic_state(sac)
    with pytest.raises(DivergenceError) as caught:
        train(sac, 1, first=2)
        sac.guard.read()
    message = str(caught.value)
    assert f"the critic loss is not finite for task-1 ({value}) in update 3, after 1,234" in message
    assert "on_nonfinite to skip" in message and "task-0" not in message
    assert_same(critic_state(sac), before)


@pytest.mark.parametrize("name", slow_unless(("mean", "famo", "nash_mtl_kept"), METHODS))
def test_skipped_step_changes_nothing_and_learning_continues(monkeypatch, name):
    ends = []
    for decides_on_device in (False, True):
        monkeypatch.setattr(update, "decides_on_device", lambda _, is_on=decides_on_device: is_on)
        sac = train(broken_sac("skip", name, updates=(2, 3)), 2)
        before, actor = critic_state(sac), copy_of(sac.actor)
        train(sac, 2, first=2)
        assert_same(critic_state(sac), before)
        assert changed(sac.actor, actor) == set(actor), "the actor's own loss is finite"
        assert sac.counters.skipped_updates == (0 if decides_on_device else 2), "not read yet"
        train(sac, 3, first=4)
        assert changed(sac.critic, before["weights"]) == set(before["weights"])
        assert all(value.isfinite().all() for value in sac.state_dict().values())
        sac.drain_metrics()
        assert (sac.counters.updates, sac.counters.skipped_updates) == (7, 2)
        ends.append(sac)
    assert changed(ends[0], copy_of(ends[1])) == set(), "both make the same steps"


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=1e-3)])
def test_an_optimizer_without_a_flag_skips_too(where, optimizer):
    sac = train(broken_sac(critic_optimizer=optimizer), 2)
    before = critic_state(sac)
    train(sac, 1, first=2)
    assert_same(critic_state(sac), before)
    assert sac.counters.skipped_updates == 1, "such an optimizer is waited for"


def test_more_steps_than_may_be_skipped_end_the_run(where):
    sac = train(broken_sac(updates=range(1, 9), max_skipped_updates=3), 4)
    sac.guard.read()
    assert sac.counters.skipped_updates == 3
    with pytest.raises(DivergenceError, match="4 updates"):
        train(sac, 1, first=4)
        sac.guard.read()


def test_pending_results_are_read_at_their_limit(monkeypatch):
    on_device(monkeypatch)
    monkeypatch.setattr(metrics, "MAX_PENDING", 8)
    sac = broken_sac(actor_every=10_000)  # 3 steps in the first update, then 1 in each
    train(sac, 5)
    assert sac.counters.skipped_updates == 0
    train(sac, 1)
    assert sac.counters.skipped_updates == 1


def test_a_checkpoint_counts_what_only_the_device_knows(monkeypatch):
    on_device(monkeypatch)
    sac = train(broken_sac(), 4)
    checkpoint = {}
    sac.on_save_checkpoint(checkpoint)
    assert checkpoint["mtrl_lightning"]["counters"]["skipped_updates"] == 1


def test_an_actors_loss_is_guarded_too(where):
    sac = train(make_sac(), 2)
    before = copy_of(sac.actor)
    with torch.no_grad():
        sac.temperature.log_alpha[2] = 100.0  # its exponential is infinite
    with pytest.raises(DivergenceError, match="task-2"):
        train(sac, 1, first=2)
        sac.guard.read()
    assert changed(sac.actor, before) == set()


def test_nonfinite_gradient_of_finite_losses_ends_the_run(where):
    sac = train(make_sac(), 1)
    sac.critic.members[0].trunk[0].weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DivergenceError, match="gradient"):
        train(sac, 1)
        sac.guard.read()
    sac.guard.read()  # all were read


def test_networks_are_repaired_also_where_the_step_is_skipped(where):
    paco = partial(PaCo, width=8, depth=1, num_sets=2, max_loss=1000.0)
    sac = train(broken_sac(critic=paco), 2)
    before = copy_of(sac.critic)
    train(sac, 1, first=2)
    moved = changed(sac.critic, before)
    assert moved == {f"members.{i}.composition.weight" for i in range(2)}
    for member in sac.critic.members:
        columns = (member.composition.weight != before["members.0.composition.weight"]).any(0)
        assert member.composition.weight.isfinite().all() and columns[1]


@pytest.mark.slow
def test_a_run_that_skips_goes_to_its_end_and_says_how_often(command_line):
    scale = "--model.init_args.reward_scale"
    command_line(
        "fit",
        *SHORT,
        f"{scale}=tests.algorithms.test_divergence.BrokenReward",
        f"{scale}.init_args.updates=[30]",
        "--model.init_args.on_nonfinite=skip",
    )
    counts = read_metrics(command_line.folder())["fault/skipped_updates"][1]
    assert set(counts) == {0, 1} and counts[-1] == 1
    last = load_checkpoint(command_line.folder() / "checkpoints" / "last.ckpt")
    assert last["mtrl_lightning"]["counters"]["skipped_updates"] == 1
    assert all(value.isfinite().all() for value in last["state_dict"].values())
