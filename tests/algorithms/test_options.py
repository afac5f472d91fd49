"""Options that a class inherits, as the command line shows them."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentParser

from mtrl_lightning import algorithms
from mtrl_lightning.auxiliaries import Auxiliary, HiPBMDP, LatentDynamics
from mtrl_lightning.networks import MLP, MultiHead, TopKGate
from mtrl_lightning.networks.mixture import ScoredAssignment


def options_of(kind: type) -> set[str]:
    """Return the names of the options that the command line has for a class, each with a help."""
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "part")
    helps = {action.dest: action.help for action in parser._actions if "part." in action.dest}
    helps = {name: text for name, text in helps.items() if not name.endswith(".help")}
    assert all(helps.values())
    return {name.split(".")[1] for name in helps}


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (algorithms.SAC, algorithms.ActorCritic),
        (algorithms.ActorCritic, algorithms.Algorithm),
        (algorithms.PPO, algorithms.Algorithm),
        (algorithms.BehaviourCloning, algorithms.Algorithm),
        (HiPBMDP, LatentDynamics),
        (LatentDynamics, Auxiliary),
        (MultiHead, MLP),
        (TopKGate, ScoredAssignment),
    ],
)
def test_a_class_has_the_options_of_its_base(kind, base):
    assert options_of(kind) > options_of(base)


def test_distral_has_sacs_options_but_those_that_it_sets_itself():
    fixed = {"temperature", "temperature_optimizer", "target_entropy"}
    fixed |= {"encoder_tau", "untrained_tasks"}
    own = {"kappa", "omega", "distilled_optimizer", "distilled_max_grad_norm"}
    assert options_of(algorithms.Distral) == options_of(algorithms.SAC) - fixed | own
