"""The native plugin's settings, `plugin_config.native`, as the front end checks them."""

from __future__ import annotations

import msgspec


class NativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the native backend."""

    isa: str | None = None
    """Instruction set that the kernels are compiled for; by default the best that CPU and compiler have."""
