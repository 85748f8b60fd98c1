"""Two backends for one group: one for rows with a single token, which come first in a batch, one for the others.

Keys and values of all rows are written before either attends, so that both may read them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.attention.interface import AttentionBackend, AttentionNeeds, KVLayout
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.support import GraphSupport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.layers.attention import AttentionLayer


@dataclass(slots=True)
class PhasedMetadata:
    """The metadata of each backend's rows; None where it has none."""

    slots: Tensor  # [T] int64, of all rows
    num_decode_tokens: int
    decode: Any = None
    prefill: Any = None


class PhasedBackend(AttentionBackend):
    """Made by `phased`. A captured step of any rows is all the prefill backend's: which rows decode is not known then."""

    decode_class: ClassVar[type[AttentionBackend]]
    prefill_class: ClassVar[type[AttentionBackend]]

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        both = (cls.decode_class, cls.prefill_class)
        return [reason for backend in both for reason in backend.unsupported(needs, capability)]

    @classmethod
    def kv_layout(cls, needs: AttentionNeeds) -> KVLayout:
        return cls.prefill_class.kv_layout(needs)

    def __init__(
        self, needs: AttentionNeeds, device: torch.device, *, max_num_seqs: int, max_num_tokens: int, max_model_len: int
    ) -> None:
        super().__init__(
            needs, device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len
        )
        self.decode, self.prefill = (
            backend(
                needs, device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len
            )
            for backend in (self.decode_class, self.prefill_class)
        )

    def uses_common_prefix(self, num_rows: int, prefix_len: int) -> bool:
        return self.decode.uses_common_prefix(num_rows, prefix_len)

    def reserve(self, max_key: BatchDescriptor) -> None:
        self.decode.reserve(max_key)
        self.prefill.reserve(max_key)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> PhasedMetadata:
        num_decode = common.num_decode_tokens if key is None else common.num_tokens if key.uniform_query_len == 1 else 0
        metadata = PhasedMetadata(common.slot_mapping, num_decode)
        if num_decode == common.num_tokens or (key is None and common.num_decode_rows == common.num_reqs):
            metadata.num_decode_tokens = common.num_tokens
            metadata.decode = self.decode.build(common, key)
        elif num_decode == 0:
            metadata.prefill = self.prefill.build(common, key)
        else:
            decodes, others = split_rows(common)
            metadata.decode, metadata.prefill = self.decode.build(decodes), self.prefill.build(others)
        return metadata

    def slot_mapping(self, metadata: PhasedMetadata) -> Tensor:
        return metadata.slots

    def forward(self, layer: AttentionLayer, query: Tensor, metadata: PhasedMetadata, output: Tensor) -> Tensor:
        count = metadata.num_decode_tokens
        if metadata.decode is not None:
            self.decode.forward(layer, query[:count], metadata.decode, output[:count])
        if metadata.prefill is not None:
            self.prefill.forward(layer, query[count:], metadata.prefill, output[count:])
        return output

    def forward_qkv(
        self, layer: AttentionLayer, qkv: Tensor, positions: Tensor, metadata: PhasedMetadata, output: Tensor
    ) -> Tensor:
        if metadata.prefill is None:
            return self.decode.forward_qkv(layer, qkv, positions, metadata.decode, output)
        if metadata.decode is None:
            return self.prefill.forward_qkv(layer, qkv, positions, metadata.prefill, output)
        return super().forward_qkv(layer, qkv, positions, metadata, output)


def split_rows(common: CommonMetadata) -> tuple[CommonMetadata, CommonMetadata]:
    """A step's rows with one token, and the others, each as a step of its own."""
    rows, tokens = common.num_decode_rows, common.num_decode_tokens
    decodes = replace(
        common, query_start_loc=common.query_start_loc[: rows + 1], seq_lens=common.seq_lens[:rows],
        block_table=common.block_table[:rows], slot_mapping=common.slot_mapping[:tokens], num_reqs=rows,
        num_tokens=tokens, num_actual_tokens=tokens, max_query_len=1,
    )  # fmt: skip
    others = replace(
        common, query_start_loc=common.query_start_loc[rows:] - tokens, seq_lens=common.seq_lens[rows:],
        block_table=common.block_table[rows:], slot_mapping=common.slot_mapping[tokens:],
        num_reqs=common.num_reqs - rows, num_tokens=common.num_tokens - tokens,
        num_actual_tokens=common.num_actual_tokens - tokens, num_decode_rows=0, num_decode_tokens=0,
        common_prefix_len=0, common_prefix=None,
    )  # fmt: skip
    return decodes, others


@cache
def phased(decode: type[AttentionBackend], prefill: type[AttentionBackend]) -> type[PhasedBackend]:
    """The class of one pair. Its graph support is the least of those of the backends that a captured step runs: steps of one
    token a row never run prefill's, so one that can capture nothing leaves them to decode's."""
    support = min(decode.graph_support, max(prefill.graph_support, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE))
    attributes = {
        "name": f"{decode.name}+{prefill.name}",
        "handles": decode.handles & prefill.handles,
        "graph_support": support,
        "decode_class": decode,
        "prefill_class": prefill,
    }
    return type("PhasedBackend", (PhasedBackend,), attributes)
