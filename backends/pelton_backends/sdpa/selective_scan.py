"""The selective scan of Mamba in torch, for CPU. Gu and Dao, Mamba (arXiv:2312.00752), section 3.

Each number e of a token has a state of its own S_e [N], token t of a row:

    S_e,t = exp(dt_e,t A_e) S_e,t-1 + dt_e,t x_e,t B_t    and    y_e,t = S_e,t . C_t + D_e x_e,t

A decay differs in every number of a state, so tokens cannot meet each other in products as Mamba-2's do. A row is cut into chunks that
take their tokens one by one side by side: once from nothing, which gives the state that each chunk adds, and once from the right state.
Passes and chunks are both about the root of the row's length. States are float32.

Shapes: T tokens of a step, E numbers of a token, N of a state, L tokens of a row in C chunks of Q.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor


class ScanParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, E + ...]: x, and more that is not read; its output [T, E]."""

    needs: AttentionNeeds
    conv_weight: Tensor  # [E, K]
    conv_bias: Tensor | None
    a_log: Tensor  # [E, N] float32
    d: Tensor  # [E] float32
    conv_states: Tensor  # [num_blocks, E, K - 1], a view of the pool
    states: Tensor  # [num_blocks, E, N] float32

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E], convolved -> dt [T, E], B and C [T, N], all float32."""
        ...


class SelectiveScan(BoundAttention):
    """A layer's convolution and states."""

    layer: ScanParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + ...] -> output [T, E], not yet gated"""
        layer = self.layer
        x = F.silu(convolve(layer, query[:, : len(layer.conv_weight)], metadata))
        dt, b, c = layer.selected(x)
        rates, x = -layer.a_log.exp(), x.float()
        parts = dt, dt * x, b, c
        if len(tokens := metadata.tokens):
            y, states = _walk(layer.states[metadata.blocks], rates, *(part[None, tokens] for part in parts))
            layer.states[metadata.blocks] = states
            output[tokens] = (y[0] + layer.d * x[tokens]).to(output.dtype)
        for row in metadata.rows:
            y, state = scan(row.before(layer.states), rates, *(part[row.tokens] for part in parts))
            layer.states[row.block] = state
            output[row.tokens] = (y + layer.d * x[row.tokens]).to(output.dtype)


class SelectiveScanBackend(StateRows):
    name: ClassVar[str] = "selective_scan"
    attention_type: ClassVar[str] = "selective_scan"
    computes: ClassVar[type[BoundAttention]] = SelectiveScan


def scan(state: Tensor, rates: Tensor, dt: Tensor, given: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens of a row: state and rates [E, N], dt and given = dt x [L, E], b and c [L, N] -> y [L, E], state behind them."""
    length = len(dt)
    dt, given, b, c = (_side_by_side(part, math.isqrt(length)) for part in (dt, given, b, c))
    _, added = _walk(state.new_zeros(dt.shape[1], *state.shape), rates, dt, given, b, c)
    kept = (dt.sum(0)[..., None] * rates).exp()
    before = []
    for chunk in range(len(added)):
        before.append(state)
        state = kept[chunk] * state + added[chunk]
    y, _ = _walk(torch.stack(before), rates, dt, given, b, c)
    return y.transpose(0, 1).flatten(0, 1)[:length], state


def _side_by_side(part: Tensor, chunk: int) -> Tensor:
    """[L, ...] -> [Q, C, ...]; tokens of zeros behind the last, which change no state."""
    return F.pad(part, (0, 0, 0, -len(part) % chunk)).unflatten(0, (-1, chunk)).transpose(0, 1)


def _walk(states: Tensor, rates: Tensor, dt: Tensor, given: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Q tokens, each of C rows at once: states [C, E, N], [Q, C, E], [Q, C, N] -> y [Q, C, E] without D x, states behind them."""
    parts = []
    for step in range(len(dt)):
        states = (dt[step, ..., None] * rates).exp() * states + given[step, ..., None] * b[step, :, None]
        parts.append((states @ c[step, ..., None])[..., 0])
    return torch.stack(parts), states
