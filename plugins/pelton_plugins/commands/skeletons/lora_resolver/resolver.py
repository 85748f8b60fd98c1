"""Adapters by a table of names and folders: `{"plugin_config": {"skeleton": {"adapters": {"sql": "/adapters/sql"}}}}`."""

from __future__ import annotations

import msgspec
from pelton.config.plugin_settings import read_settings
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import ResolverContext


class SkeletonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this plugin."""

    adapters: dict[str, str] = {}
    """Folders of adapters, by the names that requests use."""


class SkeletonResolver:
    """Made once, in the front end. A name comes from a client: only the table decides which folder it stands for."""

    def __init__(self, context: ResolverContext) -> None:
        self._adapters = read_settings(context.config, "skeleton", SkeletonSettings).adapters

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        folder = self._adapters.get(lora_name)
        return None if folder is None else LoRARequest(lora_name, 1, folder)
