"""A folder with skeleton.json, safetensors files and a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pelton.model.formats import ModelFormat, read_json
from pelton.plugins import load_plugins
from pelton.tokenizer.interface import Tokenizer

CONFIG = "skeleton.json"


class SkeletonFormat(ModelFormat):
    """Reads what lies beside the weights; a loader reads those."""

    def matches(self, path: Path) -> bool:
        return (path / CONFIG).is_file()

    def read_config(self, path: Path) -> dict[str, Any]:
        return read_json(path / CONFIG)

    def weights_format(self, path: Path) -> str:
        return "safetensors"  # a name of `pelton_model_loaders`

    def load_tokenizer(self, path: Path) -> Tokenizer:
        folder = load_plugins(only=()).find("pelton_model_formats", "hf_folder", setting="the tokenizer's format")
        return folder.resolve()().load_tokenizer(path)
