"""Attention of encoders in C: each row's tokens see each other, and nothing is kept.

Keys and values lie where the QKV product left them. To the kernels that is a cache of one block, at whose first token a row's table
points.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pelton.attention.encoder import EncoderBackend
from pelton.attention.interface import AttentionNeeds, GraphSupport
from pelton_backends.native import library
from pelton_backends.native.backend import check_memory
from pelton_backends.native.library import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.encoder import EncoderParams
    from pelton.attention.metadata import BatchDescriptor, CommonMetadata

BLOCK_SIZE = 1 << 30
"""Tokens: more than any row has."""


@dataclass(slots=True)
class EncoderStep:
    """One step, as the kernels read it."""

    step: library.Step
    starts: Tensor  # [R + 1] int32, the rows' first tokens; the struct has their addresses
    lens: Tensor  # [R] int32


class NativeEncoderBackend(EncoderBackend):
    """Float32, any head size, no windows."""

    name: ClassVar[str] = "native_encoder"
    handles: ClassVar[frozenset[str]] = frozenset({"attention_type"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.attention_type != "encoder":
            reasons.append(f"attention type {needs.attention_type}, only encoder")
        if needs.dtype != "float32":
            reasons.append(f"dtype {needs.dtype}, only float32")
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
        if not reasons:  # compiles
            why = library.reason_against()
            reasons += [why] if why else []
        return reasons

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> EncoderStep:
        starts = common.query_start_loc.contiguous()
        lens = starts.diff()
        step = library.Step(
            starts.data_ptr(), lens.data_ptr(), starts.data_ptr(), 1, len(lens), False, None, 1, 0
        )  # a row's table is its first token
        return EncoderStep(step, starts, lens)

    def attend(
        self, layer: EncoderParams, query: Tensor, key: Tensor, value: Tensor, metadata: EncoderStep, output: Tensor
    ) -> Tensor:
        query, key, value = (x if _is_dense(x) else x.contiguous() for x in (query, key, value))
        if value.stride() != key.stride():
            key, value = key.contiguous(), value.contiguous()
        _, num_kv_heads, head_dim = key.shape
        attention = library.Attention(
            key.data_ptr(), value.data_ptr(), key.stride(0), key.stride(0), key.stride(1), BLOCK_SIZE,
            layer.num_heads, num_kv_heads, layer.num_heads // num_kv_heads, head_dim, 0, layer.scale, 0.0,
            DTYPES["float32"], None,
        )  # fmt: skip
        failed = library.kernels().attend(
            byref(attention), byref(metadata.step), query.data_ptr(), query.stride(0), output.data_ptr()
        )
        check_memory(failed)
        return output


def _is_dense(x: Tensor) -> bool:
    """Return whether a token's heads lie behind each other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
