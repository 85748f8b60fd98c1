"""Hook functions of the built-in weight loaders and model formats."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, LoaderEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    return [
        LoaderEntry(name="safetensors", load="pelton_plugins.loaders.safetensors_loader:SafetensorsLoader",
                    doc="single or sharded *.safetensors, memory-mapped"),
        LoaderEntry(name="gguf", load="pelton_plugins.loaders.gguf.loader:GGUFLoader",
                    doc="a .gguf file, dequantized as it is loaded"),
        LoaderEntry(name="dummy", load="pelton_plugins.loaders.dummy_loader:DummyLoader", priority=10, doc="random weights"),
    ]  # fmt: skip


@hookimpl
def pelton_quantization_methods() -> Sequence[Entry]:
    return [Entry(name="gguf", load="pelton_plugins.loaders.gguf.quantization:GGUFBlocks",
                  doc="a .gguf file's own blocks, kept packed")]  # fmt: skip


@hookimpl
def pelton_model_formats() -> Sequence[Entry]:
    return [
        Entry(name="hf_folder", load="pelton_plugins.loaders.hf_folder.format:HFFolderFormat", priority=10,
              doc="a folder with config.json, tokenizer.json and *.safetensors"),
        Entry(name="gguf", load="pelton_plugins.loaders.gguf.format:GGUFFormat",
              doc="a .gguf file with config, tokenizer and weights"),
    ]  # fmt: skip
