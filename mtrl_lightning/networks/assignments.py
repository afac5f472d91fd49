"""How a mixture weighs its experts, given the task.

The choices are those of mtrl's encoders (Sodhani et al. 2021, "Multi-Task Reinforcement Learning
with Context-based Representations", and its code).

Shapes: ``B`` batch, ``K`` experts, ``T`` tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.language import DESCRIPTIONS, TaskTable, find_name, read_json

WORDS = (
    ("open", "unlock"),
    ("close", "lock"),
    ("push", "slide", "sweep", "kick"),
    ("pull", "unplug"),
    ("press", "hit"),
    ("pick", "lift", "place"),
    ("insert", "fit", "assembly", "disassemble"),
    ("turn", "spin", "swing"),
    ("reach",),
    ("stand", "walk", "run", "hop", "swim", "balance", "upright"),
)
"""Verbs for ten experts; every task described in this package has at least one."""


class Assignment(nn.Module):
    """A task in, a weight for each expert out; built by a factory ``(num_tasks, num_experts) -> Assignment``.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
    """

    def __init__(self, num_tasks: int, num_experts: int) -> None:
        super().__init__()

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` to weights ``[B, K]`` that are not negative and sum to 1."""
        raise NotImplementedError


class OwnExpert(Assignment):
    """Expert ``i`` for task ``i``; "identity" in mtrl.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, as many.

    Raises:
        ConfigurationError: if there are more or fewer experts than tasks.
    """

    weight_TK: Tensor

    def __init__(self, num_tasks: int, num_experts: int) -> None:
        super().__init__(num_tasks, num_experts)
        if num_experts != num_tasks:
            raise ConfigurationError(
                f"an expert for each task: num_experts is {num_experts}, set it to {num_tasks}"
            )
        self.register_buffer("weight_TK", torch.eye(num_tasks), persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to one-hot weights ``[B, K]``."""
        return self.weight_TK[task_B]


class Average(Assignment):
    """All experts alike, whatever the task; "ensemble" in mtrl.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
    """

    weight_TK: Tensor

    def __init__(self, num_tasks: int, num_experts: int) -> None:
        super().__init__(num_tasks, num_experts)
        self.register_buffer(
            "weight_TK", torch.full((num_tasks, num_experts), 1 / num_experts), persistent=False
        )

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]`` of ``1 / K``."""
        return self.weight_TK[task_B]


class Clusters(Assignment):
    """Experts for words: a task uses those, with equal weights, whose words are in its name or description.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``; as many as there are groups of words.
        words: the words of each expert, matched as whole words; null for ten groups of verbs.
        descriptions: JSON file with a sentence for each task's name; null for this package's own.

    Raises:
        ConfigurationError: if groups and experts differ in number, or the file cannot be used.
    """

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        *,
        words: Sequence[Sequence[str]] | None = None,
        descriptions: str | None = None,
    ) -> None:
        super().__init__(num_tasks, num_experts)
        self._words = [
            frozenset(map(str.lower, group)) for group in (WORDS if words is None else words)
        ]
        if len(self._words) != num_experts:
            raise ConfigurationError(
                f"num_experts is {num_experts}: set it to {len(self._words)}, the groups of words"
            )
        self._path = DESCRIPTIONS if descriptions is None else Path(descriptions)
        read_json(self._path)
        self.weights = TaskTable(num_tasks, num_experts)

    def set_task_names(self, names: Sequence[str]) -> None:
        """Pick each task's experts.

        Raises:
            ConfigurationError: if none of the words is in a task's name and description.
        """
        descriptions = read_json(self._path)
        uses_TK = np.zeros((len(names), len(self._words)), dtype=np.float32)
        for i, name in enumerate(names):
            key = find_name(name, descriptions)
            text = f"{name} {'' if key is None else descriptions[key]}".lower()
            uses_TK[i] = [
                not group.isdisjoint(re.findall(r"[a-z]+", text)) for group in self._words
            ]
            if not uses_TK[i].any():
                raise ConfigurationError(
                    f"no expert's words are in the name or description of the task {name}: add one"
                    " of its words"
                    " to a group of words, or give a file of your own as descriptions"
                )
        self.weights.fill(uses_TK / uses_TK.sum(1, keepdims=True))

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return self.weights(task_B)


class Gate(Assignment):
    """The experts that a perceptron prefers for the task, with the softmax of their scores; the others get 0.

    What tells the perceptron the task is detached: it does not learn from this.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
        num_chosen: experts of a task; 2 in mtrl.
        conditioning: what tells the perceptron the task; stays as it is built.
        width: features of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 in mtrl.

    Raises:
        ConfigurationError: if fewer than one or more than all experts would be chosen.
    """

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        *,
        num_chosen: int = 2,
        conditioning: Callable[[int], TaskConditioning] = OneHot,
        width: int = 50,
        depth: int = 2,
    ) -> None:
        super().__init__(num_tasks, num_experts)
        if not 1 <= num_chosen <= num_experts:
            raise ConfigurationError(
                f"num_chosen is {num_chosen}: choose from 1 to all {num_experts} experts"
            )
        self._num_chosen = num_chosen
        self.scores = _Scores(num_tasks, num_experts, conditioning, width, depth)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        score_TK = self.scores()
        chosen = score_TK.topk(self._num_chosen, dim=-1)
        score_TK = torch.full_like(score_TK, -torch.inf).scatter(-1, chosen.indices, chosen.values)
        return score_TK.softmax(-1)[task_B]


class Attention(Assignment):
    """The softmax of what a perceptron scores the experts for the task.

    What tells the perceptron the task is detached: it does not learn from this.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
        temperature: scores are divided by it, above 0; 1 in mtrl.
        conditioning: what tells the perceptron the task; stays as it is built.
        width: features of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 in mtrl.

    Raises:
        ConfigurationError: if the temperature is not above 0.
    """

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        *,
        temperature: float = 1.0,
        conditioning: Callable[[int], TaskConditioning] = OneHot,
        width: int = 50,
        depth: int = 2,
    ) -> None:
        super().__init__(num_tasks, num_experts)
        if not temperature > 0:
            raise ConfigurationError(
                f"the attention's temperature is {temperature}: it must be above 0"
            )
        self._temperature = temperature
        self.scores = _Scores(num_tasks, num_experts, conditioning, width, depth)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return (self.scores() / self._temperature).softmax(-1)[task_B]


class _Scores(nn.Module):
    """A perceptron's scores ``[T, K]`` of all experts for all tasks."""

    tasks_T: Tensor

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        conditioning: Callable[[int], TaskConditioning],
        width: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.register_buffer("tasks_T", torch.arange(num_tasks), persistent=False)
        # no optimizer is to decay what nothing trains
        self.conditioning = conditioning(num_tasks).requires_grad_(False)
        self.hidden = HiddenLayers(self.conditioning.out_dim, width, depth, layer_norm=False)
        self.output = nn.Linear(width, num_experts)

    def forward(self) -> Tensor:
        return self.output(self.hidden(self.conditioning(self.tasks_T).detach()))
