"""Graphs and compilation. Part of every configuration; what a platform cannot do is lowered and said."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pelton.errors import ConfigError


class CUDAGraphMode(StrEnum):
    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class CompilationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Explicit settings win over what the level sets."""

    level: int = 2
    """-O0 (eager) to -O3; sets defaults only."""
    enforce_eager: bool = False
    cudagraph_mode: CUDAGraphMode | None = None
    """From level, backend and platform when unset."""
    cudagraph_capture_sizes: list[int] | None = None
    debug_dump_path: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 3:
            raise ConfigError(f"optimization level is {self.level}; use 0 to 3.")
