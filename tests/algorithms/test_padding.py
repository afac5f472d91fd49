"""Tasks with smaller observations and actions than the largest: what pads them has no effect.

``tests/networks/test_distributions.py`` compares masked distributions with smaller ones.
"""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import SAC
from mtrl_lightning.policy import load_policy
from tests.helpers import algorithms as small

D, A = 7, 4
"""Sizes of the largest task, which is the second; the others have 4 observations, 2 actions."""
SPEC = small.make_spec(3, D, A)._replace(
    task_names=small.NAMES, observation_sizes=(4, D, 4), action_sizes=(2, A, 2)
)
IS_OWN_TA = torch.from_numpy(SPEC.action_mask_TA)
STATE_DEPENDENT = networks.StateDependentStd
CASES = [
    *(partial(make, SPEC) for make in (small.make_sac, small.make_td3, small.make_distral)),
    *(
        partial(small.make_ppo, SPEC, noise=noise, entropy_coef=0.3)
        for noise in (networks.StateIndependentStd, STATE_DEPENDENT)
    ),
    *(
        partial(small.make_bc, SPEC, loss=loss, noise=noise)
        for loss in ("log_prob", "mse")
        for noise in (None, STATE_DEPENDENT)
    ),
]


def padded_batch(algorithm, seed):
    batch = small.learning_batch(algorithm, seed)
    action_RnA = batch.action_RnA * IS_OWN_TA[batch.task_Rn]
    extra = {"unclipped_action": action_RnA} if "unclipped_action" in batch.extra else {}
    return batch._replace(action_RnA=action_RnA, extra=batch.extra | extra)


def disturb(algorithm, task_Rn):
    """Add random numbers to all outputs of a policy that are padding."""

    def change(module, given, output_RnO):
        is_own_RnO = IS_OWN_TA.repeat(1, output_RnO.shape[-1] // A)[task_Rn]
        return output_RnO + torch.randn(output_RnO.shape) * ~is_own_RnO

    for name in ("actor", "target_actor", "distilled"):
        if hasattr(algorithm, name):
            algorithm.get_submodule(name).register_forward_hook(change)
    if getattr(algorithm, "noise", None) is not None:
        algorithm.noise.log_std_TA.data[~IS_OWN_TA] -= 0.7


@pytest.mark.parametrize("make", CASES)
def test_padding_of_a_policys_outputs_changes_no_update(make):
    ends = []
    actions = []

    def note(module, given):
        actions.append(given[0][..., -A:].detach())

    for is_disturbed in (False, True):
        algorithm = make()
        small.attach(algorithm)
        batches = [padded_batch(algorithm, seed) for seed in range(3)]
        if is_disturbed:
            disturb(algorithm, batches[0].task_Rn)
        if algorithm.kind == "off-policy":
            for critic in (algorithm.critic, algorithm.target_critic):
                critic.register_forward_pre_hook(note)
        for i, batch in enumerate(batches):
            algorithm.training_step(batch, i)
        parameters = dict(algorithm.named_parameters())
        if "noise.log_std_TA" in parameters:
            parameters["noise.log_std_TA"] = parameters["noise.log_std_TA"][IS_OWN_TA]
        ends.append((parameters, algorithm.drain_metrics()))
    torch.testing.assert_close(*ends)
    is_padding_RnA = ~IS_OWN_TA[batches[0].task_Rn]
    assert not any(action_RnA[is_padding_RnA].any() for action_RnA in actions)
    assert all(action_RnA[~is_padding_RnA].all() for action_RnA in actions)
    assert bool(actions) == (algorithm.kind == "off-policy")


@pytest.mark.parametrize(
    "make", [small.make_sac, small.make_ppo, small.make_td3, small.make_distral]
)
@pytest.mark.parametrize("mode", ["random", "explore", "exploit"])
def test_what_is_not_a_tasks_own_is_zero_in_every_action(make, mode):
    task_E = np.array([0, 1, 2, 1])
    chosen = make(SPEC).act(np.ones((4, D), np.float32), task_E, mode)
    action_EA, fields = chosen if isinstance(chosen, tuple) else (chosen, {})
    is_own_EA = SPEC.action_mask_TA[task_E]
    assert (action_EA[~is_own_EA] == 0).all()
    assert (action_EA[is_own_EA] != 0).all()
    if "unclipped_action" in fields:
        assert (fields["unclipped_action"][~is_own_EA] == 0).all()


def test_each_task_aims_at_the_entropy_of_its_own_dimensions():
    assert SAC(SPEC).target_entropy_T.tolist() == [-2, -A, -2]
    for given in (-1.5, 0):
        assert SAC(SPEC, target_entropy=given).target_entropy_T.tolist() == [given] * 3


def test_the_logged_noise_is_that_of_a_tasks_own_dimensions():
    ppo = small.make_ppo(SPEC)
    ppo.noise.log_std_TA.data[:] = torch.tensor([1.0, 2, 4, 4]).log()
    ppo.mean_metrics.add({"loss": torch.tensor(1.0)})
    metrics = ppo.drain_metrics()
    stds = [metrics[f"train/noise_std/{name}"] for name in small.NAMES]
    assert stds == pytest.approx([1.5, 2.75, 1.5])


def test_a_loaded_policy_takes_and_gives_a_tasks_own_size(tmp_path):
    sac = small.make_sac(SPEC, encoder=partial(networks.Standardize, per_task=True))
    batch = small.learning_batch(sac)
    batch.observation_RnD[[0, 2], :, 4:] = 0
    sac.encoder.observe(batch.observation_RnD, batch.task_Rn)
    policy = load_policy(small.save(sac, tmp_path))
    first_BD = batch.observation_RnD[0].numpy()
    action_BA = sac.act(first_BD, np.zeros(5, np.int64), "exploit")
    for given_BD in (first_BD[:, :4], first_BD):
        found_BA = policy.act(given_BD, "reach-v3")
        assert found_BA.shape == (5, 2)
        np.testing.assert_allclose(found_BA, action_BA[:, :2], rtol=1e-5)
    assert policy.act(first_BD[0, :4], 0).shape == (2,)
    assert policy.act(first_BD[0], "push-v3").shape == (A,)


def test_the_spec_of_one_task():
    one = SPEC._replace(train_tasks=(0, 2)).of_task(1)
    assert (one.task_names, one.train_tasks) == (("push-v3",), (0,))
    assert (one.num_tasks, one.num_trained) == (1, 1)
    assert (one.observation_sizes, one.action_sizes) == ((D,), (A,))
    assert (one.observation_space, one.action_space) == (SPEC.observation_space, SPEC.action_space)
