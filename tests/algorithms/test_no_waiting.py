"""An update reads no number from its device, because it would have to wait for a GPU.

PyTorch's ``meta`` device stands for the GPU: see ``tests/helpers/meta.py``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.optim import Adam

from mtrl_lightning import algorithms, networks
from mtrl_lightning.auxiliaries import HiPBMDP, Reconstruction
from mtrl_lightning.gradients import FAMO, GradNorm, PCGrad
from mtrl_lightning.updates.metrics import MeanMetrics
from tests.helpers.algorithms import (
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
    small_mlp,
)
from tests.helpers.meta import META, meta_batch, on_meta
from tests.helpers.operations import recorded


def mixture(assignment):
    sizes = {"num_experts": 4, "width": 6, "depth": 1, "out_dim": 5}
    return partial(networks.MixtureOfEncoders, assignment=assignment, **sizes)


def combined(method):
    return {"actor_gradient": method, "critic_gradient": method}


MLP, HEADS = (partial(kind, width=8) for kind in (networks.MLP, networks.MultiHead))
ONE_PER_TASK = partial(networks.OnePerTask, make=small_mlp)
SAC_PARTS = (
    combined(PCGrad),
    combined(GradNorm),
    combined(FAMO),
    {"actor": partial(MLP, layer_norm=True), "critic": partial(MLP, residual=True)},
    {"actor": HEADS, "critic": partial(HEADS, head_width=6)},
    {"actor": partial(networks.SoftModularization, width=8), "encoder": networks.Standardize},
    {"actor": partial(networks.FiLM, width=8), "critic": partial(networks.MOORE, width=8)},
    {"actor": partial(networks.Separate, width=8), "critic": partial(networks.PaCo, width=8)},
    {"actor": ONE_PER_TASK, "critic": ONE_PER_TASK},
    {
        "encoder": partial(networks.Standardize, per_task=True),
        "critic": partial(MLP, conditioning=networks.TaskEncoder),
    },
    {
        "encoder": mixture(networks.OneHotGate),
        "critic": partial(MLP, conditioning=networks.Embedding),
    },
    {
        "encoder": mixture(networks.UniformGate),
        "critic": partial(MLP, conditioning=networks.NoConditioning),
    },
    {"encoder": mixture(networks.TopKGate), "reward_scale": algorithms.MeanReward},
    {"encoder": mixture(networks.Attention), "actor_every": 2, "target_every": 2},
    {
        "reward_scale": algorithms.ReturnRange,
        "value": partial(algorithms.Categorical, num_bins=11),
        "task_weighting": algorithms.TemperatureWeights,
    },
    {
        "temperature": partial(algorithms.Temperature, per_task=False),
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
    },
    {
        "encoder": partial(networks.MLPEncoder, width=8, context=networks.Embedding),
        "auxiliaries": [HiPBMDP, Reconstruction],
    },
)
CASES = [
    *(partial(make_sac, **options) for options in SAC_PARTS),
    partial(make_ppo, actor=HEADS, critic=HEADS, **combined(PCGrad)),
    partial(make_ppo, actor=ONE_PER_TASK, critic=ONE_PER_TASK),
    make_td3,
    make_distral,
    make_bc,
]


def update_without_numbers(make, **options):
    algorithm = on_meta(make, **options)
    batch = meta_batch(algorithm)
    for i in range(2):
        algorithm.training_step(batch, i)
    return algorithm


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES)
def test_no_part_of_an_update_waits(make, without_numbers):
    update_without_numbers(make)


def test_an_update_of_sac_does_not_wait(without_numbers):
    sac = update_without_numbers(make_sac)
    assert {parameter.device for parameter in sac.parameters()} == {META}
    assert sac.counters.updates == 2


def test_ppo_waits_only_for_the_divergence_of_an_epoch(without_numbers):
    ppo = on_meta(make_ppo, num_minibatches=2)
    batch = meta_batch(ppo)
    for _ in range(2):
        ppo.training_step(batch, 0)
        assert not ppo.is_iteration_over()
        ppo.training_step(batch, 1)
        with pytest.raises(RuntimeError, match="item"):
            ppo.is_iteration_over()
    assert ppo.counters.updates == 4


def test_an_optimizer_that_cannot_skip_on_the_device_waits(without_numbers):
    with (
        pytest.warns(UserWarning, match=r"of critic, Adam, cannot skip .* fused: true"),
        pytest.raises(RuntimeError, match="item"),
    ):
        update_without_numbers(make_sac, optimizer=Adam)


@pytest.mark.parametrize("make", [make_sac, make_td3, make_ppo])
def test_acting_copies_once_to_the_device_and_once_back(make, without_numbers, monkeypatch):
    algorithm = on_meta(make)
    fetched = []

    def cpu(tensor):
        fetched.append(tuple(tensor.shape))
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    task_E = np.repeat(np.arange(4), 2)
    for _ in range(2):
        with recorded() as operations:
            algorithm.act(np.zeros((8, 4)), task_E, "explore")
    copies = [given for name, given, _ in operations if name == "aten._to_copy.default"]
    from_host = [given for given in copies if "'cpu'" in given]
    assert len(from_host) == 1, "the observations; the tasks are there already"
    # actions, and PPO's samples and log densities
    num_columns = 2 + 2 + 1 if make is make_ppo else 2
    assert fetched == [(8, num_columns)] * 2


def test_metrics_are_read_by_one_copy(monkeypatch):
    metrics = MeanMetrics()
    metrics.add({f"metric {i}": torch.tensor(float(i)) for i in range(50)})
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    for name in ("item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    assert metrics.drain() == {f"metric {i}": i for i in range(50)}
    assert reads == [(100,)]
