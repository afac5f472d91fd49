"""Named random generators, and the process' global ones, with their states."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl_lightning.checkpoints import PER_RANK
from mtrl_lightning.ranks import distributed

NUMPY_BUFFER = 624
"""Numbers in the buffer of NumPy's global generator, an MT19937."""


class Generators:
    """Named random generators, created on the requested device.

    Args:
        seed: base seed; each name gets an independent stream.
        per_rank: names of generators whose streams differ between processes, such as those for
            the rows of a batch or for environments. All others yield the same numbers on all
            processes.
    """

    def __init__(self, seed: int, per_rank: Iterable[str] = ()) -> None:
        self.per_rank = set(per_rank)
        """Names of generators that differ between processes; add one before its first use."""
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._saved: dict[str, Any] = {}

    def get(self, name: str, device: torch.device) -> torch.Generator:
        """Return the generator with this name."""
        if name not in self._generators or self._generators[name].device.type != device.type:
            generator = torch.Generator(device)
            saved = self._saved.get(name)
            if saved is not None and saved["device"] == device.type:
                generator.set_state(saved["state"].cpu())
            else:
                stream = zlib.crc32(f"{name}-{self._seed}".encode())
                if name in self.per_rank:
                    stream = distributed.seed_of_rank(stream)
                generator.manual_seed(stream + (self._seed << 32) % 2**62)
            self._generators[name] = generator
        return self._generators[name]

    def normal_like(self, name: str, tensor: Tensor) -> Tensor:
        """Sample standard normal noise of a tensor's shape from the generator with this name."""
        generator = self.get(name, tensor.device)
        return torch.randn(tensor.shape, generator=generator, device=tensor.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and every generator's device and state."""
        used = self._saved | {
            n: {"device": g.device.type, "state": g.get_state()}
            for n, g in self._generators.items()
        }
        own = {n: used.pop(n) for n in list(used) if n in self.per_rank}
        return {"seed": self._seed, "used": used, PER_RANK: {distributed.rank(): own}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states; a generator saved on another device type restarts from the seed."""
        self._seed = state["seed"]
        self._saved = state["used"] | state[PER_RANK].get(distributed.rank(), {})
        self._generators = {}


def global_generators() -> dict[str, Any]:
    """Return the states of this process' global generators, which only user code samples from."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "python": random.getstate(),
    }


def restore_global_generators(state: dict[str, Any]) -> None:
    """Restore ``global_generators``; those of devices only if their number is the same."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    kind, keys, position, *rest = state["numpy"]
    if not 0 <= position <= NUMPY_BUFFER:  # NumPy does not check it before reading its buffer
        raise ValueError(f"the position in NumPy's generator is {position}")
    np.random.set_state((kind, keys, position, *rest))
    random.setstate(state["python"])
