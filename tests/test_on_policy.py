"""On-policy runs through the command line: iterations, faults, stops, wrong options.

``tests/matrix/test_continuation.py`` shows their continuation.
"""

import numpy as np
import pytest
import torch

from mtrl_lightning import PPO, ToyReach
from mtrl_lightning.callbacks import read_metrics
from tests.helpers.command_line import SMALL, without_replay
from tests.helpers.runs import checkpoint

CONFIGS = ("base", "env/toy", "algorithm/mtppo", "network/mlp", "gradient/mean")
OPTIONS = [
    *without_replay(SMALL),
    # iterations of 48 vector steps of 3 environments, while episodes have 20 steps
    "--model.init_args.num_steps=48",
    "--model.init_args.num_epochs=3",
    "--model.init_args.num_minibatches=4",
    "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
    "--model.init_args.learning_rate=mtrl_lightning.algorithms.LinearRate",
    "--data.total_steps=576",
    "--evaluation.every=200",
    "--metrics.every=100",
    "--checkpoint.every_n_env_steps=150",
    "--checkpoint.save_top_k=-1",
]


def fit(command_line, *options):
    command_line("fit", *OPTIONS, *options, configs=CONFIGS, small=False)


def test_iterations_are_collected_then_learned_from(command_line, monkeypatch):
    seen, ratios = [], []
    training_step, begin_iteration = PPO.training_step, PPO.begin_iteration

    def step(self, batch, batch_idx):
        if self.counters.updates % 12 == 0:
            with torch.no_grad():
                _, (log_ratio_Rn, _) = self.actor_loss(batch)
            ratios.append(log_ratio_Rn.abs().max().item())
        seen.append(("update", self.counters.env_steps))
        assert torch.equal(batch.task_Rn, torch.arange(3)[:, None].expand(3, 12))
        training_step(self, batch, batch_idx)

    def begin(self, collected, progress):
        seen.append(("begin", self.counters.env_steps))
        assert progress == (self.counters.env_steps - 144) / 576
        return begin_iteration(self, collected, progress)

    monkeypatch.setattr(PPO, "training_step", step)
    monkeypatch.setattr(PPO, "begin_iteration", begin)
    # with a large output layer the policy depends on the scale of its observations
    fit(command_line, "--model.init_args.actor.init_args.output_bound=0")
    expected = []
    for env_steps in (144, 288, 432, 576):
        expected += [("begin", env_steps), *[("update", env_steps)] * 12]
    assert seen == expected
    assert len(ratios) == 4 and max(ratios) < 1e-5
    curves = read_metrics(command_line.folder())
    assert list(curves["eval/success"][0]) == [288, 432, 576]
    names = {path.name for path in (command_line.folder() / "checkpoints").iterdir()}
    assert {f"env_steps={step:012d}.ckpt" for step in (288, 432, 576)} <= names
    for name in ("kl", "clip_fraction", "entropy", "actor_loss", "critic_loss", "critic_conflicts"):
        assert np.isfinite(curves[f"train/{name}"][1]).all()
    shares = [curves[f"train/critic_gradient_share/goal-{task}"][1] for task in range(3)]
    np.testing.assert_allclose(np.sum(shares, axis=0), 1, rtol=1e-5)
    assert max(curves["train/explained_variance/goal-0"][1]) <= 1
    assert min(curves["train/advantage_std/goal-0"][1]) > 0
    lowest = np.min([curves[f"eval/success/goal-{task}"][1] for task in range(3)], axis=0)
    assert curves["eval/success_worst_1"][1] == lowest.tolist()


def test_large_step_ends_iteration_and_steps_are_rounded_up(command_line):
    fit(command_line, "--model.init_args.max_kl=1e-9", "--data.total_steps=300")
    found = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert found["env_steps"] == 432
    assert 3 <= found["updates"] < 36 / 2


def test_rebuilt_environment_leaves_a_gap_in_the_rollout(command_line, monkeypatch):
    """The step before the gap has its own successor, and nothing of what comes after."""
    begin_iteration, gaps = PPO.begin_iteration, []

    def begin(self, collected, progress):
        found = begin_iteration(self, collected, progress)
        columns, task_E = collected.columns, collected.task_E
        for step, env in np.argwhere(~collected.valid_SE.numpy()):
            before = step - 1, env
            successor = columns["next_observation"][before]
            assert not torch.equal(successor, columns["observation"][step, env])
            value = self.return_scale.denormalize(
                self.critic(self.encoder(successor[None], task_E[env][None]), task_E[env][None]),
                task_E[env][None],
            )
            bootstrapped = found["target"][before] - columns["reward"][before]
            gaps.append((float(bootstrapped), self.discount * value.item()))
        return found

    monkeypatch.setattr(PPO, "begin_iteration", begin)
    with pytest.warns(UserWarning, match="restart 1"):
        fit(
            command_line,
            "--data.benchmark=tests.helpers.altered_reach.FaultyReach",
            "--data.benchmark.init_args.fault=nan",
            "--data.total_steps=288",
            "--model.init_args.return_scale=mtrl_lightning.algorithms.ReturnScale",
        )
    assert gaps
    for found, expected in gaps:
        assert found == pytest.approx(expected, abs=1e-5)
    found = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert found["dropped_transitions"] == len(gaps)
    assert found["env_steps"] + found["dropped_transitions"] == 3 * found["vector_steps"]


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(200, 10), (1024, 16), (250, 10), (8, 8), (13, 13), (19, 1)]
)
def test_derived_number_of_minibatches_divides_the_steps(num_steps, expected):
    assert PPO(ToyReach().spec, num_steps=num_steps).collection.num_minibatches == expected
