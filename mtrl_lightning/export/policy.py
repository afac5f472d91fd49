"""A trained policy as one file that runs without this package, as on a robot.

Shapes: ``E`` observations, ``D`` observation, ``A`` action, ``T`` tasks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.export.names import ONNX, POLICY_FILES, TORCH_EXPORT
from mtrl_lightning.loading import LoadedPolicy
from mtrl_lightning.rollout import ActionTransform
from mtrl_lightning.rollout.action_transforms import HIGH, LOW, sent_actions
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.spec import EnvSpec

TOLERANCE = 1e-4
"""Largest difference of a number of an action, between -1 and 1, that is rounding."""
NUM_OBSERVATIONS = 1_000
"""Observations on which the exported policy's actions are compared."""
NUM_TIMED = 300
"""Single observations whose actions are timed."""
LARGEST_BOUND = 1e3
"""An observation space with larger bounds counts as unbounded."""

Actions = Callable[[npt.NDArray, npt.NDArray[np.int64]], npt.NDArray]
"""Maps observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``."""


class Comparison(NamedTuple):
    """How an exported policy compares with the one that it was made from."""

    num_observations: int
    """Observations, in one batch and one by one."""
    max_difference: float
    """Largest absolute difference of a number of an action."""
    policy_microseconds: float
    """Median time of ``policy.act`` for one observation."""
    exported_microseconds: float
    """Median time of the exported policy for one observation."""


class DeterministicPolicy(nn.Module):
    """What is exported: the policy's best actions, as environments are sent them.

    It contains the normalization of observations, the encoder, the actor, what replaces untrained
    tasks, the zeros behind an action that is smaller than the largest, and the action transforms.

    Args:
        algorithm: whose policy it is.
        action_transforms: change its actions, as in an evaluation.
    """

    def __init__(
        self, algorithm: Algorithm, action_transforms: Sequence[ActionTransform] = ()
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(algorithm.acting_modules())
        # no submodule: critics and optimizers are not exported
        self.__dict__["_algorithm"] = algorithm
        self._action_transforms = list(action_transforms)

    def forward(self, observation: Tensor, task: Tensor) -> Tensor:
        """Map observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``."""
        algorithm: Algorithm = self.__dict__["_algorithm"]
        action_EA = algorithm.best_action(observation, task)
        for transform in self._action_transforms:
            action_EA = _transformed(transform, action_EA, task)
        return action_EA.clamp(LOW, HIGH) if self._action_transforms else action_EA


def _transformed(transform: ActionTransform, action_EA: Tensor, task_E: Tensor) -> Tensor:
    """Apply a transform of arrays to tensors, which have the same operations.

    Raises:
        ConfigurationError: if it needs operations that only arrays have.
    """
    try:
        changed: Any = transform.transform(action_EA, task_E, False)  # type: ignore[arg-type]
    except Exception as error:
        raise _no_transform(transform, f"{type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(changed, Tensor):
        raise _no_transform(transform, f"it returns {type(changed).__name__} for tensors")
    return changed.to(action_EA.dtype)


def _no_transform(transform: ActionTransform, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"the action transform {type(transform).__name__} cannot be exported ({cause}): let its"
        " transform use only operations that arrays and tensors both have, such as clip and *, or"
        " remove it from rollout.action_transforms in the run's config.yaml and apply it to the"
        " exported policy's actions"
    )


def export_policy(
    policy: LoadedPolicy,
    format: str,
    folder: str | Path,
    action_transforms: Sequence[ActionTransform] = (),
    num_observations: int = NUM_OBSERVATIONS,
) -> tuple[Path, Comparison]:
    """Write a policy's best actions as one file, and compare it with the policy.

    The file takes ``observation [E, D]`` and ``task [E]`` (``int64``), for any number of rows, and
    gives ``action [E, A]``. Floating-point observations are in single precision. The parameters of
    ``policy`` require no gradients afterwards.

    Args:
        policy: what ``load_policy`` returns, on the CPU.
        format: ``onnx`` or ``torch.export``.
        folder: of the file; made if it does not exist.
        action_transforms: of the run, which change the actions that environments are sent.
        num_observations: observations on which the actions are compared, at least 1.

    Returns:
        The file, and the comparison.

    Raises:
        ConfigurationError: if the policy cannot be exported, a package is missing, or the actions
            differ; no file is written then.
    """
    one_of(POLICY_FILES, format=format)
    check_packages(format)
    folder = Path(folder)
    program = capture(policy, action_transforms)
    ensure_writable(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished_") as unfinished:
        file = Path(unfinished) / POLICY_FILES[format]
        write(program, format, file)
        exported = load_exported(file, format)
        comparison = compare(policy, exported, action_transforms, num_observations)
        if not comparison.max_difference <= TOLERANCE:
            raise ConfigurationError(
                f"the {format} file's actions differ by {comparison.max_difference:.2g} from the"
                f" policy's, more than {TOLERANCE:g}: an operation of the policy has another"
                " result there; choose another format"
            )
        os.replace(file, folder / file.name)
    return folder / file.name, comparison


def check_packages(format: str) -> None:
    """Check that what a format needs is installed.

    Raises:
        ConfigurationError: naming the extra that installs it.
    """
    if format == ONNX:
        for module in ("onnx", "onnxscript", "onnxruntime"):
            import_optional(module, '"mtrl_lightning[export]"')


def capture(
    policy: LoadedPolicy, action_transforms: Sequence[ActionTransform] = ()
) -> ExportedProgram:
    """Record the operations of a policy for any number of rows.

    Raises:
        ConfigurationError: naming the part of the policy whose operations cannot be recorded.
    """
    algorithm = policy.algorithm.eval().requires_grad_(False)
    for name in ("act", "best_action"):
        if getattr(type(algorithm), name) is not getattr(Algorithm, name):
            raise ConfigurationError(
                f"{type(algorithm).__name__} has its own {name}, which is not exported: let its"
                " policy and transforms do what it does"
            )
    module = DeterministicPolicy(algorithm, action_transforms).eval()
    # other sizes than 1, which would be taken for fixed
    observation_ED, task_E = observations_of(policy.spec, max(2, policy.spec.num_tasks))
    example = (torch.from_numpy(observation_ED), torch.from_numpy(task_E))
    rows = Dim("rows")
    try:
        with torch.no_grad(), _quiet():
            module(*example)
            return torch.export.export(
                module, example, dynamic_shapes=({0: rows}, {0: rows}), strict=False
            )
    except ConfigurationError:
        raise
    except Exception as error:
        part = _failing_module(error.__traceback__, algorithm) or type(algorithm).__name__
        raise ConfigurationError(
            f"the policy cannot be exported, because of {part}"
            f" ({type(error).__name__}: {_first_line(error)}): a forward pass that is exported may"
            " not branch on the values of tensors, nor leave PyTorch; use torch.where, or train"
            " with another encoder or network"
        ) from error


def _failing_module(traceback: TracebackType | None, algorithm: Algorithm) -> str | None:
    """Return the class of the innermost module of the algorithm in which an error arose."""
    modules = {id(module) for module in algorithm.modules() if module is not algorithm}
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if id(owner) in modules:
            found = type(owner).__name__
        traceback = traceback.tb_next
    return found


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def write(program: ExportedProgram, format: str, file: Path) -> None:
    """Write what was recorded.

    Args:
        program: what ``capture`` returns.
        format: ``onnx`` or ``torch.export``.
        file: the path; an existing file is replaced.
    """
    with torch.no_grad(), _quiet():
        if format == TORCH_EXPORT:
            torch.export.save(program, file)
        else:
            torch.onnx.export(
                program,
                (),
                str(file),
                input_names=["observation", "task"],
                output_names=["action"],
                dynamo=True,
                external_data=False,
                verbose=False,
            )


def load_exported(file: str | Path, format: str) -> Actions:
    """Return the actions of an exported policy, computed as without this package.

    Args:
        file: what ``export_policy`` wrote.
        format: ``onnx`` or ``torch.export``.
    """
    if format == ONNX:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )

        def run_session(observation_ED: npt.NDArray, task_E: npt.NDArray) -> npt.NDArray:
            return session.run(None, {"observation": observation_ED, "task": task_E})[0]

        return run_session
    with _quiet():
        loaded: Any = torch.export.load(Path(file)).module()

    @torch.no_grad()
    def run_module(observation_ED: npt.NDArray, task_E: npt.NDArray) -> npt.NDArray:
        action: Tensor = loaded(torch.from_numpy(observation_ED), torch.from_numpy(task_E))
        return action.numpy()

    return run_module


def compare(
    policy: LoadedPolicy,
    exported: Actions,
    action_transforms: Sequence[ActionTransform] = (),
    num_observations: int = NUM_OBSERVATIONS,
) -> Comparison:
    """Compare the actions of an exported policy with the policy's own, and time both.

    Args:
        policy: what was exported.
        exported: what ``load_exported`` returns.
        action_transforms: change the policy's actions.
        num_observations: observations of all tasks, see ``observations_of``.
    """
    observation_ED, task_E = observations_of(policy.spec, num_observations)

    def act(observation_ED: npt.NDArray, task_E: npt.NDArray) -> npt.NDArray:
        chosen_EA = policy.act(observation_ED, task_E)
        return sent_actions(action_transforms, chosen_EA, task_E, is_training=False)

    expected_EA = act(observation_ED, task_E)
    difference = _difference(exported(observation_ED, task_E), expected_EA)
    singles = [(observation_ED[[i]], task_E[[i]]) for i in range(len(task_E))]
    own_seconds = []
    seconds = []
    for i, single in enumerate(singles):
        started = time.perf_counter()
        action_1A = exported(*single)
        seconds.append(time.perf_counter() - started)
        difference = max(difference, _difference(action_1A, expected_EA[[i]]))
        if i < NUM_TIMED:
            started = time.perf_counter()
            act(*single)
            own_seconds.append(time.perf_counter() - started)
    return Comparison(
        num_observations,
        difference,
        1e6 * float(np.median(own_seconds)),
        1e6 * float(np.median(seconds)),
    )


def _difference(action_EA: npt.NDArray, expected_EA: npt.NDArray) -> float:
    """Return the largest difference, infinite where shapes or NaN differ."""
    if action_EA.shape != expected_EA.shape:
        return float("inf")
    # max() of Python and of NumPy disagree about NaN
    difference_EA = np.abs(action_EA.astype(np.float64) - expected_EA)
    return float(np.where(np.isnan(difference_EA), np.inf, difference_EA).max())


def observations_of(spec: EnvSpec, num: int) -> tuple[npt.NDArray, npt.NDArray[np.int64]]:
    """Draw observations ``[num, D]`` of all tasks in turn, and their tasks ``[num]``.

    They are uniform where the space is bounded, and otherwise standard normal within its bounds.
    What is not the task's own is 0.

    Args:
        spec: the tasks.
        num: number of observations.
    """
    space = spec.observation_space
    task_E = np.arange(num) % spec.num_tasks
    generator = np.random.default_rng(0)
    if not np.issubdtype(space.dtype, np.floating):
        low_D = space.low.astype(np.int64)
        high_D = space.high.astype(np.int64)
        drawn_ED = generator.integers(low_D, high_D, (num, *space.shape), endpoint=True)
        return drawn_ED.astype(space.dtype), task_E
    is_bounded_D = np.maximum(np.abs(space.low), np.abs(space.high)) <= LARGEST_BOUND
    lowest_D = np.where(is_bounded_D, space.low, 0.0)
    highest_D = np.where(is_bounded_D, space.high, 1.0)
    uniform_ED = generator.uniform(lowest_D, highest_D, (num, *space.shape))
    normal_ED = generator.standard_normal((num, *space.shape)).clip(space.low, space.high)
    observation_ED = np.where(is_bounded_D, uniform_ED, normal_ED)
    observation_ED = np.where(spec.observation_mask_TD[task_E], observation_ED, 0.0)
    return observation_ED.astype(np.float32), task_E


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyTorch's exporters say about themselves."""
    import logging

    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
