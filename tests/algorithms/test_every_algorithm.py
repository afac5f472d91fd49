"""What every algorithm keeps to."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.auxiliaries import Reconstruction
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.networks import Standardize, StateIndependentStd
from tests.helpers import algorithms as small
from tests.helpers.specs import discrete_spec

ALGORITHMS = {
    "sac": partial(small.make_sac, auxiliaries=[Reconstruction], **small.FULL),
    "td3": partial(small.make_td3, encoder=small.ENCODER),
    "distral": small.make_distral,
    "ppo": partial(small.make_ppo, critic=small.HEADS, encoder=small.ENCODER),
    "ppo of standardized observations": partial(small.make_ppo, encoder=Standardize),
    "bc": partial(small.make_bc, noise=StateIndependentStd, loss="log_prob"),
    **{
        f"{make.args[0].__name__} of discrete actions": partial(make, discrete_spec())
        for make in (small.make_sac, small.make_distral, small.make_ppo, small.make_bc)
    },
}
MODES = ("exploit", "explore", "random")
every_algorithm = pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)


def act(algorithm, mode, observation_ED=small.OBSERVATION_ED, task_E=small.TASK_E):
    chosen = algorithm.act(observation_ED, task_E, mode)
    return chosen[0] if isinstance(chosen, tuple) else chosen


def assert_targets_are_copies(algorithm):
    for name in ("actor", "critic", "encoder"):
        target = getattr(algorithm, f"target_{name}", None)
        assert (
            target is None
            or small.changed(target, small.copy_of(getattr(algorithm, name))) == set()
        )


@every_algorithm
def test_every_parameter_is_in_an_optimizer_and_learns(make):
    algorithm = make()
    optimizers = small.attach(algorithm)
    given = [id(p) for made in optimizers for group in made.param_groups for p in group["params"]]
    trained = {name: p for name, p in algorithm.named_parameters() if p.requires_grad}
    assert set(given) == {id(p) for p in trained.values()}
    if not getattr(algorithm, "auxiliaries", None):
        assert len(given) == len(trained), "none is in two"
    assert_targets_are_copies(algorithm)
    before = small.copy_of(algorithm)
    small.train(algorithm, 5)
    moved = small.changed(algorithm, before)
    assert moved >= trained.keys()
    targets = {name.split(".")[0] for name in before if name.startswith("target_")}
    assert targets == {name.split(".")[0] for name in moved if name.startswith("target_")}
    assert all(p.grad is None for p in algorithm.parameters() if not p.requires_grad)
    assert all(math.isfinite(value) for value in algorithm.drain_metrics().values())


def global_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@every_algorithm
def test_seed_decides_weights_and_draws_without_global_state(make, monkeypatch):
    seeds_of_gpus = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds_of_gpus.append)
    runs = []
    for seed in (3, 3, 4):
        torch.default_generator.manual_seed(len(runs))
        before = global_states()
        algorithm = small.train(make(seed=seed), 2)
        drawn = [act(algorithm, mode) for mode in MODES]
        assert global_states() == before and seeds_of_gpus == []
        runs.append((algorithm, drawn, algorithm.drain_metrics()))
    (first, drawn, metrics), (second, again, same), (other, others, _) = runs
    assert small.changed(second, small.copy_of(first)) == set() and same == metrics
    assert all(map(np.array_equal, drawn, again))
    names = {name for name, _ in first.actor.named_parameters()}
    assert small.changed(other.actor, small.copy_of(first.actor)) >= names
    assert not any(map(np.array_equal, drawn, others))


@every_algorithm
def test_actions_have_their_shape_and_exploiting_draws_nothing(make):
    algorithm, reference = small.train(make(), 1), small.train(make(), 1)
    observation_ED = small.OBSERVATION_ED.copy()
    batch = small.learning_batch(algorithm)
    for one in (algorithm, reference):
        one.training_step(batch, 1)
    for one, other in zip(batch[:-1], small.learning_batch(algorithm)[:-1], strict=True):
        assert torch.equal(one, other), "a batch is not changed"
    exploited = [act(algorithm, "exploit", observation_ED) for _ in range(2)]
    assert np.array_equal(*exploited)
    for mode in MODES:
        found_EA = act(algorithm, mode, observation_ED.astype(np.float64))
        assert (found_EA.shape, found_EA.dtype) == ((6, algorithm.action_dim), np.float32)
        assert np.abs(found_EA).max() <= 1
        assert np.array_equal(found_EA, act(reference, mode))
        assert (mode == "exploit") == np.array_equal(act(algorithm, mode), found_EA)
        act(reference, mode)
        assert act(algorithm, mode, np.zeros((0, 4)), np.zeros(0, np.int64)).shape == (
            0,
            algorithm.action_dim,
        )
    assert np.array_equal(observation_ED, small.OBSERVATION_ED)


@every_algorithm
def test_an_algorithm_acts_with_the_weights_of_another(make):
    algorithm = small.train(make(), 2)
    other = make(seed=4)
    wanted = act(algorithm, "exploit")
    assert not np.array_equal(act(other, "exploit"), wanted)
    weights = algorithm.get_weights()
    small.train(algorithm, 1)  # the weights are copies
    other.set_weights(weights, 5)
    assert np.array_equal(act(other, "exploit"), wanted)
    assert other.counters.updates == 5


@every_algorithm
def test_run_continues_exactly_from_a_file(make, tmp_path):
    def used(seed):
        algorithm = make(seed=seed)
        act(algorithm, "explore")
        return algorithm

    whole, first, second = (used(seed) for seed in (3, 3, 99))
    small.train(whole, 6)
    optimizers = small.attach(first)
    checkpoint = load_checkpoint(small.save(small.train(first, 3), tmp_path, optimizers))
    second.on_load_checkpoint(checkpoint)
    second.load_state_dict(checkpoint["state_dict"])
    for optimizer, state in zip(small.attach(second), checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    small.train(second, 3, first=3)
    assert small.changed(second, small.copy_of(whole)) == set()
    assert second.counters == whole.counters
    assert second.drain_metrics() == whole.drain_metrics()
    for mode in MODES:
        assert np.array_equal(act(second, mode), act(whole, mode))
    rebuilt = type(whole).load_from_checkpoint(small.save(whole, tmp_path), trust=["tests"])
    assert small.changed(rebuilt, small.copy_of(whole)) == set()
    assert rebuilt.counters == whole.counters


@every_algorithm
def test_reset_draws_new_weights_and_clears_their_optimizers(make):
    algorithm, second = small.train(make(), 2), small.train(make(), 2)
    names = {f"actor.{name}" for name, p in algorithm.actor.named_parameters() if p.ndim > 1}
    before = small.copy_of(algorithm)
    algorithm.reset_networks()
    assert names <= small.changed(algorithm, before)
    assert_targets_are_copies(algorithm)
    networks = [algorithm.actor, *([algorithm.critic] if hasattr(algorithm, "critic") else [])]
    kept = {p for update in algorithm.updates for p in update.optimizer.state}
    assert not any(p in kept for network in networks for p in network.parameters())
    second.reset_networks()
    assert small.changed(second, small.copy_of(algorithm)) == set(), "the seed decides"
    second.reset_networks()
    assert names <= small.changed(second, small.copy_of(algorithm))
    small.train(algorithm, 1, first=2)
