"""Every benchmark runs at its smallest size, and the plain loop's losses are those of SAC."""

import importlib
import signal

import pytest
import torch

from benchmarks.baselines import PlainSAC
from benchmarks.updates import (
    ACTION,
    OBSERVATION,
    Work,
    direct_update,
    make_batches,
    make_sac,
    with_one_hot,
)

SMALL = "--tasks=2 --rows=4 --width=8 --depth=1 --rounds=1 --device=cpu"
COMMANDS = {
    "stepping": "--tasks=1 --workers=0 --env_steps=5 --settle=1 --rounds=1 --variants ours",
    "updates": f"{SMALL} --updates=2 --settle=1 --precisions=32-true --variants direct",
    "whole_runs": "--tasks=reach --precisions=32-true --vectors=sync --device=cpu --rounds=1"
    " --variants ours plain --sizes batch_size=8 width=8 depth=1 capacity=100 warmup=10 settle=1"
    " steps=2",
    "scaling": f"{SMALL} --ranks 1 2 --updates=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark_runs(name, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    importlib.import_module(f"benchmarks.{name}").main(COMMANDS[name].split())
    command, *_, last_row = capsys.readouterr().out.splitlines()
    assert command.startswith(f"python -m benchmarks.{name} ") and any(map(str.isdigit, last_row))


def pairs_of(plain, sac):
    """Pair the plain loop's parameters with SAC's, whose critics take the action first."""
    D = OBSERVATION
    T = sac.spec.num_tasks
    A = ACTION
    columns = [*range(D), *range(D + A, D + A + T), *range(D, D + A)]
    networks = [
        (plain.actor, sac.actor),
        *zip((plain.qf1, plain.qf2), sac.critic.members, strict=True),
        *zip((plain.qf1_target, plain.qf2_target), sac.target_critic.members, strict=True),
    ]
    for mine, theirs in networks:
        for k, (a, b) in enumerate(zip(mine.parameters(), theirs.parameters(), strict=True)):
            yield a, b[:, columns] if k == 0 and mine is not plain.actor else b


def test_plain_loop_learns_what_sac_does():
    work = Work(tasks=3, batch_size=12, width=16, depth=2)
    sac = make_sac(work)
    plain = PlainSAC(OBSERVATION, ACTION, work.tasks, work.width, work.depth)
    with torch.no_grad():
        for a, b in pairs_of(plain, sac):
            a.copy_(b)
    plain.generator.set_state(sac.generators.get("learn", sac.device).get_state())
    update = direct_update(work, sac)
    for batch in make_batches(work):
        update(batch)
        ours, theirs = sac.drain_metrics(), plain.update(with_one_hot(batch, work.tasks))
        for name, value in theirs.items():
            assert ours[f"train/{name}"] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(sac.temperature.log_alpha, plain.log_alpha_T, rtol=1e-5, atol=1e-7)
    for a, b in pairs_of(plain, sac):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
