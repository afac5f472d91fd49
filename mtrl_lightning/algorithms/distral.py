"""Distral: task policies that are pulled towards a distilled policy, with soft actor-critics.

Shapes: ``T`` tasks, ``R`` trained tasks, ``B = R * n`` batch (task-major), ``D`` observation, ``F``
features that the policies share, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Box
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adam

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.compiling import Compile
from mtrl_lightning.algorithms.divergence import OnNonfinite
from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.sac import SAC
from mtrl_lightning.algorithms.task_rows import task_by_task
from mtrl_lightning.algorithms.temperature import FixedTemperature
from mtrl_lightning.algorithms.transforms import Transform
from mtrl_lightning.algorithms.update import task_parameters
from mtrl_lightning.algorithms.values import Scalar, Value
from mtrl_lightning.algorithms.weighting import EqualWeights, TaskWeighting
from mtrl_lightning.auxiliaries import Auxiliary
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.networks import (
    MLP,
    Encoder,
    HasTaskOutputs,
    Identity,
    NeedsTaskNames,
    Network,
    NoConditioning,
    OneForAll,
    OnePerTask,
    SquashedGaussian,
    TaskConditioning,
)
from mtrl_lightning.types import EnvSpec, TransitionBatch


class Distral(SAC):
    """Distral (Teh et al. 2017, arXiv 1707.04175) with soft actor-critics in continuous actions.

    Each trained task has a policy ``pi`` and critics of its own, which learn from its own
    transitions. They share a distilled policy ``pi_0``, which does not see the task. The objective
    (equation 1, with ``kappa`` for ``c_KL`` and ``omega`` for ``c_Ent``) is the sum over the tasks
    of ``E sum_t discount^t [r - kappa log(pi / pi_0) - omega log pi]``. The paper also writes
    ``alpha = kappa / (kappa + omega)`` and ``beta = 1 / (kappa + omega)``. All three losses follow
    from it, with the same sampled action ``a`` in both policies' densities:

    - critics: ``y = r + discount (1 - terminated) [min_i Q_i' + kappa log pi_0(a'|s')
      - (kappa + omega) log pi(a'|s')]``
    - policies: ``(kappa + omega) log pi(a|s) - kappa log pi_0(a|s) - min_i Q_i(s, a)``
    - distilled policy: ``KL(pi || pi_0)`` in closed form, with ``pi`` held constant

    Tasks that are evaluated without being trained get the actions of the distilled policy. With
    ``kappa`` 0 the tasks' networks are those of separate SACs with the temperature ``omega``. The
    encoder is shared by all tasks and by the distilled policy, and must not depend on the task.

    Args:
        spec: the tasks; filled in from the data.
        actor: architecture of every policy, ``(in_dim, out_dim, num_tasks) -> Network``; each
            task's and the distilled one are built for a single task.
        critic: architecture of each task's Q functions, likewise.
        encoder: maps observations to what the networks see; trained by the critics' loss.
        conditioning: None, or one without features: no network receives the task.
        actor_gradient: how the tasks' losses of the distilled policy become one gradient. The
            tasks' own policies share nothing.
        critic_gradient: how the tasks' critic losses become one gradient of the encoder. It is
            without effect if the encoder has no weights: the critics share nothing.
        kappa: weight of the divergence from the distilled policy, at least 0 (``c_KL`` in the
            paper). 0 leaves the tasks' policies alone; the distilled policy still learns from them.
        omega: weight of the entropy, above 0 (``c_Ent`` in the paper). At 0, nothing would keep
            policies and distilled policy from becoming deterministic together.
        value: what a critic's outputs mean, and how it learns.
        task_weighting: how much each task's losses count.
        reward_scale: brings the tasks' rewards to one scale when they are sampled.
        transforms: further changes of sampled batches and of observations, after the reward scale.
        auxiliaries: further losses that train the encoder.
        num_critics: Q functions of a task of which the smallest counts, ``Q``; at least 1.
        discount: gamma, between 0 and 1.
        tau: how far the targets move at each of their updates, above 0 and at most 1.
        log_std_min: lower clamp of the policies' log standard deviations.
        log_std_max: upper clamp of the policies' log standard deviations.
        actor_every: critic updates between two updates of the policies, at least 1.
        target_every: critic updates between two target updates, at least 1.
        actor_max_grad_norm: norm to which the gradient of each task's policy is clipped; None for
            no clipping.
        critic_max_grad_norm: the same for each task's critics, and for the encoder.
        distilled_max_grad_norm: the same for the distilled policy.
        actor_optimizer: optimizer of the tasks' policies.
        critic_optimizer: optimizer of the critics and the encoder.
        distilled_optimizer: optimizer of the distilled policy.
        compile: ``default`` compiles the losses with ``torch.compile``, ``cudagraphs`` also
            launches them as CUDA graphs; compiled networks compute all tasks' rows, which costs
            ``R`` times as much.
        on_nonfinite: what follows a gradient that is not finite, which never reaches a weight:
            ``stop`` ends the run with the last checkpoint, ``skip`` leaves the step out and counts
            it in ``fault/skipped_updates``.
        max_skipped_updates: steps that may be skipped in a run, at least 0; the next one ends it.
        seed: of the weights and of all draws.

    Raises:
        ConfigurationError: if the task would be part of a network's input.
    """

    acting_networks = ("encoder", "actor", "distilled")
    actor: OnePerTask
    distilled: OneForAll
    untrained_T: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, int], Network] = MLP,
        critic: Callable[[int, int, int], Network] = MLP,
        encoder: Callable[[Box, int], Encoder] = Identity,
        conditioning: Callable[[int], TaskConditioning] | None = None,
        actor_gradient: Callable[[int], GradientMethod] = Mean,
        critic_gradient: Callable[[int], GradientMethod] = Mean,
        kappa: float = 0.05,
        omega: float = 0.05,
        value: Callable[[], Value] = Scalar,
        task_weighting: Callable[[EnvSpec], TaskWeighting] = EqualWeights,
        reward_scale: Callable[[EnvSpec], RewardScale] = RewardScale,
        transforms: list[Callable[[EnvSpec], Transform]] | None = None,
        auxiliaries: list[Callable[[EnvSpec, Encoder], Auxiliary]] | None = None,
        num_critics: int = 2,
        discount: float = 0.99,
        tau: float = 0.005,
        log_std_min: float = -20.0,
        log_std_max: float = 2.0,
        actor_every: int = 1,
        target_every: int = 1,
        actor_max_grad_norm: float | None = 1.0,
        critic_max_grad_norm: float | None = 1.0,
        distilled_max_grad_norm: float | None = 1.0,
        actor_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        critic_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        distilled_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        compile: Compile = "none",
        on_nonfinite: OnNonfinite = "stop",
        max_skipped_updates: int = 100,
        seed: int = 0,
    ) -> None:
        at_least(0, finite=True, kappa=kappa)
        # without entropy, policies and distilled policy become deterministic together
        above(0, finite=True, omega=omega)
        _check_conditioning(conditioning, actor, critic, spec.num_tasks)
        super().__init__(
            spec,
            actor=actor,
            critic=critic,
            encoder=encoder,
            conditioning=conditioning,
            actor_gradient=actor_gradient,
            critic_gradient=critic_gradient,
            value=value,
            task_weighting=task_weighting,
            reward_scale=reward_scale,
            transforms=transforms,
            temperature=partial(FixedTemperature, value=omega),
            auxiliaries=auxiliaries,
            num_critics=num_critics,
            discount=discount,
            tau=tau,
            log_std_min=log_std_min,
            log_std_max=log_std_max,
            actor_every=actor_every,
            target_every=target_every,
            actor_max_grad_norm=actor_max_grad_norm,
            critic_max_grad_norm=critic_max_grad_norm,
            actor_optimizer=actor_optimizer,
            critic_optimizer=critic_optimizer,
            compile=compile,
            on_nonfinite=on_nonfinite,
            max_skipped_updates=max_skipped_updates,
            untrained_tasks="own",  # `policy` has the distilled policy for them
            seed=seed,
        )
        _check_encoder(self.encoder)
        self.kappa = kappa
        self.omega = omega
        untrained_T = torch.from_numpy(self._is_untrained_T)
        self.register_buffer("untrained_T", untrained_T, persistent=False)
        self._distilled_loss = self.compiled(self.distilled_loss)
        self.distilled_update = self.make_update(
            "distilled",
            [self.distilled],
            distilled_optimizer,
            method=self.actor_gradient,
            max_grad_norm=distilled_max_grad_norm,
            weights=super().task_weights,
        )

    def make_networks(self) -> dict[str, nn.Module]:
        """Build SAC's networks, and the distilled policy after them."""
        networks = super().make_networks()
        encoder = networks["encoder"]
        assert isinstance(encoder, Encoder)
        make = partial(self.make_policy, encoder)
        distilled = OneForAll(encoder.out_dim, 2 * self.action_dim, make=make)
        return {**networks, "distilled": distilled}

    def make_task_network(
        self, make: Callable[[int, int, int], Network], in_dim: int, out_dim: int
    ) -> Network:
        """Build one network for each trained task."""
        tasks = self.spec.train_tasks
        return OnePerTask(in_dim, out_dim, self.spec.num_tasks, make=make, tasks=tasks)

    def critic_update_options(self) -> dict[str, Any]:
        """Combine the tasks' gradients of the encoder; clip each task's critics apart."""
        encoder = [p for p in self.encoder.parameters() if p.requires_grad]
        groups = [_trained_parameters(networks) for networks in self._critics_by_task()]
        options = super().critic_update_options()
        if encoder:
            return {**options, "clip_groups": [encoder, *groups]}
        return {**options, "method": Mean(self.num_trained), "clip_groups": groups}

    def actor_update_options(self) -> dict[str, Any]:
        """Clip each task's policy apart; they share nothing."""
        return {
            "method": Mean(self.num_trained),
            "weights": self.task_weights,
            "clip_groups": [_trained_parameters([member]) for member in self.actor.members],
        }

    def task_weights(self) -> Tensor:
        """Return how much each task's loss counts in the mean, ``[R]``.

        The factor ``R`` makes the mean a sum: a task's own networks get the gradient that they
        would have without other tasks.
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
        policy: SquashedGaussian,
        noise_BA: Tensor,
        log_prob_B: Tensor,
        observation_BD: Tensor,
        task_B: Tensor,
    ) -> Tensor:
        """Return ``omega log pi + kappa (log pi - log pi_0)`` of the sampled actions, ``[B]``.

        Args:
            policy: distribution over actions for the observations.
            noise_BA: noise from which the actions were sampled.
            log_prob_B: log densities of the actions.
            observation_BD: observations.
            task_B: tasks.
        """
        cost_B = super().action_cost(policy, noise_BA, log_prob_B, observation_BD, task_B)
        with torch.no_grad():
            distilled = self.distilled_policy(observation_BD, task_B)
        return cost_B + self.kappa * policy.log_ratio(distilled, noise_BA)

    def distilled_loss(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Return each task's ``mean KL(pi || pi_0)``, ``[R]``, and the same without a graph.

        The gradient is that of ``-mean E_pi log pi_0``: the distilled policy maximizes the
        likelihood of the tasks' actions.
        """
        with torch.no_grad():
            policy = self.policy(batch.observation_BD, batch.task_B)
            shared_BF = self.encoder.shared_features(batch.observation_BD, batch.task_B)
        output_B2A = task_by_task(self.actor_gradient, self.distilled, 0, shared_BF)
        kl_B = policy.kl(self._distribution(output_B2A, batch.task_B))
        kl_R = losses.per_task(kl_B, self.num_trained)
        return kl_R, kl_R.detach()

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> SquashedGaussian:
        """Return the distribution over actions; the distilled one for tasks without training."""
        shared_BF = self.encoder.shared_features(observation_BD, task_B)
        output_B2A = self.actor(shared_BF, task_B)
        if self.num_trained < self.spec.num_tasks:
            is_untrained_B1 = self.untrained_T[task_B][:, None]
            output_B2A = torch.where(is_untrained_B1, self.distilled(shared_BF), output_B2A)
        return self._distribution(output_B2A, task_B)

    def distilled_policy(self, observation_BD: Tensor, task_B: Tensor) -> SquashedGaussian:
        """Return the distilled policy's distribution; the task says which actions are padding."""
        output_B2A = self.distilled(self.encoder.shared_features(observation_BD, task_B))
        return self._distribution(output_B2A, task_B)

    def _untrained_explanation(self) -> str:
        return "The distilled policy acts on them"

    def _critics_by_task(self) -> list[tuple[nn.Module, ...]]:
        """Return the critics of each trained task."""
        networks_QR = []
        for critic in self.critic.members:
            assert isinstance(critic, OnePerTask)
            networks_QR.append(critic.members)
        return list(zip(*networks_QR, strict=True))


def _trained_parameters(networks: Sequence[nn.Module]) -> list[Parameter]:
    """Return what is trained, in the order in which ``Update`` adds up the norms."""
    found = task_parameters(networks)
    return [*found.shared, *found.own]


def _check_conditioning(
    conditioning: Callable[[int], TaskConditioning] | None,
    actor: Callable[..., Network],
    critic: Callable[..., Network],
    num_tasks: int,
) -> None:
    """Check that no task input is asked for.

    Raises:
        ConfigurationError: if one is.
    """
    places = {"conditioning": conditioning}
    for name, network in (("actor", actor), ("critic", critic)):
        options = network.keywords if isinstance(network, partial) else {}
        places[f"{name}.init_args.conditioning"] = options.get("conditioning")
    for place, given in places.items():
        if given is not None and given(num_tasks).out_dim > 0:
            raise ConfigurationError(
                "Distral gives no network the task: each task has networks of its own, and the"
                f" distilled policy acts on tasks it has not seen. Set model.init_args.{place} to"
                " null"
            )


def _check_encoder(encoder: Encoder) -> None:
    """Check that an encoder does not depend on the task.

    Raises:
        ConfigurationError: if it does.
    """
    for part in encoder.modules():
        sees_task = isinstance(part, (HasTaskOutputs, NeedsTaskNames))
        if sees_task and not isinstance(part, NoConditioning):
            raise ConfigurationError(
                f"the encoder {type(encoder).__name__} depends on the task"
                f" ({type(part).__name__}), which Distral's distilled policy must not see:"
                " choose an encoder that does not (-c encoder/identity or encoder/mlp for states,"
                " encoder/pixels for pictures)"
            )
