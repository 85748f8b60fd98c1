"""The name `TREE_ATTN`, for an answer: attention in which drafts are a tree, and a draft sees its own branch."""

from __future__ import annotations

from typing import Any, ClassVar

from pelton.attention.interface import AttentionBackend, AttentionNeeds
from pelton.attention.metadata import BatchDescriptor, CommonMetadata


class TreeAttentionBackend(AttentionBackend):
    """Refuses every layer: no layer of Pelton asks for trees."""

    name: ClassVar[str] = "tree_attn"

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return [
            "serves drafts that branch, and speculative decoding here has one row of drafts, which every backend serves"
        ]

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> Any:
        raise AssertionError("refused")
