"""Offers the built-in LoRA resolvers and their settings."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_lora_resolvers() -> Sequence[Entry]:
    return [
        Entry(
            name="lora_filesystem_resolver",
            load="pelton_plugins.lora_resolvers.filesystem:FilesystemResolver",
            doc="folders below plugin_config.lora_resolvers.cache_dir",
        ),
        Entry(
            name="lora_hf_hub_resolver",
            load="pelton_plugins.lora_resolvers.hub:HubResolver",
            doc="folders of the hub's repositories that plugin_config.lora_resolvers.hub_repositories lists",
        ),
    ]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(
            name="lora_resolvers", load="pelton_plugins.lora_resolvers.settings:ResolverSettings",
            doc="where LoRA resolvers look",
        )
    ]  # fmt: skip
