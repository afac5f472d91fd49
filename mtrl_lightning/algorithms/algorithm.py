"""Base of all algorithms: acts, updates, resets its networks, and has state.

Shapes: ``E`` environments, ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or
``R, n``, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from mtrl_lightning.algorithms.arguments import (
    check_factories,
    record_arguments,
    recorded_arguments,
)
from mtrl_lightning.algorithms.description import (
    cannot_rebuild,
    describe_algorithm,
    describe_spec,
    is_plain,
    summarize,
    warn_of_unknown,
    weight_shapes,
)
from mtrl_lightning.checks import one_of
from mtrl_lightning.counters import Counters, Stopwatch
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.learning.compiling import Compile, begin_graphs, check_compile, compiled
from mtrl_lightning.learning.generators import (
    Generators,
    global_generators,
    restore_global_generators,
)
from mtrl_lightning.learning.guard import DivergenceGuard, OnNonfinite
from mtrl_lightning.learning.metrics import MeanMetrics
from mtrl_lightning.learning.targets import assign_parameters
from mtrl_lightning.learning.transforms import Transform
from mtrl_lightning.learning.update import Update
from mtrl_lightning.networks import (
    ActionDistribution,
    MeanOfTrained,
    zero_padding,
)
from mtrl_lightning.networks.untrained import UntrainedTasks
from mtrl_lightning.policy import ActOutput, Mode
from mtrl_lightning.resources import CPU, to_device
from mtrl_lightning.saved import FORMAT, restoring
from mtrl_lightning.schema import Field
from mtrl_lightning.spec import EnvSpec, check_train_tasks
from mtrl_lightning.types import Kind, Rollout, RolloutConfig, TransitionBatch, Transitions

if TYPE_CHECKING:
    from typing import Self

    from mtrl_lightning.ranks.resharding import Rules, Share


F = TypeVar("F", bound=Callable[..., Any])


class Algorithm(LightningModule):
    """Base of all algorithms; also a ``Policy``.

    A subclass builds its networks in ``make_networks``, its optimizer steps with ``make_update``,
    and says in ``update`` which of them are made, and in ``policy`` how it acts.

    Args:
        spec: the tasks.
        seed: of the weights and of all draws.
        compile: ``default`` compiles the losses with ``torch.compile``, ``cudagraphs`` also
            launches them as CUDA graphs; meant for a GPU, slower on a CPU. The first updates wait
            for the compiler.
        on_nonfinite: reaction to a gradient that is not finite, which never reaches a weight:
            ``stop`` ends the run with the last checkpoint, ``skip`` leaves the step out and counts
            it in ``fault/skipped_updates``. On a GPU, fused optimizers skip without waiting.
        max_skipped_updates: steps that may be skipped in a run, at least 0; the next one ends it.
        untrained_tasks: input of the networks for tasks that are evaluated without being
            trained: ``mean``, the mean of the trained tasks' inputs and of their heads' outputs;
            or ``own``, the task's own ones, as they were initialized.
    """

    policy_fields: tuple[Field, ...] = ()
    """Further fields of a transition that ``act`` returns beside the actions when it explores."""
    collection: RolloutConfig | None = None
    """How an on-policy algorithm collects; None for any other."""
    is_offline: ClassVar[bool] = False
    """Whether it learns from ``data.demonstrations``, and no environment is stepped in training."""
    computed_columns: tuple[str, ...] = ()
    """Names of the results of ``begin_iteration`` in every iteration. It may also return new values
    for ``policy_fields``. Empty if the names are not known: any of a checkpoint are taken then."""
    acting_networks: tuple[str, ...] = ()
    """Names of the networks that ``policy`` uses; empty if it may use all of them."""
    fixed_options: tuple[str, ...] = ()
    """Options of a base class that the class sets itself, and so does not take."""
    lacking_options: ClassVar[Mapping[str, str]] = {}
    """Options of other algorithms that this one does not have: why, or the replacement."""
    action_mask_TA: Tensor | None
    """Which numbers of an action are each task's own, ``[T, A]``; None if all are."""
    _task_R: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Record the arguments of each class's own constructor, for checkpoints."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = record_arguments(cls.__init__)  # type: ignore[method-assign]

    @record_arguments
    def __init__(
        self,
        spec: EnvSpec,
        seed: int = 0,
        *,
        compile: Compile = "none",
        on_nonfinite: OnNonfinite = "stop",
        max_skipped_updates: int = 100,
        untrained_tasks: UntrainedTasks = "mean",
    ) -> None:
        super().__init__()
        one_of(get_args(UntrainedTasks), untrained_tasks=untrained_tasks)
        check_train_tasks(spec)
        own_arguments, all_arguments = recorded_arguments(self)
        check_factories(type(self), own_arguments)
        self.description = describe_algorithm(type(self), own_arguments)
        self._unknown_arguments = cannot_rebuild(self.description["init_args"])
        described = describe_algorithm(type(self), all_arguments)["init_args"]
        # lists, because loggers write them as YAML, which has no tuples
        self.save_hyperparameters(apply_to_collection(described, tuple, list))
        self.automatic_optimization = False
        self.spec = spec
        self.action_dim = spec.action_space.shape[0]
        self.num_trained = len(spec.train_tasks)
        self.counters = Counters()
        self.stopwatch = Stopwatch()
        self.mean_metrics = MeanMetrics()
        self.generators = Generators(seed, per_rank=("act", "learn"))
        self.guard = DivergenceGuard(
            on_nonfinite,
            max_skipped_updates,
            [spec.task_names[task] for task in spec.train_tasks],
            self.counters,
            steps_envs=not self.is_offline,
        )
        self.transforms = nn.ModuleList()
        """Change batches before an update learns from them, in this order: ``add_transform``."""
        self.quantities: dict[str, Callable[[], Tensor]] = {}
        """Quantities that transforms may require, by name."""
        self.updates: list[Update] = []
        """Every optimizer step that ``update`` makes; see ``make_update``."""
        self._saved_optimizers: list[Any] | None = None
        """Of the checkpoint that is continued, until the optimizers are built."""
        self._has_new_options = False
        """Whether the algorithm's options differ from the checkpoint's."""
        self._compile = compile
        self._seed = seed
        self._network_names: list[str] = []
        self._untrained_tasks = untrained_tasks
        self._is_untrained_T = np.ones(spec.num_tasks, np.bool_)
        self._is_untrained_T[list(spec.train_tasks)] = False
        self._mean_of_trained: MeanOfTrained | None = None
        self.register_buffer("_task_R", torch.tensor(spec.train_tasks), persistent=False)
        mask_TA = torch.from_numpy(spec.action_mask_TA)
        self.register_buffer("action_mask_TA", None if mask_TA.all() else mask_TA, persistent=False)

    @classmethod
    def policy_kind(cls, options: Mapping[str, Any]) -> str:
        """Return what the actor's outputs mean: a run starts only from a policy of the same.

        Args:
            options: the described arguments of an algorithm of this class.

        Returns:
            The kind of the policy, as ``a squashed Gaussian``; empty if it is not known.
        """
        return ""

    @property
    def kind(self) -> Kind:
        """What it learns from."""
        if self.is_offline:
            return "offline"
        return "off-policy" if self.collection is None else "on-policy"

    @property
    def summary(self) -> str:
        """The classes of the algorithm and of its parts, in a line."""
        return summarize(self.description)

    @property
    def untrained_summary(self) -> str:
        """Description of the policy's input for untrained tasks; empty if there are none."""
        tasks = np.flatnonzero(self._is_untrained_T)
        if not len(tasks):
            return ""
        names = ", ".join(self.spec.task_names[task] for task in tasks)
        return f"Evaluated without training: {names}. {self._untrained_explanation()}"

    def _untrained_explanation(self) -> str:
        if self._mean_of_trained is None:
            given = "their own parameters, as initialized"
        elif self._mean_of_trained.replaced:
            parts = ", ".join(self._mean_of_trained.replaced)
            given = f"the mean over the trained tasks ({parts})"
        else:
            given = "no input that would have to be learned"
        return f"The policy is given {given}"

    def make_networks(self) -> dict[str, nn.Module]:
        """Build the parts that ``reset_networks`` replaces, by attribute name.

        PyTorch's global generator is seeded when this is called, and restored afterwards.
        """
        raise NotImplementedError

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> ActionDistribution:
        """Return the distribution over actions."""
        raise NotImplementedError

    def explore(
        self, policy: ActionDistribution, noise_BA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return actions ``[B, A]`` for standard normal noise, and the ``policy_fields``."""
        return policy.sample(noise_BA)[0], {}

    def action_mask(self, task_B: Tensor) -> Tensor | None:
        """Return which numbers of an action are its task's own, ``[B, A]``; None if all are.

        For a learning batch, ``[R, 1, A]``.
        """
        if self.action_mask_TA is None:
            return None
        return self.action_mask_TA[task_B if task_B.ndim == 1 else task_B[:, :1]]

    def begin_iteration(self, collected: Rollout, progress: float) -> dict[str, Tensor]:
        """Receive the rollout that an on-policy algorithm learns from next.

        Args:
            collected: the transitions of the iteration.
            progress: fraction of the run's environment steps made before them, from 0 to 1.

        Returns:
            Further columns of its minibatches by name, ``[S, E]``, such as advantages.
        """
        raise NotImplementedError

    def is_iteration_over(self) -> bool:
        """Return whether the rest of an iteration's minibatches is left out."""
        return False

    def end_iteration(self, collected: Rollout) -> None:
        """Receive the transitions of an iteration once more, after its last update."""

    @property
    def step_unit(self) -> str:
        """What a step of the schedules, and of ``counters.env_steps``, is called."""
        return "updates" if self.is_offline else "env steps"

    def begin_update(self, progress: float) -> None:
        """Receive how far an offline run has come, before each update.

        Args:
            progress: fraction of the run's updates that are made, from 0 to 1.
        """

    def scale_learning_rates(self, factor: float) -> None:
        """Set the learning rates of all updates to a multiple of those that they began with."""
        for update in self.updates:
            assert update.optimizer is not None
            for group in update.optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = factor * group["initial_lr"]

    def update(self, batch: TransitionBatch) -> None:
        """Learn from a batch, as it was sampled: ``transform`` it first."""
        raise NotImplementedError

    def add_networks(self) -> None:
        """Build the networks of ``make_networks`` and make them attributes.

        Raises:
            ConfigurationError: if the policy cannot be given anything for a task that is evaluated
                without being trained.
        """
        for name, module in self._build_networks(self._seed).items():
            self.add_module(name, module)
            self._network_names.append(name)
        if self._replaces_untrained:
            acting = nn.ModuleList(self.acting_modules().values())
            spec = self.spec
            self._mean_of_trained = MeanOfTrained(acting, spec.num_tasks, spec.train_tasks)

    def acting_modules(self) -> dict[str, nn.Module]:
        """Return the networks that ``policy`` uses, by name."""
        names = self.acting_networks or self._network_names
        return {name: self.get_submodule(name) for name in names}

    def add_transform(self, transform: Transform) -> None:
        """Append to the transforms.

        Raises:
            ConfigurationError: if it requires a quantity that this algorithm does not have.
        """
        missing = [name for name in transform.requires if name not in self.quantities]
        if missing:
            raise ConfigurationError(
                f"{type(transform).__name__} requires {', '.join(missing)},"
                f" and {type(self).__name__} has {', '.join(self.quantities) or 'none'}:"
                " choose another"
            )
        name = f"transform_{len(self.transforms)}"
        self.generators.per_rank.add(name)
        transform.generator = partial(self.generators.get, name)
        self.transforms.append(transform)

    def make_update(
        self,
        name: str,
        modules: Sequence[nn.Module],
        make_optimizer: OptimizerCallable,
        **options: Any,
    ) -> Update:
        """Return a new ``Update`` with this algorithm's generators, metrics and guard.

        Args:
            name: prefix of its metrics.
            modules: the trained modules.
            make_optimizer: builds the optimizer from the parameters.
            options: further arguments of ``Update``.
        """
        update = Update(
            name,
            modules,
            make_optimizer,
            generators=self.generators,
            metrics=self.mean_metrics,
            guard=self.guard,
            spec=self.spec,
            **options,
        )
        self.updates.append(update)
        return update

    def compiled(self, function: F) -> F:
        """Return the function, compiled if that was asked for."""
        return compiled(function, self._compile)

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of all updates, in the order in which these were made."""
        optimizers = [update.configure_optimizer() for update in self.updates]
        saved = self._saved_optimizers
        self._saved_optimizers = None
        if saved is not None:
            with restoring("states of the optimizers"):
                for update, state in zip(self.updates, saved, strict=True):
                    update.check_saved_optimizer(state, self._has_new_options)
        return optimizers

    def check_device(self, device: torch.device) -> None:
        """Check before training that the options work on the device.

        Raises:
            ConfigurationError: if it cannot.
        """
        check_compile(
            self._compile, device, all(update.method.is_one_pass for update in self.updates)
        )

    @torch.no_grad()
    def act(
        self,
        observation_ED: npt.NDArray,
        task_E: npt.NDArray[np.int64],
        mode: Mode,
        noise_EA: npt.NDArray[np.float32] | None = None,
    ) -> ActOutput:
        """Choose actions ``[E, A]`` between -1 and 1; padding entries are 0.

        Args:
            observation_ED: the environments' observations.
            task_E: their tasks.
            mode: how to choose.
            noise_EA: standard normal noise with which it explores; None to sample it here.

        Returns:
            The actions; with the ``policy_fields`` where there are some and it explores.

        Raises:
            DivergenceError: if an update before was not finite and ends the run.
        """
        shape = (len(observation_ED), self.action_dim)
        generator = self.generators.get("act", self.device)
        if mode == "random":
            task = to_device(task_E, self.device)
            uniform_EA = torch.rand(shape, generator=generator, device=self.device)
            return zero_padding(2 * uniform_EA - 1, self.action_mask(task)).cpu().numpy()
        if np.issubdtype(observation_ED.dtype, np.floating):
            observation_ED = observation_ED.astype(np.float32)
        # [R, n] as in a learning batch, where the environments' order allows it, or [E]
        rows = self._leading_shape(task_E)
        task_B = to_device(task_E.reshape(rows), self.device)
        observation_BD = to_device(observation_ED, self.device).unflatten(0, rows)
        for transform in self.transforms:
            observation_BD = transform.observation(observation_BD, task_B)  # type: ignore[operator]
        with self._untrained_replaced(task_E):
            policy = self.policy(observation_BD, task_B)
        fields: dict[str, Tensor] = {}
        if mode == "exploit":
            action_BA = policy.mode()
        else:
            if noise_EA is None:
                noise = torch.randn(shape, generator=generator, device=self.device)
            else:
                noise = to_device(noise_EA, self.device)
            action_BA, fields = self.explore(policy, noise.unflatten(0, rows))
        chosen_BA = zero_padding(action_BA, self.action_mask(task_B))
        chosen_EA = chosen_BA.cpu().numpy().reshape(shape)
        self.guard.read()  # the device was waited for already
        if not fields:
            return chosen_EA
        return chosen_EA, {
            name: column_B.cpu().numpy().reshape(len(task_E), *column_B.shape[len(rows) :])
            for name, column_B in fields.items()
        }

    def _leading_shape(self, task_E: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Return ``(R, n)`` for the trained tasks in order or a single task; else ``(E,)``.

        Networks with parameters per task compute groups in one product.
        """
        num_envs = len(task_E)
        num_rows = num_envs // self.num_trained
        if num_rows and np.array_equal(task_E, np.repeat(self.spec.train_tasks, num_rows)):
            return self.num_trained, num_rows
        if num_envs and (task_E == task_E[0]).all():
            return 1, num_envs
        return (num_envs,)

    def best_action(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the actions ``[B, A]`` that ``act`` chooses in the mode ``exploit``.

        No operation depends on the values of a tensor, so that the actions can be exported.

        Args:
            observation_BD: in single precision if they are floating-point numbers.
            task_B: tasks.
        """
        for transform in self.transforms:
            observation_BD = transform.observation(observation_BD, task_B)  # type: ignore[operator]
        replaced = self._mean_of_trained
        with contextlib.nullcontext() if replaced is None else replaced.applied():
            policy = self.policy(observation_BD, task_B)
        return zero_padding(policy.mode(), self.action_mask(task_B))

    @property
    def _replaces_untrained(self) -> bool:
        return self._untrained_tasks == "mean" and bool(self._is_untrained_T.any())

    def _untrained_replaced(
        self, task_E: npt.NDArray[np.int64]
    ) -> contextlib.AbstractContextManager[None]:
        """Use the trained tasks' mean for the untrained ones of these tasks."""
        if self._mean_of_trained is None or not self._is_untrained_T[task_E].any():
            return contextlib.nullcontext()
        return self._mean_of_trained.applied()

    def seed_actions(self, seed: int) -> None:
        """Seed the draws of ``act``, explored and random, from here on."""
        self.generators.get("act", self.device).manual_seed(seed)

    @property
    def weights_seq_no(self) -> int:
        """Number of updates that the weights have had."""
        return self.counters.updates

    def _acting_parts(self) -> dict[str, nn.Module]:
        return {**self.acting_modules(), "transforms": self.transforms}

    def get_weights(self) -> dict[str, Any]:
        """Return copies of the weights for ``act``, on the CPU: networks' states by name."""
        states = {name: part.state_dict() for name, part in self._acting_parts().items()}
        # a state that is no tensor, as running statistics in NumPy, is copied as well
        copied = copy.deepcopy(states)
        return apply_to_collection(copied, Tensor, lambda tensor: tensor.detach().cpu())

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Act with the weights that ``get_weights`` of the same algorithm has returned.

        This is for an algorithm that acts and is not trained here: critics and optimizers stay.

        Args:
            weights: of the networks that act.
            weights_seq_no: number of updates that they have had.

        Raises:
            ConfigurationError: if they are of another network.
        """
        parts = self._acting_parts()
        current = {name: weight_shapes(part.state_dict()) for name, part in parts.items()}
        received = {name: weight_shapes(state) for name, state in weights.items()}
        differing = [
            name
            for name in dict.fromkeys([*current, *received])
            if current.get(name) != received.get(name)
        ]
        if differing:
            raise ConfigurationError(
                f"the weights of {', '.join(differing)} are of another network: give those of an"
                " algorithm with the same arguments"
            )
        for name, part in parts.items():
            part.load_state_dict(weights[name])
        self.counters.updates = weights_seq_no

    def observe(self, transitions: Transitions, has_ended: bool = True) -> None:
        """Receive the transitions of one vector step, in the order in which they happen.

        Args:
            transitions: of this rank's environments.
            has_ended: whether an episode may have ended in this step, on any rank.
        """
        for transform in self.transforms:
            transform.observe(transitions)  # type: ignore[operator]
            if has_ended:
                transform.sync_ranks()  # type: ignore[operator]

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Receive each trained task's mean reward in the replay.

        Called before the first update and whenever the networks are reset.
        """
        for transform in self.transforms:
            transform.begin_learning(mean_reward_R)  # type: ignore[operator]

    def training_step(self, batch: TransitionBatch, batch_idx: int) -> None:
        """Make one update and count it."""
        if self._compile == "cudagraphs":
            begin_graphs([update.optimizer for update in self.updates if update.optimizer])
        with self.stopwatch.measure("update"):
            self.update(batch)
        self.counters.updates += 1

    def transform(self, batch: TransitionBatch) -> TransitionBatch:
        """Return the batch after all transforms."""
        for transform in self.transforms:
            assert isinstance(transform, Transform)
            quantities = {name: self.quantities[name]() for name in transform.requires}
            batch = transform(batch, **quantities)
        return batch

    def is_due(self, every: int) -> bool:
        """Return whether an action with this period is due in the present update."""
        return self.counters.updates % every == 0

    def noise_like(self, action_RnA: Tensor) -> Tensor:
        """Draw standard normal noise of the actions' shape for a loss."""
        generator = self.generators.get("learn", self.device)
        return torch.randn(action_RnA.shape, generator=generator, device=self.device)

    def reset_networks(self) -> None:
        """Reinitialize the parts of ``make_networks``, and clear their optimizer states everywhere.

        Buffers (an encoder's statistics) stay, and so does everything else.

        Raises:
            ConfigurationError: if the algorithm has nothing to reset.
        """
        if not self._network_names:
            raise ConfigurationError(
                f"{type(self).__name__} cannot reset its networks: set resets.every to null"
            )
        seed = int(torch.randint(2**31, (), generator=self.generators.get("reset", CPU)))
        was_reset = set()
        for name, fresh in self._build_networks(seed).items():
            module = self.get_submodule(name)
            if isinstance(fresh, GradientMethod):
                module.load_state_dict(fresh.state_dict())
            else:
                assign_parameters(fresh, module)
            was_reset |= {id(parameter) for parameter in module.parameters()}
        for update in self.updates:
            for parameter in update.parameters:
                if update.optimizer and id(parameter) in was_reset:
                    update.optimizer.state.pop(parameter, None)

    def set_targets(self) -> None:
        """Make target networks copies of those that they follow; here there are none.

        Called when a run starts from a trained policy. What an algorithm that defines this names
        ``target_...`` is not copied from the policy's checkpoint.
        """

    def _build_networks(self, seed: int) -> dict[str, nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.make_networks()

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics, averaged since the last call."""
        return {f"train/{name}": value for name, value in self.mean_metrics.drain().items()}

    def images(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return images ``[H, W, 3]`` by name that show the learned model; here none."""
        return {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: evaluation runs episodes, see ``callbacks/evaluation.py``."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the algorithm's description and state; keep hyper-parameters of plain values."""
        warn_of_unknown(self._unknown_arguments)
        self._unknown_arguments = {}  # once is enough
        self.guard.read()  # skipped steps that only the device knows of are counted
        checkpoint["mtrl_lightning"] = {
            "format": FORMAT,
            "algorithm": self.description,
            "spec": describe_spec(self.spec),
            "counters": self.counters.state_dict(),
            "generators": self.generators.state_dict(),
            "global_generators": global_generators(),
            "metrics": self.mean_metrics.state_dict(),
        }
        checkpoint["hyper_parameters"] = {
            name: value
            for name, value in checkpoint.get("hyper_parameters", {}).items()
            if is_plain(value)
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Restore weights, buffers and the extra states of modules.

        Raises:
            ConfigurationError: if they are of other modules, or damaged.
        """
        with restoring("weights"):
            return super().load_state_dict(state_dict, strict, assign)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state that ``on_save_checkpoint`` added.

        Raises:
            ConfigurationError: if the checkpoint is of other tasks or of another network.
        """
        from mtrl_lightning.algorithms.loading import check_tasks, check_weights

        with restoring("state of the algorithm"):
            check_tasks(checkpoint, self.spec)
            check_weights(checkpoint["state_dict"], self.state_dict())
            self._saved_optimizers = checkpoint.get("optimizer_states")
            state = checkpoint["mtrl_lightning"]
            self._has_new_options = state.get("algorithm") != self.description
            self.counters.load_state_dict(state["counters"])
            self.generators.load_state_dict(state["generators"])
            if "global_generators" in state:  # left out where the process is not to be changed
                restore_global_generators(state["global_generators"])
            self.mean_metrics.load_state_dict(state["metrics"])

    def reshard(self, states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
        """Return the state of a rank that differs between ranks, from those of all saved ranks."""
        rules: Rules = {
            "generators": partial(self.generators.reshard, share=share),
            "global_generators": lambda of_ranks: of_ranks[share.rank % len(of_ranks)],
            "metrics": partial(self.mean_metrics.reshard, share=share),
        }
        return share.join("the algorithm", states, rules)

    def reshard_extra_states(
        self, states: Sequence[Mapping[str, Any]], share: Share
    ) -> dict[str, Any]:
        """Return a rank's extra states of modules; those without ``reshard`` are equal on all."""
        modules = dict(self.named_modules(remove_duplicate=False))
        resharded = {}
        for name in states[0]:
            of_ranks = [state[name] for state in states]
            rule = getattr(modules.get(name.rpartition(".")[0]), "reshard", None)
            resharded[name] = of_ranks[0] if rule is None else rule(of_ranks, share)
        return resharded

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **overrides: Any,
    ) -> Self:
        """Build the algorithm that a checkpoint describes, with its weights and its state.

        Args:
            checkpoint_path: a file in a run's ``checkpoints/`` folder.
            map_location: device of the weights; None for the CPU.
            hparams_file: not supported: give ``overrides``.
            strict: whether all weights have to be those of the checkpoint; None for yes.
            weights_only: not used: nothing in a checkpoint is ever executed.
            trust: modules and packages, ``["mytasks"]``, whose classes the checkpoint may use
                beside those of this package and of ``torch.nn`` and ``torch.optim``.
            overrides: arguments of the constructor in place of the saved ones.

        Raises:
            ConfigurationError: if the checkpoint cannot be used; the message says what to do.
        """
        from mtrl_lightning.algorithms.loading import load_algorithm

        if hparams_file is not None:
            raise ConfigurationError(
                f"hparams_file is {hparams_file}: give the arguments themselves, such as seed=3"
            )
        return load_algorithm(
            cls,
            checkpoint_path,
            map_location or "cpu",
            strict=strict is not False,
            trust=trust,
            overrides=overrides,
        )
