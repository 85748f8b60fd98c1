"""Two backends for one group: one for rows with a single token, which come first in a batch, one for the others.

Keys and values of all rows are written before either attends, so that both may read them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, KVLayout
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.support import GraphSupport

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Phased:
    """A choice of two backend classes, in place of one: called like a class, it makes a `PhasedBackend`."""

    decode: type[AttentionBackend]
    prefill: type[AttentionBackend]

    @property
    def name(self) -> str:
        return f"{self.decode.name}+{self.prefill.name}"

    @property
    def graph_support(self) -> GraphSupport:
        """The least support of the backends that a captured step runs. Steps of one token a row never run prefill's, so one that
        can capture nothing leaves them to decode's."""
        return min(self.decode.graph_support, max(self.prefill.graph_support, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE))

    def kv_layout(self, needs: AttentionNeeds) -> KVLayout:
        return self.prefill.kv_layout(needs)

    def builder_needs(self, needs: AttentionNeeds) -> Hashable:
        return self.decode.builder_needs(needs), self.prefill.builder_needs(needs)

    def __call__(
        self, needs: AttentionNeeds, device: torch.device, *, max_num_seqs: int, max_num_tokens: int, max_model_len: int
    ) -> PhasedBackend:
        decode, prefill = (
            backend(
                needs, device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len
            )
            for backend in (self.decode, self.prefill)
        )
        return PhasedBackend(decode, prefill)


BackendChoice = type[AttentionBackend] | Phased


@dataclass(slots=True)
class PhasedMetadata:
    """The metadata of each backend's rows; None where it has none."""

    common: CommonMetadata  # of all rows
    num_decode_tokens: int
    decode: Any = None
    prefill: Any = None


class PhasedBackend(AttentionBackend):
    """Two backends as one. A captured step of any rows is all the prefill backend's: which rows decode is not known then."""

    def __init__(self, decode: AttentionBackend, prefill: AttentionBackend) -> None:
        super().__init__(
            prefill.needs,
            prefill.device,
            max_num_seqs=prefill.max_num_seqs,
            max_num_tokens=prefill.max_num_tokens,
            max_model_len=prefill.max_model_len,
        )
        self.decode, self.prefill = decode, prefill
        self.needs_zeroed_blocks = decode.needs_zeroed_blocks or prefill.needs_zeroed_blocks

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        """Both classes were asked when they were chosen."""
        return []

    def uses_common_prefix(self, num_rows: int, prefix_len: int) -> bool:
        return self.decode.uses_common_prefix(num_rows, prefix_len)

    def reserve(self, max_key: BatchDescriptor) -> None:
        self.decode.reserve(max_key)
        self.prefill.reserve(max_key)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> PhasedMetadata:
        num_decode = common.num_decode_tokens if key is None else common.num_tokens if key.uniform_query_len == 1 else 0
        metadata = PhasedMetadata(common, num_decode)
        if num_decode == common.num_tokens or (key is None and common.num_decode_rows == common.num_reqs):
            metadata.num_decode_tokens = common.num_tokens
            metadata.decode = self.decode.build(common, key)
        elif num_decode == 0:
            metadata.prefill = self.prefill.build(common, key)
        else:
            decodes, others = split_rows(common)
            metadata.decode, metadata.prefill = self.decode.build(decodes), self.prefill.build(others)
        return metadata

    def bind(self, layer: Any) -> BoundAttention:
        return PhasedAttention(layer, self.decode.bind(layer), self.prefill.bind(layer))


class PhasedAttention(BoundAttention):
    """A layer's attention by both backends."""

    def __init__(self, layer: Any, decode: BoundAttention, prefill: BoundAttention) -> None:
        super().__init__(layer)
        self._decode, self._prefill = decode, prefill

    def __call__(self, query: Tensor, metadata: PhasedMetadata, output: Tensor) -> None:
        count = metadata.num_decode_tokens
        if metadata.decode is not None:
            self._decode(query[:count], metadata.decode, output[:count])
        if metadata.prefill is not None:
            self._prefill(query[count:], metadata.prefill, output[count:])

    def attend_part(self, query: Tensor, metadata: PhasedMetadata, output: Tensor, lse: Tensor) -> None:
        count = metadata.num_decode_tokens
        if metadata.decode is not None:
            self._decode.attend_part(query[:count], metadata.decode, output[:count], lse[:count])
        if metadata.prefill is not None:
            self._prefill.attend_part(query[count:], metadata.prefill, output[count:], lse[count:])

    def write_and_attend(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, metadata: PhasedMetadata, output: Tensor
    ) -> object:
        if metadata.prefill is None:
            return self._decode.write_and_attend(qkv, positions, slot_mapping, metadata.decode, output)
        if metadata.decode is None:
            return self._prefill.write_and_attend(qkv, positions, slot_mapping, metadata.prefill, output)
        return super().write_and_attend(qkv, positions, slot_mapping, metadata, output)


def split_rows(common: CommonMetadata) -> tuple[CommonMetadata, CommonMetadata]:
    """A step's rows with one token, and the others, each as a step of its own."""
    rows, tokens = common.num_decode_rows, common.num_decode_tokens
    decodes = replace(
        common, query_start_loc=common.query_start_loc[: rows + 1], seq_lens=common.seq_lens[:rows],
        block_table=common.block_table[:rows], slot_mapping=common.slot_mapping[:tokens],
        num_reqs=rows, num_tokens=tokens, num_actual_tokens=tokens, max_query_len=1,
    )  # fmt: skip
    others = replace(
        common, query_start_loc=common.query_start_loc[rows:] - tokens, seq_lens=common.seq_lens[rows:],
        block_table=common.block_table[rows:], slot_mapping=common.slot_mapping[tokens:],
        num_reqs=common.num_reqs - rows, num_tokens=common.num_tokens - tokens,
        num_actual_tokens=common.num_actual_tokens - tokens,
        num_decode_rows=0, num_decode_tokens=0, common_prefix_len=0, common_prefix=None,
    )  # fmt: skip
    return decodes, others
