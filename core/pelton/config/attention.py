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

    def __post_init__(self) -> None:
        if self.backend is not None:
            msgspec.structs.force_setattr(self, "backend", BACKEND_ALIASES.get(self.backend, self.backend))
