"""The examples run, at sizes that take a second each, and compute what they say."""

import runpy
import sys
from functools import partial

import pytest
import torch

import mtrl_lightning
from mtrl_lightning import PPO, SAC, ToyConflict, read_metrics
from mtrl_lightning.gradients import FAMO, PCGrad, TaskParameters
from mtrl_lightning.networks import MLP
from tests.helpers.algorithms import make_batch
from tests.helpers.command_line import ROOT, short_train
from tests.helpers.runs import small
from tests.helpers.specs import spec_of

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PRINTED = {
    "custom_tasks": "heavy",
    "custom_benchmark": "eval_extrapolation after 120 env steps",
    "custom_network": "goal-2",
    "custom_gradient_method": "goal-5",
    "custom_algorithm": "goal-2",
    "custom_callback": "worst task: goal-",
    "load_and_act": "success",
    "remote_collector": "transitions, at most 20 updates old",
    "tune_optuna": "best of 1 trials",
}
"""What each example prints, among other things."""
ARGUMENTS = {"tune_optuna": ["--trials=1"]}


def imported(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


def test_every_example_is_known():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_every_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mtrl_lightning, "train", short_train)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out
    if name == "remote_collector":  # which trains with Lightning's trainer alone
        return
    (folder,) = (tmp_path / "runs").rglob("version_0")
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_custom_gradient_method_equalizes_the_norms():
    shared = torch.nn.Parameter(torch.zeros(2))
    loss_R = torch.stack([shared[0], 4 * shared[1]])  # gradients of the norms 1 and 4, mean 2.5
    method = imported("custom_gradient_method")["EqualNorms"](spec_of(2), power=1.0)
    method.backward(loss_R, TaskParameters([shared], [], []), torch.Generator())
    assert shared.grad.tolist() == pytest.approx([1.25, 1.25])


def test_custom_algorithm_bootstraps_where_the_task_did_not_end():
    algorithm = imported("custom_algorithm")["DDPG"](spec_of(2), discount=0.5)
    algorithm.q = lambda critic, observation_RnD, action_RnA, task_Rn: torch.full((2, 5), 10.0)
    batch = make_batch(algorithm.spec)
    expected_Rn = batch.reward_Rn + 5.0 * ~batch.terminated_Rn
    torch.testing.assert_close(algorithm.critic_target(batch), expected_Rn)


def documented_metrics():
    """Return the names in the tables of docs/logging.md."""
    lines = (ROOT / "docs" / "logging.md").read_text().splitlines()
    names = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name.strip().strip("`") for cell in names for name in cell.split(",")}


@pytest.mark.parametrize(
    "algorithm",
    [
        partial(SAC, critic_gradient=PCGrad, actor_gradient=FAMO),
        partial(PPO, critic_gradient=PCGrad, num_steps=10, num_minibatches=2),
    ],
    ids=["SAC", "PPO"],
)
def test_every_metric_of_a_run_is_on_its_page(algorithm, tmp_path):
    benchmark = ToyConflict()
    network = partial(MLP, width=8, depth=1)
    algorithm = partial(algorithm, actor=network, critic=network)
    run = small(benchmark, tmp_path, algorithm=algorithm, total_steps=120)
    logged = set(read_metrics(run.folder))
    for task in benchmark.spec.task_names:
        logged = {name.replace(f"/{task}", "/<task>") for name in logged}
    assert len(logged) > 30
    assert logged - documented_metrics() == set()
