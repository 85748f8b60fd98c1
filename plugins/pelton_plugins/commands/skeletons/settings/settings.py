"""`--plugin-config.skeleton.weight 2`, a settings file, or `LLM(plugin_config={"skeleton": {"weight": 2}})`."""

from __future__ import annotations

import msgspec
from pelton.errors import ConfigError


class SkeletonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this plugin."""

    weight: float = 1.0
    """Share of the device, more than 0."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ConfigError(f"plugin_config.skeleton.weight is {self.weight}; use more than 0, such as 1.")
