"""Selective state spaces in torch, for CPU: the layers of Mamba-2. Dao and Gu, Transformers are SSMs (arXiv:2405.21060).

For head h with state S [P, N], token t of a row:  S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T  and  y_t = S_t C_t + D x_t. x, B and C come
through a causal convolution over the row's own last tokens. Rows go in chunks, within which tokens meet each other as in attention
(section 6 of the paper). States are float32.

Shapes: T tokens of a step, H heads, P numbers of a head, N of a state, G groups of heads with the same B and C, E = H P, K taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor

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


class StateSpace(BoundAttention):
    """A layer's convolution and states."""

    layer: StateParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + E + 2 G N + H] -> output [T, E], not yet gated"""
        layer = self.layer
        inner, width = layer.num_heads * layer.head_dim, layer.conv_weight.shape[0]
        _, mixed, steps = query.split([inner, width, layer.num_heads], dim=-1)
        parts = self._parts(convolve(layer, mixed, metadata))
        dt = F.softplus(steps.float() + layer.dt_bias).clamp(*layer.dt_limit)
        for row in metadata.rows:
            x, b, c = (part[row.tokens] for part in parts)
            y = scan(row.state(layer.states), x, dt[row.tokens], b, c, layer.a_log) + layer.d[:, None] * x
            output[row.tokens] = y.flatten(1).to(output.dtype)

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, H, P], B and C [n, H, N] float32 of what came through the convolution."""
        layer, count = self.layer, len(convolved)
        inner, shared = layer.num_heads * layer.head_dim, layer.num_groups * layer.state_size
        x, b, c = F.silu(convolved).float().split([inner, shared, shared], dim=-1)
        repeats = layer.num_heads // layer.num_groups
        b, c = (part.view(count, layer.num_groups, -1).repeat_interleave(repeats, dim=1) for part in (b, c))
        return x.view(count, layer.num_heads, layer.head_dim), b, c


class StateSpaceBackend(StateRows):
    name: ClassVar[str] = "state_space"
    attention_type: ClassVar[str] = STATE
    computes: ClassVar[type[BoundAttention]] = StateSpace


def scan(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor) -> Tensor:
    """A row's tokens: state [H, P, N], changed in place, x [L, H, P], dt [L, H], b and c [L, H, N] -> y [L, H, P] without D x."""
    if len(x) > 1:
        chunks = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]
        return torch.cat([_scan_chunk(state, x[chunk], dt[chunk], b[chunk], c[chunk], a_log) for chunk in chunks])
    state.mul_(torch.exp(-dt[0] * a_log.exp())[:, None, None]).addcmul_(
        (dt[0, :, None] * x[0])[..., None], b[0, :, None]
    )
    return (state @ c[0, ..., None])[None, ..., 0]


def _scan_chunk(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor) -> Tensor:
    """The same for Q tokens of one chunk."""
    passed = torch.cumsum(-dt * a_log.exp(), dim=0).t()  # [H, Q], logarithms of the decay up to and with a token
    is_before = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    between = (passed[:, :, None] - passed[:, None, :]).masked_fill(~is_before, -torch.inf).exp()  # [H, Q, Q]
    given = (dt[..., None] * x).transpose(0, 1)  # [H, Q, P]
    b, c = b.transpose(0, 1), c.transpose(0, 1)  # [H, Q, N]
    inside = (c @ b.transpose(1, 2) * between) @ given
    from_before = passed.exp()[..., None] * (c @ state.transpose(1, 2))
    left = (passed[:, -1:] - passed).exp()[..., None] * given
    state.mul_(passed[:, -1].exp()[:, None, None]).baddbmm_(left.transpose(1, 2), b)
    return (inside + from_before).transpose(0, 1)
