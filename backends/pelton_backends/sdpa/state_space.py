"""Selective state spaces in torch, for CPU: the layers of Mamba-2. Dao and Gu, Transformers are SSMs (arXiv:2405.21060).

For head h with state S [P, N], token t of a row:  S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T  and  y_t = S_t C_t + D x_t. x, B and C come
through a causal convolution over the row's own last tokens. Rows of one token take one step, all together; others go in chunks, within
which tokens meet each other as in attention (section 6 of the paper). States are float32.

Shapes: T tokens of a step, H heads, P numbers of a head, N of a state, G groups of heads with the same B and C, E = H P, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, GraphSupport
from pelton_backends.sdpa.backend import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import BatchDescriptor, CommonMetadata

STATE = "state"
"""The `attention_type` of such a layer's needs."""
CHUNK = 64


class StateParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, E + E + 2 G N + H]: gate, x, B and C, dt; its output [T, E]."""

    needs: AttentionNeeds
    num_heads: int
    head_dim: int  # P
    num_groups: int  # G
    state_size: int  # N
    conv_weight: Tensor  # [E + 2 G N, K]
    conv_bias: Tensor | None
    dt_bias: Tensor  # [H] float32, as the next two
    a_log: Tensor
    d: Tensor
    dt_limit: tuple[float, float]
    conv_states: Tensor  # [num_blocks, E + 2 G N, K - 1], a view of the pool
    states: Tensor  # [num_blocks, H, P, N] float32


@dataclass(slots=True)
class Row:
    """A row of several tokens, or one that begins: its tokens in the step, and the block of its state."""

    tokens: slice
    block: int
    is_new: bool


@dataclass(slots=True)
class StateMetadata:
    """Rows of a step. Those of one token that have a state already are computed together."""

    rows: list[Row]
    tokens: Tensor  # of the others, [n] int64
    blocks: Tensor  # and the blocks of their states, [n] int64


class StateSpaceBackend(AttentionBackend):
    """Handles float32, bfloat16 and float16."""

    name: ClassVar[str] = "state_space"
    handles: ClassVar[frozenset[str]] = frozenset({"attention_type"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.attention_type != STATE:
            reasons.append(f"attention type {needs.attention_type}, only {STATE}")
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        return None

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> StateMetadata:
        starts = common.query_start_loc[: common.num_reqs + 1].tolist()
        lengths, blocks = common.seq_lens[: common.num_reqs].tolist(), common.block_table[: common.num_reqs, 0].tolist()
        rows, single = [], []
        for start, stop, length, block in zip(starts, starts[1:], lengths, blocks, strict=False):
            if stop - start == 1 and length > 1:
                single.append((start, block))
            elif stop > start:
                rows.append(Row(slice(start, stop), block, length == stop - start))
        found = torch.tensor(single, dtype=torch.int64).view(-1, 2)
        return StateMetadata(rows, found[:, 0], found[:, 1])

    def bind(self, layer: Any) -> BoundAttention:
        return StateSpace(layer)


class StateSpace(BoundAttention):
    """A layer's convolution and states."""

    layer: StateParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + E + 2 G N + H] -> output [T, E], not yet gated"""
        layer = self.layer
        inner, width = layer.num_heads * layer.head_dim, layer.conv_weight.shape[0]
        _, convolved, steps = query.split([inner, width, layer.num_heads], dim=-1)
        if len(metadata.tokens):
            output[metadata.tokens] = self._step(
                convolved[metadata.tokens], self._dt(steps[metadata.tokens]), metadata.blocks
            )
        for row in metadata.rows:
            output[row.tokens] = self._row(convolved[row.tokens], self._dt(steps[row.tokens]), row)

    def _dt(self, steps: Tensor) -> Tensor:
        low, high = self.layer.dt_limit
        return F.softplus(steps.float() + self.layer.dt_bias).clamp(low, high)

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, H, P], B and C [n, H, N] float32 of what came through the convolution."""
        layer, count = self.layer, len(convolved)
        inner, shared = layer.num_heads * layer.head_dim, layer.num_groups * layer.state_size
        x, b, c = F.silu(convolved).float().split([inner, shared, shared], dim=-1)
        repeats = layer.num_heads // layer.num_groups
        b, c = (part.view(count, layer.num_groups, -1).repeat_interleave(repeats, dim=1) for part in (b, c))
        return x.view(count, layer.num_heads, layer.head_dim), b, c

    def _step(self, convolved: Tensor, dt: Tensor, blocks: Tensor) -> Tensor:
        """One token of each row: [n, E + 2 G N], [n, H] -> [n, E]"""
        layer = self.layer
        seen = torch.cat([layer.conv_states[blocks], convolved[..., None]], dim=-1)
        layer.conv_states[blocks] = seen[..., 1:]
        mixed = (seen * layer.conv_weight).sum(dim=-1)
        x, b, c = self._parts(mixed if layer.conv_bias is None else mixed + layer.conv_bias)
        decay = torch.exp(-dt * layer.a_log.exp())[..., None, None]
        states = layer.states[blocks] * decay + (dt[..., None] * x)[..., None] * b[:, :, None]
        layer.states[blocks] = states
        y = (states @ c[..., None])[..., 0] + layer.d[:, None] * x
        return y.flatten(1).to(convolved.dtype)

    def _row(self, convolved: Tensor, dt: Tensor, row: Row) -> Tensor:
        """All tokens of a row: [L, E + 2 G N], [L, H] -> [L, E]"""
        layer = self.layer
        before, state = layer.conv_states[row.block], layer.states[row.block]
        if row.is_new:  # whatever the block's last request left there
            before, state = torch.zeros_like(before), torch.zeros_like(state)
        seen = torch.cat([before, convolved.t()], dim=1)
        mixed = F.conv1d(seen[None], layer.conv_weight[:, None], layer.conv_bias, groups=len(seen))[0].t()
        layer.conv_states[row.block] = seen[:, seen.shape[1] - before.shape[1] :]
        x, b, c = self._parts(mixed)
        parts = []
        for chunk in _chunks(len(x)):
            y, state = _scan(x[chunk], dt[chunk], b[chunk], c[chunk], layer.a_log, state)
            parts.append(y)
        layer.states[row.block] = state
        return (torch.cat(parts) + layer.d[:, None] * x).flatten(1).to(convolved.dtype)


def _chunks(length: int) -> Sequence[slice]:
    return [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]


def _scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one chunk: x [Q, H, P], dt [Q, H], b and c [Q, H, N], state [H, P, N] -> y [Q, H, P] without D x, state behind them."""
    passed = torch.cumsum(-dt * a_log.exp(), dim=0).t()  # [H, Q], logarithms of the decay up to and with a token
    is_before = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    between = (passed[:, :, None] - passed[:, None, :]).masked_fill(~is_before, -torch.inf).exp()  # [H, Q, Q]
    given = (dt[..., None] * x).transpose(0, 1)  # [H, Q, P]
    b, c = b.transpose(0, 1), c.transpose(0, 1)  # [H, Q, N]
    inside = (c @ b.transpose(1, 2) * between) @ given
    from_before = passed.exp()[..., None] * (c @ state.transpose(1, 2))
    left = (passed[:, -1:] - passed).exp()[..., None] * given
    return (inside + from_before).transpose(0, 1), passed[:, -1].exp()[:, None, None] * state + left.transpose(1, 2) @ b
