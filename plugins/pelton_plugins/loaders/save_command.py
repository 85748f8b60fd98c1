"""`pelton save-sharded-state`: a model folder in which each rank has a file of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.sdk.llm_engine import LLMEngine
from pelton_plugins.flags import parse_flags
from pelton_plugins.loaders.sharded_state import MAX_PART_BYTES, PATTERN

DOC = """Write a model as one file a rank, for starts that read nothing else.
Give the sizes and the quantization that it will be served with.

  pelton save-sharded-state meta-llama/Llama-3.1-70B --output llama-70b-8 --tensor-parallel-size 8
  pelton serve llama-70b-8 --tensor-parallel-size 8"""
LEFT_OUT = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt*", "*.ckpt", "*.gguf")


class SaveArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files go."""

    output: str = ""
    """Folder to write; a new or an empty one."""
    pattern: str = PATTERN
    """Names of the files, with {rank} and {part}."""
    max_file_bytes: int = MAX_PART_BYTES
    """Bytes of one file at most; a tensor is never divided."""


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [SaveArguments], program="pelton save-sharded-state", doc=DOC)
    arguments: SaveArguments = parsed.structs["SaveArguments"]
    if not arguments.output:
        raise ConfigError("There is no --output; name the folder to write.")
    output = Path(arguments.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output is {arguments.output}, which is not an empty folder; name a new one.")
    engine = LLMEngine(saving(parsed.config, arguments), explicit=parsed.explicit)
    try:
        source = Path(engine.model.path)
    finally:
        engine.shutdown()
    shutil.copytree(source, output, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    files = sorted(output.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    print(f"{output}: {len(files)} files, {num_bytes / 1e9:.3g} GB")
    return 0


def saving(config: EngineConfig, arguments: SaveArguments) -> EngineConfig:
    """The settings of an engine that writes the files while it starts, and does little else."""
    extra = {"output": arguments.output, "pattern": arguments.pattern, "max_size": arguments.max_file_bytes}
    return replace(
        config,
        load=replace(config.load, load_format="save_sharded_state", model_loader_extra_config=extra),
        model=replace(config.model, skip_tokenizer_init=True),
        compilation=replace(config.compilation, enforce_eager=True),
    )
