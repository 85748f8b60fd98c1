"""Refusals of products: weight formats, dtypes, sizes and ranks that their kernels do not take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pelton_backends.triton.ops.pieces import ACTIVATIONS

MAX_HIDDEN_SIZE = 16384
"""Numbers of a row that one program norms: it holds them in its registers."""


def dtype_refusals(dtype: str, dtypes: Collection[str]) -> list[str]:
    return [] if dtype in dtypes else [f"dtype {dtype}, only {', '.join(dtypes)}"]


def row_refusals(needs: Any, dtypes: Collection[str], max_hidden_size: int | None = MAX_HIDDEN_SIZE) -> list[str]:
    """Return the refusals of what is done to rows before and behind a product: norms and activations."""
    reasons = dtype_refusals(needs.dtype, dtypes)
    if max_hidden_size is not None and hasattr(needs, "norm") and needs.norm.size > max_hidden_size:
        reasons.append(f"hidden size {needs.norm.size}, at most {max_hidden_size}")
    if hasattr(needs, "activation") and needs.activation not in ACTIVATIONS:
        reasons.append(f"activation {needs.activation!r}")
    return reasons


def format_refusals(weight_format: str, formats: Collection[str]) -> list[str]:
    if weight_format in formats:
        return []
    known = repr(next(iter(formats))) if len(formats) == 1 else ", ".join(formats)
    return [f"weight format {weight_format!r}, only {known}"]


def product_refusals(
    needs: Any, formats: Collection[str], dtypes: Collection[str], max_hidden_size: int | None = MAX_HIDDEN_SIZE, *,
    sums_over_ranks: bool = False,
) -> list[str]:  # fmt: skip
    """Return the refusals of a product with its norm and activation, where the needs have them."""
    reasons = format_refusals(needs.linear.weight_format, formats) + row_refusals(needs, dtypes, max_hidden_size)
    if getattr(needs, "tp_size", 1) > 1 and not sums_over_ranks:
        reasons.append(f"tp_size {needs.tp_size}: the sum over ranks is `add_norm`'s")
    return reasons


def logits_refusals(
    needs: Any, formats: Collection[str], dtypes: Collection[str], *, sums_over_ranks: bool = False
) -> list[str]:
    reasons = format_refusals(needs.linear.weight_format, formats) + dtype_refusals(needs.dtype, dtypes)
    if needs.tp_size > 1 and not sums_over_ranks:
        reasons.append("a vocabulary split over ranks")
    return reasons
