"""The gated delta rule in torch, for CPU. Yang et al., Gated Delta Networks (arXiv:2412.06464); with a decay for each number of a key:
Kimi Linear (arXiv:2510.26692).

For head h with state S [D, P], token t of a row, key k and query q of length 1:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T    and    o_t = S_t^T q_t / sqrt(D)

with the decay a_t = exp(-exp(A) softplus(. + dt_bias)), one number or one for each of D, and b_t = sigmoid(.). Within a chunk the values
that tokens write depend on each other by a triangular system, which is solved for all chunks of a row at once (section 3.2 of the paper);
states pass from chunk to chunk. States are float32.

Shapes: T tokens of a step, G heads of keys and queries, each for H / G heads of values, D numbers of a key, P of a value, R = 1 or D of a
decay, E = H P, K taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64
KEY_CHUNK = 8
"""Where each number of a key has a decay."""
_MOST_DECAY = 60.0
"""Of a chunk, as a logarithm, with which its inverse and its products with a key's numbers are far from float32's largest."""
_EPS = 1e-6  # of the length of keys and queries


class DeltaParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, 2 G D + E + H + H R + ...]: q, k and v, what makes b, what makes a, and more that is
    not read; its output [T, E]."""

    needs: AttentionNeeds
    num_heads: int  # H
    head_dim: int  # P
    num_groups: int  # G
    state_size: int  # D
    max_beta: float  # b is sigmoid(.) times it
    conv_weight: Tensor  # [2 G D + E, K]
    conv_bias: Tensor | None
    dt_bias: Tensor  # [H R] float32
    a_log: Tensor  # [H] float32
    conv_states: Tensor  # [num_blocks, 2 G D + E, K - 1], a view of the pool
    states: Tensor  # [num_blocks, H, D, P] float32


class DeltaRule(BoundAttention):
    """A layer's convolution and states."""

    layer: DeltaParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, 2 G D + E + H + H R + ...] -> output [T, E]"""
        layer, count = self.layer, len(query)
        keys, inner, heads = layer.num_groups * layer.state_size, layer.num_heads * layer.head_dim, layer.num_heads
        sizes = [2 * keys + inner, heads, len(layer.dt_bias)]
        mixed, b, a = query[:, : sum(sizes)].split(sizes, dim=-1)
        q, k, v = F.silu(convolve(layer, mixed, metadata)).float().split([keys, keys, inner], dim=-1)
        q, k = (_unit(part.view(count, layer.num_groups, -1)) for part in (q, k))
        q, k = (part.repeat_interleave(heads // layer.num_groups, dim=1) for part in (q, k))
        beta = layer.max_beta * torch.sigmoid(b.float())
        decay = -layer.a_log.exp()[:, None] * F.softplus(a.float() + layer.dt_bias).view(
            count, heads, -1
        )  # its logarithm
        parts = q * layer.state_size**-0.5, k, v.view(count, heads, -1), decay, beta
        for row in metadata.rows:
            compute = step if row.tokens.stop - row.tokens.start == 1 else scan
            found = compute(row.state(layer.states), *(part[row.tokens] for part in parts))
            output[row.tokens] = found.flatten(1).to(output.dtype)


class DeltaRuleBackend(StateRows):
    """One decay for each head."""

    name: ClassVar[str] = "delta_rule"
    attention_type: ClassVar[str] = "delta_rule"
    computes: ClassVar[type[BoundAttention]] = DeltaRule


class KeyDeltaRuleBackend(StateRows):
    """One decay for each number of a key."""

    name: ClassVar[str] = "key_delta_rule"
    attention_type: ClassVar[str] = "key_delta_rule"
    computes: ClassVar[type[BoundAttention]] = DeltaRule


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """A row's one token: state [H, D, P], changed in place, q and k [1, H, D], v [1, H, P], decay [1, H, R], beta [1, H] -> o [1, H, P]."""
    q, k, v, decay, beta = (part[0] for part in (q, k, v, decay, beta))
    state.mul_(decay.exp()[..., None])
    known = (k[:, None] @ state)[:, 0]
    state.addcmul_(k[..., None], (beta[..., None] * (v - known))[:, None])
    return (q[:, None] @ state).transpose(0, 1)


def scan(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """A row's tokens: the same with L of them -> o [L, H, P]."""
    length, chunk = len(q), min(len(q), CHUNK if decay.shape[-1] == 1 else KEY_CHUNK)
    q, k, v, decay, beta = (_chunked(part, chunk) for part in (q, k, v, decay, beta))
    passed = decay.cumsum(2)  # [H, C, Q, R], logarithms of the decay within a chunk, up to and with a token
    learned = beta[..., None] * k
    system, inside = _between(learned, q, k, passed)  # the system's diagonal is ones, whatever it holds
    given = torch.cat([beta[..., None] * v, learned * passed.exp()], dim=-1)
    written, seen = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    asked = q * passed.exp()
    left = (k * (passed[:, :, -1:] - passed).exp()).transpose(-1, -2)
    kept = passed[:, :, -1].exp()[..., None]
    parts = []
    for at in range(q.shape[1]):
        new = written[:, at] - seen[:, at] @ state
        parts.append(asked[:, at] @ state + inside[:, at] @ new)
        state.mul_(kept[:, at]).baddbmm_(left[:, at], new)
    return torch.cat(parts, dim=1)[:, :length].transpose(0, 1)


def _between(first: Tensor, second: Tensor, k: Tensor, passed: Tensor) -> tuple[Tensor, Tensor]:
    """Products of each token's two vectors with the keys of those up to it, decayed: [H, C, Q, D], passed [H, C, Q, R] -> [H, C, Q, Q]."""
    is_before = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[..., None]

    def decays(of: Tensor) -> Tensor:
        return (of[..., :, None, :] - of[..., None, :, :]).masked_fill(~is_before, -torch.inf).exp()

    if passed.shape[-1] == 1:
        shared = decays(passed)[..., 0]
        return first @ k.transpose(-1, -2) * shared, second @ k.transpose(-1, -2) * shared
    if passed.min() > -_MOST_DECAY:
        grown = (k * (-passed).exp()).transpose(-1, -2)
        products = (part * passed.exp() @ grown for part in (first, second))
        system, inside = (part.masked_fill(~is_before[..., 0], 0.0) for part in products)
        return system, inside
    found = []
    for at in range(k.shape[1]):
        decayed = k[:, at, None] * decays(passed[:, at])  # [H, Q, Q, D]
        found.append([(decayed @ part[:, at, ..., None])[..., 0] for part in (first, second)])
    system, inside = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
    return system, inside


def _chunked(part: Tensor, chunk: int) -> Tensor:
    """[L, H, ...] -> [H, C, Q, ...]; tokens of zeros behind the last, which change no state."""
    padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(part) % chunk))
    return padded.transpose(0, 1).unflatten(1, (-1, chunk))
