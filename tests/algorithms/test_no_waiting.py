"""An update reads no number from its device, because it would have to wait for a GPU.

PyTorch's ``meta`` device stands for the GPU: see ``tests/helpers/meta.py``.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import Adam

from mtrl_lightning import networks
from mtrl_lightning.algorithms import ByTemperature, Categorical, MeanReward, Temperature
from mtrl_lightning.auxiliaries import HiPBMDP, Reconstruction
from mtrl_lightning.gradients import FAMO
from mtrl_lightning.learning.guard import MAX_PENDING, SPARE_ROWS
from mtrl_lightning.networks import MLP, MultiHead, NoConditioning
from tests.helpers.algorithms import make_sac
from tests.helpers.meta import META, meta_batch, on_meta

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


def test_an_optimizer_that_cannot_skip_on_the_device_waits(without_numbers):
    with pytest.raises(RuntimeError, match="item"):
        update_without_numbers(optimizer=Adam)


def test_the_outcomes_of_steps_are_read_when_metrics_are_logged_and_checkpoints_saved(
    without_numbers, monkeypatch
):
    sac = update_without_numbers(num_updates=2)
    assert sac.guard._rows.shape == (MAX_PENDING + SPARE_ROWS, 3 * (1 + 4)), (
        "critic, actor and temperature"
    )
    with pytest.raises(NotImplementedError, match="copy out of meta"):
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


def test_metrics_are_read_where_they_are_asked_for(without_numbers):
    sac = update_without_numbers()
    with pytest.raises(RuntimeError, match=r"item|copy out of meta"):
        sac.mean_metrics.drain()
