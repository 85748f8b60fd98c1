"""Which attention backend serves the model."""

from __future__ import annotations

import msgspec

BACKEND_ALIASES = {
    "FLASH_ATTN": "flash_attn", "FLASHINFER": "flashinfer", "TRITON_ATTN": "triton",
    "FLEX_ATTENTION": "flex", "CPU_ATTN": "sdpa", "TORCH_SDPA": "sdpa",
}  # fmt: skip
"""vLLM's spellings, accepted wherever a backend is named."""


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named backend wins over every priority, and fails loudly when it cannot serve the model."""

    backend: str | None = None
    """Name of an attention backend (`pelton backends` lists them); the best that fits when unset."""

    prefill_backend: str | None = None
    """For rows with more than one token of a step, before `backend`."""
    decode_backend: str | None = None
    """For rows with one token of a step, before `backend`. The two must lay out the cache's pages alike."""

    def __post_init__(self) -> None:
        for field in ("backend", "prefill_backend", "decode_backend"):
            name = getattr(self, field)
            if name is not None:
                msgspec.structs.force_setattr(self, field, BACKEND_ALIASES.get(name, name))
