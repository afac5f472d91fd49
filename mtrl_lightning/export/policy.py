"""A trained policy as a checkpoint of its own, or as a file that runs without this package.

Shapes: ``E`` observations, ``D`` observation, ``A`` action, ``T`` tasks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.export import Dim

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.export import ONNX, POLICY_FILES, TORCH_EXPORT
from mtrl_lightning.networks import zero_padding
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.rollout import ActionTransform
from mtrl_lightning.rollout.action_transforms import HIGH, LOW, sent_actions
from mtrl_lightning.runs import ensure_writable, replacing
from mtrl_lightning.spec import EnvSpec

CHECKPOINT = Path("checkpoints/best.ckpt")
"""The checkpoint of an exported policy in its folder, which is laid out as a run's."""
OF_POLICY = ("pytorch-lightning_version", "state_dict", "hyper_parameters", "mtrl_lightning")
"""What an exported policy keeps of a checkpoint: neither optimizers nor environments."""
TOLERANCE = 1e-4
"""Largest difference of a number of an action, between -1 and 1, that is rounding."""
NUM_OBSERVATIONS = 1_000
"""Observations on which the exported policy's actions are compared."""
LARGEST_BOUND = 1e3
"""An observation space with larger bounds counts as unbounded."""

Actions = Callable[[npt.NDArray, npt.NDArray[np.int64]], npt.NDArray]
"""Maps observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``."""


def export_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Write the policy of a checkpoint as a checkpoint without the state of its training.

    Args:
        checkpoint: of a run.
        folder: of the policy; made if it does not exist.

    Returns:
        The written checkpoint.
    """
    file = folder / CHECKPOINT
    if file.exists():
        raise ConfigurationError(f"{file} exists: delete it, or give another --folder")
    content = load_checkpoint(checkpoint)
    ensure_writable(file.parent)
    with replacing(file) as unfinished:
        torch.save({name: content[name] for name in OF_POLICY}, unfinished)
    return file


class _DeterministicPolicy(nn.Module):
    """A policy's best actions, as they are sent to environments.

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
        self.action_transforms = list(action_transforms)

    def forward(self, observation: Tensor, task: Tensor) -> Tensor:
        """Map observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``."""
        algorithm: Algorithm = self.__dict__["_algorithm"]
        mode_EA = algorithm.policy(observation, task).mode()
        action_EA = zero_padding(mode_EA, algorithm.action_mask(task))
        for transform in self.action_transforms:
            # of arrays: tensors have the same operations
            changed_EA: Any = transform.transform(action_EA, task, False)  # type: ignore[arg-type]
            action_EA = changed_EA.to(action_EA.dtype)
        return action_EA.clamp(LOW, HIGH) if self.action_transforms else action_EA


def export_policy(
    policy: LoadedPolicy,
    format: str,
    folder: str | Path,
    action_transforms: Sequence[ActionTransform] = (),
    num_observations: int = NUM_OBSERVATIONS,
) -> tuple[Path, float]:
    """Write a policy's best actions as one file, and compare it with the policy.

    The file takes ``observation [E, D]`` and ``task [E]`` (``int64``), for any number of rows, and
    gives ``action [E, A]``. Floating-point observations are in single precision. The parameters of
    ``policy`` require no gradients afterwards.

    Args:
        policy: returned by ``load_policy``, on the CPU.
        format: ``onnx`` or ``torch.export``.
        folder: of the file; made if it does not exist.
        action_transforms: of the run, which change the actions that environments are sent.
        num_observations: observations on which the actions are compared, at least 1.

    Returns:
        The file, and the largest difference of a number of an action.
    """
    one_of(POLICY_FILES, format=format)
    if format == ONNX:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_optional(package, '"mtrl_lightning[export]"')
    folder = Path(folder)
    algorithm = policy.algorithm.eval().requires_grad_(False)
    algorithm.untrained.fill(algorithm.acting_modules())
    module = _DeterministicPolicy(algorithm, action_transforms).eval()
    # other sizes than 1, which would be taken for fixed
    observation_ED, task_E = observations_of(policy.spec, max(2, policy.spec.num_tasks))
    example = (torch.from_numpy(observation_ED), torch.from_numpy(task_E))
    rows = Dim("rows")
    with torch.no_grad(), _quiet():
        module(*example)
        program = torch.export.export(
            module, example, dynamic_shapes=({0: rows}, {0: rows}), strict=False
        )
    ensure_writable(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished_") as unfinished:
        file = Path(unfinished) / POLICY_FILES[format]
        with torch.no_grad(), _quiet():
            if format == TORCH_EXPORT:
                torch.export.save(program, file)
            else:
                torch.onnx.export(
                    program,
                    f=file,
                    input_names=["observation", "task"],
                    output_names=["action"],
                    dynamo=True,
                    external_data=False,
                    verbose=False,
                )
        exported = load_exported(file, format)
        difference = max_difference(policy, exported, action_transforms, num_observations)
        if not difference <= TOLERANCE:
            raise ConfigurationError(
                f"the {format} file's actions differ by {difference:.2g} from the policy's, more"
                f" than {TOLERANCE:g}: choose another format"
            )
        os.replace(file, folder / file.name)
    return folder / file.name, difference


def load_exported(file: str | Path, format: str) -> Actions:
    """Return the actions of an exported policy, computed as without this package.

    Args:
        file: written by ``export_policy``.
        format: ``onnx`` or ``torch.export``.
    """
    if format == ONNX:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return lambda observation_ED, task_E: session.run(
            None, {"observation": observation_ED, "task": task_E}
        )[0]
    with _quiet():
        loaded: Any = torch.export.load(Path(file)).module()
    return lambda observation_ED, task_E: (
        loaded(torch.from_numpy(observation_ED), torch.from_numpy(task_E)).detach().numpy()
    )


def max_difference(
    policy: LoadedPolicy,
    exported: Actions,
    action_transforms: Sequence[ActionTransform] = (),
    num_observations: int = NUM_OBSERVATIONS,
) -> float:
    """Return how far the actions of an exported policy are from the policy's own.

    Args:
        policy: the exported one.
        exported: returned by ``load_exported``.
        action_transforms: change the policy's actions.
        num_observations: observations of all tasks, in one batch and one by one; see
            ``observations_of``.

    Returns:
        The largest difference of a number of an action; NaN where one is NaN.
    """
    observation_ED, task_E = observations_of(policy.spec, num_observations)
    chosen_EA = policy.act(observation_ED, task_E)
    expected_EA = sent_actions(action_transforms, chosen_EA, task_E, is_training=False)
    one_by_one = [exported(observation_ED[[i]], task_E[[i]]) for i in range(num_observations)]
    actions = [exported(observation_ED, task_E), np.concatenate(one_by_one)]
    return float(np.abs(np.stack(actions) - expected_EA).max())


def observations_of(spec: EnvSpec, num: int) -> tuple[npt.NDArray, npt.NDArray[np.int64]]:
    """Sample observations ``[num, D]`` of all tasks in turn, and their tasks ``[num]``.

    They are uniform where the space is bounded, and otherwise as Gymnasium samples unbounded
    spaces. What is not the task's own is 0.
    """
    task_E = np.arange(num) % spec.num_tasks
    space = spec.observation_space
    if np.issubdtype(space.dtype, np.floating):
        low_D = np.where(space.low < -LARGEST_BOUND, -np.inf, space.low).astype(np.float32)
        high_D = np.where(space.high > LARGEST_BOUND, np.inf, space.high).astype(np.float32)
        space = Box(low_D, high_D)
    batch = batch_space(space, num)
    batch.seed(0)
    observation_ED = batch.sample()
    if spec.observation_sizes:
        observation_ED[~spec.observation_mask_TD[task_E]] = 0
    return observation_ED, task_E


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of PyTorch's exporters."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
