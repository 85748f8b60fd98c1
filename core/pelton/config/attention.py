"""Which attention backend serves the model."""

from __future__ import annotations

import msgspec


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named backend wins over every priority, and fails loudly when it cannot serve the model."""

    backend: str | None = None
    """Name of an attention backend (`pelton backends` lists them), ours or vLLM's; the best that fits when unset."""
    prefill_backend: str | None = None
    """For rows with more than one token of a step, before `backend`."""
    decode_backend: str | None = None
    """For rows with one token of a step, before `backend`. The two must lay out the cache's pages alike."""
    flash_attn_version: int | None = None
    """For the backend flash_attn: 2, 3 or 4. Of 3, 4 and 2 the first that is installed when unset."""
