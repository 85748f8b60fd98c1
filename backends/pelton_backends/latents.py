"""Common parts of attention backends over latents (MLA)."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.attention.interface import AttentionNeeds
from pelton_backends.context_parts import spread_refusals


def latent_refusals(needs: AttentionNeeds, dtypes: Sequence[str]) -> list[str]:
    """Return why a backend of latents, whose model and cache have one of `dtypes`, cannot serve `needs`."""
    reasons = [] if needs.is_mla else ["keys and values of their own, only latents"]
    if needs.dtype not in dtypes:
        reasons.append(f"dtype {needs.dtype}, only {', '.join(dtypes)}")
    if needs.kv_dtype not in ("auto", *dtypes):
        reasons.append(f"kv dtype {needs.kv_dtype}, only auto, {', '.join(dtypes)}")
    return reasons + spread_refusals(needs)
