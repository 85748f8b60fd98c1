"""Paged attention on CPUs in C: rows of one token and of many, pages with heads first."""

from __future__ import annotations

import math
from ctypes import byref
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
from pelton.errors import EngineError
from pelton_backends.context_parts import spread_refusals
from pelton_backends.native import library
from pelton_backends.native.library import DTYPES
from pelton_backends.native.rope import fits_kernel, make_rope, make_written

if TYPE_CHECKING:
    from torch import Tensor

LEAST_PREFIX_ROWS, LEAST_PREFIX = 8, 64
"""Rows that share a prefix, and its tokens: from here on it is read once for all."""


@dataclass(slots=True)
class NativeMetadata:
    """One step of one group, as the kernels read it."""

    common: CommonMetadata  # keeps the tensors alive
    step: library.Step
    prefix: Tensor | None = None  # the struct has its address


class NativeBackend(AttentionBackend):
    """Handles decoder attention in float32, bfloat16 and float16, fp8 caches, any block and head size, windows, chunks, caps and sinks."""

    name: ClassVar[str] = "native"
    handles: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window", "attention_chunk_size", "logit_soft_cap", "has_sinks", "decode_context_parallel"}
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM_BATCH

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        reasons += library.kv_refusals(needs.dtype, needs.kv_dtype)
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
        reasons += spread_refusals(needs)
        if not reasons:  # compiles
            why = library.reason_against(*library.groups_of_dtype(needs.dtype), dtype=needs.dtype)
            reasons += [why] if why else []
        return reasons

    @classmethod
    def kv_layout(cls, needs: AttentionNeeds) -> KVLayout:
        return KVLayout(heads_first=True)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> NativeMetadata:
        prefix = self._common_prefix(common, key)
        step = library.Step(
            common.query_start_loc.data_ptr(), common.seq_lens.data_ptr(), common.block_table.data_ptr(),
            common.block_table.stride(0), common.num_reqs, int(common.causal),
            None if prefix is None else prefix.data_ptr(),
            self.needs.decode_context_parallel, self.needs.context_rank,
        )  # fmt: skip
        return NativeMetadata(common, step, prefix)

    def uses_common_prefix(self, num_rows: int, prefix_len: int) -> bool:
        return not self.needs.is_local and num_rows >= LEAST_PREFIX_ROWS and prefix_len >= LEAST_PREFIX

    def _common_prefix(self, common: CommonMetadata, key: BatchDescriptor | None) -> Tensor | None:
        """[1] int32, for a step of one token a row that is served better by reading its common prefix once."""
        if key is not None:
            return common.common_prefix if key.has_common_prefix and not self.needs.is_local else None
        if common.max_query_len != 1 or not self.uses_common_prefix(common.num_reqs, common.common_prefix_len):
            return None
        return torch.tensor([common.common_prefix_len], dtype=torch.int32)

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return NativeAttention(layer)


class NativeAttention(BoundAttention):
    """A layer's constants as the kernels read them, and the two calls."""

    layer: AttentionParams

    def __init__(self, layer: AttentionParams) -> None:
        super().__init__(layer)
        k_cache = layer.k_cache
        self._row = layer.num_heads * layer.head_dim
        self._sinks = None if layer.sinks is None else (layer.sinks.float() * math.log2(math.e)).contiguous()
        self._attention = library.Attention(
            k_cache.data_ptr(), layer.v_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            k_cache.shape[1], layer.num_heads, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads,
            layer.head_dim, _window(layer.needs), layer.scale, layer.soft_cap or 0.0, DTYPES[layer.needs.dtype],
            library.kv_dtype_of(layer.needs.dtype, layer.needs.kv_dtype),
            None if self._sinks is None else self._sinks.data_ptr(),
        )  # fmt: skip
        self._kernels = library.kernels_for(self._attention, dtype=layer.needs.dtype)
        fits = fits_kernel(layer.write_needs)
        self._rope = make_rope(layer.write_needs, layer.write_tensors) if fits else None

    def __call__(self, query: Tensor, metadata: NativeMetadata, output: Tensor) -> None:
        query = query if query.is_contiguous() else query.contiguous()
        failed = self._kernels.attend(
            byref(self._attention), byref(metadata.step), query.data_ptr(), self._row, output.data_ptr()
        )
        check_memory(failed)

    def attend_part(self, query: Tensor, metadata: NativeMetadata, output: Tensor, lse: Tensor) -> None:
        query = query if query.is_contiguous() else query.contiguous()
        failed = self._kernels.attend_part(
            byref(self._attention), byref(metadata.step), query.data_ptr(), self._row, output.data_ptr(), lse.data_ptr()
        )
        check_memory(failed)

    def write_and_attend(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, metadata: NativeMetadata, output: Tensor
    ) -> None:
        if self._rope is None:
            super().write_and_attend(qkv, positions, slot_mapping, metadata, output)
            return
        qkv = qkv if qkv.is_contiguous() else qkv.contiguous()
        failed = self._kernels.rope_attend(
            byref(self._rope), byref(self._attention), byref(make_written(qkv, positions, slot_mapping)),
            byref(metadata.step), qkv.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        check_memory(failed)


def _window(needs: AttentionNeeds) -> int:
    return -needs.attention_chunk_size if needs.attention_chunk_size else needs.sliding_window or 0


def check_memory(failed: int) -> None:
    if failed:
        raise EngineError("Attention found no memory for its scratch space. Give the process more memory.")
