"""Mixtures of encoders: gates that assign experts to tasks, mtrl's mixture, and CARE.

Sodhani, Zhang and Pineau 2021, "Multi-Task Reinforcement Learning with Context-based
Representations", and its code, mtrl.

Shapes: ``B`` rows, ``D`` observation, ``K`` experts, ``T`` tasks, ``Z`` features of
an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, TaskEncoder
from mtrl_lightning.networks.encoder import Encoder, require_vectors
from mtrl_lightning.networks.experts import Experts
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.language import DESCRIPTIONS, Language, TaskTable, find_name, read_json
from mtrl_lightning.networks.network import TaskAxis, task_values
from mtrl_lightning.spec import EnvSpec

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

    Built by a factory ``(num_experts, spec) -> Assignment``.

    Args:
        num_experts: number of experts, ``K``.
        spec: the tasks.
    """

    def __init__(self, num_experts: int, spec: EnvSpec) -> None:
        super().__init__()

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` to nonnegative weights ``[B, K]`` that sum to 1."""
        raise NotImplementedError


class OneHotGate(Assignment):
    """Use only expert ``i`` for task ``i``; "identity" in mtrl.

    Args:
        num_experts: number of experts, equal to the number of tasks.
        spec: the tasks.
    """

    weight_TK: Tensor

    def __init__(self, num_experts: int, spec: EnvSpec) -> None:
        super().__init__(num_experts, spec)
        if num_experts != spec.num_tasks:
            raise ConfigurationError(
                f"OneHotGate needs one expert per task, but num_experts is {num_experts}:"
                f" set it to {spec.num_tasks}"
            )
        self.register_buffer("weight_TK", torch.eye(spec.num_tasks), persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to one-hot weights ``[B, K]``."""
        return task_values(self.weight_TK, task_B)


class UniformGate(Assignment):
    """Weight all experts equally, for every task; "ensemble" in mtrl.

    Args:
        num_experts: number of experts, ``K``.
        spec: the tasks.
    """

    weight_TK: Tensor

    def __init__(self, num_experts: int, spec: EnvSpec) -> None:
        super().__init__(num_experts, spec)
        weight_TK = torch.full((spec.num_tasks, num_experts), 1 / num_experts)
        self.register_buffer("weight_TK", weight_TK, persistent=False)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]`` of ``1 / K``."""
        return task_values(self.weight_TK, task_B)


class Clusters(Assignment):
    """Assign experts by keywords in a task's name or description; "cluster" in mtrl.

    Each expert has a group of keywords. A task uses all experts with a keyword in its name or
    description, with equal weights.

    Args:
        num_experts: number of experts, ``K``, equal to the number of groups.
        spec: the tasks.
        words: one group of keywords per expert, matched as whole words; None for ten groups of
            verbs.
        descriptions: JSON file ``{task name: sentence}``; None for the file of this package.
    """

    def __init__(
        self,
        num_experts: int,
        spec: EnvSpec,
        *,
        words: Sequence[Sequence[str]] | None = None,
        descriptions: str | None = None,
    ) -> None:
        super().__init__(num_experts, spec)
        groups = [frozenset(map(str.lower, group)) for group in (words or WORDS)]
        if len(groups) != num_experts:
            raise ConfigurationError(
                f"num_experts is {num_experts}:"
                f" set it to {len(groups)}, the number of groups of keywords"
            )
        path = DESCRIPTIONS if descriptions is None else Path(descriptions)
        self.weights = TaskTable(_uses(spec.task_names, groups, read_json(path)))

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return self.weights(task_B)


def _uses(
    names: Sequence[str], groups: Sequence[frozenset[str]], descriptions: Mapping[str, str]
) -> np.ndarray:
    """Return the weights ``[T, K]`` of the experts whose words are in each task's text."""
    uses_TK = np.zeros((len(names), len(groups)), dtype=np.float32)
    for i, name in enumerate(names):
        key = find_name(name, descriptions)
        text = f"{name} {'' if key is None else descriptions[key]}".lower()
        words = re.findall(r"[a-z]+", text)
        # 1 for each expert with a word in the text
        uses_TK[i] = [not group.isdisjoint(words) for group in groups]
        if not uses_TK[i].any():
            raise ConfigurationError(
                f"no expert has a keyword in the name or description of the task {name}:"
                " add one of its words to a group of words,"
                " or set descriptions to a file that describes the task"
            )
    return uses_TK / uses_TK.sum(1, keepdims=True)


class ScoredAssignment(Assignment):
    """Base of assignments that weight the experts by an MLP's scores for the task.

    Args:
        num_experts: number of experts, ``K``.
        spec: the tasks.
        conditioning: task conditioning, the input of the MLP; frozen.
        width: size of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 in mtrl.
    """

    tasks_T: Tensor

    def __init__(
        self,
        num_experts: int,
        spec: EnvSpec,
        *,
        conditioning: Callable[[EnvSpec], TaskConditioning] = OneHot,
        width: int = 50,
        depth: int = 2,
    ) -> None:
        super().__init__(num_experts, spec)
        self.register_buffer("tasks_T", torch.arange(spec.num_tasks), persistent=False)
        # frozen, so that no optimizer applies weight decay to it
        self.conditioning = conditioning(spec).requires_grad_(False)
        self.hidden = HiddenLayers(self.conditioning.out_dim, width, depth, layer_norm=False)
        self.output = nn.Linear(width, num_experts)

    def scores(self) -> Tensor:
        """Return the scores of all experts for all tasks, ``[T, K]``."""
        scores_TK: Tensor = self.output(self.hidden(self.conditioning(self.tasks_T).detach()))
        return scores_TK

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of the first layer that multiply a one-hot task ID."""
        return self.conditioning.columns("hidden.0.weight")


class TopKGate(ScoredAssignment):
    """Weight the experts with the highest scores by a softmax; the others get weight 0.

    An MLP scores the experts for each task.

    Args:
        num_experts: number of experts, ``K``.
        spec: the tasks.
        num_chosen: number of experts per task; 2 in mtrl.
        options: arguments of ``ScoredAssignment``.
    """

    def __init__(
        self, num_experts: int, spec: EnvSpec, *, num_chosen: int = 2, **options: Any
    ) -> None:
        within(1, num_experts, num_chosen=num_chosen, hint=", the number of experts")
        super().__init__(num_experts, spec, **options)
        self._num_chosen = num_chosen

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        score_TK = self.scores()
        chosen = score_TK.topk(self._num_chosen, dim=-1)
        # exp(-inf) = 0: the softmax is taken over the chosen scores only
        excluded_TK = torch.full_like(score_TK, -torch.inf)
        score_TK = excluded_TK.scatter(-1, chosen.indices, chosen.values)
        return score_TK.softmax(-1)[task_B]


class Attention(ScoredAssignment):
    """Weight the experts by the softmax of an MLP's scores for the task.

    Args:
        num_experts: number of experts, ``K``.
        spec: the tasks.
        temperature: softmax temperature, above 0; 1 in mtrl.
        options: arguments of ``ScoredAssignment``.
    """

    def __init__(
        self, num_experts: int, spec: EnvSpec, *, temperature: float = 1.0, **options: Any
    ) -> None:
        above(0, temperature=temperature, prefix="Attention's ")
        super().__init__(num_experts, spec, **options)
        self._temperature = temperature

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to weights ``[B, K]``."""
        return (self.scores() / self._temperature).softmax(-1)[task_B]


class MixtureOfEncoders(Encoder):
    """Mix the features of ``K`` MLPs ``z_k``: ``sum_k a_k(task) z_k(observation)``.

    Args:
        spec: the tasks; observations are vectors.
        num_experts: number of MLPs, ``K``; up to 10 in mtrl.
        width: size of a hidden layer; 50 in mtrl.
        depth: number of hidden layers. mtrl has 1, because its setting of 2 layers includes the
            output layer.
        out_dim: number of output features, ``Z``; 50 in mtrl.
        assignment: weights ``a`` of the MLPs for each task.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_experts: int = 10,
        width: int = 50,
        depth: int = 2,
        out_dim: int = 50,
        assignment: Callable[[int, EnvSpec], Assignment] = UniformGate,
    ) -> None:
        super().__init__(spec)
        require_vectors(spec.observation_space, type(self).__name__)
        at_least(1, depth=depth)
        in_dim = spec.observation_space.shape[0]
        self.experts = Experts(num_experts, in_dim, out_dim, width=width, depth=depth)
        self.assignment = assignment(num_experts, spec)
        self.out_dim = out_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations and tasks to features: ``[B, Z]``, or ``[R, n, Z]``."""
        z_KBZ = self.experts(observation_BD.flatten(0, -2))
        # sum_k a_k(task) z_k(observation)
        z_BZ = torch.einsum("kbz,bk->bz", z_KBZ, self.assignment(task_B.flatten()))
        return z_BZ.view(*task_B.shape, self.out_dim)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the MLPs if each task has its own."""
        if not isinstance(self.assignment, OneHotGate):
            return {}
        names = [f"experts.{name}" for name, _ in self.experts.named_parameters()]
        return dict.fromkeys(names, TaskAxis(has_mean=False))


class CARE(Encoder):
    """Mix encoders by attention to a task context, and append the context.

    The features are ``sum_k a_k z_k(observation) || z_context(task)`` with
    ``a = softmax_k <z_k, sg(z_context)>``. They contain the task: combine CARE with actor and
    critic networks with ``NoConditioning``. Due to the stop-gradient ``sg``, the context is trained
    only through the appended features.

    Args:
        spec: the tasks; observations are vectors.
        num_experts: number of encoders ``z_k``, ``k`` in the paper; 6 for MT10, 10 for MT50.
        width: size of a hidden layer of encoders and context; 50 in the paper.
        depth: number of hidden layers of encoders and context; 2 in the paper.
        out_dim: number of features of an encoder and of the context, ``Z``; 50 in the paper.
        conditioning: task conditioning, the input of the context; in the paper a frozen embedding
            of the task's description.
    """

    context: TaskEncoder

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_experts: int = 6,
        width: int = 50,
        depth: int = 2,
        out_dim: int = 50,
        conditioning: Callable[[EnvSpec], TaskConditioning] = Language,
    ) -> None:
        super().__init__(spec)
        require_vectors(spec.observation_space, type(self).__name__)
        at_least(1, depth=depth)
        in_dim = spec.observation_space.shape[0]
        self.experts = Experts(num_experts, in_dim, out_dim, width=width, depth=depth)
        self.context = TaskEncoder(
            spec, embedding=conditioning, width=width, depth=depth, out_dim=out_dim
        )
        self.out_dim = 2 * out_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations and tasks to features: ``[B, 2 Z]``, or ``[R, n, 2 Z]``."""
        z_KBZ = self.experts(observation_BD.flatten(0, -2))
        context_BZ = self.context(task_B.flatten())
        # a = softmax_k <z_k, sg(z_context)>
        attention_BK = torch.einsum("kbz,bz->bk", z_KBZ, context_BZ.detach()).softmax(-1)
        # sum_k a_k z_k || z_context
        z_BZ = torch.einsum("kbz,bk->bz", z_KBZ, attention_BK)
        return torch.cat([z_BZ, context_BZ], dim=-1).view(*task_B.shape, self.out_dim)
