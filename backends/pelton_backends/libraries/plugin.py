"""Attention backends of libraries, each with its reasons where it cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import BackendEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"
_ENTRIES = (
    # Measured on an H200 only where docs/performance.md says so: a package that is there is not taken by itself.
    (
        "flash_attn",
        "flash_attn:FlashAttentionBackend",
        40,
        ("cuda",),
        "FlashAttention 2, 3 or 4, of the packages flash_attn and flash_attn_4",
    ),
    ("flashinfer", "flashinfer:FlashInferBackend", 35, ("cuda",), "of the package flashinfer"),
    (
        "flex_attention",
        "flex:FlexAttentionBackend",
        5,
        ("cpu", "cuda", "rocm"),
        "torch's FlexAttention over gathered blocks",
    ),
    ("tree_attn", "tree:TreeAttentionBackend", 1, ("cpu", "cuda", "rocm"), "drafts in trees: refused, and why"),
)


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    return [
        BackendEntry(
            name=name, load=f"pelton_backends.libraries.{target}", priority=priority, device_types=(device_type,), doc=doc
        )
        for name, target, priority, device_types, doc in _ENTRIES
        if device_type in device_types
    ]  # fmt: skip
