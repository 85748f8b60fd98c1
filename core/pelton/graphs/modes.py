"""Which graph mode a model gets: what was asked for, lowered to what its backends and its device can do.

The mode of a model is bounded by the least of its attention backends. Pieces are graphs between attention calls: a device
that can capture at all has them.
"""

from __future__ import annotations

from collections.abc import Collection

from pelton.attention.support import GraphSupport
from pelton.config.compilation import CompilationConfig, CUDAGraphMode

_NONE, _PIECEWISE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
_DECODE_ONLY, _BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

_BY_LEVEL = {0: _NONE, 1: _PIECEWISE, 2: _BOTH, 3: _BOTH}


def captures_decode(mode: CUDAGraphMode) -> bool:
    """Uniform decode steps as one graph."""
    return mode in (_FULL, _DECODE_ONLY, _BOTH)


def captures_pieces(mode: CUDAGraphMode) -> bool:
    return mode in (_PIECEWISE, _BOTH)


def requested_mode(config: CompilationConfig, *, is_pooling: bool = False) -> CUDAGraphMode:
    """What the settings ask for: `enforce_eager`, then the mode itself, then the level's."""
    if config.enforce_eager:
        return _NONE
    if config.cudagraph_mode is not None:
        return config.cudagraph_mode
    mode = _BY_LEVEL[config.level]
    return _PIECEWISE if is_pooling and mode is _BOTH else mode


def lower_mode(
    requested: CUDAGraphMode,
    support: GraphSupport,
    *,
    has_pieces: bool = True,
    decode_query_len: int = 1,
    offered: Collection[CUDAGraphMode] | None = None,
) -> tuple[CUDAGraphMode, str]:
    """(the nearest mode that can be had, why it differs from `requested` or "").

    support: the least of the model's backends. decode_query_len: tokens of a decode row, 1 + drafts. offered: the
    platform's modes, None for all.
    """
    mode, why = requested, ""
    if captures_decode(mode):
        less = _PIECEWISE if has_pieces else _NONE
        if support is GraphSupport.NEVER:
            mode, why = less, "an attention backend of this model cannot be captured"
        elif support is GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE and decode_query_len > 1:
            mode, why = less, f"an attention backend captures one token a row, and decode rows have {decode_query_len}"
        elif mode is _FULL and support is not GraphSupport.ALWAYS:
            mode = _BOTH if has_pieces else _DECODE_ONLY
            why = "an attention backend captures uniform decode batches only"
    if not has_pieces and captures_pieces(mode):
        mode = _DECODE_ONLY if mode is _BOTH else _NONE
        why = why or "this device has no piecewise graphs"
    if offered is not None and mode not in offered:
        mode, why = _NONE, "this platform does not capture graphs"
    return mode, why
