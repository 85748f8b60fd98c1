"""`--plugin-config.skeleton.most_tokens 64`, a settings file, or `LLM(plugin_config={"skeleton": {"most_tokens": 64}})`."""

from __future__ import annotations

import msgspec
from pelton.errors import ConfigError


class SkeletonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this plugin."""

    most_tokens: int | None = None
    """Tokens of the largest step that is served; larger ones go to the next op by priority. None: all."""

    def __post_init__(self) -> None:
        if self.most_tokens is not None and self.most_tokens < 1:
            raise ConfigError(f"plugin_config.skeleton.most_tokens is {self.most_tokens}; use at least 1, such as 64.")
