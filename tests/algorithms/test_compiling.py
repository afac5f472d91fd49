"""The compiled update beside the plain one."""

from __future__ import annotations

import shutil

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import FAMO, PCGrad
from mtrl_lightning.learning import compiling
from tests.helpers.algorithms import make_batch, make_distral, make_sac, make_spec, make_td3, train
from tests.helpers.recorder import recorded_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)
@pytest.mark.parametrize(
    ("make", "num_metrics", "backend"), [(make_sac, 7, "inductor"), (make_td3, 5, "aot_eager")]
)
def test_compiled_losses_give_the_same_updates(make, num_metrics, backend, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend=backend))
    plain, fast = (train(make(compile=how), 4) for how in ("none", "default"))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    wanted, found = plain.drain_metrics(), fast.drain_metrics()
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4) and len(wanted) >= num_metrics


def test_only_what_was_asked_for_is_compiled(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "compile", lambda function: asked.append(function.__name__) or function
    )
    make_sac()
    make_sac(compile="graph")
    assert asked == []
    make_sac(compile="default")
    assert asked == ["critic_target", "critic_loss", "actor_loss"]


@pytest.mark.parametrize("make", [make_sac, make_distral, make_td3])
def test_a_compiled_function_has_a_graph_for_its_losses_only(make):
    sac = make()
    batch = make_batch(sac.spec)
    noise_RnA = torch.zeros_like(batch.action_RnA)
    target = sac.critic_target(batch, noise_RnA)
    assert len(target) == 2 and not any(value.requires_grad for value in target)
    actor_loss = sac.actor_loss(batch) if make is make_td3 else sac.actor_loss(batch, noise_RnA)
    computed = [sac.critic_loss(batch, target), actor_loss]
    if make is make_distral:
        computed.append(sac.distilled_loss(batch))
    for loss_T, other in computed:
        assert loss_T.requires_grad and (other is None or not other.requires_grad)


def test_distrals_target_is_one_graph_also_with_tasks_that_are_not_trained():
    distral = make_distral(make_spec(3, train_tasks=(0, 2)))
    batch = make_batch(distral.spec)
    target = torch.compile(distral.critic_target, backend="eager", fullgraph=True)
    noise_RnA = torch.ones_like(batch.action_RnA)
    for found, wanted in zip(
        target(batch, noise_RnA), distral.critic_target(batch, noise_RnA), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_an_unknown_option_is_an_error_at_once():
    with pytest.raises(
        ConfigurationError, match="compile is 'graphs': give one of none, default, graph"
    ):
        make_sac(compile="graphs")


def test_cuda_graphs_need_a_gpu():
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        compiling.check_compile("graph", CPU)


def test_the_former_name_of_graphs_is_accepted():
    with pytest.warns(UserWarning, match="cudagraphs means graph now"):
        sac = make_sac(compile="cudagraphs")
    assert sac.compile_mode == "graph"
    with pytest.raises(ConfigurationError, match="compile graph needs a CUDA device"):
        compiling.prepare_device(sac, CPU)


def test_compiling_for_the_cpu_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    compiling.check_compile("none", CPU)
    with pytest.raises(ConfigurationError, match=r"install g\+\+"):
        compiling.check_compile("default", CPU)
    monkeypatch.setenv("CXX", "mine")
    monkeypatch.setattr(
        compiling.shutil, "which", lambda name: f"/bin/{name}" if name == "mine" else None
    )
    compiling.check_compile("default", CPU)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: f"/bin/{name}")


def test_compiling_for_a_gpu_needs_triton_and_a_compiler(with_triton, monkeypatch):
    how = "default"
    compiling.check_compile(how, CUDA)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=f"compile {how} needs Triton, .* and a C compiler"
    ):
        compiling.check_compile(how, CUDA)
    monkeypatch.setenv("CC", "mine")
    monkeypatch.setattr(
        compiling.shutil, "which", lambda name: "/bin/mine" if name == "mine" else None
    )
    compiling.check_compile(how, CUDA)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="set compile to none"):
        compiling.check_compile(how, CUDA)


def test_what_is_differentiated_task_by_task_cannot_be_compiled(with_triton):
    how = "default"
    with pytest.raises(ConfigurationError, match="the gradient methods to Mean or FAMO"):
        compiling.prepare_device(make_sac(compile=how, actor_gradient=PCGrad), CUDA)
    compiling.prepare_device(make_sac(compile=how, actor_gradient=FAMO), CUDA)
    compiling.prepare_device(make_sac(actor_gradient=PCGrad), CUDA)


def test_a_new_device_has_no_graphs_of_the_last():
    sac = make_sac()
    sac.graphs = recorded_graphs(sac)
    compiling.prepare_device(sac, CPU)
    assert sac.graphs is None


def test_several_processes_have_no_graphs(monkeypatch):
    monkeypatch.setattr(compiling.distributed, "world_size", lambda: 2)
    sac = make_sac(compile="graph")
    with pytest.warns(UserWarning, match="no effect with several processes"):
        compiling.prepare_device(sac, CUDA)
    assert sac.graphs is None
