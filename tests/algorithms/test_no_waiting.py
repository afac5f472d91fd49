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
from mtrl_lightning.gradients import (
    FAMO,
    GradNorm,
    PCGrad,
)
from mtrl_lightning.networks import MLP, MultiHead, NoConditioning
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

PARTS = {
    "Separate": {"actor": partial(networks.Separate, width=8)},
    "heads with a hidden layer": {"critic": partial(MultiHead, width=8, head_width=6)},
    "one network per task": {
        name: partial(networks.OnePerTask, make=small_mlp) for name in ("actor", "critic")
    },
    "PCGrad": {"actor_gradient": PCGrad, "critic_gradient": PCGrad},
    "GradNorm": {"actor_gradient": GradNorm, "critic_gradient": GradNorm},
    "FAMO": {"actor_gradient": FAMO, "critic_gradient": FAMO},
}
SMALL_ENCODER = {"num_experts": 4, "width": 6, "depth": 1, "out_dim": 5}
MIXTURES = {
    name: {
        "encoder": partial(
            networks.MixtureOfEncoders, assignment=getattr(networks, name), **SMALL_ENCODER
        )
    }
    for name in ("OneHotGate", "UniformGate", "TopKGate", "Attention")
}
NETWORKS = {
    "MLP": {},
    "MLP, LayerNorm": {"layer_norm": True},
    "MLP, residual": {"residual": True},
    **{name: {} for name in ("MultiHead", "SoftModularization", "FiLM", "PaCo", "MOORE")},
}
OTHERS = {
    "Standardize": {"encoder": networks.Standardize},
    "Standardize per task": {"encoder": partial(networks.Standardize, per_task=True)},
    "ReturnRange": {"reward_scale": algorithms.ReturnRange},
    **PARTS,
    **MIXTURES,
    "a task embedding": {
        "critic": partial(MLP, width=8, conditioning=partial(networks.Embedding, dim=3))
    },
    "a task encoder": {"critic": partial(MLP, width=8, conditioning=networks.TaskEncoder)},
    "no conditioning": {"critic": partial(MLP, width=8, conditioning=NoConditioning)},
    "Categorical": {"value": partial(algorithms.Categorical, num_bins=11)},
    "TemperatureWeights": {"task_weighting": algorithms.TemperatureWeights},
    "one temperature": {"temperature": partial(algorithms.Temperature, per_task=False)},
    "no clipping": {"actor_max_grad_norm": None, "critic_max_grad_norm": None},
    "MeanReward": {"reward_scale": algorithms.MeanReward},
    "delays": {"actor_every": 2, "target_every": 2},
    "auxiliaries": {
        "encoder": partial(networks.MLPEncoder, width=8, context=networks.Embedding),
        "auxiliaries": [HiPBMDP, Reconstruction],
    },
}


def update_without_numbers(make=make_sac, num_updates=3, **options):
    algorithm = on_meta(make, **options)
    batch = meta_batch(algorithm)
    for i in range(num_updates):
        algorithm.training_step(batch, i)
    return algorithm


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_an_update_does_not_wait(name, without_numbers):
    network = partial(getattr(networks, name.split(",")[0]), width=8, **NETWORKS[name])
    sac = update_without_numbers(actor=network, critic=network)
    known = [
        *sac.targets._sources,
        *sac.actor_update._frozen,
        *(p for update in sac.updates for p in (*update.parameters, *update._trained)),
    ]
    assert {parameter.device for parameter in [*known, *sac.parameters()]} == {META}
    assert sac.counters.updates == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_no_part_of_an_update_waits(name, without_numbers):
    update_without_numbers(**OTHERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_no_part_of_an_update_of_ppo_waits(name, without_numbers):
    update_without_numbers(make_ppo, **PARTS[name])


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


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_distral, make_td3, make_bc])
def test_no_algorithm_waits(make, without_numbers):
    update_without_numbers(make, num_updates=2)


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
            chosen = algorithm.act(np.zeros((8, 4)), task_E, "explore")
    copies = [given for name, given, _ in operations if name == "aten._to_copy.default"]
    from_host = [given for given in copies if "'cpu'" in given]
    assert len(from_host) == 1, "the observations; the tasks are there already"
    if make is make_ppo:
        assert {name: x.shape for name, x in chosen[1].items()} == {
            "unclipped_action": (8, 2),
            "log_prob": (8,),
        }
        assert fetched == [(8, 2 + 2 + 1)] * 2
    else:
        assert chosen.shape == (8, 2) and fetched == [(8, 2)] * 2


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


def test_an_optimizer_that_cannot_skip_on_the_device_waits(without_numbers):
    with (
        pytest.warns(UserWarning, match=r"of critic, Adam, cannot skip .* fused: true"),
        pytest.raises(RuntimeError, match="item"),
    ):
        update_without_numbers(optimizer=Adam)


def test_outcomes_are_read_for_metrics_and_checkpoints(without_numbers, monkeypatch):
    sac = update_without_numbers(num_updates=2)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"copy out of meta|item"):
        sac.guard.read()
    for asks in (sac.drain_metrics, lambda: sac.on_save_checkpoint({})):
        reads = []
        monkeypatch.setattr(sac.guard, "read", lambda reads=reads: reads.append(1))
        with pytest.raises((NotImplementedError, RuntimeError)):
            asks()
        assert reads == [1]


def test_it_would_be_seen(without_numbers):
    class Asking(MultiHead):
        def forward(self, x_BD, task_B):
            y_BO = super().forward(x_BD, task_B)
            return y_BO if float(x_BD.sum()) > 0 else -y_BO

    with pytest.raises(RuntimeError, match="item"):
        update_without_numbers(actor=partial(Asking, width=8))
