"""States of the gated delta rule, token by token: one program has some columns of a head's state, and goes through a row's tokens.

For rows of one token; for all rows of float32 models, whose chunks (`delta_scan.py`) would be products without tensor cores, of more
numbers than a thread has registers for; and where each number of a key has a decay of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.rows import softplus

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.sdpa.delta_rule import DeltaParams

NUMBERS = 2048
"""Of a state that a program has: 16 a thread."""


@triton.jit
def unit(x, axis: tl.constexpr):
    """x / |x| of float32 vectors along an axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=axis, keep_dims=True) + 1e-6)


@triton.jit
def decays_and_rates(marks, head, is_token, dt_bias, a_log, max_beta, HEADS: tl.constexpr):
    """Logarithms of what tokens leave of the state, and how much they write of what it lacks. marks: pointers to the tokens' b; a lies
    behind all heads' b. 0 for what is no token, which then changes nothing."""
    b = tl.load(marks + head, is_token, 0.0).to(tl.float32)
    a = tl.load(marks + HEADS + head, is_token, 0.0).to(tl.float32)
    fading = -tl.exp(tl.load(a_log + head)) * softplus(a + tl.load(dt_bias + head))
    return tl.where(is_token, fading, 0.0), tl.where(is_token, max_beta / (1.0 + tl.exp(-b)), 0.0)


@triton.jit(do_not_specialize=["stride_table", "first_row"])
def delta_step_kernel(
    convolved, marks, states, dt_bias, a_log, output, query_start_loc, seq_lens, block_table, max_beta, scale, first_row,
    stride_marks, stride_block, stride_output, stride_table,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED_STATE: tl.constexpr, KEYED: tl.constexpr, TAKES_SINGLE: tl.constexpr, TAKES_OTHERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a row, a head, and COLUMNS of the DIM columns of its state."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    if query_len <= 0:
        return
    if not TAKES_SINGLE and query_len == 1:
        return
    if not TAKES_OTHERS and query_len > 1:
        return
    has_state = tl.load(seq_lens + row) > query_len
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    dim, number = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED_STATE)
    is_dim, is_number = dim < DIM, number < STATE
    width: tl.constexpr = 2 * GROUPS * STATE + HEADS * DIM
    q_at = convolved + head // (HEADS // GROUPS) * STATE + number
    v_at = convolved + 2 * GROUPS * STATE + head * DIM + dim
    is_state = is_number[:, None] & is_dim[None, :]
    at = states + block * stride_block + head * (STATE * DIM) + number[:, None] * DIM + dim[None, :]
    state = tl.load(at, is_state & has_state, 0.0)  # whatever the block's last request left there is not read
    for place in range(query_len):
        token = (start + place).to(tl.int64)
        q = unit(tl.load(q_at + token * width, is_number, 0.0).to(tl.float32), 0) * scale
        k = unit(tl.load(q_at + token * width + GROUPS * STATE, is_number, 0.0).to(tl.float32), 0)
        v = tl.load(v_at + token * width, is_dim, 0.0).to(tl.float32)
        mark = marks + token * stride_marks
        if KEYED:
            rate = max_beta / (1.0 + tl.exp(-tl.load(mark + head).to(tl.float32)))
            a = tl.load(mark + HEADS + head * STATE + number, is_number, 0.0).to(tl.float32)
            a += tl.load(dt_bias + head * STATE + number, is_number, 0.0)
            state = state * tl.exp(-tl.exp(tl.load(a_log + head)) * softplus(a))[:, None]
        else:
            fading, rate = decays_and_rates(mark, head, token >= 0, dt_bias, a_log, max_beta, HEADS)
            state = state * tl.exp(fading)
        new = rate * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * new[None, :]
        to = output + token * stride_output + head * DIM + dim
        tl.store(to, tl.sum(state * q[:, None], axis=0).to(output.dtype.element_ty), is_dim)
    tl.store(at, state, is_state)


_launch = Launcher(delta_step_kernel)


class DeltaStep:
    """For each token of a row: `S = a S; S = S + k (b (v - S^T k))^T; output = S^T q / sqrt(D)`, q and k of length 1, a = exp(-exp(a_log)
    softplus(. + dt_bias)) one number or one for each of D, b = max_beta sigmoid(.); S is zeros where the row begins.

    Paper  Yang et al., Gated Delta Networks (arXiv:2412.06464); a decay for each number of a key: Kimi Linear (arXiv:2510.26692).

    T tokens, H heads of values, G of keys, D numbers of a key, P of a value, P' blocks, R rows, B blocks of the widest table
      convolved        [T, 2 G D + H P]  q, k, v: a float dtype, contiguous
      marks            [T, H + H]        what makes b, and what makes a; [T, H + H D] where dt_bias has H D; a float dtype; strides (any, 1)
      states           [P', H, D, P]     float32, contiguous but for the first axis; written in place
      output           [T, H P]          a float dtype; strides (any, 1)
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32, of which the first column is read

    A call takes the first `num_rows` rows, and of these those of one token; `scan` those from `first_row` on, with `skip_single` those of
    several tokens alone. Others are left alone. All in float32.
    """

    def __init__(self, layer: DeltaParams, *, pdl: bool) -> None:
        padded = triton.next_power_of_2(layer.state_size)
        columns = min(max(NUMBERS // padded, 1), triton.next_power_of_2(layer.head_dim))
        if INTERPRETED:
            columns = triton.next_power_of_2(layer.head_dim)
        self._layer, self._scale = layer, layer.state_size**-0.5
        self._grid = layer.num_heads, triton.cdiv(layer.head_dim, columns)
        constants = {
            "HEADS": layer.num_heads, "GROUPS": layer.num_groups, "DIM": layer.head_dim, "STATE": layer.state_size,
            "COLUMNS": columns, "PADDED_STATE": padded, "KEYED": len(layer.dt_bias) > layer.num_heads, "PDL": pdl,
        }  # fmt: skip
        key = layer.states.stride(0), layer.states.device.index, alignment(layer.states, layer.dt_bias, layer.a_log)
        options = {"num_warps": 4, **launch_options(pdl)}
        self._variants = {
            kinds: _launch.variant(
                key, constants | dict(zip(("TAKES_SINGLE", "TAKES_OTHERS"), kinds, strict=True)), **options
            )
            for kinds in ((True, False), (True, True), (False, True))
        }

    def __call__(self, convolved: Tensor, marks: Tensor, output: Tensor, /, *rows: Tensor, num_rows: int) -> None:
        self._launch(self._variants[True, False], 0, num_rows, convolved, marks, output, *rows)

    def scan(
        self, convolved: Tensor, marks: Tensor, output: Tensor, /, *rows: Tensor, num_reqs: int, first_row: int,
        skip_single: bool,
    ) -> None:  # fmt: skip
        variant = self._variants[not skip_single, True]
        self._launch(variant, first_row, num_reqs - first_row, convolved, marks, output, *rows)

    def _launch(
        self,
        variant: Variant,
        first_row: int,
        num_rows: int,
        convolved: Tensor,
        marks: Tensor,
        output: Tensor,
        *rows: Tensor,
    ) -> None:
        layer, strides = self._layer, (marks.stride(0), self._layer.states.stride(0), output.stride(0))
        arguments = (
            convolved, marks, layer.states, layer.dt_bias, layer.a_log, output, *rows, layer.max_beta, self._scale,
            first_row, *strides, rows[2].stride(0),
        )  # fmt: skip
        key = convolved.dtype, marks.dtype, output.dtype, strides, alignment(convolved, marks, output, *rows)
        variant(key, (num_rows, *self._grid), arguments)
