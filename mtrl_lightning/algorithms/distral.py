"""Distral: task policies that are pulled towards a distilled policy, with soft actor-critics.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task in a batch, ``B`` rows of any tasks
or ``R, n``, ``D`` observation, ``F`` features that the policies share, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adam

from mtrl_lightning.algorithms.algorithm import compiled, num_actor_outputs
from mtrl_lightning.algorithms.sac import SAC, Policy
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import Mean, per_task_forward
from mtrl_lightning.networks import (
    Assignment,
    Encoder,
    Network,
    NoConditioning,
    OneForAll,
    OnePerTask,
    TaskConditioning,
    UniformGate,
)
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.update import task_parameters
from mtrl_lightning.updates.weighting import FixedTemperature


class Distral(SAC):
    """Distral (Teh et al. 2017, arXiv 1707.04175) with soft actor-critics in continuous actions.

    Each trained task has its own policy ``pi`` and critics, which learn from its own transitions.
    They share a distilled policy ``pi_0``, which is not conditioned on the task. The objective
    (equation 1, with ``kappa`` for ``c_KL`` and ``omega`` for ``c_Ent``) is the sum over the tasks
    of ``E sum_t discount^t [r - kappa log(pi / pi_0) - omega log pi]``. The paper also writes
    ``alpha = kappa / (kappa + omega)`` and ``beta = 1 / (kappa + omega)``. All three losses follow
    from it, with the same sampled action ``a`` in both policies' densities:

    - critics: ``y = r + discount (1 - terminated) [min_i Q_i' + kappa log pi_0(a'|s')
      - (kappa + omega) log pi(a'|s')]``
    - policies: ``(kappa + omega) log pi(a|s) - kappa log pi_0(a|s) - min_i Q_i(s, a)``
    - distilled policy: ``KL(pi || pi_0)`` in closed form, with ``pi`` held constant

    Tasks that are evaluated without being trained use the distilled policy. With ``kappa`` 0, the
    tasks' networks learn as separate SACs with temperature ``omega``. The encoder is shared by all
    tasks and by the distilled policy, and must not depend on the task.

    With ``compile``, every task's network processes the rows of all tasks: ``R`` times the cost.

    Args:
        spec: the tasks; filled in from the data.
        kappa: weight of the divergence from the distilled policy, at least 0 (``c_KL`` in the
            paper). With 0, only the distilled policy learns from the tasks' policies.
        omega: weight of the entropy, above 0 (``c_Ent`` in the paper). At 0, the tasks' policies
            and the distilled policy could collapse to deterministic ones together.
        distilled_max_grad_norm: norm to which the distilled policy's gradient is clipped; None for
            no clipping. Gradients of the tasks' policies and critics are clipped per task.
        distilled_optimizer: optimizer of the distilled policy.
        options: further arguments of ``SAC``. ``actor`` and ``critic`` build every task's networks
            and the distilled policy, each for a single task, so that a task conditioning is
            constant. ``actor_gradient`` combines the tasks' gradients of the distilled policy,
            because the tasks' own policies share no parameters; ``critic_gradient`` combines those
            of the encoder.
    """

    acting_networks = ("encoder", "actor", "distilled")
    actor: OnePerTask
    distilled: OneForAll
    untrained_T: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        kappa: float = 0.05,
        omega: float = 0.05,
        distilled_max_grad_norm: float | None = 1.0,
        distilled_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        at_least(0, finite=True, kappa=kappa)
        # without an entropy bonus, all policies could collapse to deterministic ones together
        above(0, finite=True, omega=omega)
        super().__init__(
            spec,
            temperature=partial(FixedTemperature, value=omega),
            temperature_optimizer=Adam,  # the temperature is fixed
            target_entropy=None,
            encoder_tau=None,
            untrained_tasks="own",  # `policy` uses the distilled policy for them
            **options,
        )
        _check_encoder(self.encoder)
        self.untrained.explanation = "They use the distilled policy"
        self.kappa = kappa
        self.omega = omega
        untrained_T = torch.from_numpy(self.untrained.is_untrained_T)
        self.register_buffer("untrained_T", untrained_T, persistent=False)
        self._distilled_loss = compiled(self.distilled_loss, self._compile)
        self.distilled_update = self.make_update(
            "distilled",
            [self.distilled],
            distilled_optimizer,
            method=self.actor_gradient,
            max_grad_norm=distilled_max_grad_norm,
            weights=super().task_weights,
        )

    def make_networks(self) -> dict[str, nn.Module]:
        """Build SAC's networks, then the distilled policy."""
        networks = super().make_networks()
        encoder = networks["encoder"]
        assert isinstance(encoder, Encoder)
        make = partial(encoder.make_actor, self._make_actor)
        num_outputs = num_actor_outputs(self.spec, self.outputs_per_action)
        distilled = OneForAll(encoder.out_dim, num_outputs, self.spec, make=make)
        return {**networks, "distilled": distilled}

    def make_task_network(
        self, make: Callable[[int, int, EnvSpec], Network], in_dim: int, out_dim: int, spec: EnvSpec
    ) -> Network:
        """Build one network for each trained task."""
        return OnePerTask(in_dim, out_dim, spec, make=make, tasks=spec.train_tasks)

    def critic_update_options(self) -> dict[str, Any]:
        """Combine the tasks' gradients of the encoder; clip the critics' gradients per task."""
        encoder = [p for p in self.encoder.parameters() if p.requires_grad]
        groups = [_trained_parameters(networks) for networks in self._critics_by_task()]
        options = super().critic_update_options()
        if encoder:
            return {**options, "clip_groups": [encoder, *groups]}
        return {**options, "method": Mean(self.spec), "clip_groups": groups}

    def actor_update_options(self) -> dict[str, Any]:
        """Clip gradients per task: the tasks' policies share no parameters."""
        return {
            "method": Mean(self.spec),
            "weights": self.task_weights,
            "clip_groups": [_trained_parameters([network]) for network in self.actor.networks],
        }

    def task_weights(self) -> Tensor:
        """Return the weight of each task's loss in the mean, ``[R]``.

        The factor ``R`` turns the mean into a sum, so that a task's own networks get the same
        gradient as without other tasks.
        """
        return self.num_trained * super().task_weights()

    def update_policy(self, batch: TransitionBatch) -> None:
        """Update the tasks' policies and then the distilled policy, from a transformed batch."""
        super().update_policy(batch)
        kl_R = self.distilled_update(lambda: self._distilled_loss(batch))
        self.mean_metrics.add({"distral_kl": kl_R.mean()})
        for task, kl in zip(self.spec.train_tasks, kl_R.unbind(), strict=True):
            self.mean_metrics.add({f"distral_kl/{self.spec.task_names[task]}": kl})

    def action_cost(
        self,
        policy: Policy,
        noise_RnA: Tensor,
        log_prob_Rn: Tensor,
        observation_RnD: Tensor,
        task_Rn: Tensor,
    ) -> Tensor:
        """Return ``omega log pi + kappa (log pi - log pi_0)`` of the actions, ``[R, n]``."""
        cost_Rn = super().action_cost(policy, noise_RnA, log_prob_Rn, observation_RnD, task_Rn)
        with torch.no_grad():
            distilled = self.distilled_policy(observation_RnD, task_Rn)
        return cost_Rn + self.kappa * policy.log_ratio(distilled, noise_RnA)  # type: ignore[arg-type]  # both are of one class

    def distilled_loss(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Return each task's ``mean KL(pi || pi_0)``, ``[R]``, and a detached copy.

        The gradient is that of ``-mean E_pi log pi_0``: the distilled policy maximizes the
        likelihood of the tasks' actions.
        """
        with torch.no_grad():
            policy = self.policy(batch.observation_RnD, batch.task_Rn)
            shared_RnF = self.encoder.shared_features(batch.observation_RnD, batch.task_Rn)
        output_Rn2A = per_task_forward(self.actor_gradient, self.distilled, 0, shared_RnF)
        kl_Rn = policy.kl(self.distribution(output_Rn2A, batch.task_Rn))  # type: ignore[arg-type]
        kl_R = kl_Rn.mean(1)
        return kl_R, kl_R.detach()

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> Policy:
        """Return the distribution over actions; the distilled policy's for untrained tasks."""
        shared_BF = self.encoder.shared_features(observation_BD, task_B)
        output_B2A = self.actor(shared_BF, task_B)
        if self.num_trained < self.spec.num_tasks:
            is_untrained_B1 = task_values(self.untrained_T, task_B)[..., None]
            output_B2A = torch.where(is_untrained_B1, self.distilled(shared_BF), output_B2A)
        return self.distribution(output_B2A, task_B)

    def distilled_policy(self, observation_BD: Tensor, task_B: Tensor) -> Policy:
        """Return the distilled policy's distribution; the task only determines action padding."""
        output_B2A = self.distilled(self.encoder.shared_features(observation_BD, task_B))
        return self.distribution(output_B2A, task_B)

    def _critics_by_task(self) -> list[tuple[nn.Module, ...]]:
        """Return the critics of each trained task."""
        networks_QR = []
        for critic in self.critic.members:
            assert isinstance(critic, OnePerTask)
            networks_QR.append(critic.networks)
        return list(zip(*networks_QR, strict=True))


def _trained_parameters(networks: Sequence[nn.Module]) -> list[Parameter]:
    """Return the trained parameters, in the order in which ``Update`` sums their norms."""
    trained = task_parameters(networks)
    return [*trained.shared, *trained.own]


def _check_encoder(encoder: Encoder) -> None:
    """Check that an encoder does not depend on the task."""
    for part in encoder.modules():
        sees_task = isinstance(part, TaskConditioning | Assignment)
        if sees_task and not isinstance(part, NoConditioning | UniformGate):
            raise ConfigurationError(
                f"the encoder {type(encoder).__name__} depends on the task"
                f" ({type(part).__name__}), but Distral's distilled policy must not depend on it:"
                " choose an encoder that does not (-c encoder/identity or encoder/mlp for states,"
                " encoder/pixels for images)"
            )
