"""Multi-task proximal policy optimization with a balanced critic.

Shapes: ``S`` steps of an iteration, ``E`` environments, ``T`` tasks, ``R`` trained tasks, ``n``
rows of a task, ``B`` rows of any tasks or ``R, n``, ``D`` observation, ``Z`` features, ``A``
action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning.algorithms import advantages
from mtrl_lightning.algorithms.algorithm import compiled, make_actor_parts
from mtrl_lightning.algorithms.arguments import with_conditioning
from mtrl_lightning.algorithms.on_policy import OnPolicyAlgorithm
from mtrl_lightning.checks import above, at_least, within
from mtrl_lightning.gradients import GradientMethod, Mean, per_task_forward
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_weights, statistics
from mtrl_lightning.networks import (
    MLP,
    ActionDistribution,
    ClippedGaussian,
    Encoder,
    Identity,
    Network,
    OneHotCategorical,
    PolicyStd,
    StateIndependentStd,
    TaskConditioning,
)
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import Rollout, RolloutConfig, TransitionBatch
from mtrl_lightning.updates.learning_rate import LearningRate
from mtrl_lightning.updates.popart import PopArt, ReturnScale

MOST_LOG_RATIO = 80.0
"""Bound for actions that another task's policy chose: far from the task's own policy, the
probability ratio could overflow single precision."""
MOST_MINIBATCHES = 16
"""Largest derived number of minibatches per epoch: more would have too few rows per task."""


class PPO(OnPolicyAlgorithm):
    """Multi-task proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347).

    An iteration collects ``num_steps`` steps from every environment, then trains for ``num_epochs``
    epochs of ``num_minibatches`` minibatches. Advantages are normalized per task. The critic learns
    returns normalized per task (``return_scale``).

    Steps in which the policy of another task acted (``PolicyReuse``) are learned by self-imitation
    (Oh et al. 2018, "Self-Imitation Learning", arXiv 1806.05635): negative advantages are set to 0,
    so the actor learns only from steps that turned out better than their value. The old policy in
    their ratios is the task's own policy at collection time, so that these ratios are clipped, too.
    The critic learns from all steps: it estimates the value of the policies that acted.

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, spec) -> Network``.
        critic: network of the values, likewise.
        encoder: maps observations to features of actor and critic; trained by the critic's loss.
            Its statistics are updated only between iterations.
        conditioning: how actor and critic are conditioned on the task; None for each network's
            default, a one-hot task ID. A ``conditioning`` set on a network takes precedence.
        actor_gradient: how the tasks' actor losses are combined into one gradient.
        critic_gradient: how the tasks' critic losses are combined into one gradient.
        return_scale: normalizes the critic's targets.
        noise: the policy's standard deviation, which determines exploration; not used for discrete
            actions.
        learning_rate: schedule of a factor of all learning rates over the run; None for constant
            rates.
        num_steps: steps of each environment in an iteration, at least 1.
        num_epochs: passes over an iteration's transitions, at least 1.
        num_minibatches: minibatches per epoch, at least 1; each has the same number of rows of
            every trained task. None for the largest number up to 16 that divides ``num_steps``.
        discount: gamma, between 0 and 1.
        gae_lambda: lambda of generalized advantage estimation, between 0 and 1.
        clip: clip range of the probability ratio around 1, above 0 (``epsilon`` in the paper; 0.2).
        entropy_coef: coefficient of the entropy bonus, at least 0.
        max_kl: stop an iteration early once an epoch's mean estimated KL divergence from the policy
            that collected the rollout exceeds this, or all its steps were skipped
            (``on_nonfinite``). The estimate of a single minibatch would be too noisy. Skipped
            steps do not count in the mean. Above 0; None for no limit, which ``CorrelatedNoise``
            requires.
        actor_max_grad_norm: global norm to which the actor's gradient is clipped; None for no
            clipping.
        critic_max_grad_norm: the same for the critic and the encoder.
        actor_optimizer: optimizer of the actor and the standard deviation.
        critic_optimizer: optimizer of the critic and the encoder.
        options: arguments of ``Algorithm``, such as ``seed`` and ``compile``.
    """

    encoder: Encoder
    actor: Network
    noise: PolicyStd
    critic: Network
    return_scale: ReturnScale
    actor_gradient: GradientMethod
    critic_gradient: GradientMethod
    num_iterations: Tensor
    epoch_kl: Tensor
    epoch_updates: Tensor
    epoch_skipped: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, EnvSpec], Network] = MLP,
        critic: Callable[[int, int, EnvSpec], Network] = MLP,
        encoder: Callable[[EnvSpec], Encoder] = Identity,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
        actor_gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        critic_gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        return_scale: Callable[[EnvSpec, Network], ReturnScale] = PopArt,
        noise: Callable[[EnvSpec], PolicyStd] = StateIndependentStd,
        learning_rate: Callable[[], LearningRate] | None = None,
        num_steps: int = 200,
        num_epochs: int = 8,
        num_minibatches: int | None = None,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        clip: float = 0.2,
        entropy_coef: float = 0.002,
        max_kl: float | None = 0.05,
        actor_max_grad_norm: float | None = 1.0,
        critic_max_grad_norm: float | None = 1.0,
        actor_optimizer: OptimizerCallable = lambda p: Adam(p, lr=5e-4, eps=1e-5, fused=True),
        critic_optimizer: OptimizerCallable = lambda p: Adam(p, lr=5e-4, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        if num_minibatches is None:
            # a divisor of num_steps divides the rows for any number of environments
            candidates = range(1, MOST_MINIBATCHES + 1)
            num_minibatches = max(n for n in candidates if num_steps % n == 0)
        self.acting_networks = ("encoder", "actor", *([] if spec.is_discrete else ["noise"]))
        self.collection = RolloutConfig(num_steps, num_epochs, num_minibatches)
        self.computed_columns = ("advantage", "target", "weight")
        self.policy_fields = (Field("unclipped_action", (self.action_dim,)), Field("log_prob"))
        at_least(1, **self.collection._asdict())
        within(0, 1, discount=discount, gae_lambda=gae_lambda)
        above(0, clip=clip, max_kl=max_kl)
        at_least(0, entropy_coef=entropy_coef)
        self.discount = discount
        self.gae_lambda = gae_lambda
        self.clip = clip
        self.entropy_coef = entropy_coef
        self.max_kl = max_kl
        self.learning_rate = None if learning_rate is None else learning_rate()
        self._make_actor = with_conditioning(actor, conditioning, spec)
        self._make_critic = with_conditioning(critic, conditioning, spec)
        self._make_encoder = encoder
        self._make_return_scale = return_scale
        self._make_noise = noise
        self._make_actor_gradient = actor_gradient
        self._make_critic_gradient = critic_gradient
        self._is_first_update = False
        self.register_buffer("num_iterations", torch.tensor(0))
        # in this epoch: the sum of the estimated KL divergences, the number of updates, and the
        # number of skipped updates
        self.register_buffer("epoch_kl", torch.tensor(0.0))
        self.register_buffer("epoch_updates", torch.tensor(0))
        self.register_buffer("epoch_skipped", torch.tensor(0))
        # host copies, so that reading them does not synchronize with the GPU
        self._iterations_made = 0
        self._updates_of_epoch = 0
        self.register_load_state_dict_post_hook(PPO._read_counts)
        self.add_networks()
        self._actor_loss = compiled(self.actor_loss, self._compile)
        self._critic_loss = compiled(self.critic_loss, self._compile)
        self.actor_update = self.make_update(
            "actor",
            [self.actor] if spec.is_discrete else [self.actor, self.noise],
            actor_optimizer,
            method=self.actor_gradient,
            max_grad_norm=actor_max_grad_norm,
        )
        self.critic_update = self.make_update(
            "critic",
            [self.encoder, self.critic, self.return_scale],
            critic_optimizer,
            method=self.critic_gradient,
            max_grad_norm=critic_max_grad_norm,
        )

    def make_networks(self) -> dict[str, nn.Module]:
        """Build encoder, actor, noise, critic, return scale and gradient methods."""
        encoder = self._make_encoder(self.spec)
        noise = None if self.spec.is_discrete else self._make_noise(self.spec)
        outputs_per_action = noise.outputs_per_action if noise else 1
        critic = self._make_critic(encoder.out_dim, 1, self.spec)
        return {
            **make_actor_parts(
                self.spec,
                encoder,
                self._make_actor,
                self._make_actor_gradient,
                outputs_per_action,
                noise,
            ),
            "critic": critic,
            "return_scale": self._make_return_scale(self.spec, critic),
            "critic_gradient": self._make_critic_gradient(self.spec),
        }

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> ClippedGaussian | OneHotCategorical:
        """Return the distribution over actions."""
        output_BO = self.actor(self.encoder(observation_BD, task_B), task_B)
        return self._distribution(output_BO, task_B)

    def explore(
        self, policy: ActionDistribution, noise_BA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return actions, the samples before clipping, and their log densities."""
        assert isinstance(policy, ClippedGaussian | OneHotCategorical)
        sample_BA = policy.draw(noise_BA)
        fields = {"unclipped_action": sample_BA, "log_prob": policy.log_prob(sample_BA)}
        return sample_BA.clamp(-1, 1), fields

    @torch.no_grad()
    def begin_iteration(self, collected: Rollout, progress: float) -> dict[str, Tensor]:
        """Compute advantages and returns, and update the statistics of the returns.

        Args:
            collected: the transitions of the iteration.
            progress: fraction of the run's environment steps made before them, from 0 to 1.

        Returns:
            ``advantage``, normalized per task; ``target``, the return
            that the critic learns; ``weight`` of the task's losses (``task_weights``). In the first
            iteration of an encoder with statistics, and if the policy of another task has acted,
            also ``log_prob``, which replaces the collected ones.
        """
        self._is_first_update = True
        # annealed between iterations: all epochs of an iteration have the same learning rate
        if self.learning_rate is not None:
            self.learning_rate.set(self.updates, progress)
        columns = collected.columns
        task_E = collected.task_E
        valid_SE = collected.valid_SE
        foreign_SE = columns.get("foreign")
        computed = {}
        if self._iterations_made == 0 and self._observe(collected):
            # the first statistics rescale the policy's input and thereby change the policy. Ratios
            # to the changed policy start at 1, as in every other iteration; the actions were
            # sampled from the previous policy, which biases only this iteration
            computed["log_prob"] = self._log_probs(columns)
        elif foreign_SE is not None and foreign_SE.any():
            log_prob_SE = self._log_probs(columns)
            computed["log_prob"] = torch.where(foreign_SE, log_prob_SE, columns["log_prob"])
        cut_SE = advantages.episode_cuts(columns["terminated"], columns["truncated"], valid_SE)
        value_SE, next_value_SE = self._values(collected, cut_SE)
        # A_t = sum_l (discount lambda)^l delta_(t + l), up to the end of the episode or the rollout
        advantage_SE = advantages.generalized_advantages(
            columns["reward"],
            value_SE,
            next_value_SE,
            columns["terminated"],
            cut_SE,
            self.discount,
            self.gae_lambda,
        )
        # the lambda-return
        target_SE = advantage_SE + value_SE
        target_moments = self._task_moments(target_SE, valid_SE, task_E)
        # PopArt adapts to these returns before the critic learns them
        self.return_scale.observe(*target_moments)
        mean_T, variance_T, _ = self._task_moments(advantage_SE, valid_SE, task_E)
        std_T = variance_T.sqrt()
        # the target is value + advantage, so the advantage is the residual of the value
        explained_T = 1 - variance_T / target_moments[1].clamp(min=advantages.EPSILON)
        self._log_per_task("advantage_std", std_T[self._task_R])
        self._log_per_task("explained_variance", explained_T[self._task_R])
        if foreign_SE is None:
            gain_SE = advantage_SE - mean_T[task_E]
        else:
            own_mean_T, _, _ = self._task_moments(advantage_SE, valid_SE & ~foreign_SE, task_E)
            own_gain_SE = advantage_SE - own_mean_T[task_E]
            # no gradient from steps in which another policy did worse
            gain_SE = torch.where(foreign_SE, advantage_SE.clamp(min=0), own_gain_SE)
        # per task: otherwise the task with the largest returns would dominate the gradient
        normalized_SE = gain_SE / (std_T[task_E] + advantages.EPSILON)
        weight_R = advantages.task_weights(valid_SE, self.num_trained)
        return {
            **computed,
            "advantage": normalized_SE,
            "target": target_SE,
            "weight": weight_R.repeat_interleave(len(task_E) // len(weight_R)).expand_as(target_SE),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add whether the next update is the first of its iteration."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["mtrl_lightning"]["is_first_update"] = self._is_first_update

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it."""
        super().on_load_checkpoint(checkpoint)
        self._is_first_update = checkpoint["mtrl_lightning"].get("is_first_update", False)

    def is_iteration_over(self) -> bool:
        """Return whether the KL divergence exceeds ``max_kl``."""
        if self.max_kl is None or self._updates_of_epoch < self.collection.num_minibatches:
            return False
        mean_kl = self.epoch_kl / (self.epoch_updates - self.epoch_skipped)
        # also if NaN, because every minibatch was skipped
        return not bool(mean_kl <= self.max_kl)

    def end_iteration(self, collected: Rollout) -> None:
        """Update the encoder's statistics, which stay fixed within an iteration."""
        if self._iterations_made > 0:
            self._observe(collected)
        self.num_iterations += 1
        self._iterations_made += 1
        self._begin_epoch()

    def update(self, batch: TransitionBatch) -> None:
        """Make one optimizer step of the actor and one of the critic."""
        if self._updates_of_epoch == self.collection.num_minibatches:
            self._begin_epoch()
        if self._is_first_update:
            self._is_first_update = False
            self._log_gradient_shares(batch)
        log_ratio_Rn, entropy = self.actor_update(lambda: self._actor_loss(batch))
        self.critic_update(lambda: self._critic_loss(batch))
        # of the policy before this step: KL(pi_old || pi) ~ mean (ratio - 1) - log ratio
        kl, clip_fraction = advantages.kl_and_clip_fraction(
            log_ratio_Rn, self.clip, batch.extra["weight"]
        )
        self.mean_metrics.add({"kl": kl, "clip_fraction": clip_fraction, "entropy": entropy})
        if self.max_kl is not None:
            # a skipped step has no finite norm, and does not count in the epoch's mean
            is_skipped = ~(self.actor_update.grad_norm < torch.inf)  # also for NaN
            self.epoch_kl += distributed.mean(kl).masked_fill(is_skipped, 0.0)
            self.epoch_updates += 1
            self.epoch_skipped += is_skipped
            self._updates_of_epoch += 1

    def actor_loss(self, batch: TransitionBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return each task's actor loss ``[R]``; ``log pi / pi_old`` and the mean entropy.

        Where the policy of another task acted, the returned ``log pi / pi_old`` is 0: these actions
        are not samples of ``pi_old`` and must not contribute to the estimated KL divergence.
        """
        # bfloat16 is too imprecise for the probability ratio
        with torch.autocast(batch.task_Rn.device.type, enabled=False):
            with torch.no_grad():
                # only the critic's loss trains the encoder
                z_RnZ = self.encoder(batch.observation_RnD, batch.task_Rn)
            output_RnO = per_task_forward(self.actor_gradient, self.actor, 0, z_RnZ, batch.task_Rn)
            policy = self._distribution(output_RnO, batch.task_Rn)
            # densities of the samples before clipping to [-1, 1], as at collection time
            log_prob_Rn = policy.log_prob(batch.extra["unclipped_action"])
            entropy_Rn = policy.entropy()
        log_ratio_Rn = log_prob_Rn - batch.extra["log_prob"]
        own_log_ratio_Rn = log_ratio_Rn.detach()
        if "foreign" in batch.extra:
            own_log_ratio_Rn = own_log_ratio_Rn.masked_fill(batch.extra["foreign"], 0.0)
            log_ratio_Rn = log_ratio_Rn.clamp(max=MOST_LOG_RATIO)
        surrogate_Rn = advantages.surrogate_loss(log_ratio_Rn, batch.extra["advantage"], self.clip)
        # L = -E[min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)] - entropy_coef E[H(pi)]
        loss_Rn = torch.add(surrogate_Rn, entropy_Rn, alpha=-self.entropy_coef)
        weight_Rn = batch.extra["weight"]
        entropy = advantages.weighted_mean(entropy_Rn.detach(), weight_Rn)
        return weight_Rn[:, 0] * loss_Rn.mean(1), (own_log_ratio_Rn, entropy)

    def critic_loss(self, batch: TransitionBatch) -> tuple[Tensor, None]:
        """Return each task's critic loss ``[R]``."""
        observation_RnD = batch.observation_RnD
        value_Rn = per_task_forward(
            self.critic_gradient, self._normalized_values, 0, observation_RnD, batch.task_Rn
        )
        return self._value_loss(value_Rn, batch), None

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics since the last call, and each task's standard deviation."""
        metrics = super().drain_metrics()
        if not metrics or self.spec.is_discrete:
            return metrics
        std_TA = self.noise.log_std_TA.detach().exp()
        if self.action_mask_TA is None:
            std_T = std_TA.mean(1)
        else:
            std_T = std_TA.masked_fill(~self.action_mask_TA, torch.nan).nanmean(1)
        stds = std_T.tolist()
        for task in self.spec.train_tasks:
            metrics[f"train/noise_std/{self.spec.task_names[task]}"] = stds[task]
        return metrics

    def _distribution(
        self, output_BO: Tensor, task_B: Tensor
    ) -> ClippedGaussian | OneHotCategorical:
        if self.spec.is_discrete:
            return OneHotCategorical(output_BO, self.spec.action_choices, self.action_mask(task_B))
        policy = self.noise.distribution(output_BO, task_B)
        return policy._replace(mask_BA=self.action_mask(task_B))

    def _value_loss(self, value_Rn: Tensor, batch: TransitionBatch) -> Tensor:
        target_Rn = self.return_scale.normalize(batch.extra["target"], batch.task_Rn)
        # L = (V - G)^2 in units of the return scale
        error_Rn = F.mse_loss(value_Rn, target_Rn, reduction="none")
        return batch.extra["weight"][:, 0] * error_Rn.mean(1)

    def _normalized_values(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        z_BZ = self.encoder(observation_BD, task_B)
        value_B: Tensor = self.return_scale(self.critic(z_BZ, task_B), task_B)
        return value_B

    def _values(self, collected: Rollout, cut_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the observations and of their true successors, ``[S, E]`` each."""
        columns = collected.columns
        value_SE = self._observation_values(columns["observation"])
        # the next row is the successor, except at cuts
        next_value_SE = torch.cat([value_SE[1:], value_SE[-1:]])
        is_needed_SE = cut_SE & ~columns["terminated"] & collected.valid_SE
        successor_ND = columns["next_observation"][is_needed_SE]
        task_N = collected.task_E.expand(len(cut_SE), -1)[is_needed_SE]
        next_value_SE[is_needed_SE] = self.return_scale.denormalize(
            self._normalized_values(successor_ND, task_N), task_N
        )
        return value_SE, next_value_SE

    def _observation_values(self, observation_SED: Tensor) -> Tensor:
        """Return the values of observations, ``[S, E]``."""
        observation_RnD, task_Rn = self._by_task(observation_SED)
        value_Rn = self.return_scale.denormalize(
            self._normalized_values(observation_RnD, task_Rn), task_Rn
        )
        return value_Rn.view(-1, len(observation_SED)).t()

    def _log_probs(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the log densities of the collected samples under the policy, ``[S, E]``."""
        observation_RnD, task_Rn = self._by_task(columns["observation"])
        sample_RnA, _ = self._by_task(columns["unclipped_action"])
        log_prob_Rn = self.policy(observation_RnD, task_Rn).log_prob(sample_RnA)
        return log_prob_Rn.view(-1, len(columns["log_prob"])).t()

    def _by_task(self, column_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Return a column ``[R, n, ...]``, environment after environment, and its tasks."""
        # environments are sorted by task, with the same number for each task
        column_Rn = column_SE.transpose(0, 1).reshape(self.num_trained, -1, *column_SE.shape[2:])
        return column_Rn, self._task_R[:, None].expand(column_Rn.shape[:2])

    def _begin_epoch(self) -> None:
        self.epoch_kl.zero_()
        self.epoch_updates.zero_()
        self.epoch_skipped.zero_()
        self._updates_of_epoch = 0

    def _read_counts(self, _: Any) -> None:
        """Copy the loaded counts to the host."""
        self._iterations_made = int(self.num_iterations)
        self._updates_of_epoch = int(self.epoch_updates)

    def _observe(self, collected: Rollout) -> bool:
        """Update the encoder's statistics; return whether they have changed."""
        valid_SE = collected.valid_SE
        task_SE = collected.task_E.expand(len(valid_SE), -1)
        observation_BD = collected.columns["observation"][valid_SE]
        return self.encoder.observe(observation_BD, task_SE[valid_SE])

    def _task_moments(
        self, value_SE: Tensor, valid_SE: Tensor, task_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        moments = advantages.task_moments(value_SE, task_E, valid_SE, self.spec.num_tasks)
        return distributed.merged_moments(*moments)

    def _log_gradient_shares(self, batch: TransitionBatch) -> None:
        """Log each task's share of the critic's gradient, and the conflict between tasks.

        Called only once per iteration because it differentiates the tasks' losses one by one.
        """
        parameters = self.critic_update.task_parameters
        if not parameters.shared:
            return
        with torch.enable_grad():
            value_Rn = per_task_forward(
                None, self._normalized_values, 0, batch.observation_RnD, batch.task_Rn
            )
            gradients = TaskGradients.from_losses(self._value_loss(value_Rn, batch), parameters)
        gram_RR = gradients.gram()
        norm_R = gram_RR.diagonal().sqrt()
        self._log_per_task(
            "critic_gradient_share", norm_R / norm_R.sum().clamp(min=advantages.EPSILON)
        )
        if self.critic_gradient.is_one_pass:  # other methods log it in every update
            weight_R = equal_weights(self.num_trained, self.device)
            result = statistics(gram_RR, weight_R, weight_R)
            names = ("conflicts", "cosine")
            self.mean_metrics.add({f"critic_{name}": result[name] for name in names})

    def _log_per_task(self, name: str, value_R: Tensor) -> None:
        tasks = [self.spec.task_names[task] for task in self.spec.train_tasks]
        values = zip(tasks, value_R.unbind(), strict=True)
        self.mean_metrics.add({f"{name}/{task}": value for task, value in values})
