"""A name for a model's KV cache: equal for engines that would compute the same KV, different for all others.

Weights are told apart by their files' names, sizes, and samples of their content: reading all of them would take as long as
loading the model. Where the files lie does not matter.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pelton.model.resolved import ResolvedModel

_FORMAT = 1
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_SUFFIXES = (".safetensors", ".gguf")


def model_fingerprint(model: ResolvedModel, block_size: int) -> str:
    """Return a folder's name, 32 hexadecimal digits."""
    digest = hashlib.sha256()
    described = {
        "format": _FORMAT, "config": model.hf_config, "dtype": model.dtype, "architecture": model.architecture,
        "weights": model.weights_format, "block_size": block_size,
    }  # fmt: skip
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    path = Path(model.path)
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES)
    for file in files:
        digest.update(f"\0{'' if path.is_file() else file.name}\0{file.stat().st_size}\0".encode())
        _add_samples(digest, file)
    return digest.hexdigest()[:32]


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    """Add samples from the whole length of the file, its first and last bytes among them."""
    last = max(file.stat().st_size - _SAMPLE_BYTES, 0)
    with file.open("rb") as opened:
        for index in range(_NUM_SAMPLES):
            opened.seek(last * index // (_NUM_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
