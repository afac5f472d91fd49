"""What an algorithm saves, and what it restores."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.checkpoints import FORMAT
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Standardize
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_sac,
    make_spec,
    small_mlp,
    train,
)
from tests.helpers.checkpoints import (
    assert_continued_is_the_same,
    checkpoint_of,
    through_a_file,
)
from tests.helpers.sac import FULL, Reconstruction, act, fit

PLAIN = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)


def types_in(value):
    if isinstance(value, dict):
        return {type(value)}.union(*(types_in(item) for pair in value.items() for item in pair))
    if isinstance(value, (list, tuple)):
        return {type(value)}.union(*(types_in(item) for item in value))
    return {type(value)}


def test_a_trainers_checkpoint_is_read_without_executing_anything(tmp_path):
    sac = make_sac(auxiliaries=[Reconstruction], **FULL)
    act(sac, "explore")
    fit(sac, 3).save_checkpoint(tmp_path / "file.ckpt")
    checkpoint = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert checkpoint["mtrl_lightning"]["counters"]["updates"] == 3
    assert len(checkpoint["optimizer_states"]) == 4
    assert set(checkpoint["state_dict"]) == set(sac.state_dict())


def test_what_is_added_are_tensors_and_plain_values(tmp_path):
    sac = train(make_sac(**FULL), 2)
    added = through_a_file(checkpoint_of(sac), tmp_path)["mtrl_lightning"]
    assert types_in(added) <= set(PLAIN)
    assert added["format"] == FORMAT
    assert added["spec"]["task_names"] == ["task-0", "task-1", "task-2"]
    assert added["spec"]["protocol"] == {"benchmark": "dummy", "horizon": 10}


@pytest.mark.parametrize("value", [np.float64(0.9), np.float32(0.9)])
def test_numpy_numbers_as_hyper_parameters_leave_the_file_loadable(tmp_path, value):
    sac = make_sac(discount=value)
    try:
        through_a_file(checkpoint_of(sac), tmp_path)
    except pickle.UnpicklingError as error:
        pytest.fail(str(error).splitlines()[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**FULL, "auxiliaries": [Reconstruction]},
        {"encoder": partial(Standardize, num_updates=7)},
    ],
)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, options):
    def make(seed):
        sac = make_sac(seed=seed, **options)
        act(sac, "random")
        return sac

    whole, second = assert_continued_is_the_same(make, tmp_path, half=5)
    assert np.array_equal(act(second, "random"), act(whole, "random"))
    assert np.array_equal(act(second, "explore"), act(whole, "explore"))


def test_a_checkpoint_does_not_move_with_the_run():
    sac = train(make_sac(seed=3), 2)
    added = checkpoint_of(sac)["mtrl_lightning"]
    wanted, state = (
        sac.drain_metrics(),
        added["generators"]["per_rank"][0]["learn"]["state"].clone(),
    )
    train(sac, 2, first=2)
    assert added["counters"]["updates"] == 2
    assert torch.equal(added["generators"]["per_rank"][0]["learn"]["state"], state)
    other = make_sac()
    other.mean_metrics.load_state_dict(added["metrics"])
    restored = other.drain_metrics()
    assert {name: restored[name] for name in restored if "temperature/" not in name} == {
        name: value for name, value in wanted.items() if "temperature/" not in name
    }


def test_an_algorithm_is_rebuilt_from_its_file(tmp_path):
    sac = make_sac(discount=0.9, actor_every=2)
    fit(sac, 3).save_checkpoint(tmp_path / "file.ckpt")
    rebuilt = SAC.load_from_checkpoint(
        tmp_path / "file.ckpt", spec=sac.spec, actor=small_mlp, critic=small_mlp, weights_only=True
    )
    assert (rebuilt.discount, rebuilt.actor_every, rebuilt.counters.updates) == (0.9, 2, 3)
    assert changed(rebuilt, copy_of(sac)) == set()


def test_an_algorithm_rebuilt_with_another_network_is_refused(tmp_path):
    sac = make_sac()
    fit(sac, 1).save_checkpoint(tmp_path / "file.ckpt")
    with pytest.raises(ConfigurationError, match="another network"):
        SAC.load_from_checkpoint(tmp_path / "file.ckpt", actor=MLP, trust=["tests"])


@pytest.mark.parametrize(
    "names", [("task-0", "task-1", "push"), ("task-0", "task-1"), ("task-1", "task-0", "task-2")]
)
def test_other_tasks_are_refused_with_both_lists(names):
    checkpoint = checkpoint_of(make_sac())
    other = make_sac(make_spec(len(names))._replace(task_names=names))
    with pytest.raises(ConfigurationError) as caught:
        other.on_load_checkpoint(checkpoint)
    assert "of other tasks: task-0, task-1, task-2 there" in str(caught.value)
    assert f"{', '.join(names)} here" in str(caught.value)
    assert "config.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "weight", "there", "here"),
    [
        ({"actor": partial(MLP, width=24, depth=2)}, "actor.trunk.0.weight", "(16, 7)", "(24, 7)"),
        (
            {"critic": partial(MLP, width=16, depth=3)},
            "critic.members.0.trunk.4.weight",
            "none",
            "(16, 16)",
        ),
        ({"num_critics": 3}, "critic.members.2.trunk.0.weight", "none", "(16, 9)"),
        ({"num_critics": 1}, "critic.members.1.trunk.0.weight", "(16, 9)", "none"),
        ({"encoder": Standardize}, "encoder.mean_D", "none", "(4,)"),
    ],
)
def test_another_network_is_refused_with_a_weight_and_the_remedy(options, weight, there, here):
    checkpoint = checkpoint_of(make_sac())
    with pytest.raises(ConfigurationError, match=r"another network.*config\.yaml") as caught:
        make_sac(**options).on_load_checkpoint(checkpoint)
    assert f"{weight} has shape {there} there and {here} here" in str(caught.value)


def test_a_checkpoint_that_is_refused_changes_nothing():
    checkpoint = checkpoint_of(train(make_sac(seed=3, num_critics=3), 2))
    sac, reference = make_sac(seed=5), make_sac(seed=5)
    with pytest.raises(ConfigurationError):
        sac.on_load_checkpoint(checkpoint)
    assert sac.counters == reference.counters
    assert sac.drain_metrics() == {}
    for algorithm in (sac, reference):
        attach(algorithm)
        algorithm.training_step(make_batch(algorithm.spec), 0)
    assert changed(sac, copy_of(reference)) == set()
