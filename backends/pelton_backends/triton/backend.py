"""The Triton attention backend: split-KV decode, fused with the step's norm, rotation and cache write; paged prefill.

Rows with one token come first in a batch and have their own kernel; the others have prefill's. A captured step whose
rows may be anything (`uniform_query_len` 0) launches both over all rows, and each leaves out on the device what is
the other's. Kernels of steps with drafts and of ranks that keep a part of each row are imported where they are launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    AttentionParams,
    BoundAttention,
    GraphSupport,
    KVLayout,
)
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.context_parts import spread_refusals
from pelton_backends.triton.attention.cascade import cascade_attention, pays
from pelton_backends.triton.attention.decode import DecodeAttention, NewTokens, NormRope
from pelton_backends.triton.attention.decode_shares import (
    FEW_PAIRS,
    LaunchShape,
    PartBuffers,
    deal_rows,
    launch_shape,
    row_bytes,
)
from pelton_backends.triton.attention.prefill import PrefillAttention
from pelton_backends.triton.ops.pieces import is_hopper
from pelton_backends.triton.runtime import attention_starts_early, has_pdl, num_sms

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.triton.attention.decode_drafts import DraftParts
    from pelton_backends.triton.attention.decode_resident import ResidentDecode, ResidentParts, ResidentShape

DTYPES = ("float16", "bfloat16", "float32")
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(slots=True)
class TritonMetadata:
    """One step of one group."""

    common: CommonMetadata
    decode_rows: int  # the decode kernel's: rows 0 .. decode_rows - 1
    first_prefill_row: int  # the prefill kernel's: from here on
    is_mixed: bool  # rows of unknown kinds: both kernels have all rows and look at each one's number of tokens
    prefix_len: int | Tensor | None = None  # tokens that all decode rows share, read once; on the device when captured
    decode_shape: LaunchShape | None = (
        None  # of the decode kernel's launches, whose rows are dealt out; None: no launches
    )
    drafts_shape: LaunchShape | None = None  # the same of the kernel for rows with drafts
    resident_shape: ResidentShape | None = (
        None  # of `ResidentDecode`, for layers that it serves and steps that it is made for
    )
    num_tokens: int = 0  # most tokens of a row, where rows are decodes and their drafts; 0: other rows

    @property
    def is_decode(self) -> bool:
        return self.first_prefill_row == self.common.num_reqs and not self.is_mixed


class TritonBackend(AttentionBackend):
    """Any block size that is a multiple of 16, heads of 16 to 256 numbers (those that are not a power of two in padded tiles)."""

    name: ClassVar[str] = "triton"
    handles: ClassVar[frozenset[str]] = frozenset(
        {
            "sliding_window",
            "attention_chunk_size",
            "logit_soft_cap",
            "has_sinks",
            "has_alibi",
            "decode_context_parallel",
        }
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if not 16 <= needs.head_dim <= 256 or needs.head_dim % 8:
            reasons.append(f"head size {needs.head_dim}, only multiples of 8 from 16 to 256")
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if needs.kv_dtype not in (*KV_DTYPES, needs.dtype):
            reasons.append(f"kv dtype {needs.kv_dtype}, only {', '.join(KV_DTYPES)}")
        if needs.block_size % 16:
            reasons.append(f"block size {needs.block_size}, only multiples of 16")
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
        least, what = (8, 0), ""
        if needs.kv_dtype in ("fp8", "fp8_e4m3"):  # Triton's compiler has it where the hardware converts it
            least, what = (8, 9), f" for kv dtype {needs.kv_dtype}"
        if capability is not None and capability < least:
            found, wanted = (f"{major}.{minor}" for major, minor in (capability, least))
            reasons.append(f"compute capability {found}, only {wanted} and later{what}")
        return reasons + spread_refusals(needs)

    @classmethod
    def kv_layout(cls, needs: AttentionNeeds) -> KVLayout:
        """A kv head's part of a block is one contiguous piece: 4 KiB at 16 tokens of 128 numbers."""
        return KVLayout(heads_first=True)

    def __init__(
        self, needs: AttentionNeeds, device: torch.device, *, max_num_seqs: int, max_num_tokens: int, max_model_len: int
    ) -> None:
        super().__init__(
            needs, device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len
        )
        self.pdl = has_pdl(device)
        self._parts: PartBuffers | None = None
        self._draft_parts: dict[int, DraftParts] = {}  # by tokens of a row
        self._resident_parts: ResidentParts | None = None
        self._has_resident = self._has_others = (
            False  # layers that `ResidentDecode` serves, and layers that it does not
        )

    def uses_common_prefix(self, num_rows: int, prefix_len: int) -> bool:
        return not (self.needs.is_local or self._is_spread) and pays(num_rows, prefix_len)

    @property
    def _is_spread(self) -> bool:
        return self.needs.decode_context_parallel > 1

    def reserve(self, max_key: BatchDescriptor) -> None:
        if not self._is_spread:
            self.part_buffers(max_key.num_reqs)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> TritonMetadata:
        if self._is_spread:  # one kernel has all rows
            return TritonMetadata(common, decode_rows=0, first_prefill_row=0, is_mixed=False)
        metadata = self._divide(common, key)
        metadata.resident_shape = self._deal_resident(metadata)
        attention_starts_early.set(metadata.resident_shape is not None)
        if metadata.decode_rows and metadata.prefix_len is None:
            metadata.decode_shape = self._deal(metadata)
        if metadata.num_tokens:
            metadata.drafts_shape = self._deal_drafts(metadata)
        return metadata

    def _divide(self, common: CommonMetadata, key: BatchDescriptor | None) -> TritonMetadata:
        """Which rows are whose."""
        rows = common.num_reqs
        if key is not None and key.is_prompt:
            return TritonMetadata(common, decode_rows=0, first_prefill_row=0, is_mixed=False)
        query_len = common.max_query_len if key is None else key.uniform_query_len
        if key is not None and query_len == 0:
            return TritonMetadata(common, decode_rows=rows, first_prefill_row=0, is_mixed=True)
        if query_len <= 1:
            prefix_len = self._prefix_len(common, key)
            return TritonMetadata(
                common, decode_rows=rows, first_prefill_row=rows, is_mixed=False, prefix_len=prefix_len
            )
        if key is not None:
            return TritonMetadata(common, decode_rows=0, first_prefill_row=0, is_mixed=False, num_tokens=query_len)
        decodes = common.num_decode_rows
        return TritonMetadata(common, decode_rows=decodes, first_prefill_row=decodes, is_mixed=False)

    def _deal(self, metadata: TritonMetadata) -> LaunchShape:
        """How the decode kernel's programs are shared out, told them where the lengths say it."""
        needs, common, rows = self.needs, metadata.common, metadata.decode_rows
        parts, group = self.part_buffers(common.num_reqs), needs.num_heads // needs.num_kv_heads
        # A bound that is the same for all steps: programs of a row follow from it, and a kernel is compiled for each number.
        shape = launch_shape(
            self._rows_to_deal(metadata, rows), needs.num_kv_heads, group, self.max_model_len,
            row_bytes(needs.head_dim, getattr(torch, needs.dtype)), num_sms(self.device),
        )  # fmt: skip
        if shape.is_dealt:
            deal_rows(
                common.seq_lens, common.block_table, parts, shape, num_rows=rows, block_size=needs.block_size,
                sliding_window=signed_window(needs),
                query_start_loc=common.query_start_loc if metadata.is_mixed else None, pdl=self.pdl,
            )  # fmt: skip
        return shape

    def _deal_drafts(self, metadata: TritonMetadata) -> LaunchShape:
        """As `_deal`, of rows with drafts."""
        from pelton_backends.triton.attention.decode_drafts import drafts_shape, span

        needs, common, num_tokens = self.needs, metadata.common, metadata.num_tokens
        shape = drafts_shape(
            self._rows_to_deal(metadata, common.num_reqs), needs.num_kv_heads, needs.num_heads // needs.num_kv_heads, num_tokens,
            self.max_model_len, row_bytes(needs.head_dim, getattr(torch, needs.dtype)), num_sms(self.device),
        )  # fmt: skip
        if shape.is_dealt:
            deal_rows(
                common.seq_lens, common.block_table, self.draft_parts(num_tokens, common.num_reqs), shape,
                num_rows=common.num_reqs, block_size=needs.block_size, pdl=self.pdl,
                sliding_window=span(num_tokens, needs.sliding_window), new_first=True,
            )  # fmt: skip
        return shape

    def _rows_to_deal(self, metadata: TritonMetadata, rows: int) -> int:
        """Rows that a shape is asked for. Where `ResidentDecode` has all layers, others' kernels only serve calls with made queries, and
        nothing is dealt out for them: as for so many rows."""
        if metadata.resident_shape is None or self._has_others:
            return rows
        return max(rows, FEW_PAIRS // self.needs.num_kv_heads + 1)

    def _deal_resident(self, metadata: TritonMetadata) -> ResidentShape | None:
        """As `_deal`, for `ResidentDecode`. None: another kernel has the step."""
        common, num_tokens = metadata.common, metadata.num_tokens
        rows = common.num_reqs if num_tokens else metadata.decode_rows
        if not self._has_resident or metadata.prefix_len is not None or not (metadata.is_decode or num_tokens):
            return None
        from pelton_backends.triton.attention.decode_resident import deal_resident, resident_shape

        needs = self.needs
        group = needs.num_heads // needs.num_kv_heads
        shape = resident_shape(rows, needs.num_kv_heads, group, max(num_tokens, 1), num_sms(self.device))
        if shape is not None:
            deal_resident(
                common.seq_lens, common.block_table, self.resident_parts().shares, shape, num_rows=rows,
                query_start_loc=common.query_start_loc if num_tokens else None, pdl=self.pdl,
            )  # fmt: skip
        return shape

    def _prefix_len(self, common: CommonMetadata, key: BatchDescriptor | None) -> int | Tensor | None:
        if key is not None:
            return common.common_prefix if key.has_common_prefix and not self.needs.is_local else None
        is_used = self.uses_common_prefix(common.num_decode_rows, common.common_prefix_len)
        return common.common_prefix_len if is_used else None

    def bind(self, layer: AttentionParams) -> BoundAttention:
        if not self._is_spread:
            return TritonAttention(layer, self)
        from pelton_backends.triton.attention.context_part import TritonPartAttention

        return TritonPartAttention(layer, self.pdl)

    def part_buffers(self, num_rows: int = 0) -> PartBuffers:
        """Made once: captured graphs hold its addresses."""
        if self._parts is None:
            self._parts = PartBuffers.allocate(
                self.device, max_rows=max(self.max_num_seqs, num_rows), num_heads=self.needs.num_heads,
                num_kv_heads=self.needs.num_kv_heads, head_dim=self.needs.head_dim,
            )  # fmt: skip
        return self._parts

    def resident_parts(self) -> ResidentParts:
        """Made once: captured graphs hold its addresses."""
        if self._resident_parts is None:
            from pelton_backends.triton.attention.decode_resident import ResidentParts

            self._resident_parts = ResidentParts.allocate(self.device)
        return self._resident_parts

    def bind_resident(
        self, layer: AttentionParams, norm_rope: NormRope | None, num_tokens: int
    ) -> ResidentDecode | None:
        """None: a layer that it does not serve. num_tokens: of a row, at most."""
        served = None
        if norm_rope is not None and is_hopper(self.device):
            from pelton_backends.triton.attention.decode_resident import ResidentDecode

            if ResidentDecode.serves(layer):
                served = ResidentDecode(layer, self.resident_parts(), norm_rope, num_tokens=num_tokens, pdl=self.pdl)
        self._has_resident |= served is not None
        self._has_others |= served is None
        return served

    def draft_parts(self, num_tokens: int, num_rows: int) -> DraftParts:
        """Made once for each number of tokens of a row: captured graphs hold its addresses."""
        parts = self._draft_parts.get(num_tokens)
        if parts is None:
            from pelton_backends.triton.attention.decode_drafts import DraftParts

            needs = self.needs
            parts = self._draft_parts[num_tokens] = DraftParts.allocate(
                self.device, max_rows=max(self.max_num_seqs, num_rows), num_heads=needs.num_heads,
                num_kv_heads=needs.num_kv_heads, head_dim=needs.head_dim, num_tokens=num_tokens,
            )  # fmt: skip
        return parts


def signed_window(needs: AttentionNeeds) -> int | None:
    """As the kernels read it: how many keys a token sees, or, below 0, the size of the aligned chunk that it sees of."""
    return -needs.attention_chunk_size if needs.attention_chunk_size else needs.sliding_window


class TritonAttention(BoundAttention):
    """A layer's kernels, each with what follows from the layer."""

    layer: AttentionParams

    def __init__(self, layer: AttentionParams, backend: TritonBackend) -> None:
        super().__init__(layer)
        self._backend, self._pdl = backend, backend.pdl
        self._takes_drafts = layer.sinks is None and layer.alibi_slopes is None and not layer.needs.attention_chunk_size
        self._norm_rope: NormRope | None = None  # where the kernels that attend make queries and new keys too
        needs, tensors = layer.write_needs, layer.write_tensors
        self._decode = self._bind_decode(None)
        self._fused_decode: DecodeAttention | None = None
        if needs.q_norm == needs.k_norm and needs.writes_kv:
            self._norm_rope = NormRope(needs.rotary_dim, tensors.cos_sin, tensors.q_norm, tensors.k_norm, needs.q_norm)
            self._fused_decode = self._bind_decode(self._norm_rope)
        self._resident = {1: backend.bind_resident(layer, self._norm_rope, 1)}  # by tokens of a row
        self._prefill = PrefillAttention(
            layer.k_cache, layer.v_cache, num_heads=layer.num_heads, dtype=getattr(torch, layer.needs.dtype),
            scale=layer.scale, sliding_window=signed_window(layer.needs), soft_cap=layer.soft_cap, sinks=layer.sinks,
            alibi_slopes=layer.alibi_slopes, pdl=self._pdl,
        )  # fmt: skip

    def _bind_decode(self, norm_rope: NormRope | None) -> DecodeAttention:
        layer = self.layer
        return DecodeAttention(
            layer.k_cache, layer.v_cache, self._backend.part_buffers(), num_heads=layer.num_heads,
            dtype=getattr(torch, layer.needs.dtype), scale=layer.scale, sliding_window=signed_window(layer.needs),
            soft_cap=layer.soft_cap, sinks=layer.sinks, alibi_slopes=layer.alibi_slopes, norm_rope=norm_rope,
            pdl=self._pdl,
        )  # fmt: skip

    def __call__(self, query: Tensor, metadata: TritonMetadata, output: Tensor) -> None:
        common = metadata.common
        if metadata.prefix_len is not None:
            self._attend_behind_prefix(query, metadata, output)
            return
        if metadata.num_tokens and self._takes_drafts:
            self._attend_drafts(query, metadata, output)
            return
        if metadata.decode_rows:
            assert metadata.decode_shape is not None, "rows that the decode kernel has are dealt out by `build`"
            self._decode(
                query, output, common.seq_lens, common.block_table, metadata.decode_shape,
                num_rows=metadata.decode_rows,
                query_start_loc=common.query_start_loc if metadata.is_mixed else None,
            )  # fmt: skip
        if metadata.first_prefill_row < common.num_reqs:
            self._prefill(
                query, output, common.query_start_loc, common.seq_lens, common.block_table, num_reqs=common.num_reqs,
                first_row=metadata.first_prefill_row, max_query_len=common.max_query_len, max_seq_len=common.max_seq_len,
                causal=common.causal, skip_single=metadata.is_mixed,
            )  # fmt: skip

    def write_and_attend(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, metadata: TritonMetadata, output: Tensor
    ) -> None:
        if metadata.resident_shape is not None and self._resident[1] is not None:
            self._attend_resident(qkv, positions, slot_mapping, metadata, metadata.resident_shape, output)
            return
        if metadata.num_tokens and self._takes_drafts and self._norm_rope is not None:
            self._attend_drafts(qkv, metadata, output, NewTokens(positions, slot_mapping, self._norm_rope))
            return
        if self._fused_decode is None or not metadata.is_decode or metadata.prefix_len is not None:
            super().write_and_attend(qkv, positions, slot_mapping, metadata, output)
            return
        common = metadata.common
        assert metadata.decode_shape is not None, "rows that the decode kernel has are dealt out by `build`"
        self._fused_decode(
            qkv, output, common.seq_lens, common.block_table, metadata.decode_shape, num_rows=metadata.decode_rows,
            positions=positions, slot_mapping=slot_mapping,
        )  # fmt: skip

    def _attend_resident(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        metadata: TritonMetadata,
        shape: ResidentShape,
        output: Tensor,
    ) -> None:
        common, num_tokens = metadata.common, max(metadata.num_tokens, 1)
        attend = self._resident.get(num_tokens)
        if attend is None:
            attend = self._resident[num_tokens] = self._backend.bind_resident(self.layer, self._norm_rope, num_tokens)
        assert attend is not None, "a layer that is served with one token a row is served with more"
        attend(
            qkv, output, positions, slot_mapping, common.query_start_loc if metadata.num_tokens else None, common.seq_lens,
            common.block_table, shape,
        )  # fmt: skip

    def _attend_behind_prefix(self, query: Tensor, metadata: TritonMetadata, output: Tensor) -> None:
        layer, common = self.layer, metadata.common
        assert metadata.prefix_len is not None
        cascade_attention(
            query, layer.k_cache, layer.v_cache, output, common.seq_lens, common.block_table,
            num_rows=metadata.decode_rows, prefix_len=metadata.prefix_len, max_seq_len=common.max_seq_len,
            scale=layer.scale, soft_cap=layer.soft_cap, sinks=layer.sinks, alibi_slopes=layer.alibi_slopes,
            pdl=self._pdl,
        )  # fmt: skip

    def _attend_drafts(
        self, query: Tensor, metadata: TritonMetadata, output: Tensor, new: NewTokens | None = None
    ) -> None:
        from pelton_backends.triton.attention.decode_drafts import drafts_attention

        layer, common = self.layer, metadata.common
        assert metadata.drafts_shape is not None, "rows with drafts are dealt out by `build`"
        drafts_attention(
            query, layer.k_cache, layer.v_cache, output, common.query_start_loc, common.seq_lens, common.block_table,
            self._backend.draft_parts(metadata.num_tokens, common.num_reqs), metadata.drafts_shape, num_rows=common.num_reqs,
            num_tokens=metadata.num_tokens, scale=layer.scale, sliding_window=layer.sliding_window, soft_cap=layer.soft_cap,
            new=new, pdl=self._pdl,
        )  # fmt: skip
