"""The action that is stored is the policy's; the action that is sent may be another."""

from types import SimpleNamespace

import numpy as np
import pytest

from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.errors import ConfigurationError, PolicyFaultError
from mtrl_lightning.rollout import ActionNoise, ActionTransform, Collector
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from tests.helpers.fakes import Constant, Numbering, Scripted
from tests.helpers.rollout import Scale

ACTION = (0.75, -0.5)


def collector(*transforms, policy=None):
    envs = VectorEnv(Scripted(2), [0, 1], num_workers=0)
    return Collector(envs, policy or Constant(ACTION), action_transforms=transforms)


def stored_and_sent(found, mode="explore"):
    """Return the first numbers of the stored actions, and of those that the environments took."""
    transitions, _ = found.step(mode)
    return transitions.action_EA[:, 0].tolist(), transitions.next_observation_ED[:, 3].tolist()


class Spoil(ActionTransform):
    """Write into the argument, and return something else."""

    def __init__(self, result=lambda action_EA: action_EA):
        self.result = result

    def transform(self, action_EA, task_E, is_training):
        action_EA[:] = 0.125
        return self.result(action_EA)


class PerTask(ActionTransform):
    def transform(self, action_EA, task_E, is_training):
        return action_EA + task_E[:, None] / 10


@pytest.mark.parametrize(
    ("transforms", "sent"),
    [
        ([Scale(-0.5)], [-0.375, -0.375]),
        ([Scale(4.0)], [1, 1]),
        ([Scale(4.0), Scale(0.25)], [0.75, 0.75]),
        ([Scale(0.0), PerTask()], [0, np.float32(0.1)]),
        ([PerTask(), Scale(0.0)], [0, 0]),
        ([Spoil()], [0.125, 0.125]),
    ],
)
def test_policys_action_is_stored_and_transformed_one_sent(transforms, sent):
    assert stored_and_sent(collector(*transforms)) == ([0.75, 0.75], sent)


def test_noise_is_seeded_and_left_out_of_evaluations():
    noise = ActionNoise(0.1)
    noise.seed(3)
    draws_SEA = 0.1 * np.random.default_rng(3).standard_normal((2, 2, 2))
    found = collector(noise)
    for draw_EA, mode in zip(draws_SEA, ("explore", "random"), strict=True):
        stored, sent = stored_and_sent(found, mode)
        assert stored == [0.75, 0.75]
        assert sent == pytest.approx(0.75 + draw_EA[:, 0])
    assert stored_and_sent(found, "exploit") == ([0.75, 0.75], [0.75, 0.75])
    loud = collector(ActionNoise(100.0))
    assert {abs(number) for _ in range(3) for number in stored_and_sent(loud)[1]} == {1}


def test_noise_continues_where_it_was_saved():
    found, other = (collector(ActionNoise(0.1), Scale(0.7), ActionNoise(0.1)) for _ in range(2))
    found.action_transforms[0].seed(5)
    found.step("explore")
    other.set_state(found.get_state())
    assert [stored_and_sent(other) for _ in range(3)] == [stored_and_sent(found) for _ in range(3)]


def test_what_cannot_be_sent_is_refused_by_the_transforms_name():
    for result in (lambda action_EA: action_EA[:, :1], lambda action_EA: action_EA * np.nan):
        with pytest.raises(ConfigurationError, match="Spoil"):
            collector(Spoil(result)).step("explore")
    with pytest.raises(PolicyFaultError):  # the policy's own
        collector(Scale(0.5), policy=Constant((np.nan, 0.0))).step("explore")


def test_a_transformed_policy_acts_as_in_an_evaluation():
    policy = Numbering()
    assert with_action_transforms(policy, []) is policy
    transformed = with_action_transforms(policy, [Scale(0.5), ActionNoise(9.0)])
    observation_ED, task_E = np.zeros((2, 4)), np.arange(2)
    action_EA = transformed.act(observation_ED, task_E, "exploit")
    assert action_EA[:, 0].tolist() == [0.5 / 1024, 1 / 1024] and action_EA.dtype == np.float32

    fields = {"log_prob": np.zeros(2)}
    with_fields = SimpleNamespace(act=lambda *_: (np.ones((2, 2), np.float32), fields))
    chosen_EA, found = with_action_transforms(with_fields, [Scale(0.5)]).act(
        observation_ED, task_E, "explore"
    )
    assert chosen_EA.tolist() == [[0.5, 0.5]] * 2 and found is fields
