"""Generalized advantages against the double sum of the paper, for any ends and gaps."""

from __future__ import annotations

import torch

from mtrl_lightning.algorithms import advantages
from tests.helpers.properties import given, st

KINDS = ("step", "terminated", "truncated", "terminated and truncated", "gap")
GARBAGE = 1e6
"""In the rows of transitions that never happened."""


@st.composite
def rollouts(draw):
    """Return what happened in each step ``[S, E]``, and a seed of the numbers."""
    num_steps, num_envs = draw(st.integers(1, 10)), draw(st.integers(1, 3))
    row = st.lists(st.sampled_from(KINDS), min_size=num_envs, max_size=num_envs)
    return draw(st.lists(row, min_size=num_steps, max_size=num_steps)), draw(st.integers(0, 99))


def slow_advantage(kinds, step, deltas, decay):
    """Return equation 16 for one step, and the last step of its sum."""
    total = 0.0
    for later in range(step, len(kinds)):
        total += decay ** (later - step) * deltas[later]
        has_ended = kinds[later] != "step"
        if has_ended or later + 1 == len(kinds) or kinds[later + 1] == "gap":
            return total, later
    raise AssertionError


@given(rollout=rollouts(), discount=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_advantages_and_cuts_equal_the_double_sum(rollout, discount, gae_lambda):
    kind_SE, seed = rollout
    generator = torch.Generator().manual_seed(seed)
    shape = (len(kind_SE), len(kind_SE[0]))
    reward_SE, value_SE, next_value_SE = torch.randn(3, *shape, generator=generator).double()
    terminated_SE, truncated_SE = (
        torch.tensor([[name in kind for kind in kinds] for kinds in kind_SE])
        for name in ("terminated", "truncated")
    )
    valid_SE = torch.tensor([[kind != "gap" for kind in kinds] for kinds in kind_SE])
    for column_SE in (reward_SE, value_SE, next_value_SE):
        column_SE[~valid_SE] = GARBAGE
    cut_SE = advantages.episode_cuts(terminated_SE, truncated_SE, valid_SE)
    found_SE = advantages.generalized_advantages(
        reward_SE, value_SE, next_value_SE, terminated_SE, cut_SE, discount, gae_lambda
    )
    for env, kinds in enumerate(zip(*kind_SE, strict=True)):
        deltas = [
            (reward + (0 if "terminated" in kind else discount * following) - value).item()
            for kind, reward, value, following in zip(
                kinds, reward_SE[:, env], value_SE[:, env], next_value_SE[:, env], strict=True
            )
        ]
        for step, kind in enumerate(kinds):
            if kind == "gap":
                continue
            wanted, last = slow_advantage(kinds, step, deltas, discount * gae_lambda)
            torch.testing.assert_close(found_SE[step, env].item(), wanted)
            assert cut_SE[step, env].item() == (step == last)
