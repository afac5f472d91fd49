"""The compiled update beside the plain one."""

import shutil
from functools import partial

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import PCGrad
from tests.helpers.algorithms import make_distral, make_ppo, make_sac, make_spec, make_td3, train


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)
@pytest.mark.parametrize(
    ("make", "num_metrics", "backend"),
    [
        (make_sac, 7, "inductor"),
        (make_td3, 5, "aot_eager"),
        (make_ppo, 7, "aot_eager"),
        (partial(make_distral, make_spec(3, train_tasks=(0, 2))), 7, "aot_eager"),
    ],
)
def test_compiled_losses_give_the_same_updates(make, num_metrics, backend, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, mode: compiled(function, backend=backend)
    )
    plain, fast = (train(make(compile=how), 4) for how in (None, "default"))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    wanted, found = plain.drain_metrics(), fast.drain_metrics()
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4) and len(wanted) >= num_metrics


def test_losses_are_compiled_in_the_given_mode_and_steps_marked(monkeypatch):
    asked = []
    found = []
    monkeypatch.setattr(
        torch, "compile", lambda function, mode: asked.append((function.__name__, mode)) or function
    )
    make_sac()
    assert asked == []
    sac = make_sac(compile="reduce-overhead")
    losses = ("critic_target", "critic_loss", "actor_loss")
    assert asked == [(name, "reduce-overhead") for name in losses]
    monkeypatch.setattr(
        torch.compiler,
        "cudagraph_mark_step_begin",
        lambda: found.append({p.grad for update in sac.updates for p in update.parameters}),
    )
    train(sac, 3)
    assert found == [{None}] * 3, "gradients are cleared before"


def test_what_is_differentiated_task_by_task_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    with pytest.raises(ConfigurationError, match="PCGrad"):
        make_sac(compile="default", actor_gradient=PCGrad)
