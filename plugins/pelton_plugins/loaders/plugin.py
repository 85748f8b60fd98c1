"""Hook functions of the built-in weight loaders and model formats."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import CommandEntry, Entry, LoaderEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    return [
        LoaderEntry(name="safetensors", load="pelton_plugins.loaders.safetensors_loader:SafetensorsLoader",
                    doc="single or sharded *.safetensors, read by several threads"),
        LoaderEntry(name="gguf", load="pelton_plugins.loaders.gguf.loader:GGUFLoader",
                    doc="a .gguf file, dequantized as it is loaded"),
        LoaderEntry(name="sharded_state", load="pelton_plugins.loaders.sharded_state:ShardedStateLoader",
                    doc="one file a rank, as pelton save-sharded-state writes it"),
        LoaderEntry(name="save_sharded_state", load="pelton_plugins.loaders.sharded_state:SavingLoader", priority=10,
                    doc="as safetensors, and writes each rank's file; for pelton save-sharded-state"),
        LoaderEntry(name="streamed", load="pelton_plugins.loaders.streamed_loader:StreamedLoader",
                    doc="one safetensors file or an index, from a path or an HTTP server, by several connections"),
        LoaderEntry(name="dummy", load="pelton_plugins.loaders.dummy_loader:DummyLoader", priority=10, doc="random weights"),
    ]  # fmt: skip


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    return [CommandEntry(name="save-sharded-state", load="pelton_plugins.loaders.save_command:run", priority=10,
                         help="write a model as one file a rank, which starts read whole")]  # fmt: skip


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
