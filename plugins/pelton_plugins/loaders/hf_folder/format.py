"""The Hugging Face form of a model: a folder with a file for each part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton.model.formats import ModelFormat, read_json
from pelton.model.pooling import PoolingFolder
from pelton_plugins.loaders.hf_folder.quantization import with_quantization
from pelton_plugins.loaders.hf_folder.sentence_transformers import read_sentence_transformers

if TYPE_CHECKING:
    from pelton.tokenizer.interface import Tokenizer

SHARDED_STATE = "model-rank-0-part-0.safetensors"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class HFFolderFormat(ModelFormat):
    """A folder with config.json, tokenizer.json and *.safetensors."""

    def matches(self, path: Path) -> bool:
        return path.is_dir()

    def read_config(self, path: Path) -> dict[str, Any]:
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json; give a folder in Hugging Face form, or a .gguf file.")
        return with_quantization(read_json(file), path)

    def weights_format(self, path: Path) -> str:
        if (path / SHARDED_STATE).is_file():
            return "sharded_state"
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

    def read_pooling(self, path: Path) -> PoolingFolder:
        return read_sentence_transformers(path)

    def load_tokenizer(self, path: Path) -> Tokenizer:
        from pelton_plugins.loaders.hf_folder.tokenizer import load_hf_tokenizer

        return load_hf_tokenizer(path)
