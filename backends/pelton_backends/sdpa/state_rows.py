"""Rows of a step as layers with states see them, and the short causal convolution that such layers begin with; in torch, for CPU.

States are changed where they lie, row by row: gathering those of rows that decode, and putting them back, took seven times as long (8 rows,
2 MiB each). A row that begins heeds nothing of what its block's last request left there. Tokens of no row (padding) reach no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, GraphSupport
from pelton_backends.sdpa.backend import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import BatchDescriptor, CommonMetadata


@dataclass(slots=True)
class Row:
    """A row's tokens in the step, and the block of its state."""

    tokens: slice
    block: int
    is_new: bool

    def state(self, states: Tensor) -> Tensor:
        """Return its part of a tensor [num_blocks, ...], to be changed there: zeros where it begins, whatever its block held before."""
        state = states[self.block]
        return state.zero_() if self.is_new else state


@dataclass(slots=True)
class StateMetadata:
    """Rows of a step that have tokens."""

    rows: list[Row]
    longer: list[Row]  # of several tokens, or that begin
    tokens: Tensor  # of the others, [n] int64
    blocks: Tensor  # and the blocks of their states, [n] int64


class StateRows(AttentionBackend):
    """Handles float32, bfloat16 and float16. A subclass names the kind of its layers and what computes them."""

    attention_type: ClassVar[str]
    computes: ClassVar[type[BoundAttention]]
    handles: ClassVar[frozenset[str]] = frozenset({"attention_type"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.attention_type != cls.attention_type:
            reasons.append(f"attention type {needs.attention_type}, only {cls.attention_type}")
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        return None

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> StateMetadata:
        starts = common.query_start_loc[: common.num_reqs + 1].tolist()
        lengths, blocks = common.seq_lens[: common.num_reqs].tolist(), common.block_table[: common.num_reqs, 0].tolist()
        rows, longer, single = [], [], []
        for start, stop, length, block in zip(starts, starts[1:], lengths, blocks, strict=False):
            if stop == start:
                continue
            rows.append(row := Row(slice(start, stop), block, length == stop - start))
            if row.is_new or stop - start > 1:
                longer.append(row)
            else:
                single.append((start, block))
        found = torch.tensor(single, dtype=torch.int64).view(-1, 2)
        return StateMetadata(rows, longer, found[:, 0], found[:, 1])

    def bind(self, layer: Any) -> BoundAttention:
        return self.computes(layer)


class ConvolutionParams(Protocol):
    """Facts of a layer's convolution: W numbers of a token, each with K taps of its own."""

    conv_weight: Tensor  # [W, K]
    conv_bias: Tensor | None  # [W]
    conv_states: Tensor  # [num_blocks, W, K - 1], a view of the pool: the last inputs of each row


def convolve(layer: ConvolutionParams, x: Tensor, metadata: StateMetadata) -> Tensor:
    """Convolve each row's tokens with those before them, and keep the last ones: [T, W] -> [T, W], zeros for tokens of no row."""
    result = torch.zeros_like(x)
    if len(metadata.tokens):
        result[metadata.tokens] = _convolve_tokens(layer, x[metadata.tokens], metadata.blocks)
    for row in metadata.longer:
        result[row.tokens] = _convolve_row(layer, x[row.tokens], row)
    return result


def _convolve_tokens(layer: ConvolutionParams, x: Tensor, blocks: Tensor) -> Tensor:
    seen = torch.cat([layer.conv_states[blocks], x[..., None]], dim=-1)
    layer.conv_states[blocks] = seen[..., 1:]
    mixed = (seen * layer.conv_weight).sum(dim=-1)
    return mixed if layer.conv_bias is None else mixed + layer.conv_bias


def _convolve_row(layer: ConvolutionParams, x: Tensor, row: Row) -> Tensor:
    before = row.state(layer.conv_states)
    seen = torch.cat([before, x.t()], dim=1)
    before.copy_(seen[:, seen.shape[1] - before.shape[1] :])
    return F.conv1d(seen[None], layer.conv_weight[:, None], layer.conv_bias, groups=len(seen))[0].t()
