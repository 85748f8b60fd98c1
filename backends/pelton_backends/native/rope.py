"""q/k norm, rope and writing keys and values, in C: as an op of its own, and what the attention backend needs for both at once."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.ops.interface import QkNormRopeWriteKv, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.native import library
from pelton_backends.native.library import DTYPES

if TYPE_CHECKING:
    from torch import Tensor


def fits_kernel(needs: QkNormRopeWriteKvNeeds) -> bool:
    return needs.dtype in DTYPES and not library.kv_refusals(needs.dtype, needs.kv_dtype) and needs.writes_kv


def make_rope(needs: QkNormRopeWriteKvNeeds, tensors: QkNormRopeWriteKvTensors) -> library.Rope:
    """The kernel's struct. The tensors are the layer's, which outlives it."""
    q_norm, k_norm = needs.q_norm, needs.k_norm
    return library.Rope(
        _address(tensors.cos_sin), _address(tensors.q_norm), _address(tensors.k_norm),
        needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.rotary_dim,
        q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0,
        bool(q_norm and q_norm.unit_offset), bool(k_norm and k_norm.unit_offset), needs.writes_kv, DTYPES[needs.dtype],
    )  # fmt: skip


def make_written(qkv: Tensor, positions: Tensor, slot_mapping: Tensor) -> library.Written:
    return library.Written(positions.data_ptr(), slot_mapping.data_ptr(), qkv.shape[0])


class NativeQkNormRopeWriteKv:
    """The fused op by itself, for attention backends without their own."""

    handles = frozenset(["q_norm", "k_norm", "writes_kv", "unit_offset"])
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: QkNormRopeWriteKvNeeds) -> list[str]:
        if needs.dtype not in DTYPES:
            return [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
        if reasons := library.kv_refusals(needs.dtype, needs.kv_dtype):
            return reasons
        if not needs.writes_kv:
            return ["rows of queries alone"]
        why = library.reason_against(dtype=needs.dtype)
        return [why] if why else []

    @staticmethod
    def bind(needs: QkNormRopeWriteKvNeeds, tensors: QkNormRopeWriteKvTensors) -> QkNormRopeWriteKv:
        rope, run = make_rope(needs, tensors), library.kernels(dtype=needs.dtype).rope_write
        heads, kv_heads, head_dim = needs.num_heads, needs.num_kv_heads, needs.head_dim
        kv_dtype = library.kv_dtype_of(needs.dtype, needs.kv_dtype)
        kept = tensors  # the struct has their addresses

        def qk_norm_rope_write_kv(
            qkv: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
        ) -> Tensor:
            assert kept is tensors
            qkv = qkv if qkv.is_contiguous() else qkv.contiguous()
            cache = library.Attention(
                k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
                k_cache.shape[1], heads, kv_heads, heads // kv_heads, head_dim,
                dtype=rope.dtype, kv_dtype=kv_dtype,
            )  # fmt: skip
            query = torch.empty(qkv.shape[0], heads, head_dim, dtype=qkv.dtype)
            run(
                byref(rope), byref(cache), byref(make_written(qkv, positions, slot_mapping)),
                qkv.data_ptr(), query.data_ptr(), heads * head_dim,
            )  # fmt: skip
            return query

        return qk_norm_rope_write_kv


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
