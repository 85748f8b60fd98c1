"""Which steps an attention backend supports in captured graphs."""

from __future__ import annotations

from enum import IntEnum


class GraphSupport(IntEnum):
    """A model's is the minimum over its backends."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3
