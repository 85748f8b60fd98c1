"""A causal convolution over the last few tokens of each row, of each channel by itself, as layers with states have it.

Prompts of any length, chunks of them and rows of one token go through one launch. A tile has tokens of one row. A row's first tile
alone reads what the row's earlier tokens left, and writes what its later ones will find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.rows import tile_of

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, CHANNELS = 16, 128
"""Of a tile, in steps with prompts: 16 numbers a thread. 32 x 64 are as many, and the compiler takes twice the registers for them."""
SINGLE_CHANNELS = 256
"""The same where all rows have one token."""


@triton.jit
def _inputs(at, mask, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Load what is convolved: x, with GATED times the gate before it, rounded as x is."""
    x = tl.load(at, mask, 0.0)
    if GATED:
        x = (x.to(tl.float32) * tl.load(at - 2 * WIDTH, mask, 0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _keep_last(
    own, before, is_channel, has_state, query_len, stride_projected, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the row's last TAPS - 1 inputs, some of which may have been there before. own, before: pointers to the channels' first."""
    place = tl.arange(0, PLACES)
    token = query_len - (TAPS - 1) + place
    is_place = is_channel[:, None] & (place < TAPS - 1)[None, :]
    is_new = (token >= 0)[None, :]
    new = _inputs(own[:, None] + token.to(tl.int64)[None, :] * stride_projected, is_place & is_new, WIDTH, GATED)
    old = tl.load(before[:, None] + (place + query_len)[None, :], is_place & (token < 0)[None, :] & has_state, 0.0)
    tl.debug_barrier()  # all threads of the program have read what others of them write now
    tl.store(before[:, None] + place[None, :], tl.where(is_new, new.to(old.dtype), old), is_place)


@triton.jit(do_not_specialize=["stride_table", "first_row", "num_reqs"])
def conv_kernel(
    projected, weight, bias, conv_states, convolved, query_start_loc, seq_lens, block_table, first_row, num_reqs,
    stride_projected, stride_block, stride_table,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for TOKENS tokens of a row and CHANNELS channels. PLACES: TAPS - 1, to a power of two. With GATED a line of `projected`
    has two gates and x, and the pointer is that of x."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if TOKENS == 1:  # so have the rows
        row, first = first_row + tl.program_id(0), 0
        start = tl.load(query_start_loc + row)
        query_len = tl.load(query_start_loc + row + 1) - start
    else:
        row, start, query_len, first = tile_of(tl.program_id(0), query_start_loc, first_row, num_reqs, TOKENS)
    if first >= query_len:
        return
    has_state = tl.load(seq_lens + row) > query_len
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < WIDTH
    own = projected + start.to(tl.int64) * stride_projected + channel
    before = conv_states + block * stride_block + channel * (TAPS - 1)
    local = first + tl.arange(0, TOKENS)
    is_token = local < query_len
    mixed = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        mixed += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        at = local + (tap - (TAPS - 1))
        is_read = (is_token & (at >= 0))[:, None] & is_channel[None, :]
        x = _inputs(own[None, :] + at.to(tl.int64)[:, None] * stride_projected, is_read, WIDTH, GATED).to(tl.float32)
        mixed += x * tl.load(weight + channel * TAPS + tap, is_channel, 0.0).to(tl.float32)[None, :]
    if first == 0:
        for tap in tl.static_range(TAPS - 1):
            is_kept = (is_token & (local + tap < TAPS - 1) & has_state)[:, None] & is_channel[None, :]
            x = tl.load(before[None, :] + (local + tap)[:, None], is_kept, 0.0).to(tl.float32)
            mixed += x * tl.load(weight + channel * TAPS + tap, is_channel, 0.0).to(tl.float32)[None, :]
        _keep_last(own, before, is_channel, has_state, query_len, stride_projected, WIDTH, TAPS, PLACES, GATED)
    if GATED:
        behind = own[None, :] - WIDTH + local.to(tl.int64)[:, None] * stride_projected
        mixed *= tl.load(behind, is_token[:, None] & is_channel[None, :], 0.0).to(tl.float32)
    elif ACTIVATED:
        mixed = mixed / (1.0 + tl.exp(-mixed))
    to = convolved + (start + local).to(tl.int64)[:, None] * WIDTH + channel[None, :]
    tl.store(to, mixed.to(convolved.dtype.element_ty), is_token[:, None] & is_channel[None, :])


_launch = Launcher(conv_kernel)


class ShortConv:
    """`convolved[t] = silu(bias + sum_k weight[:, k] x[t - K + 1 + k])`, x the tokens of t's row: those of the step, and before them
    the K - 1 that the row's block has, zeros where the row begins. is_gated: x is the last third of `projected` times the first, and
    what is convolved is multiplied by the second, in place of the activation. is_activated: whether there is the activation.

    T tokens, W channels, K taps, P blocks, R rows, B blocks of the widest table
      projected        [T, W], with is_gated [T, 3 W]; a float dtype; strides (any, 1)
      weight, bias     [W, K], [W] or None; a float dtype, contiguous
      conv_states      [P, W, K - 1]  strides (any, K - 1, 1): the last inputs of the row whose block it is, written in place
      convolved        [T, W]  contiguous
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32, of which the first column is read

    Rows without tokens, and tokens of padding, are left alone: blocks of both kinds are neither read nor written. Sums in float32.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        conv_states: Tensor,
        *,
        is_gated: bool = False,
        is_activated: bool = True,
        pdl: bool,
    ) -> None:
        self._width, self._taps = weight.shape
        assert conv_states.stride()[1:] == (self._taps - 1, 1) and weight.is_contiguous(), "channels lie side by side"
        assert self._taps <= TOKENS, "a tile has all tokens that read the state"
        self._tensors, self._is_gated = (weight, bias, conv_states), is_gated
        self._constants = {
            "WIDTH": self._width, "TAPS": self._taps, "PLACES": triton.next_power_of_2(max(self._taps - 1, 1)),
            "GATED": is_gated, "ACTIVATED": is_activated, "PDL": pdl,
        }  # fmt: skip
        self._key = (
            weight.dtype, bias is not None and bias.dtype, conv_states.dtype, conv_states.stride(0), weight.device.index,
            alignment(weight, bias, conv_states),
        )  # fmt: skip
        self._options = launch_options(pdl)
        self._variants: dict[bool, Variant] = {}

    def __call__(
        self,
        projected: Tensor,
        convolved: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        num_reqs: int,
        is_single: bool,
    ) -> None:
        """is_single: no row has more than one token."""
        tokens, channels = (1, SINGLE_CHANNELS) if is_single else (TOKENS, CHANNELS)
        if INTERPRETED:  # a program takes as long with few numbers as with many
            channels = max(triton.next_power_of_2(self._width), 16)
        if is_single not in self._variants:
            constants = {**self._constants, "TOKENS": tokens, "CHANNELS": channels}
            self._variants[is_single] = _launch.variant(self._key, constants, num_warps=4, **self._options)
        num_tiles = num_reqs if is_single else len(projected) // tokens + num_reqs
        weight, bias, conv_states = self._tensors
        if self._is_gated:
            projected = projected[:, 2 * self._width :]
        arguments = (
            projected, weight, bias, conv_states, convolved, query_start_loc, seq_lens, block_table, 0, num_reqs,
            projected.stride(0), conv_states.stride(0), block_table.stride(0),
        )  # fmt: skip
        key = (
            projected.dtype,
            projected.stride(0),
            alignment(projected, convolved, query_start_loc, seq_lens, block_table),
        )
        self._variants[is_single](key, (num_tiles, triton.cdiv(self._width, channels)), arguments)
