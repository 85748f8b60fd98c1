"""Make the resolvers that the settings list, once the engine has reported which adapters it takes."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from pelton.lora.resolver import LoRAResolver, ResolverContext
from pelton.plugins import make

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.messages.report import EngineInfo
    from pelton.plugins import Plugins


def make_resolvers(config: EngineConfig, plugins: Plugins, info: EngineInfo) -> list[tuple[str, LoRAResolver]]:
    """(name, resolver) in the order of `lora_resolvers`. Raises `ConfigError` for an unknown one, or one whose settings are wrong."""
    if not config.lora.lora_resolvers:
        return []
    model = config.model.model
    context = ResolverContext(
        config=config,
        max_lora_rank=config.lora.max_lora_rank,
        target_modules=info.report.adapter_modules,
        base_model_names=list(dict.fromkeys([model, PurePath(model).name, *(config.model.served_model_name or [])])),
    )
    entries = [
        plugins.find("pelton_lora_resolvers", name, setting="lora_resolvers") for name in config.lora.lora_resolvers
    ]
    return [(entry.name, make(entry, LoRAResolver, context)) for entry in entries]  # type: ignore[type-abstract]
