"""A token more for states of Mamba-2: one program updates some rows of a head's state, and reads the token's output from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.rows import columns, softplus

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 2048
"""Of a state that a program has: 16 a thread, so that one row of Mamba-2's sizes gives a device hundreds of programs."""


@triton.jit(do_not_specialize=["stride_table"])
def step_kernel(
    convolved, steps, states, dt_bias, a_log, d, output, query_start_loc, seq_lens, block_table, low, high, stride_steps,
    stride_block, stride_output, stride_table,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, X: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, LINE: tl.constexpr, ACTIVATE: tl.constexpr, ROWS: tl.constexpr, PADDED_STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a row, a head, and ROWS of its DIM numbers. X, B, C: where they begin in a line of `convolved`, which has LINE."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    has_state = tl.load(seq_lens + row) > 1
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    dim = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, PADDED_STATE)
    is_dim, is_number = dim < DIM, number < STATE
    own = convolved + token.to(tl.int64) * LINE
    shared = own + head // (HEADS // GROUPS) * STATE + number
    x = columns(own + X + head * DIM + dim, is_dim, ACTIVATE).to(tl.float32)
    b = columns(shared + B, is_number, ACTIVATE).to(tl.float32)
    c = columns(shared + C, is_number, ACTIVATE).to(tl.float32)
    dt = 1.0
    if dt_bias is not None:
        raw = tl.load(steps + token.to(tl.int64) * stride_steps + head).to(tl.float32) + tl.load(dt_bias + head)
        dt = tl.minimum(tl.maximum(softplus(raw), low), high)
    decay = tl.exp(-dt * tl.exp(tl.load(a_log + head)))
    is_state = is_dim[:, None] & is_number[None, :]
    at = states + block * stride_block + (head * DIM + dim)[:, None] * STATE + number[None, :]
    state = tl.load(at, is_state & has_state, 0.0)  # whatever the block's last request left there is not read
    state = state * decay + (dt * x)[:, None] * b[None, :]
    tl.store(at, state, is_state)
    y = tl.sum(state * c[None, :], axis=1)
    if d is not None:
        y += tl.load(d + head) * x
    to = output + token.to(tl.int64) * stride_output + head * DIM + dim
    tl.store(to, y.to(output.dtype.element_ty), is_dim)


_launch = Launcher(step_kernel)


def places(layer: Any, at: tuple[int, int, int] | None) -> dict[str, Any]:
    """Constants of kernels: where x, B and C begin in a line, and whether SiLU is still to be done."""
    inner, shared = layer.num_heads * layer.head_dim, layer.num_groups * layer.state_size
    return {**dict(zip("XBC", at or (0, inner, inner + shared), strict=True)), "ACTIVATE": at is not None}


class StateStep:
    """For rows of one token: `S = exp(-dt exp(a_log)) S + dt x B^T`, `output = S C + d x`, dt = softplus(steps + dt_bias) within the
    layer's limits; S is zeros where the row begins.

    Paper  Dao and Gu, Transformers are SSMs (arXiv:2405.21060).

    T tokens, H heads, P numbers of a head, N of a state, G groups, P' blocks, R rows, B blocks of the widest table
      convolved        [T, H P + 2 G N]  x, B, C, or as `at` says: a float dtype; strides (any, 1)
      steps            [T, H]            a float dtype; strides (any, 1)
      states           [P', H, P, N]     float32, contiguous but for the first axis; written in place
      output           [T, H P]          a float dtype; strides (any, 1)
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32, of which the first column is read

    at: where x, B and C begin in a line of `convolved` where they have not come through SiLU yet: it is done here, and rounded to
    convolved's dtype. Where `dt_bias` is None dt is 1, and `steps` is not read; where `d` is None nothing is added.

    Rows of another number of tokens are left alone. All in float32.
    """

    def __init__(self, layer: Any, *, at: tuple[int, int, int] | None = None, pdl: bool) -> None:
        padded = triton.next_power_of_2(layer.state_size)
        rows = min(max(NUMBERS // padded, 1), triton.next_power_of_2(layer.head_dim))
        if INTERPRETED:
            rows = triton.next_power_of_2(layer.head_dim)
        self._layer = layer
        self._grid = layer.num_heads, triton.cdiv(layer.head_dim, rows)
        self._constants = {
            "HEADS": layer.num_heads, "GROUPS": layer.num_groups, "DIM": layer.head_dim, "STATE": layer.state_size,
            **places(layer, at), "ROWS": rows, "PADDED_STATE": padded, "PDL": pdl,
        }  # fmt: skip
        own = layer.states, layer.dt_bias, layer.a_log, layer.d
        self._key = layer.states.stride(0), layer.states.device.index, alignment(*own)
        self._options = {"num_warps": 4, **launch_options(pdl)}
        self._variants: dict[int, Variant] = {}

    def __call__(
        self,
        convolved: Tensor,
        steps: Tensor,
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        num_rows: int,
    ) -> None:
        layer, line = self._layer, convolved.stride(0)
        if line not in self._variants:
            self._variants[line] = _launch.variant(self._key, {**self._constants, "LINE": line}, **self._options)
        strides = steps.stride(0), layer.states.stride(0), output.stride(0)
        arguments = (
            convolved, steps, layer.states, layer.dt_bias, layer.a_log, layer.d, output, query_start_loc, seq_lens,
            block_table, *layer.dt_limit, *strides, block_table.stride(0),
        )  # fmt: skip
        key = (
            convolved.dtype, steps.dtype, output.dtype, strides,
            alignment(convolved, steps, output, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        self._variants[line](key, (num_rows, *self._grid), arguments)
