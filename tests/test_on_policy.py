"""On-policy runs through the command line: iterations, continuation, faults, wrong options."""

from __future__ import annotations

import signal
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from mtrl_lightning import PPO, ReplayData, ToyReach, load_policy
from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.networks import MLP
from tests.helpers.runs import assert_same, checkpoint, signal_in_call, small

CONFIGS = ("base", "env/toy", "algorithm/mtppo", "network/mlp", "gradient/mean")
OPTIONS = [
    # iterations of 48 vector steps of 3 environments, while episodes have 20 steps
    "--model.init_args.num_steps=48",
    "--model.init_args.num_epochs=3",
    "--model.init_args.num_minibatches=4",
    "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
    "--model.init_args.learning_rate=mtrl_lightning.algorithms.LinearRate",
    "--data.total_steps=576",
    "--data.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=200",
    "--evaluation.num_episodes=2",
    "--metrics.every=100",
    "--checkpoint.every_n_env_steps=150",
    "--checkpoint.save_top_k=-1",
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.critic.init_args.width=16",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]


def fit(command_line, *options, configs=CONFIGS):
    command_line("fit", *OPTIONS, *options, configs=configs, small=False)


def assert_same_run(command_line, name, other):
    ends = [checkpoint(command_line, run) for run in (name, other)]
    for end in ends:  # paths of files, their sizes, and how often the trainer was started
        for part in ("epoch", "loops", "callbacks"):
            del end[part]
    assert_same(*ends)
    assert command_line.rows(name) == command_line.rows(other)


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
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (576, 48)
    evaluated = read_metrics(command_line.folder())["eval/success"][0]
    assert list(evaluated) == [288, 432, 576]
    names = {path.name for path in (command_line.folder() / "checkpoints").iterdir()}
    assert {f"env_steps={step:012d}.ckpt" for step in (288, 432, 576)} <= names
    curves = read_metrics(command_line.folder())
    for name in ("kl", "clip_fraction", "entropy", "actor_loss", "critic_loss", "critic_conflicts"):
        assert np.isfinite(curves[f"train/{name}"][1]).all()
    shares = [curves[f"train/critic_gradient_share/goal-{task}"][1] for task in range(3)]
    np.testing.assert_allclose(np.sum(shares, axis=0), 1, rtol=1e-5)
    assert max(curves["train/explained_variance/goal-0"][1]) <= 1
    assert min(curves["train/advantage_std/goal-0"][1]) > 0
    worst = curves["eval/success_worst_1"][1]
    lowest = np.min([curves[f"eval/success/goal-{task}"][1] for task in range(3)], axis=0)
    assert worst == lowest.tolist()


def test_large_step_ends_iteration_and_steps_are_rounded_up(command_line):
    fit(command_line, "--model.init_args.max_kl=1e-9", "--data.total_steps=300")
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert counters["env_steps"] == 432
    assert 3 <= counters["updates"] < 36 / 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gradient"), [("collecting", "pcgrad"), ("learning", "famo")])
def test_interrupted_run_ends_as_the_uninterrupted_one(command_line, monkeypatch, kind, gradient):
    configs = (*CONFIGS[:4], f"gradient/{gradient}")
    fit(command_line, "--name=whole", configs=configs)
    # in the middle of the second iteration, where episodes are under way
    method, call = {"collecting": ("act", 70), "learning": ("training_step", 19)}[kind]
    with monkeypatch.context() as patch:
        signal_in_call(patch, PPO, method, call, signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_info:
            fit(command_line, "--name=parts", configs=configs)
    assert exit_info.value.code == 143
    state = checkpoint(command_line, "parts")["RolloutData"]["buffer"]
    of_envs = state["per_env"]
    if kind == "collecting":
        assert 0 < of_envs["valid"].shape[1] < 48 and not of_envs["computed"]
    else:
        assert of_envs["valid"].shape[1] == 48 and 0 < state["num_minibatches"] < 12
    fit(command_line, "--name=parts", "--ckpt_path=last", configs=configs)
    assert_same_run(command_line, "whole", "parts")


@pytest.mark.slow
def test_checkpoint_between_iterations_holds_no_transitions(command_line):
    options = ["--trainer.precision=bf16-mixed", "--checkpoint.every_n_env_steps=288"]
    fit(command_line, *options, "--name=whole", "--model.init_args.learning_rate=ConstantRate")
    fit(
        command_line,
        *options,
        "--name=parts",
        "--data.total_steps=288",
        "--model.init_args.learning_rate=ConstantRate",
    )
    of_envs = checkpoint(command_line, "parts")["RolloutData"]["buffer"]["per_env"]
    assert of_envs["valid"].shape[1] == 0
    more = ["--ckpt_path=last", "--model.init_args.learning_rate=ConstantRate"]
    fit(command_line, *options, "--name=parts", *more)
    ends = [checkpoint(command_line, run) for run in ("whole", "parts")]
    for end in ends:  # the former end evaluated and logged once more
        for part in ("epoch", "loops", "callbacks"):
            del end[part]
        del end["mtrl_lightning"]["metrics"]
    assert_same(*ends)


def test_rebuilt_environment_leaves_a_gap_in_the_rollout(command_line, monkeypatch):
    begin_iteration = PPO.begin_iteration
    gaps = []

    def begin(self, collected, progress):
        found = begin_iteration(self, collected, progress)
        for step, env in np.argwhere(~collected.valid_SE.numpy()):
            gaps.append((int(step), int(env)))
            # the step before the gap has its own successor, and nothing of what comes after
            delta = found["target"][step - 1, env] - collected.columns["reward"][step - 1, env]
            successor = collected.columns["next_observation"][step - 1, env]
            assert not torch.equal(successor, collected.columns["observation"][step, env])
            value = self.return_scale.denormalize(
                self._normalized_values(successor[None], collected.task_E[env][None]),
                collected.task_E[env][None],
            )
            gaps_values.append((float(delta), self.discount * value.item()))
        return found

    gaps_values = []
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
    for found, expected in gaps_values:
        assert found == pytest.approx(expected, abs=1e-5)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert counters["dropped_transitions"] == len(gaps)
    assert counters["env_steps"] + counters["dropped_transitions"] == 3 * counters["vector_steps"]


def test_one_thread_acts_and_all_learn(tmp_path, monkeypatch):
    threads = {"act": set(), "update": set()}
    for name, method in (("act", PPO.act), ("update", PPO.update)):

        def watched(self, *args, name=name, method=method):
            threads[name].add(torch.get_num_threads())
            return method(self, *args)

        monkeypatch.setattr(PPO, name, watched)
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        network = partial(MLP, width=16, depth=1)
        options = {"num_steps": 10, "num_epochs": 1, "num_minibatches": 2}
        ppo = partial(PPO, actor=network, critic=network, **options)
        data = {"learner_threads": 2}
        small(ToyReach(3, horizon=5), tmp_path, algorithm=ppo, total_steps=60, data=data)
        assert threads == {"act": {1}, "update": {2}}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(former)


def test_early_stopping_ends_a_run_after_an_iteration(tmp_path):
    stop = EarlyStopping(
        "eval/return", patience=1, min_delta=1e9, check_on_train_epoch_end=False, mode="max"
    )
    network = partial(MLP, width=16, depth=1)
    options = {"num_steps": 40, "num_epochs": 2, "num_minibatches": 2}
    run = small(
        ToyReach(3, horizon=20),
        tmp_path,
        algorithm=partial(PPO, actor=network, critic=network, **options),
        total_steps=1200,
        evaluation={"every": 150},
        callbacks=[stop],
    )
    assert run.algorithm.counters.env_steps == 360
    policy = load_policy(run.checkpoint)
    observation = np.zeros(policy.spec.observation_space.shape, np.float32)
    assert policy.act(observation, "goal-1", "explore").shape == policy.spec.action_space.shape


@pytest.mark.slow
def test_networks_are_reset_between_iterations(command_line, monkeypatch):
    resets = []
    reset_networks = PPO.reset_networks

    def reset(self):
        resets.append(self.counters.env_steps)
        reset_networks(self)

    monkeypatch.setattr(PPO, "reset_networks", reset)
    fit(command_line, "--resets.every=200", "--name=whole")
    assert resets == [288, 432]
    resets.clear()
    fit(command_line, "--resets.every=200", "--name=parts", "--data.total_steps=288")
    assert resets == []
    more = ("--data.total_steps=576", "--ckpt_path=last")
    fit(command_line, "--resets.every=200", "--name=parts", *more)
    assert resets == [288, 432]


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(200, 10), (1024, 16), (250, 10), (8, 8), (13, 13), (19, 1)]
)
def test_the_derived_number_of_minibatches_divides_the_steps(num_steps, expected):
    assert PPO(ToyReach().spec, num_steps=num_steps).collection.num_minibatches == expected


@pytest.mark.slow
def test_other_iteration_size_is_refused_within_an_iteration(command_line, monkeypatch, capsys):
    other = "--model.init_args.num_steps=60"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_in_call(patch, PPO, "training_step", 19, signal.SIGTERM)
        fit(command_line, "--name=within")
    with pytest.raises(SystemExit):
        fit(command_line, other, "--name=within", "--ckpt_path=last")
    assert "in the middle of an iteration" in capsys.readouterr().err
    fit(command_line, "--data.total_steps=288")
    fit(command_line, other, "--ckpt_path=last")
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert counters["env_steps"] == 288 + 2 * 180


def test_data_without_numbers_have_those_of_the_protocol():
    data = ReplayData(ToyReach(num_tasks=3))
    assert (data.batch_size, data.capacity) == (3 * 128, 300_000)
