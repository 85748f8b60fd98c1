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

    @classmethod
    def _missing_(cls, value: object) -> CUDAGraphMode | None:
        """Names in lower case, wherever a mode is read."""
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class CompilationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Explicit settings win over what the level sets."""

    level: int = 2
    """-O0 (no graphs), -O1, -O2 or -O3: the default of cudagraph_mode and nothing else (docs/cuda.md)."""
    enforce_eager: bool = False
    """Capture no graphs, whatever level and cudagraph_mode say."""
    cudagraph_mode: CUDAGraphMode | None = None
    """From level, backend and platform when unset."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes, in tokens, that graphs are captured for; when unset, up to max_num_seqs for decode steps, and for others as
    far as graphs save time (docs/cuda.md)."""
    step_kernel: str | None = None
    """Whole-step kernel of a plugin that computes decode steps in place of the model's layers; the best that serves the model when
    unset, "none" for none."""
    debug_dump_path: str | None = None
    """Folder in which each captured graph's nodes are written, to be looked at (CUDA: in Graphviz's language)."""

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 3:
            raise ConfigError(f"level is {self.level}; use 0 to 3 (-O2 is the default).")
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and min(sizes, default=0) < 1:
            raise ConfigError(
                f"cudagraph_capture_sizes is {sizes}; use sizes of at least 1, such as [1, 8]. To capture nothing, set "
                "enforce_eager, or cudagraph_mode NONE."
            )
