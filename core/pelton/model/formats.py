"""The promise of a model format, and core's own: a Hugging Face folder.

A format knows how a model lies on disk: where its config, its tokenizer and its weights are. Reading the
weights themselves is the loader's part (`loading.py`), in the worker. Imports no torch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from pelton.tokenizer.tokenizer import Tokenizer

MAX_JSON_BYTES = 256 * 2**20  # of one config, index or tokenizer file
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class ModelFormat(ABC):
    """Made without arguments; methods take the local path that a source found. All raise `ConfigError` naming the file."""

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Whether `path` has this form: from its name and kind alone, nothing is read."""

    @abstractmethod
    def read_config(self, path: Path) -> dict[str, Any]:
        """The fields of config.json, under Hugging Face names."""

    @abstractmethod
    def weights_format(self, path: Path) -> str:
        """Name of the loader for the weights that lie here."""

    def read_generation_config(self, path: Path) -> dict[str, Any]:
        """The fields of generation_config.json; empty when there is none."""
        return {}

    @abstractmethod
    def load_tokenizer(self, path: Path) -> Tokenizer: ...


class HFFolderFormat(ModelFormat):
    """A folder with config.json, tokenizer.json and *.safetensors."""

    def matches(self, path: Path) -> bool:
        return path.is_dir()

    def read_config(self, path: Path) -> dict[str, Any]:
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json; give a folder in Hugging Face form, or a .gguf file.")
        return read_json(file)

    def weights_format(self, path: Path) -> str:
        if any(path.glob("*.safetensors")):
            return "safetensors"
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED_SUFFIXES)
        if pickled:
            raise ConfigError(
                f"{path} has weights only as {pickled[0]}, which Pelton does not read (loading it may run code). "
                "Convert it to safetensors: load it with transformers where you trust it, and save_pretrained()."
            )
        raise ConfigError(f"{path} has no *.safetensors file; download the weights, or use --load-format dummy.")

    def read_generation_config(self, path: Path) -> dict[str, Any]:
        file = path / "generation_config.json"
        return read_json(file) if file.is_file() else {}

    def load_tokenizer(self, path: Path) -> Tokenizer:
        from pelton.tokenizer.hf_folder import load_hf_tokenizer

        return load_hf_tokenizer(path)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} are read. Is it the right file?")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable as JSON: {error}. Download it again, or mend it.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value
