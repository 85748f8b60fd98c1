"""The selective scan of Mamba: states of a row, token by token.

A decay differs in every number of a state, so tokens cannot meet each other in products as Mamba-2's do. One program has some of the
token's numbers with their states, and goes through the row's tokens; a warp each, so that a row gives a device hundreds of them. It
computes some tokens while it loads the next: whoever loads one token at a time waits for memory at each.
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

    from pelton_backends.sdpa.selective_scan import ScanParams
    from pelton_backends.triton.states.backend import StateMetadata

NUMBERS = 256
"""Of the states of a program, in steps with prompts: 8 a thread of its warp."""
TOKENS = 4
"""Of a row, that are loaded at once, while those before them are computed."""
SINGLE_NUMBERS = 512
"""The same where all rows have one token."""


@triton.jit
def _load(
    x_at, dt_at, b_at, c_at, count, is_channel, is_number, stride_dt, stride_b, stride_c, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """x, dt, B and C of each of TOKENS tokens; zeros from the one at `count` on, which change no state."""
    found = ()
    for token in tl.static_range(TOKENS):
        is_read, is_shared = is_channel & (token < count), is_number & (token < count)
        found += (
            (
                tl.load(x_at + token * WIDTH, is_read, 0.0), tl.load(dt_at + token * stride_dt, is_read, 0.0),
                tl.load(b_at + token * stride_b, is_shared, 0.0), tl.load(c_at + token * stride_c, is_shared, 0.0),
            ),
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["stride_table"])
def selective_scan_kernel(
    convolved, dt, b, c, states, a_log, d, output, query_start_loc, seq_lens, block_table, stride_dt, stride_b, stride_c,
    stride_block, stride_output, stride_table,
    WIDTH: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr, PADDED_STATE: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
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
    channel, number = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PADDED_STATE)
    is_channel, is_number = channel < WIDTH, number < STATE
    first = start.to(tl.int64)
    x_at, dt_at = convolved + first * WIDTH + channel, dt + first * stride_dt + channel
    b_at, c_at, to = (
        b + first * stride_b + number,
        c + first * stride_c + number,
        output + first * stride_output + channel,
    )
    loaded = _load(
        x_at, dt_at, b_at, c_at, query_len, is_channel, is_number, stride_dt, stride_b, stride_c, WIDTH, TOKENS
    )
    is_state = is_channel[:, None] & is_number[None, :]
    inside = channel[:, None] * STATE + number[None, :]
    rates = -1.4426950408889634 * tl.exp(tl.load(a_log + inside, is_state, 0.0))  # of powers of two
    skip = tl.load(d + channel, is_channel, 0.0)
    at = states + block * stride_block + inside
    state = tl.load(at, is_state & has_state, 0.0)  # whatever the block's last request left there is not read
    for count in range(query_len, 0, -TOKENS):
        x_at, dt_at = x_at + TOKENS * WIDTH, dt_at + TOKENS * stride_dt
        b_at, c_at = b_at + TOKENS * stride_b, c_at + TOKENS * stride_c
        ahead = _load(
            x_at, dt_at, b_at, c_at, count - TOKENS, is_channel, is_number, stride_dt, stride_b, stride_c, WIDTH, TOKENS
        )
        for token in tl.static_range(TOKENS):
            x, step, given, read = loaded[token]
            x = x.to(tl.float32)
            state = tl.exp2(step[:, None] * rates) * state + (step * x)[:, None] * given[None, :]
            y = tl.sum(state * read[None, :], axis=1) + skip * x
            tl.store(to + token * stride_output, y.to(output.dtype.element_ty), is_channel & (token < count))
        to += TOKENS * stride_output
        loaded = ahead
    tl.store(at, state, is_state)


_launch = Launcher(selective_scan_kernel)


class SelectiveScan(BoundAttention):
    """A layer's convolution and states: `S_e = exp(dt_e A_e) S_e + dt_e x_e B; y_e = S_e . C + D_e x_e` for each number e of a token,
    A = -exp(a_log), x convolved, dt, B and C the layer's `selected`; S is zeros where the row begins. All in float32.

    Paper  Gu and Dao, Mamba (arXiv:2312.00752), section 3.
    """

    layer: ScanParams

    def __init__(self, layer: ScanParams, *, pdl: bool) -> None:
        super().__init__(layer)
        self._convolve = ShortConv(layer.conv_weight, layer.conv_bias, layer.conv_states, pdl=pdl)
        self._width, size = layer.a_log.shape
        padded = triton.next_power_of_2(size)
        constants = {"WIDTH": self._width, "STATE": size, "PADDED_STATE": padded, "PDL": pdl}
        key = layer.states.stride(0), layer.states.device.index, alignment(layer.states, layer.a_log, layer.d)
        self._variants = []
        for numbers, tokens in ((SINGLE_NUMBERS, 1), (NUMBERS, TOKENS)):
            channels = triton.next_power_of_2(self._width) if INTERPRETED else max(numbers // padded, 1)
            own = {**constants, "CHANNELS": channels, "TOKENS": tokens}
            variant = _launch.variant(key, own, num_warps=1, **launch_options(pdl))
            self._variants.append((variant, triton.cdiv(self._width, channels)))

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + ...] -> output [T, E], not yet gated; rows of padding are left as they are"""
        layer, common = self.layer, metadata.common
        rows = common.query_start_loc, common.seq_lens, common.block_table
        convolved = query.new_zeros(len(query), self._width)  # `selected` reads padding too
        self._convolve(
            query[:, : self._width], convolved, *rows, num_reqs=common.num_reqs, is_single=not metadata.is_scanned
        )
        dt, b, c = layer.selected(convolved)
        strides = dt.stride(0), b.stride(0), c.stride(0), layer.states.stride(0), output.stride(0)
        arguments = (
            convolved, dt, b, c, layer.states, layer.a_log, layer.d, output, *rows, *strides, common.block_table.stride(0)
        )  # fmt: skip
        key = convolved.dtype, output.dtype, strides, alignment(convolved, dt, b, c, output, *rows)
        variant, num_parts = self._variants[metadata.is_scanned]
        variant(key, (common.num_reqs, num_parts), arguments)
