"""Discrete actions: losses against loops and Stable-Baselines3, tasks of different sizes."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mtrl_lightning.updates.weighting import FixedTemperature
from tests.helpers.algorithms import (
    attach,
    make_batch,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
)
from tests.helpers.specs import discrete_spec

ALPHA = 0.3


def discrete_batch(spec, rows=6):
    """Random transitions, with actions that are the tasks' own."""
    batch = make_batch(spec, rows)
    score_RnA = batch.action_RnA.masked_fill(
        ~torch.from_numpy(spec.action_mask_TA)[batch.task_Rn], -2
    )
    parts = [F.one_hot(p.argmax(-1), p.shape[-1]) for p in score_RnA.split(spec.action_choices, -1)]
    return batch._replace(action_RnA=torch.cat(parts, -1).float())


@pytest.mark.parametrize(
    "spec", [discrete_spec((2, 3)), discrete_spec((5, 5), (3, 2))], ids=["two sizes", "components"]
)
def test_sac_losses_are_sums_over_the_actions(spec):
    sac = make_sac(spec, temperature=partial(FixedTemperature, value=ALPHA), discount=0.9)
    batch = discrete_batch(spec)
    noise_RnA = torch.randn_like(batch.action_RnA)
    critic_loss_R, _ = sac.critic_loss(batch, sac.critic_target(batch, noise_RnA))
    actor_loss_R, log_prob_Rn = sac.actor_loss(batch, noise_RnA)
    for task in range(spec.num_tasks):
        own_A = torch.from_numpy(spec.action_mask_TA[task])
        task_n = batch.task_Rn[task]

        def log_probs(observation_nD, own_A=own_A, task_n=task_n):
            """Those of the task's own choices, one component after the other."""
            logits = sac.actor(observation_nD, task_n).split(spec.action_choices, -1)
            owns = own_A.split(spec.action_choices)
            parts = [x[:, own].log_softmax(-1) for x, own in zip(logits, owns, strict=True)]
            return torch.cat(parts, -1)

        # y = r + discount (1 - terminated) sum_a pi(a|s') [min_i Q_i'(s', a) - alpha log pi]
        next_nD = batch.next_observation_RnD[task]
        log_pi_nA = log_probs(next_nD)
        next_q_nA = sac.target_critic(next_nD, task_n)[..., own_A].amin(0)
        value_n = (log_pi_nA.exp() * (next_q_nA - ALPHA * log_pi_nA)).sum(-1)
        target_n = batch.reward_Rn[task] + 0.9 * ~batch.terminated_Rn[task] * value_n
        q_QnA = sac.critic(batch.observation_RnD[task], task_n)[..., own_A]
        error_Qn = (q_QnA * batch.action_RnA[task][:, own_A]).sum(-1) - target_n
        torch.testing.assert_close(critic_loss_R[task], error_Qn.square().sum(0).mean())
        # J_pi = sum_a pi(a|s) [alpha log pi - min_i Q_i]
        log_pi_nA = log_probs(batch.observation_RnD[task])
        cost_n = (log_pi_nA.exp() * (ALPHA * log_pi_nA - q_QnA.amin(0))).sum(-1)
        torch.testing.assert_close(actor_loss_R[task], cost_n.mean())
        torch.testing.assert_close(log_prob_Rn[task], (log_pi_nA.exp() * log_pi_nA).sum(-1))


def test_ppos_steps_of_the_actor_are_those_of_stable_baselines3():
    sb3 = pytest.importorskip("stable_baselines3")
    other = sb3.PPO(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=0.3,
        n_steps=64,
        batch_size=64,
        n_epochs=4,
        normalize_advantage=False,
        clip_range=0.1,
        ent_coef=0.2,
        vf_coef=0.0,
        max_grad_norm=1e9,
        policy_kwargs={"net_arch": [16], "optimizer_class": torch.optim.SGD},
        device="cpu",
        seed=0,
    )
    layers = nn.Sequential(*other.policy.mlp_extractor.policy_net, other.policy.action_net)
    actor = copy.deepcopy(layers)
    actor.forward = lambda x_BD, task_B: nn.Sequential.forward(actor, x_BD)
    sgd = partial(torch.optim.SGD, lr=0.3)
    spec = discrete_spec((2,))
    ppo = make_ppo(
        spec,
        actor=lambda *_: actor,
        actor_optimizer=sgd,
        clip=0.1,
        entropy_coef=0.2,
        actor_max_grad_norm=None,
    )
    attach(ppo)
    old = copy.deepcopy(layers.state_dict())
    other.learn(64)
    rows = other.rollout_buffer
    extra = {"log_prob": rows.log_probs, "advantage": rows.advantages, "weight": np.ones(64, "f4")}
    columns = {name: torch.from_numpy(value).view(1, 64) for name, value in extra.items()}
    action_RnA = F.one_hot(torch.from_numpy(rows.actions).long().view(1, 64)).float()
    batch = make_batch(spec, 64)._replace(
        observation_RnD=torch.from_numpy(rows.observations)[None],
        extra={**columns, "unclipped_action": action_RnA},
    )
    for _ in range(4):
        ppo.actor_update(lambda: ppo.actor_loss(batch))
    assert not torch.allclose(old["0.weight"], layers[0].weight, atol=1e-2)
    torch.testing.assert_close(actor.state_dict(), layers.state_dict())


def test_target_entropy_is_of_the_tasks_own_number_of_actions():
    sizes = 0.98 * np.log([2, 3])
    np.testing.assert_allclose(make_sac(discrete_spec((2, 3))).target_entropy_T, sizes, rtol=1e-6)
    several = make_sac(discrete_spec((5, 5), (3, 2))).target_entropy_T
    np.testing.assert_allclose(several, [0.98 * np.log(6)] * 2, rtol=1e-6)


@pytest.mark.parametrize("make", [make_sac, make_ppo, make_distral, make_bc])
def test_padded_choices_are_never_taken(make):
    spec = discrete_spec((2, 3))
    algorithm = make(spec)
    observation_ED = np.zeros((200, 4), np.float32)
    task_E = np.zeros(200, np.int64)
    for mode in ("explore", "random", "exploit"):
        output = algorithm.act(observation_ED, task_E, mode)
        action_EA = output[0] if isinstance(output, tuple) else output
        assert (action_EA.sum(1) == 1).all() and not action_EA[:, 2].any()
        if mode == "explore":
            assert 0 < action_EA[:, 0].sum() < 200
        if mode == "random":
            assert 70 < action_EA[:, 0].sum() < 130


def test_behaviour_cloning_minimizes_the_cross_entropy():
    spec = discrete_spec((3, 3))
    algorithm = make_bc(spec)
    batch = discrete_batch(spec)
    loss_R, _ = algorithm.actor_loss(batch)
    logits_RnA = algorithm.actor(batch.observation_RnD, batch.task_Rn)
    expected_Rn = F.cross_entropy(
        logits_RnA.flatten(0, 1), batch.action_RnA.argmax(-1).flatten(), reduction="none"
    ).view(loss_R.shape[0], -1)
    torch.testing.assert_close(loss_R, expected_Rn.mean(1))
