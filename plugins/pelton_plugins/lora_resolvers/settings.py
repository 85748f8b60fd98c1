"""Settings of the built-in LoRA resolvers."""

from __future__ import annotations

import msgspec

NAME = "lora_resolvers"


class ResolverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where adapters are looked for."""

    cache_dir: str | None = None
    """lora_filesystem_resolver: the folder that has a PEFT folder for each adapter, by its name."""
    hub_repositories: list[str] = msgspec.field(default_factory=list)
    """lora_hf_hub_resolver: repositories that may be downloaded from, as owner/name; no other ever is."""
