"""`lora_filesystem_resolver`: the adapter `sql` is the PEFT folder `<cache_dir>/sql`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from pelton import limits
from pelton.config.plugin_settings import read_settings
from pelton.errors import ConfigError, InvalidAdapterError
from pelton.lora.peft import PeftConfig, check_targets, read_config
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import ResolverContext
from pelton_plugins.lora_resolvers.settings import NAME, ResolverSettings


class FilesystemResolver:
    def __init__(self, context: ResolverContext) -> None:
        self._context = context
        cache_dir = read_settings(context.config, NAME, ResolverSettings).cache_dir
        if cache_dir is None or not os.path.isdir(cache_dir) or not os.access(cache_dir, os.R_OK | os.X_OK):
            raise ConfigError(
                f"plugin_config.lora_resolvers.cache_dir is {cache_dir!r}: it must be set to a valid directory that can be "
                "read, for lora_filesystem_resolver. Create it, or leave the resolver out of lora_resolvers."
            )
        self._cache_dir = Path(cache_dir).resolve()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        folder = await asyncio.to_thread(find_folder, self._cache_dir, lora_name)
        if folder is None:
            return None
        await asyncio.to_thread(check_folder, folder, lora_name, self._context)
        return LoRARequest(lora_name, 1, str(folder))


def find_folder(parent: Path, name: str) -> Path | None:
    """The folder `name` below `parent`; None where there is none, or the name leads elsewhere."""
    parts = PurePath(name).parts
    is_plain = 0 < len(name) <= limits.MAX_ADAPTER_NAME_CHARS and "\0" not in name and "\\" not in name
    if not is_plain or not parts or any(part in ("..", ".", "/") for part in name.split("/")) or name.startswith("/"):
        return None
    try:
        folder = (parent / name).resolve()
        return folder if folder.is_relative_to(parent) and folder != parent and folder.is_dir() else None
    except OSError:
        return None


def check_folder(folder: Path, name: str, context: ResolverContext) -> PeftConfig:
    """All that can be said without the weights. Raises `AdapterNotFoundError`, `InvalidAdapterError`, `AdapterRankError`."""
    config = read_config(folder, max_rank=context.max_lora_rank, name=name)
    check_base(config, context.base_model_names, name)
    check_targets(config, context.target_modules, name)
    return config


def check_base(config: PeftConfig, base_names: Sequence[str], name: str) -> None:
    """Raise `InvalidAdapterError` for an adapter of another model. A path counts by its last part: the model may lie elsewhere here."""
    base = config.base_model
    if base is None:
        raise InvalidAdapterError(
            f"Invalid adapter configuration: base_model_name_or_path is missing (adapter {name!r}).", param="model"
        )
    known = {PurePath(known).name for known in base_names}
    if PurePath(base).name not in known:
        raise InvalidAdapterError(
            f"Invalid adapter configuration: base_model_name_or_path is {base!r}, and this server's model is "
            f"{base_names[0]!r} (adapter {name!r}).",
            param="model",
        )
