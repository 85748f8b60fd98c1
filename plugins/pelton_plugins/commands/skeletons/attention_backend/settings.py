"""`--plugin-config.skeleton.scores_kib 8192`, a settings file, or `LLM(plugin_config={"skeleton": {"scores_kib": 8192}})`."""

from __future__ import annotations

import msgspec
from pelton.errors import ConfigError


class SkeletonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this plugin."""

    scores_kib: int = 65_536
    """Memory of the scores of one row; a prompt that needs more attends in pieces."""

    def __post_init__(self) -> None:
        if self.scores_kib < 1:
            raise ConfigError(f"plugin_config.skeleton.scores_kib is {self.scores_kib}; use at least 1, such as 65536.")
