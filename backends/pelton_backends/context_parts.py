"""Common parts of backends that attend to a part of each row's tokens (`AttentionNeeds.decode_context_parallel`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.attention.interface import AttentionNeeds

if TYPE_CHECKING:
    from torch import Tensor


def spread_refusals(needs: AttentionNeeds) -> list[str]:
    """Return why a backend cannot attend to a part of each row's tokens, of what goes by place in the whole row."""
    if needs.decode_context_parallel == 1:
        return []
    named = ("sliding_window", "has_sinks", "has_alibi")
    return [f"{name} with decode_context_parallel" for name in named if getattr(needs, name)]


def kept_of(needs: AttentionNeeds, num_tokens: Tensor) -> Tensor:
    """How many of a row's first `num_tokens` this rank's cache has."""
    ranks = needs.decode_context_parallel
    return num_tokens if ranks == 1 else (num_tokens + ranks - 1 - needs.context_rank) // ranks
