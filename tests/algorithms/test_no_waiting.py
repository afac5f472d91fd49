"""An update reads no number from its device, because it would have to wait for a GPU.

PyTorch's ``meta`` device stands for the GPU: its tensors have shapes and no numbers, so that
whoever asks for one, or mixes it with tensors on the CPU, gets an error. It knows neither
generators nor autocast.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.optim import Adam

from mtrl_lightning import networks
from mtrl_lightning.algorithms import ByTemperature, Categorical, MeanReward, Temperature
from mtrl_lightning.auxiliaries import Auxiliary, HiPBMDP, Reconstruction
from mtrl_lightning.gradients import FAMO
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.networks import MLP, MultiHead, NoConditioning
from tests.helpers.algorithms import attach, make_batch, make_sac, make_spec

META = torch.device("meta")
SMALL_ENCODER = {"num_experts": 4, "width": 6, "depth": 1, "out_dim": 5}
MIXTURES = {
    name: {
        "encoder": partial(
            networks.MixtureOfEncoders, assignment=getattr(networks, name), **SMALL_ENCODER
        )
    }
    for name in ("OwnExpert", "Average", "Gate", "Attention")
}
NETWORKS = {
    "MLP": {},
    "MLP, LayerNorm": {"layer_norm": True},
    "MLP, residual": {"residual": True},
    **{name: {} for name in ("MultiHead", "SoftModularization", "FiLM", "PaCo", "MOORE")},
}
OTHERS = {
    "Standardize": {"encoder": networks.Standardize},
    **MIXTURES,
    "a task embedding": {
        "critic": partial(MLP, width=8, conditioning=partial(networks.Embedding, dim=3))
    },
    "a task encoder": {"critic": partial(MLP, width=8, conditioning=networks.TaskEncoder)},
    "no conditioning": {"critic": partial(MLP, width=8, conditioning=NoConditioning)},
    "Categorical": {"value": partial(Categorical, num_bins=11)},
    "ByTemperature": {"task_weighting": ByTemperature},
    "one temperature": {"temperature": partial(Temperature, per_task=False)},
    "no clipping": {"actor_max_grad_norm": None, "critic_max_grad_norm": None},
    "MeanReward": {"reward_scale": MeanReward},
    "FAMO": {"actor_gradient": FAMO, "critic_gradient": FAMO},
    "delays": {"actor_every": 2, "target_every": 2},
    "auxiliaries": {
        "encoder": partial(networks.MLPEncoder, width=8, context=networks.Embedding),
        "auxiliaries": [HiPBMDP, Reconstruction],
    },
}


@pytest.fixture
def without_numbers(monkeypatch):
    # the way to this device would otherwise replace the parameters, which those who train them know
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    monkeypatch.setattr(
        Generators, "get", lambda self, name, device: torch.Generator() if device != META else None
    )
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())


class SkippingAdam(Adam):
    """Stands for fused Adam, which no kernel exists of here: it is given the flag as a tensor."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.device == META and self.found_inf.shape == ()
        del self.found_inf
        return super().step(closure)


def update_without_numbers(num_updates=3, **options):
    plain = {
        name: partial(SkippingAdam, lr=1e-3)
        for name in ("actor_optimizer", "critic_optimizer", "temperature_optimizer")
    }
    sac = make_sac(make_spec(4), **{**plain, **options}).to(META)
    for update in sac.updates:
        if isinstance(getattr(update._make_optimizer, "__self__", None), Auxiliary):
            update._make_optimizer = plain["actor_optimizer"]
    attach(sac)
    batch = make_batch(sac.spec)
    for i in range(num_updates):
        sac.training_step(type(batch)(*(field.to(META) for field in batch[:-1])), i)
    return sac


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


def test_an_optimizer_that_cannot_skip_on_the_device_waits(without_numbers):
    with pytest.raises(RuntimeError, match="item"):
        update_without_numbers(critic_optimizer=partial(Adam, lr=1e-3))


def test_the_outcome_of_a_step_is_read_with_the_next_action(without_numbers):
    sac = update_without_numbers(num_updates=2)
    assert [name for name, _, _ in sac.guard._pending] == ["critic", "actor", "temperature"] * 2
    with pytest.raises(RuntimeError):
        sac.guard.read()


def test_it_would_be_seen(without_numbers):
    class Asking(MultiHead):
        def forward(self, x_BD, task_B):
            y_BO = super().forward(x_BD, task_B)
            return y_BO if float(x_BD.sum()) > 0 else -y_BO

    with pytest.raises(RuntimeError, match="item"):
        update_without_numbers(actor=partial(Asking, width=8))


def test_metrics_are_read_where_they_are_asked_for(without_numbers):
    sac = update_without_numbers()
    with pytest.raises(RuntimeError, match="item"):
        sac.drain_metrics()
