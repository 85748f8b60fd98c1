"""The selective scan of Mamba: states of a row, token by token.

A decay differs in every number of a state, so tokens cannot meet each other in products as Mamba-2's do. One program has some of the
token's numbers with their states, and goes through the row's tokens; a warp each, so that a row gives a device hundreds of them.
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

NUMBERS = 512
"""Of the states of a program: 16 a thread of its warp."""


@triton.jit(do_not_specialize=["stride_table"])
def selective_scan_kernel(
    convolved, dt, b, c, states, a_log, d, output, query_start_loc, seq_lens, block_table, stride_dt, stride_b, stride_c,
    stride_block, stride_output, stride_table,
    WIDTH: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr, PADDED_STATE: tl.constexpr, PDL: tl.constexpr,
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
    is_state = is_channel[:, None] & is_number[None, :]
    inside = channel[:, None] * STATE + number[None, :]
    rates = -tl.exp(tl.load(a_log + inside, is_state, 0.0))
    skip = tl.load(d + channel, is_channel, 0.0)
    at = states + block * stride_block + inside
    state = tl.load(at, is_state & has_state, 0.0)  # whatever the block's last request left there is not read
    for place in range(query_len):
        token = (start + place).to(tl.int64)
        x = tl.load(convolved + token * WIDTH + channel, is_channel, 0.0).to(tl.float32)
        step = tl.load(dt + token * stride_dt + channel, is_channel, 0.0)
        given, read = (
            tl.load(b + token * stride_b + number, is_number, 0.0),
            tl.load(c + token * stride_c + number, is_number, 0.0),
        )
        state = tl.exp(step[:, None] * rates) * state + (step * x)[:, None] * given[None, :]
        y = tl.sum(state * read[None, :], axis=1) + skip * x
        tl.store(output + token * stride_output + channel, y.to(output.dtype.element_ty), is_channel)
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
        channels = max(NUMBERS // padded, 1)
        if INTERPRETED:
            channels = triton.next_power_of_2(self._width)
        self._num_parts = triton.cdiv(self._width, channels)
        constants = {"WIDTH": self._width, "STATE": size, "CHANNELS": channels, "PADDED_STATE": padded, "PDL": pdl}
        key = layer.states.stride(0), layer.states.device.index, alignment(layer.states, layer.a_log, layer.d)
        self._variant = _launch.variant(key, constants, num_warps=1, **launch_options(pdl))

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
        self._variant(key, (common.num_reqs, self._num_parts), arguments)
