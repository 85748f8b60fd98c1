"""Settings of KV transfer: a connector brings KV cache from elsewhere, and saves it there."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class KVRole(StrEnum):
    """The part that a connector plays here."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    """Save only."""
    CONSUMER = "kv_consumer"
    """Load only."""

    @property
    def saves(self) -> bool:
        return self is not KVRole.CONSUMER

    @property
    def loads(self) -> bool:
        return self is not KVRole.PRODUCER


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which KV connector is used, and for what."""

    kv_connector: str | None = None
    """Name of a KV connector, such as shared_storage; none when unset."""
    kv_role: KVRole = KVRole.BOTH
    """kv_both, kv_producer (saves only) or kv_consumer (loads only)."""
    kv_connector_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of the connector itself; it checks them."""
