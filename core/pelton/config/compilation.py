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
    """Capture and compile nothing."""
    cudagraph_mode: CUDAGraphMode | None = None
    """From level, backend and platform when unset."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes, in tokens, that graphs are captured for; from max_num_seqs when unset."""
    debug_dump_path: str | None = None
    """Folder for what the compiler and the graphs leave to be looked at."""

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 3:
            raise ConfigError(f"level is {self.level}; use 0 to 3 (-O2 is the default).")
