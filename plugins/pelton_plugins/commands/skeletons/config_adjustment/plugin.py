"""A config adjustment: a setting changed with its reason, before anything is built.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pelton import hookimpl
from pelton.config import EngineConfig

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_config_adjustments(config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
    """Settings that the user gave stay; two plugins that want different values are an error."""
    if config.kv_cache.enable_prefix_caching:
        return {}
    return {"kv_cache_metrics": (False, "skeleton: residency says nothing without a prefix cache")}
