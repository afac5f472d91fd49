"""A task in a padded set against the same task with the same weights in a set of its own size.

Both sets have the same tasks. In the padded one, one task has larger observations and actions, so
that networks have further inputs and outputs, whose weights are arbitrary.
"""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import PPO, SAC, TD3, BehaviourCloning, Distral
from mtrl_lightning.auxiliaries import HiPBMDP, LatentDynamics, LossInputs, Reconstruction
from mtrl_lightning.policy import load_policy
from tests.helpers.algorithms import NAMES, STACKS, make_batch, make_spec
from tests.helpers.checkpoints import save

T, D, A = 3, 7, 2
MORE_D, MORE_A = 3, 2
"""What the largest task has more."""
LARGEST = 1
"""The task whose observations and actions are larger in the padded set."""
ROWS = 4
"""Transitions of each task."""


def specs():
    """Return the spec of the tasks alone, and one in which they are padded."""
    alone = make_spec(T, D, A)._replace(task_names=NAMES)
    padded = make_spec(T, D + MORE_D, A + MORE_A)._replace(task_names=NAMES)
    return alone, padded._replace(
        observation_sizes=(D, D + MORE_D, D), action_sizes=(A, A + MORE_A, A)
    )


def own_places(role, size, padded_size, feature_sizes):
    """Return which of a padded dimension's places are there without padding, too.

    Args:
        role: name of the module.
        size: of the dimension of a parameter.
        padded_size: of the same dimension in the padded set.
        feature_sizes: of the encoder's output, without padding and with it.
    """
    places = np.arange(padded_size)
    more = padded_size - size
    if more == 0:
        return places
    if role.endswith("critic"):  # its inputs: features, SAC's action, task input
        features, padded_features = feature_sizes
        places = np.delete(places, slice(D, D + padded_features - features))
        takes_action = len(places) > size
        return np.delete(places, slice(features + A, features + A + MORE_A * takes_action))
    if more == MORE_D:
        return np.delete(places, slice(D, D + MORE_D))
    if role == "auxiliaries":  # inputs of latent models, of which the action is the last
        return places[:size]
    return places.reshape(-1, A + MORE_A)[:, :A].ravel()  # outputs: A, 2A, or as many of each task


def own_indices(alone, padded):
    """Return, by parameter, where the weights that the tasks have alone are in the padded set."""
    feature_sizes = (alone.encoder.out_dim, padded.encoder.out_dim)
    parameters = dict(padded.named_parameters())
    return {
        name: np.ix_(
            *(
                own_places(name.split(".")[0], *sizes, feature_sizes)
                for sizes in zip(parameter.shape, parameters[name].shape, strict=True)
            )
        )
        for name, parameter in alone.named_parameters()
    }


def make_pair(kind, **options):
    """Return an algorithm of the tasks alone and one of the padded set with its weights."""
    alone, padded = (kind(spec, **options) for spec in specs())
    generator = torch.Generator().manual_seed(5)
    indices = own_indices(alone, padded)
    own = dict(alone.named_parameters())
    with torch.no_grad():
        for name, parameter in padded.named_parameters():
            if parameter.shape != own[name].shape:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            parameter[indices[name]] = own[name]
    return alone, padded, indices


def batches(algorithms):
    """Return one batch for both: zeros pad it, but for the largest task."""
    alone, padded = (make_batch(algorithm.spec, ROWS) for algorithm in algorithms)
    padding = algorithms[1].spec
    observation_mask_RnD = torch.from_numpy(padding.observation_mask_TD)[padded.task_Rn]
    action_mask_RnA = torch.from_numpy(padding.action_mask_TA)[padded.task_Rn]
    padded.observation_RnD[..., :D] = alone.observation_RnD
    padded.next_observation_RnD[..., :D] = alone.next_observation_RnD
    padded.action_RnA[..., :A] = alone.action_RnA
    return alone, alone._replace(
        observation_RnD=padded.observation_RnD * observation_mask_RnD,
        next_observation_RnD=padded.next_observation_RnD * observation_mask_RnD,
        action_RnA=padded.action_RnA * action_mask_RnA,
    )


def noises():
    generator = torch.Generator().manual_seed(3)
    padded_RnA = torch.randn(T, ROWS, A + MORE_A, generator=generator)
    return padded_RnA[..., :A], padded_RnA


# ---- losses ----


def losses_of(algorithm, batch, noise_RnA):
    """Return each task's losses, ``[R]`` each."""
    if isinstance(algorithm, PPO):
        return losses_of_ppo(algorithm, batch, noise_RnA)
    if isinstance(algorithm, BehaviourCloning):
        return [algorithm.actor_loss(batch)[0]]
    target = algorithm.critic_target(batch, noise_RnA)
    losses = [algorithm.critic_loss(batch, target)[0]]
    inputs = LossInputs(algorithm.encoder, algorithm.target_encoder, None)
    losses += [auxiliary.loss(batch, inputs) for auxiliary in algorithm.auxiliaries]
    if isinstance(algorithm, TD3):
        return [*losses, algorithm.actor_loss(batch)[0]]
    actor_loss_R, log_prob_Rn = algorithm.actor_loss(batch, noise_RnA)
    if isinstance(algorithm, Distral):
        return [*losses, actor_loss_R, algorithm.distilled_loss(batch)[0]]
    return [*losses, actor_loss_R, algorithm.temperature_loss(log_prob_Rn, batch.task_Rn)[0]]


def losses_of_ppo(ppo, batch, noise_RnA):
    policy = ppo.policy(batch.observation_RnD, batch.task_Rn)
    sample_RnA = policy.draw(noise_RnA).detach()
    log_prob_Rn = policy.log_prob(sample_RnA)
    generator = torch.Generator().manual_seed(7)
    extra = {
        name: torch.randn(T, ROWS, generator=generator) for name in ("advantage", "value", "target")
    }
    shift_Rn = 0.3 * torch.randn(T, ROWS, generator=generator)
    extra |= {"weight": torch.ones(T, ROWS), "unclipped_action": sample_RnA}
    batch = batch._replace(extra={**extra, "log_prob": log_prob_Rn.detach() + shift_Rn})
    losses = [ppo.actor_loss(batch)[0], ppo.critic_loss(batch)[0]]
    return [*losses, log_prob_Rn.mean(1), policy.entropy().mean(1)]


def gradients_of(loss, algorithm):
    parameters = {name: p for name, p in algorithm.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def assert_losses_agree(indices, algorithms, losses):
    """Compare each task's loss and its gradients of all parameters, but for the largest task."""
    num_reached = 0
    for task in set(range(T)) - {LARGEST}:
        torch.testing.assert_close(losses[1][task], losses[0][task], rtol=1e-4, atol=1e-6)
        gradients, padded_gradients = (
            gradients_of(loss_R[task], algorithm)
            for loss_R, algorithm in zip(losses, algorithms, strict=True)
        )
        assert padded_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            num_reached += bool(gradient.any())
            found = padded_gradients[name]
            torch.testing.assert_close(found[indices[name]], gradient, rtol=1e-4, atol=1e-6)
            found[indices[name]] = 0
            assert not found.any(), f"the padded places of {name} have a gradient"
    assert num_reached > 0
    assert losses[1].isfinite().all()


AUXILIARIES = {
    "latent dynamics": partial(LatentDynamics, width=6),
    "bisimulation": partial(HiPBMDP, width=6, distance_weight=0.5),
    "reconstruction": partial(Reconstruction, latent_weight=0.5),
}
CASES = [
    *((SAC, stack, {}) for stack in STACKS),
    *((SAC, "mlp_encoder_context", {"auxiliaries": [make]}) for make in AUXILIARIES.values()),
    *((TD3, stack, {}) for stack in ("multi_head", "mlp_encoder", "standardize")),
    *((Distral, stack, {}) for stack in ("mlp", "moore", "multi_head", "standardize")),
    *((PPO, stack, {"entropy_coef": 0.3}) for stack in STACKS),
    *((PPO, stack, {"noise": networks.StateDependentStd}) for stack in ("mlp", "multi_head")),
    *(
        (BehaviourCloning, "mlp", {"loss": loss, "noise": noise})
        for loss in ("log_prob", "mse")
        for noise in (None, networks.StateDependentStd)
    ),
]


@pytest.mark.parametrize(("kind", "stack", "options"), CASES)
def test_padding_changes_no_loss_and_no_gradient(kind, stack, options):
    parts = dict(STACKS[stack])
    if kind is BehaviourCloning:
        del parts["critic"]
    *algorithms, indices = make_pair(kind, **parts, **options)
    found = []
    for algorithm, batch, noise_RnA in zip(algorithms, batches(algorithms), noises(), strict=True):
        algorithm.encoder.observe(batch.observation_RnD, batch.task_Rn)
        if algorithm.targets is not None:
            algorithm.targets.copy_buffers()
        found.append(losses_of(algorithm, batch, noise_RnA))
    for both in zip(*found, strict=True):
        assert_losses_agree(indices, algorithms, both)


# ---- actions and what is derived of their sizes ----


@pytest.mark.parametrize("kind", [SAC, PPO, TD3, Distral])
@pytest.mark.parametrize("mode", ["random", "explore", "exploit"])
def test_what_is_not_a_tasks_own_is_zero_in_every_action(kind, mode):
    algorithm = make_pair(kind, **STACKS["mlp"])[1]
    task_E = np.array([0, LARGEST, 2, LARGEST])
    chosen = algorithm.act(np.ones((4, D + MORE_D), np.float32), task_E, mode)
    action_EA, fields = chosen if isinstance(chosen, tuple) else (chosen, {})
    is_own_EA = algorithm.spec.action_mask_TA[task_E]
    assert (action_EA[~is_own_EA] == 0).all()
    assert (action_EA[is_own_EA] != 0).all()
    if "unclipped_action" in fields:
        assert (fields["unclipped_action"][~is_own_EA] == 0).all()


def test_each_task_aims_at_the_entropy_of_its_own_dimensions():
    spec = specs()[1]
    assert SAC(spec).target_entropy_T.tolist() == [-A, -A - MORE_A, -A]
    for given in (-1.5, 0):
        assert SAC(spec, target_entropy=given).target_entropy_T.tolist() == [given] * T


def test_the_logged_noise_is_that_of_a_tasks_own_dimensions():
    ppo = make_pair(PPO, **STACKS["mlp"])[1]
    with torch.no_grad():
        ppo.noise.log_std_TA[:] = torch.tensor([1.0, 2, 4, 4]).log()
    ppo.mean_metrics.add({"loss": torch.tensor(1.0)})
    metrics = ppo.drain_metrics()
    stds = [metrics[f"train/noise_std/{name}"] for name in NAMES]
    assert stds == pytest.approx([1.5, 2.75, 1.5])


def test_the_spec_of_one_task():
    spec = make_spec(train_tasks=(0, 2))._replace(observation_sizes=(4, 3, 2))
    one = spec.of_task(1)
    assert (one.task_names, one.train_tasks) == (("task-1",), (0,))
    assert (one.num_tasks, one.num_trained, spec.num_trained) == (1, 1, 2)
    assert (one.observation_sizes, one.action_sizes) == ((3,), ())
    assert one.observation_space == spec.observation_space
    torch.testing.assert_close(networks.OneHot(one)(torch.tensor([0])), torch.ones(1, 1))


def test_a_loaded_policy_takes_and_gives_a_tasks_own_size(tmp_path):
    pair = make_pair(SAC, encoder=partial(networks.Standardize, per_task=True), **STACKS["mlp"])
    sac, (_, batch) = pair[1], batches(pair[:2])
    sac.encoder.observe(batch.observation_RnD, batch.task_Rn)
    policy = load_policy(save(sac, tmp_path))
    observation_BD = batch.observation_RnD.flatten(0, 1).numpy()
    task_B = batch.task_Rn.flatten().numpy()
    action_BA = sac.act(observation_BD, task_B, "exploit")
    assert np.array_equal(policy.act(observation_BD, task_B), action_BA)
    own_BD = observation_BD[:ROWS, :D]
    for given_BD in (own_BD, observation_BD[:ROWS]):
        found_BA = policy.act(given_BD, "reach-v3")
        assert found_BA.shape == (ROWS, A)
        np.testing.assert_allclose(found_BA, action_BA[:ROWS, :A], rtol=1e-5)
    assert policy.act(own_BD[0], 0).shape == (A,)
    assert policy.act(observation_BD[0], "push-v3").shape == (A + MORE_A,)
