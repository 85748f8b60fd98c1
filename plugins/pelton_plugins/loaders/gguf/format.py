"""The GGUF form of a model: everything in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.model.formats import ModelFormat
from pelton_plugins.loaders.gguf.config import hf_config
from pelton_plugins.loaders.gguf.file import GGUFFile

if TYPE_CHECKING:
    from pelton.tokenizer.interface import Tokenizer


class GGUFFormat(ModelFormat):
    def matches(self, path: Path) -> bool:
        return path.suffix == ".gguf"

    def read_config(self, path: Path) -> dict[str, Any]:
        return hf_config(GGUFFile(path))

    def weights_format(self, path: Path) -> str:
        return "gguf"

    def load_tokenizer(self, path: Path) -> Tokenizer:
        from pelton_plugins.loaders.gguf.tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(GGUFFile(path))
