"""Attention of encoders in C: each row's tokens see each other, and nothing is kept. And whole layers of encoders around it.

Keys and values lie where the QKV product left them. To the kernels that is a cache of one block, at whose first token a row's table
points.
"""

from __future__ import annotations

from ctypes import addressof, byref, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.attention.encoder import EncoderBackend
from pelton.attention.interface import AttentionNeeds, GraphSupport
from pelton_backends.native import library
from pelton_backends.native.backend import check_memory
from pelton_backends.native.embed import PlainRows
from pelton_backends.native.layer_norm import LayerNorm
from pelton_backends.native.library import DTYPES
from pelton_backends.native.linear import NativeLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    max_query_len: int


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
            why = library.reason_against("encoder", *library.groups_of_dtype(needs.dtype), dtype=needs.dtype)
            reasons += [why] if why else []
        return reasons

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> EncoderStep:
        starts = common.query_start_loc.contiguous()
        lens = starts.diff()
        step = library.Step(
            starts.data_ptr(), lens.data_ptr(), starts.data_ptr(), 1, len(lens), False, None, 1, 0
        )  # a row's table is its first token
        return EncoderStep(step, starts, lens, common.max_query_len)

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
            DTYPES["float32"], DTYPES["float32"], None,
        )  # fmt: skip
        failed = library.kernels_for(attention, dtype="float32").attend(
            byref(attention), byref(metadata.step), query.data_ptr(), query.stride(0), output.data_ptr()
        )
        check_memory(failed)
        return output

    def bind_layers(self, layers: Sequence[Any], embeddings: Any) -> WholeLayers | None:
        """The layers as one call, where all of their parts are in C; None: they are not.

        layers: of each the attributes `attention` (`EncoderParams`), the bound ops `qkv`, `out`, `up`, which has its activation, and
        `down`, and the bound norms `out_norm` and `down_norm` behind the sums of residuals and of what `out` and `down` give.
        embeddings: before them, the bound op `words`, the tables `positions` [*, H] and `types` [*, H], and the bound `norm` of the sum
        of a row of each.
        """
        fits = all(
            all(isinstance(op, NativeLinear) for op in (layer.qkv, layer.out, layer.up, layer.down))
            and all(isinstance(norm, LayerNorm) for norm in (layer.out_norm, layer.down_norm))
            and layer.attention.num_kv_heads == layer.attention.num_heads
            for layer in layers
        )
        return WholeLayers(layers, embeddings, self.needs.head_dim) if fits else None


class WholeLayers:
    """Encoder layers that norm behind each sub-layer (csrc/encoder.c), and their embeddings. Weights may be packed later: it has the
    ops' own structs."""

    MOST_TOKENS = 1024
    """Of a text: a thread keeps what lies between the kernels of a layer for all of them."""

    def __init__(self, layers: Sequence[Any], embeddings: Any, head_dim: int) -> None:
        first, self._embeddings = layers[0].attention, embeddings
        self._kept = [
            [*(op.struct for op in (layer.qkv, layer.out, layer.up, layer.down)), layer.out_norm.op, layer.down_norm.op]
            for layer in layers
        ]
        self._layers = (library.EncoderLayer * len(layers))(
            *(library.EncoderLayer(*map(addressof, parts)) for parts in self._kept)
        )
        self._op = library.Encoder(self._layers, len(layers), first.num_heads, head_dim, first.scale)
        self._run = library.kernels("encoder").encode

    @property
    def embeds(self) -> bool:
        """Return whether embeddings are in C as well, where all tokens are of type 0."""
        words, norm = self._embeddings.words, self._embeddings.norm
        return isinstance(words, PlainRows) and words.is_bare and isinstance(norm, LayerNorm)

    def fits(self, metadata: EncoderStep) -> bool:
        return metadata.max_query_len <= self.MOST_TOKENS

    def embed(self, input_ids: Tensor, positions: Tensor, metadata: EncoderStep) -> Tensor:
        """Hidden states [T, H] of token ids [T] int64 at rows `positions` [T] int64 of their table; where it `embeds`."""
        given = self._embeddings
        input_ids, positions = input_ids.contiguous(), positions.contiguous()
        hidden = torch.empty(len(input_ids), given.norm.op.size, dtype=torch.float32)
        inputs = library.EncoderInputs(
            given.words.weight.data_ptr(), given.types.data_ptr(), given.positions.data_ptr(), pointer(given.norm.op),
            input_ids.data_ptr(), positions.data_ptr(),
        )  # fmt: skip
        return self._encode(inputs, hidden, metadata)

    def __call__(self, hidden: Tensor, metadata: EncoderStep) -> Tensor:
        """hidden [T, H] float32, contiguous, is overwritten."""
        return self._encode(None, hidden, metadata)

    def _encode(self, inputs: library.EncoderInputs | None, hidden: Tensor, metadata: EncoderStep) -> Tensor:
        """Return `hidden`, undefined for padding tokens."""
        address = None if inputs is None else byref(inputs)
        check_memory(
            self._run(byref(self._op), address, metadata.starts.data_ptr(), len(metadata.lens), hidden.data_ptr())
        )
        return hidden


def _is_dense(x: Tensor) -> bool:
    """Return whether a token's heads lie behind each other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
