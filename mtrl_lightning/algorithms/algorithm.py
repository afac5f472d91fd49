"""Base of all algorithms: policy, networks, updates, checkpoints.

Shapes: ``E`` environments, ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or
``R, n``, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from mtrl_lightning.algorithms.arguments import KeepsArguments, rebuild
from mtrl_lightning.checkpoints import FORMAT, PER_RANK, check_tasks, load_checkpoint, restoring
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.networks import ActionDistribution, Encoder, Network, zero_padding
from mtrl_lightning.networks.distributions import masked, one_hot
from mtrl_lightning.networks.network import UntrainedParameters, UntrainedTasks, task_values
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec, Field, check_train_tasks
from mtrl_lightning.transitions import ActOutput, Kind, Mode, TransitionBatch
from mtrl_lightning.updates.generators import (
    Generators,
    global_generators,
    restore_global_generators,
)
from mtrl_lightning.updates.metrics import DivergenceGuard, MeanMetrics, OnNonfinite
from mtrl_lightning.updates.targets import (
    PolyakAverage,
    assign_parameters,
    copied_weights,
)
from mtrl_lightning.updates.transforms import Transforms
from mtrl_lightning.updates.update import Update
from mtrl_lightning.utils.counters import Counters, Stopwatch

if TYPE_CHECKING:
    from typing import Self

Compile = Literal["default", "reduce-overhead", "max-autotune"]
"""Mode of ``torch.compile``."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Algorithm(KeepsArguments, LightningModule):
    """Base of all algorithms; also a ``Policy``.

    A subclass builds its networks in ``make_networks`` and its optimizer steps with
    ``make_update``, returns its action distribution from ``policy``, and learns from a batch in
    ``update``.

    Args:
        spec: the tasks.
        seed: seed of the initial weights and of all random numbers.
        compile: mode of ``torch.compile`` for the losses; the first updates include compilation.
            ``reduce-overhead`` and ``max-autotune`` use CUDA graphs on a GPU. None to disable.
        on_nonfinite: action on a non-finite gradient, which is never applied: ``stop`` ends the
            run and keeps the last checkpoint; ``skip`` skips the step and counts it in
            ``fault/skipped_updates``. On a GPU, fused optimizers skip without synchronization.
        max_skipped_updates: maximum number of skipped steps in a run, at least 0; one more ends it.
        untrained_tasks: parameters of tasks that are evaluated without being trained: ``mean``,
            the mean of the trained tasks' parameters; ``own``, the task's initial parameters.
    """

    kind: ClassVar[Kind] = "off-policy"
    """Source of its training data."""
    policy_fields: tuple[Field, ...] = ()
    """Additional transition fields that ``act`` returns with the actions when exploring."""
    acting_networks: tuple[str, ...] = ()
    """Names of the networks that ``policy`` uses; empty for all of them."""
    data_name: str = ""
    """Class name of its data module; the key of the data's state in Lightning's checkpoints."""
    targets: PolyakAverage | None = None
    """The target networks, initialized as copies of the online networks."""
    progress = 0.0
    """Completed fraction of an offline run's updates, from 0 to 1."""
    action_mask_TA: Tensor | None
    """False for the padding entries of each task's actions, ``[T, A]``; None without padding."""
    _task_R: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        seed: int = 0,
        *,
        compile: Compile | None = None,
        on_nonfinite: OnNonfinite = "stop",
        max_skipped_updates: int = 100,
        untrained_tasks: UntrainedParameters = "mean",
    ) -> None:
        super().__init__()
        check_train_tasks(spec)
        self.save_hyperparameters(self.hyper_parameters)
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
        )
        self.transforms = Transforms()
        """Transforms of sampled batches before an update, in order."""
        self.updates: list[Update] = []
        """The optimizer steps of ``update``; see ``make_update``."""
        self._compile = compile
        self._seed = seed
        self._acting_tasks = TaskTensors(spec.train_tasks)
        self._network_names: list[str] = []
        self.untrained = UntrainedTasks(spec, untrained_tasks)
        self.register_buffer("_task_R", torch.tensor(spec.train_tasks), persistent=False)
        mask_TA = torch.from_numpy(spec.action_mask_TA)
        self.register_buffer("action_mask_TA", None if mask_TA.all() else mask_TA, persistent=False)

    # networks

    def make_networks(self) -> dict[str, nn.Module]:
        """Build the modules that ``reset_networks`` reinitializes, by attribute name.

        PyTorch's global generator is seeded before this call and restored afterwards.
        """
        raise NotImplementedError

    def add_networks(self) -> None:
        """Build the networks of ``make_networks`` and register them as attributes."""
        for name, module in seeded(self._seed, self.make_networks).items():
            self.add_module(name, module)
            self._network_names.append(name)
        self.untrained.check(self.acting_modules())

    def acting_modules(self) -> dict[str, nn.Module]:
        """Return the networks that ``policy`` uses, by name."""
        names = self.acting_networks or self._network_names
        return {name: self.get_submodule(name) for name in names}

    def reset_networks(self) -> None:
        """Reinitialize the modules of ``make_networks``, their optimizer states and their targets.

        Keeps buffers such as an encoder's statistics, auxiliaries, and SAC's temperatures.
        """
        if not self._network_names:
            raise ConfigurationError(
                f"{type(self).__name__} cannot reset its networks: set resets.every to null"
            )
        generator = self.generators.get("reset", torch.device("cpu"))
        seed = int(torch.randint(2**31, (), generator=generator))
        was_reset: set[Parameter] = set()
        for name, fresh in seeded(seed, self.make_networks).items():
            module = self.get_submodule(name)
            if isinstance(fresh, GradientMethod):
                module.load_state_dict(fresh.state_dict())
            else:
                assign_parameters(fresh, module)
            was_reset.update(module.parameters())
        for update in self.updates:
            update.clear_state(was_reset)
        if self.targets is not None:
            self.targets.copy()

    # policy

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> ActionDistribution:
        """Return the distribution over actions."""
        raise NotImplementedError

    def begin_exploring(self, tasks: Sequence[int], envs: Sequence[int]) -> None:
        """Set the training environments, in the order in which ``act`` explores them.

        Args:
            tasks: tasks of the environments of all processes.
            envs: indices of this process' environments among them.
        """

    def explore(
        self, policy: ActionDistribution, noise_BA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return actions ``[B, A]`` for standard normal noise, and the ``policy_fields``."""
        return policy.sample(noise_BA)[0], {}

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
            observation_ED: observations.
            task_E: task indices.
            mode: sample from the policy, take its mode, or sample uniformly.
            noise_EA: standard normal noise for ``explore``; None to sample it.

        Returns:
            The actions and, when exploring, the ``policy_fields`` if any.
        """
        shape = (len(observation_ED), self.action_dim)
        generator = self.generators.get("act", self.device)
        if mode == "random":
            task = move_data_to_device(torch.as_tensor(task_E), self.device)
            uniform_EA = torch.rand(shape, generator=generator, device=self.device)
            if self.spec.is_discrete:
                score_EA = masked(uniform_EA, self.action_mask(task))
                return one_hot(score_EA, self.spec.action_choices).cpu().numpy()
            return zero_padding(2 * uniform_EA - 1, self.action_mask(task)).cpu().numpy()
        if np.issubdtype(observation_ED.dtype, np.floating):
            observation_ED = observation_ED.astype(np.float32)
        task_B = self._acting_tasks(task_E, self.device)
        rows = task_B.shape
        observation_BD = torch.as_tensor(observation_ED).unflatten(0, rows)
        observation_BD = move_data_to_device(observation_BD, self.device)
        if self.untrained.is_untrained_T[task_E].any():
            self.untrained.fill(self.acting_modules())
        policy = self.policy(observation_BD, task_B)
        fields: dict[str, Tensor] = {}
        if mode == "exploit":
            action_BA = policy.mode()
        else:
            if noise_EA is None:
                given_EA = torch.randn(shape, generator=generator, device=self.device)
            else:
                given_EA = move_data_to_device(torch.as_tensor(noise_EA), self.device)
            action_BA, fields = self.explore(policy, given_EA.unflatten(0, rows))
        action_BA = zero_padding(action_BA, self.action_mask(task_B))
        action_EA, *columns = _as_arrays(
            [x_BA.flatten(0, len(rows) - 1) for x_BA in (action_BA, *fields.values())]
        )
        return (action_EA, dict(zip(fields, columns, strict=True))) if fields else action_EA

    def action_mask(self, task_B: Tensor) -> Tensor | None:
        """Return a mask, false for padding entries of the actions; None without padding.

        Args:
            task_B: tasks ``[B]``, or ``[R, n]`` in a training batch.

        Returns:
            ``[B, A]``, or ``[R, 1, A]`` for a training batch.
        """
        if self.action_mask_TA is None:
            return None
        return task_values(self.action_mask_TA, task_B if task_B.ndim == 1 else task_B[:, :1])

    def seed_actions(self, seed: int) -> None:
        """Seed the random numbers of ``act`` in the modes ``explore`` and ``random``."""
        self.generators.get("act", self.device).manual_seed(seed)

    def get_weights(self) -> dict[str, Any]:
        """Return CPU copies of the weights that ``act`` uses: networks' states by name."""
        return copied_weights(self.acting_modules())

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Load weights that ``get_weights`` of an equal algorithm returned.

        Args:
            weights: states of the policy's networks by name.
            weights_seq_no: number of updates after which they were taken.
        """
        for name, network in self.acting_modules().items():
            network.load_state_dict(weights[name])
        self.counters.updates = weights_seq_no

    # updates

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
        if self._compile is not None and not update.method.is_one_pass:
            raise ConfigurationError(
                f"compile {self._compile} does not support the per-task gradients that"
                f" {type(update.method).__name__} computes: set compile to null, or the gradient"
                " methods to Mean or FAMO"
            )
        self.updates.append(update)
        return update

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of all updates, in the order of ``make_update``."""
        return [update.configure_optimizer() for update in self.updates]

    def configure_callbacks(self) -> list[Callback]:
        """Return the required callbacks of this package that the trainer does not have yet.

        Only this package's data modules require any; ``trainer.fit(algorithm, batches)`` does not.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.missing_callbacks() if hasattr(data, "missing_callbacks") else []

    def on_fit_start(self) -> None:
        """Make ``trainer.global_step`` count updates, and call the gradient hooks of callbacks.

        Lightning counts optimizer steps: here those of the first ``Update``.
        """

        def call_hook(name: str, *args: Any) -> None:
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                getattr(callback, name)(self.trainer, self, *args)
            getattr(self, name)(*args)

        optimizers = self.optimizers()
        first = optimizers[0] if isinstance(optimizers, list) else optimizers
        for update in self.updates:
            update.call_hook = call_hook
        self.updates[0].step = first.step

    def training_step(self, batch: TransitionBatch, batch_idx: int) -> None:
        """Make one update and count it."""
        with self.stopwatch.measure("update"):
            if self._compile is not None:
                # CUDA graphs may overwrite the results of the last update, such as gradients
                for update in self.updates:
                    for parameter in update.parameters:
                        parameter.grad = None
                torch.compiler.cudagraph_mark_step_begin()
            with self.mean_metrics.added_at_end():
                self.update(batch)
            self.counters.updates += 1

    def update(self, batch: TransitionBatch) -> None:
        """Learn from a sampled batch; start with ``self.transforms(batch)``."""
        raise NotImplementedError

    # metrics and checkpoints; Lightning calls the on_... hooks

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics, averaged since the last call.

        Raises:
            DivergenceError: if a non-finite gradient stops the run.
        """
        self.guard.read()
        return {f"train/{name}": value for name, value in self.mean_metrics.drain().items()}

    def images(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return images ``[H, W, 3]`` by name that visualize the learned model; none by default."""
        return {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: ``EvaluationCallback`` runs evaluation episodes."""

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the algorithm's arguments and state."""
        self.guard.read()  # skipped steps are counted on the device until it is read
        checkpoint["mtrl_lightning"] = {
            "format": FORMAT,
            "spec": self.spec.to_dict(),
            "counters": self.counters.state_dict(),
            "generators": self.generators.state_dict(),
            "global_generators": {PER_RANK: {distributed.rank(): global_generators()}},
            "metrics": self.mean_metrics.state_dict(),
            "num_processes": distributed.world_size(),
        }
        if self.data_name:
            checkpoint["mtrl_lightning"]["data"] = self.data_name
        # a subclass may have added unconverted arguments with save_hyperparameters
        checkpoint["hyper_parameters"] = self.hyper_parameters

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state that ``on_save_checkpoint`` added."""
        with restoring(self.trainer.ckpt_path if self.data_name else None):
            check_tasks(checkpoint, self.spec)
            state = checkpoint["mtrl_lightning"]
            saved_data = state.get("data", "none")
            if self.data_name not in ("", saved_data):
                raise ConfigurationError(
                    f"the checkpoint has the state of {saved_data}, but this run has the data"
                    f" module {self.data_name}: resume with the original data module"
                )
            self.counters.load_state_dict(state["counters"])
            self.generators.load_state_dict(state["generators"])
            if "global_generators" in state:  # left out by load_from_checkpoint
                own = state["global_generators"][PER_RANK].get(distributed.rank())
                if own is not None:
                    restore_global_generators(own)
            self.mean_metrics.load_state_dict(state["metrics"])
            # None if left out by load_from_checkpoint; Lightning would ignore missing ones
            optimizers = checkpoint.get("optimizer_states")
            if optimizers is not None and len(optimizers) != len(self.updates):
                raise ValueError(f"it has {len(optimizers)} optimizers, not {len(self.updates)}")
        has_new_options = checkpoint["hyper_parameters"] != self.hyper_parameters
        for update in self.updates:
            update.has_new_options = has_new_options

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        *,
        strict: bool = True,
        weights_only: bool = True,
        trust: Sequence[str] = (),
        **overrides: Any,
    ) -> Self:
        """Build the algorithm of a checkpoint, with its weights and its state.

        No code in the file is executed.

        Args:
            checkpoint_path: a file in a run's ``checkpoints/`` folder.
            map_location: device of the weights; None for the CPU.
            strict: whether the keys of all weights must match those of the checkpoint.
            weights_only: Lightning's argument; always treated as True.
            trust: modules and packages, such as ``["mytasks"]``, whose classes the checkpoint may
                use in addition to those of this package, ``torch.nn`` and ``torch.optim``.
            overrides: constructor arguments that replace the saved ones.
        """
        checkpoint = load_checkpoint(checkpoint_path)
        state = checkpoint["mtrl_lightning"]
        # a run that starts with these weights has new optimizers
        checkpoint.pop("optimizer_states", None)
        state.pop("global_generators", None)  # leave this process' generators unchanged
        with restoring(checkpoint_path):
            spec = EnvSpec.from_dict(state["spec"])
            built = rebuild(checkpoint["hyper_parameters"], spec, cls, trust, overrides)
            built.on_load_checkpoint(checkpoint)
            built.load_state_dict(checkpoint["state_dict"], strict=strict)
        return built.to(map_location or "cpu")


def num_actor_outputs(spec: EnvSpec, outputs_per_action: int) -> int:
    """Return the outputs of an actor: one per discrete action, or as many per dimension."""
    return (1 if spec.is_discrete else outputs_per_action) * spec.action_space.shape[0]


def make_actor_parts(
    spec: EnvSpec,
    encoder: Encoder,
    make_actor: Callable[[int, int, EnvSpec], Network],
    make_gradient: Callable[[EnvSpec], GradientMethod],
    outputs_per_action: int,
    noise: nn.Module | None = None,
) -> dict[str, nn.Module]:
    """Build the policy's networks and ``actor_gradient``; return them by attribute name.

    Args:
        spec: the tasks.
        encoder: maps observations to the actor's inputs.
        make_actor: builds the actor, ``(in_dim, out_dim, spec) -> Network``.
        make_gradient: builds the method that combines the tasks' actor losses.
        outputs_per_action: outputs of the actor per dimension of continuous actions.
        noise: the policy's standard deviation if it is a module; None otherwise.
    """
    num_outputs = num_actor_outputs(spec, outputs_per_action)
    return {
        "encoder": encoder,
        "actor": make_actor(encoder.out_dim, num_outputs, spec),
        **({} if noise is None else {"noise": noise}),
        "actor_gradient": make_gradient(spec),
    }


def compiled(loss: F, mode: Compile | None) -> F:
    """Compile a loss function with ``torch.compile`` unless the mode is None.

    With gradients disabled, as when a gradient method recomputes losses, the original function is
    called: a second compilation would cost more than it saves.
    """
    if mode is None:
        return loss
    fast = torch.compile(loss, mode=mode)

    @functools.wraps(loss)
    def call(*args: Any) -> Any:
        return fast(*args) if torch.is_grad_enabled() else loss(*args)

    return call  # type: ignore[return-value]


class TaskTensors:
    """The tasks of a step's environments as a tensor, cached because they rarely change.

    Args:
        train_tasks: the trained tasks.
    """

    def __init__(self, train_tasks: Sequence[int]) -> None:
        self._train_tasks = train_tasks
        self._last_E = np.zeros(0, np.int64)
        self._last_B = torch.zeros(0, dtype=torch.int64)

    def __call__(self, task_E: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        """Return the tasks, ``[R, n]`` for the trained tasks in order or one task, else ``[E]``."""
        if self._last_B.device == device and np.array_equal(self._last_E, task_E):
            return self._last_B
        num_envs = len(task_E)
        num_rows = num_envs // len(self._train_tasks)
        # grouped by task, networks with per-task parameters compute one matrix product
        shape: tuple[int, ...] = (num_envs,)
        if num_rows and np.array_equal(task_E, np.repeat(self._train_tasks, num_rows)):
            shape = (len(self._train_tasks), num_rows)
        elif num_envs and (task_E == task_E[0]).all():
            shape = (1, num_envs)
        # a copy: the caller may write into its array, whose memory a tensor on a CPU shares
        self._last_E = task_E.copy()
        self._last_B = move_data_to_device(torch.as_tensor(self._last_E.reshape(shape)), device)
        return self._last_B


def _as_arrays(tensors: Sequence[Tensor]) -> list[npt.NDArray]:
    """Return tensors ``[N, ...]`` as arrays, with a single copy from a GPU.

    Args:
        tensors: tensors with the same number of rows; those with another dtype than the first are
            copied separately.
    """
    first = tensors[0]
    if first.device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    joined = [tensor for tensor in tensors if tensor.dtype == first.dtype]
    flat = [tensor.reshape(len(tensor), -1) for tensor in joined]
    parts = iter(torch.cat(flat, 1).cpu().split([rows.shape[1] for rows in flat], 1))
    arrays = []
    for tensor in tensors:
        is_joined = tensor.dtype == first.dtype
        array = next(parts).reshape(tensor.shape) if is_joined else tensor.cpu()
        arrays.append(array.numpy())
    return arrays


def seeded(seed: int, make: Callable[[], T]) -> T:
    """Call a function with PyTorch's global generator seeded, and return its result."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()
