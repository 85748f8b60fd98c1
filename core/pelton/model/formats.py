"""The interface of a model format, such as a Hugging Face folder or a GGUF file.

A format knows how a model lies on disk: where its config, its tokenizer and its weights are. Reading the
weights themselves is the loader's part (`loading.py`), in the worker. Imports no torch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton.model.pooling import PoolingFolder

if TYPE_CHECKING:
    from pelton.tokenizer.interface import Tokenizer

MAX_JSON_BYTES = 256 * 2**20  # of one config, index or tokenizer file


class ModelFormat(ABC):
    """Made without arguments; methods take the local path that a source found. All raise `ConfigError` naming the file."""

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Return whether `path` has this form: from its name and kind alone, nothing is read."""

    @abstractmethod
    def read_config(self, path: Path) -> dict[str, Any]:
        """The fields of config.json, under Hugging Face names."""

    @abstractmethod
    def weights_format(self, path: Path) -> str:
        """Name of the loader for the weights that lie here."""

    def read_generation_config(self, path: Path) -> dict[str, Any]:
        """The fields of generation_config.json; empty when there is none."""
        return {}

    def read_pooling(self, path: Path) -> PoolingFolder:
        """Read what lies beside the config on pooling; an empty one when nothing does."""
        return PoolingFolder()

    @abstractmethod
    def load_tokenizer(self, path: Path) -> Tokenizer: ...


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} are read. Is it the right file?")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable as JSON: {error}. Download it again, or fix it.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value
