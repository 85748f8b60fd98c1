"""Common parts of attention backends over latents (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pelton.attention.interface import AttentionNeeds
from pelton_backends.context_parts import spread_refusals

if TYPE_CHECKING:
    from torch import Tensor

INDEXER = "indexer"
"""`AttentionNeeds.attention_type` of a layer that chooses which tokens another one attends to."""


def latent_refusals(needs: AttentionNeeds, dtypes: Sequence[str]) -> list[str]:
    """Return why a backend of latents, whose model and cache have one of `dtypes`, cannot serve `needs`."""
    reasons = [] if needs.is_mla else ["keys and values of their own, only latents"]
    if needs.dtype not in dtypes:
        reasons.append(f"dtype {needs.dtype}, only {', '.join(dtypes)}")
    if needs.kv_dtype not in ("auto", *dtypes):
        reasons.append(f"kv dtype {needs.kv_dtype}, only auto, {', '.join(dtypes)}")
    return reasons + spread_refusals(needs)


def sparse_refusals(needs: AttentionNeeds, dtypes: Sequence[str]) -> list[str]:
    """The same of a backend that attends to chosen latents, and chooses them."""
    if needs.attention_type == INDEXER:
        return latent_refusals(replace(needs, is_mla=True), dtypes)
    reasons = latent_refusals(needs, dtypes)
    if needs.attention_type != "decoder":
        reasons.append(f"attention type {needs.attention_type}, only decoder, {INDEXER}")
    if not needs.is_sparse:
        reasons.append("attention to all tokens, only to those that an indexer chooses")
    return reasons


def sinks_of(layer: Any) -> Tensor | None:
    """Return the sinks [num_heads] of a layer over latents, of its attribute `sinks`, where its needs say that it has some."""
    return layer.sinks if layer.needs.has_sinks else None
