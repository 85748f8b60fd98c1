"""The real-gated linear recurrent unit (RG-LRU): one number of state for each number of a token, token by token.

One program has some of a token's numbers, and goes through the row's tokens; a warp each. It computes some tokens while it loads the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pelton.attention.interface import BoundAttention
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.runtime import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.conv import ShortConv

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.sdpa.rg_lru import RgLruParams
    from pelton_backends.triton.states.backend import StateMetadata

CHANNELS = 64
"""Of a program: two a thread."""
TOKENS = 4
"""Of a row, that are loaded at once, while those before them are computed."""


@triton.jit
def _load(decay_at, given_at, count, is_channel, stride_decay, stride_given, TOKENS: tl.constexpr):
    """Decay's logarithm and input of each of TOKENS tokens; zeros from the one at `count` on, which change no state."""
    found = ()
    for token in tl.static_range(TOKENS):
        is_read = is_channel & (token < count)
        found += (
            (tl.load(decay_at + token * stride_decay, is_read, 0.0), tl.load(given_at + token * stride_given, is_read, 0.0)),
        )  # fmt: skip
    return found


@triton.jit
def _lost(x):
    """1 - exp(x) of x <= 0, near 0 by its series, where the difference has few digits left."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.05, series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["stride_table"])
def rg_lru_kernel(
    decay, given, states, output, query_start_loc, seq_lens, block_table, stride_decay, stride_given, stride_block,
    stride_output, stride_table, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a row and CHANNELS of a token's WIDTH numbers."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    if query_len <= 0:
        return
    has_state = tl.load(seq_lens + row) > query_len
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, first = channel < WIDTH, start.to(tl.int64)
    decay_at, given_at = decay + first * stride_decay + channel, given + first * stride_given + channel
    to, at = output + first * stride_output + channel, states + block * stride_block + channel
    loaded = _load(decay_at, given_at, query_len, is_channel, stride_decay, stride_given, TOKENS)
    state = tl.load(at, is_channel & has_state, 0.0)  # whatever the block's last request left there is not read
    for count in range(query_len, 0, -TOKENS):
        decay_at, given_at = decay_at + TOKENS * stride_decay, given_at + TOKENS * stride_given
        ahead = _load(decay_at, given_at, count - TOKENS, is_channel, stride_decay, stride_given, TOKENS)
        for token in tl.static_range(TOKENS):
            fallen, own = loaded[token]
            factor = tl.sqrt(_lost(2.0 * fallen))
            if token == 0:  # the row's first is the state itself
                factor = tl.where((count == query_len) & (has_state == 0), 1.0, factor)
            state = tl.exp(fallen) * state + factor * own
            tl.store(to + token * stride_output, state.to(output.dtype.element_ty), is_channel & (token < count))
        to += TOKENS * stride_output
        loaded = ahead
    tl.store(at, state, is_channel)


_launch = Launcher(rg_lru_kernel)


class RgLru(BoundAttention):
    """A layer's convolution and states: `h = a h + sqrt(1 - a^2) g` for each number of a token, x convolved, log(a) and g the layer's
    `gated`; h is g where the row begins. All in float32.

    Paper  De et al., Griffin (arXiv:2402.19427), section 2.4.

    T tokens, E numbers of a token, P blocks
      log(a), g  [T, E]  float32; strides (any, 1)
      states     [P, E]  float32; strides (any, 1), written in place
      output     [T, E]  a float dtype; strides (any, 1)
    """

    layer: RgLruParams

    def __init__(self, layer: RgLruParams, *, pdl: bool) -> None:
        super().__init__(layer)
        self._convolve = ShortConv(layer.conv_weight, layer.conv_bias, layer.conv_states, is_activated=False, pdl=pdl)
        self._width = len(layer.conv_weight)
        channels = triton.next_power_of_2(self._width) if INTERPRETED else CHANNELS
        self._num_parts = triton.cdiv(self._width, channels)
        key = layer.states.stride(0), layer.states.device.index, alignment(layer.states)
        self._variants = [
            _launch.variant(
                key, {"WIDTH": self._width, "CHANNELS": channels, "TOKENS": tokens, "PDL": pdl}, num_warps=1,
                **launch_options(pdl),
            )
            for tokens in (1, TOKENS)
        ]  # fmt: skip

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + ...] -> output [T, E]; rows of padding are left as they are"""
        layer, common = self.layer, metadata.common
        rows = common.query_start_loc, common.seq_lens, common.block_table
        convolved = query.new_zeros(len(query), self._width)  # `gated` reads padding too
        self._convolve(
            query[:, : self._width], convolved, *rows, num_reqs=common.num_reqs, is_single=not metadata.is_scanned
        )
        decay, given = layer.gated(convolved)
        strides = decay.stride(0), given.stride(0), layer.states.stride(0), output.stride(0)
        arguments = decay, given, layer.states, output, *rows, *strides, common.block_table.stride(0)
        key = output.dtype, strides, alignment(decay, given, output, *rows)
        self._variants[metadata.is_scanned](key, (common.num_reqs, self._num_parts), arguments)
