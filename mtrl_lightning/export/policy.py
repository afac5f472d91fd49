"""Export a trained policy as a small checkpoint, or as a file that runs without this package.

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
from mtrl_lightning.spec import EnvSpec, chosen

CHECKPOINT = Path("checkpoints/best.ckpt")
"""Path of the checkpoint in the folder of an exported policy, which has a run's layout."""
OF_POLICY = ("pytorch-lightning_version", "state_dict", "hyper_parameters", "mtrl_lightning")
"""Sections of a checkpoint that an exported policy keeps: neither optimizers nor environments."""
TOLERANCE = 1e-4
"""Largest absolute difference between actions that counts as rounding."""
NUM_OBSERVATIONS = 1_000
"""Number of observations on which the exported policy's actions are compared."""
LARGEST_BOUND = 1e3
"""Observation spaces with larger bounds count as unbounded."""

Actions = Callable[[npt.NDArray, npt.NDArray[np.int64]], npt.NDArray]
"""Maps observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``."""


def export_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Write the policy of a checkpoint as a checkpoint without training state.

    Args:
        checkpoint: a run's checkpoint.
        folder: folder of the policy, created if it does not exist.

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
    """A policy's deterministic actions, as they are sent to environments.

    Args:
        algorithm: the algorithm with the policy.
        action_transforms: transforms of its actions, as in an evaluation.
    """

    def __init__(
        self, algorithm: Algorithm, action_transforms: Sequence[ActionTransform] = ()
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(algorithm.acting_modules())
        # not a submodule, so that critics are not exported
        self.__dict__["_algorithm"] = algorithm
        self.action_transforms = list(action_transforms)

    def forward(self, observation: Tensor, task: Tensor) -> Tensor:
        """Map observations ``[E, D]`` and tasks ``[E]`` to actions ``[E, A]``, or their indices."""
        algorithm: Algorithm = self.__dict__["_algorithm"]
        mode_EA = algorithm.policy(observation, task).mode()
        action_EA = zero_padding(mode_EA, algorithm.action_mask(task))
        for transform in self.action_transforms:
            # transforms expect arrays, but tensors support the same operations
            changed_EA: Any = transform.transform(action_EA, task, False)  # type: ignore[arg-type]
            action_EA = changed_EA.to(action_EA.dtype)
        if algorithm.spec.is_discrete:
            parts = action_EA.split(algorithm.spec.action_choices, -1)
            index_EC = torch.stack([part.argmax(-1) for part in parts], -1)
            return index_EC if len(parts) > 1 else index_EC[:, 0]
        return action_EA.clamp(LOW, HIGH) if self.action_transforms else action_EA


def export_policy(
    policy: LoadedPolicy,
    format: str,
    folder: str | Path,
    action_transforms: Sequence[ActionTransform] = (),
    num_observations: int = NUM_OBSERVATIONS,
) -> tuple[Path, float]:
    """Export the deterministic policy to one file, and compare their actions.

    The exported model maps ``observation [E, D]`` and ``task [E]`` (``int64``), for any number of
    rows, to ``action [E, A]``. For discrete actions, it returns their indices: ``[E]``, or
    ``[E, components]`` for several components. Floating-point observations are in single
    precision. The parameters of ``policy`` do not require gradients afterwards.

    Args:
        policy: policy returned by ``load_policy``, on the CPU.
        format: ``onnx`` or ``torch.export``.
        folder: output folder, created if it does not exist.
        action_transforms: the run's transforms of the actions sent to environments.
        num_observations: number of observations on which the actions are compared, at least 1.

    Returns:
        The file, and the largest absolute difference between actions.
    """
    one_of(POLICY_FILES, format=format)
    if format == ONNX:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_optional(package, "export")
    folder = Path(folder)
    algorithm = policy.algorithm.eval().requires_grad_(False)
    algorithm.untrained.fill(algorithm.acting_modules())
    module = _DeterministicPolicy(algorithm, action_transforms).eval()
    # sizes other than 1, which would be exported as constants
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
                f" than the tolerance of {TOLERANCE:g}: choose another format"
            )
        os.replace(file, folder / file.name)
    return folder / file.name, difference


def load_exported(file: str | Path, format: str) -> Actions:
    """Load an exported policy, in the same way as without this package.

    Args:
        file: file written by ``export_policy``.
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
    """Return the largest difference between the actions of a policy and its export.

    Args:
        policy: the original policy.
        exported: exported policy returned by ``load_exported``.
        action_transforms: transforms of the original policy's actions.
        num_observations: number of observations of all tasks, passed in one batch and one by one;
            see ``observations_of``.

    Returns:
        The largest absolute difference; NaN if any action is NaN.
    """
    observation_ED, task_E = observations_of(policy.spec, num_observations)
    chosen_EA = policy.act(observation_ED, task_E)
    expected_EA: npt.NDArray = sent_actions(action_transforms, chosen_EA, task_E, is_training=False)
    if policy.spec.is_discrete:
        expected_EA = chosen(expected_EA, policy.spec.action_choices)
    one_by_one = [exported(observation_ED[[i]], task_E[[i]]) for i in range(num_observations)]
    actions = [exported(observation_ED, task_E), np.concatenate(one_by_one)]
    return float(np.abs(np.stack(actions) - expected_EA).max())


def observations_of(spec: EnvSpec, num: int) -> tuple[npt.NDArray, npt.NDArray[np.int64]]:
    """Sample observations ``[num, D]`` of all tasks in turn, and their tasks ``[num]``.

    Bounded dimensions are sampled uniformly, unbounded ones as in Gymnasium. Padding is 0.
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
