"""Settings of this plugin: `--plugin-config.window_model.release_blocks 8`."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError


class WindowModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the example model."""

    release_blocks: int = 4
    """Blocks that a window has passed and that are given back together: fewer, larger releases for some more memory."""

    def __post_init__(self) -> None:
        if self.release_blocks < 1:
            raise ConfigError(
                f"plugin_config.window_model.release_blocks is {self.release_blocks}; use at least 1, such as 4."
            )
