"""Limits that libraries of attention share, each reason against them in words."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pelton.attention.interface import AttentionNeeds

DTYPES = ("bfloat16", "float16")


def refused(
    needs: AttentionNeeds,
    head_dims: Collection[int],
    head_dims_in_words: str,
    capability: tuple[int, int] | None,
    least: tuple[int, int],
) -> list[str]:
    """Give reasons against dtypes, heads and the device. capability: of the device, None where unknown. least: the earliest that
    the library's kernels run on."""
    reasons = []
    if needs.dtype not in DTYPES:
        reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
    if needs.kv_dtype not in ("auto", needs.dtype):
        reasons.append(f"kv dtype {needs.kv_dtype}, only that of the model")
    if needs.head_dim not in head_dims:
        reasons.append(f"head size {needs.head_dim}, only {head_dims_in_words}")
    if needs.num_heads % needs.num_kv_heads:
        reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
    if capability is not None and capability < least:
        reasons.append(
            f"compute capability {'.'.join(map(str, capability))}, only {'.'.join(map(str, least))} and later"
        )
    return reasons
