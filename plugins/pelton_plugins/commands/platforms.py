"""Every platform on offer, and which one is chosen: for commands that list them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.platform.select import PlatformStatus, choose_platform, platform_statuses

if TYPE_CHECKING:
    from pelton.plugins import Plugins


def describe_platforms(config: EngineConfig, plugins: Plugins) -> list[tuple[PlatformStatus, bool]]:
    """(status, chosen) of every platform on offer, best first; nothing is chosen when nothing fits."""
    statuses = platform_statuses(plugins)
    try:
        chosen = choose_platform(statuses, config.parallel.device)
    except ConfigError:
        return [(status, False) for status in statuses]
    return [(status, status is chosen) for status in statuses]
