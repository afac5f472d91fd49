"""Assignments: the weight of each expert of a mixture, given the task.

The choices are those of mtrl's encoders (Sodhani et al. 2021, "Multi-Task Reinforcement Learning
with Context-based Representations", and its code).

Shapes: ``B`` batch, ``K`` experts, ``T`` tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above, within
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
    """Map a task to a weight for each expert.

    Built by a factory ``(num_tasks, num_experts) -> Assignment``.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
    """

    def __init__(self, num_tasks: int, num_experts: int) -> None:
        super().__init__()

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` to nonnegative weights ``[B, K]`` that sum to 1."""
        raise NotImplementedError


class OwnExpert(Assignment):
    """Use expert ``i`` alone for task ``i``; "identity" in mtrl.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, equal to ``num_tasks``.

    Raises:
        ConfigurationError: if ``num_experts`` differs from ``num_tasks``.
    """

    weight_TK: Tensor

    def __init__(self, num_tasks: int, num_experts: int) -> None:
        super().__init__(num_tasks, num_experts)
        if num_experts != num_tasks:
            raise ConfigurationError(
                "OwnExpert needs one expert per task:"
                f" num_experts is {num_experts}, set it to {num_tasks}"
            )
        self.register_buffer("weight_TK", torch.eye(num_tasks), persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to one-hot weights ``[B, K]``."""
        return self.weight_TK[task_B]

    def own_tasks(self, train_tasks: Sequence[int]) -> Collection[int]:
        """Return the trained tasks; the mean of their weights stands for the others'."""
        return train_tasks


class Average(Assignment):
    """Weight all experts equally, for every task; "ensemble" in mtrl.

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
    """Assign experts by words in a task's name or description; "cluster" in mtrl.

    Each expert has a group of words. A task uses, with equal weights, all experts with a word in
    the task's name or description.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``, equal to the number of groups of words.
        words: one group of words per expert, matched as whole words; None for ten groups of verbs.
        descriptions: JSON file ``{task name: sentence}``; None for the file of this package.

    Raises:
        ConfigurationError: if the number of groups differs from ``num_experts``, or the file cannot
            be used.
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
        groups = WORDS if words is None else words
        self._words = [frozenset(map(str.lower, group)) for group in groups]
        if len(self._words) != num_experts:
            raise ConfigurationError(
                f"num_experts is {num_experts}:"
                f" set it to {len(self._words)}, the number of groups of words"
            )
        self._path = DESCRIPTIONS if descriptions is None else Path(descriptions)
        read_json(self._path)
        self.weights = TaskTable(num_tasks, num_experts)

    def set_task_names(self, names: Sequence[str]) -> None:
        """Choose each task's experts.

        Raises:
            ConfigurationError: if no expert has a word in a task's name or description.
        """
        descriptions = read_json(self._path)
        uses_TK = np.zeros((len(names), len(self._words)), dtype=np.float32)
        for i, name in enumerate(names):
            key = find_name(name, descriptions)
            text = f"{name} {'' if key is None else descriptions[key]}".lower()
            words = re.findall(r"[a-z]+", text)
            uses_TK[i] = [not group.isdisjoint(words) for group in self._words]
            if not uses_TK[i].any():
                raise ConfigurationError(
                    f"no expert has a word in the name or description of the task {name}:"
                    " add one of its words to a group of words,"
                    " or give a file of your own as descriptions"
                )
        self.weights.fill(uses_TK / uses_TK.sum(1, keepdims=True))

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return self.weights(task_B)


class Gate(Assignment):
    """Choose a task's experts with the highest scores, weighted by the softmax of these scores.

    A perceptron scores the experts. All other experts get the weight 0. The task conditioning is
    frozen and detached: this does not train it.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
        num_chosen: number of experts per task; 2 in mtrl.
        conditioning: task conditioning, the input of the perceptron; it is not trained.
        width: size of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 in mtrl.
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
        within(1, num_experts, num_chosen=num_chosen, hint=", the number of experts")
        self._num_chosen = num_chosen
        self.scores = _Scores(num_tasks, num_experts, conditioning, width, depth)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        score_TK = self.scores()
        chosen = score_TK.topk(self._num_chosen, dim=-1)
        excluded_TK = torch.full_like(score_TK, -torch.inf)
        score_TK = excluded_TK.scatter(-1, chosen.indices, chosen.values)
        return score_TK.softmax(-1)[task_B]


class Attention(Assignment):
    """Weight the experts by the softmax of a perceptron's scores for the task.

    The task conditioning is frozen and detached: this does not train it.

    Args:
        num_tasks: number of tasks, ``T``.
        num_experts: number of experts, ``K``.
        temperature: divisor of the scores, above 0; 1 in mtrl.
        conditioning: task conditioning, the input of the perceptron; it is not trained.
        width: size of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 in mtrl.
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
        above(0, temperature=temperature, prefix="Attention's ")
        self._temperature = temperature
        self.scores = _Scores(num_tasks, num_experts, conditioning, width, depth)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return (self.scores() / self._temperature).softmax(-1)[task_B]


class _Scores(nn.Module):
    """Score all experts for all tasks with a perceptron, ``[T, K]``."""

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
        # frozen, so that no optimizer applies weight decay to it
        self.conditioning = conditioning(num_tasks).requires_grad_(False)
        self.hidden = HiddenLayers(self.conditioning.out_dim, width, depth, layer_norm=False)
        self.output = nn.Linear(width, num_experts)

    def forward(self) -> Tensor:
        return self.output(self.hidden(self.conditioning(self.tasks_T).detach()))
