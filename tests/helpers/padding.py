"""Networks by name, for tests over all of them."""

from __future__ import annotations

from functools import partial

from mtrl_lightning.networks import (
    MLP,
    MOORE,
    FiLM,
    MultiHead,
    PaCo,
    Separate,
    SoftModularization,
)

NAMES = ("reach-v3", "push-v3", "door-open-v3")
"""Some conditionings read descriptions of the tasks, which there are for these."""
NETWORKS = {
    "mlp": partial(MLP, width=8, depth=2),
    "mlp_residual": partial(MLP, width=8, depth=1, residual=True),
    "multi_head": partial(MultiHead, width=8, depth=2),
    "multi_head_mtrl": partial(MultiHead, width=8, depth=2, head_width=6),
    "paco": partial(PaCo, width=8, depth=2, num_sets=2),
    "moore": partial(MOORE, width=8, depth=2, num_experts=2),
    "separate": partial(Separate, width=8, depth=2),
    "film": partial(FiLM, width=8, depth=2),
    "film_scalar": partial(FiLM, width=8, depth=2, scalar=True),
    "soft_modularization": partial(
        SoftModularization, width=8, depth=2, num_modules=2, embedding_dim=12
    ),
}
