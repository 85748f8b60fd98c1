"""Which graph mode a model gets: what was asked for, lowered to what its backends and its device can do.

The mode of a model is bounded by the least of its attention backends, and by what its platform offers. Pieces are graphs
between attention calls: no backend refuses them.
"""

from __future__ import annotations

from collections.abc import Collection

from pelton.attention.support import GraphSupport
from pelton.config.compilation import CompilationConfig, CUDAGraphMode

_NONE, _PIECEWISE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
_DECODE_ONLY, _BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

_FROM_MOST_TO_LEAST = (_FULL, _BOTH, _DECODE_ONLY, _PIECEWISE, _NONE)
_BY_LEVEL = {0: _NONE, 1: _PIECEWISE, 2: _BOTH, 3: _BOTH}


def captures_decode(mode: CUDAGraphMode) -> bool:
    """Uniform decode steps as one graph."""
    return mode in (_FULL, _DECODE_ONLY, _BOTH)


def captures_piecewise(mode: CUDAGraphMode) -> bool:
    return mode in (_PIECEWISE, _BOTH)


def requested_mode(config: CompilationConfig, *, is_pooling: bool = False) -> CUDAGraphMode:
    """Return the mode that the settings ask for: `enforce_eager`, then the mode itself, then the level's."""
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
    offered: Collection[CUDAGraphMode] = tuple(CUDAGraphMode),
    decode_query_len: int = 1,
) -> tuple[CUDAGraphMode, str]:
    """(the nearest mode that can be had, why it differs from `requested` or "").

    support: the least of the model's backends. offered: the platform's modes, NONE among them. decode_query_len: tokens of
    a decode row, 1 + drafts.
    """
    reasons: dict[str, None] = {}
    for mode in _FROM_MOST_TO_LEAST[_FROM_MOST_TO_LEAST.index(requested) :]:
        missing = [_of_backends(mode, support, decode_query_len), _of_platform(mode, offered)]
        if not any(missing):
            return mode, "; ".join(reasons)
        reasons |= dict.fromkeys(filter(None, missing))
    raise AssertionError("every platform offers NONE")


def _of_backends(mode: CUDAGraphMode, support: GraphSupport, decode_query_len: int) -> str:
    """Return what `mode` lacks of them, or ""."""
    if not captures_decode(mode):
        return ""
    if support is GraphSupport.NEVER:
        return "an attention backend of this model cannot be captured"
    if support is GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE and decode_query_len > 1:
        return f"an attention backend captures one token a row, and decode rows have {decode_query_len}"
    if mode is _FULL and support is not GraphSupport.ALWAYS:
        return "an attention backend captures uniform decode batches only"
    return ""


def _of_platform(mode: CUDAGraphMode, offered: Collection[CUDAGraphMode]) -> str:
    if mode in offered:
        return ""
    most_first = [str(known) for known in _FROM_MOST_TO_LEAST if known in offered and known is not _NONE]
    return (
        f"this platform captures {' or '.join(most_first)} only" if most_first else "this platform captures no graphs"
    )
