"""Greedy rows whose best tokens came with the logits: a row's end, without its logits.

A kernel that makes logits can leave the best of each row beside them (`linear/hopper_vocab.py`). It goes with the tensor that was
returned and with no other: logits that a model scales, or of which somebody takes a part, have none, and are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import triton
import triton.language as tl

from pelton_backends.triton.ops.sampling.pieces import INF_KEY, MINUS_INF_KEY, NOT_FINITE, OK, finish_row
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

NO_KEY = -(2**63)
"""Of a row before its first logit."""


def leave_best(logits: Tensor, best: Tensor) -> Tensor:
    """Return logits, whose rows' best are known: best [n] int64, order key of the logit above 2^31 - 1 - its lowest token."""
    logits.pelton_best = best  # type: ignore[attr-defined]
    return logits


def best_of(logits: Tensor) -> Tensor | None:
    """Return what `leave_best` left with this tensor."""
    return cast("Tensor | None", getattr(logits, "pelton_best", None))


@triton.jit
def token_of_best(found, V):
    """The token that a key stands for, and its code."""
    top = (found >> 32).to(tl.int32)
    token = tl.minimum(0x7FFFFFFF - (found & 0x7FFFFFFF), V - 1).to(tl.int32)
    return token, tl.where((top >= INF_KEY) | (top <= MINUS_INF_KEY), NOT_FINITE, OK)


@triton.jit(do_not_specialize=["num_rows", "width"])
def end_best_kernel(
    keys,
    slots,
    result,
    token_ids,
    num_computed_tokens,
    side_slots,
    counts,
    touched,
    num_rows,
    width,
    token_stride,
    padding_slot,
    SIZE: tl.constexpr,
    V: tl.constexpr,
    NO_KEY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The end of `greedy_kernel`, a program a row. keys [SIZE, num_rows]: of each rank's `width` tokens, counted from its first."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slots + row)
    if slot == padding_slot:
        tl.store(result + 2 * row, 0)
        tl.store(result + 2 * row + 1, 0)
    else:
        largest = tl.load(keys + row)
        for rank in tl.static_range(1, SIZE):
            found = tl.load(keys + rank * num_rows + row)
            # Its token's number lies in the lower bits, from 2^31 - 1 down: so a lower one is the larger key.
            largest = tl.maximum(largest, tl.where(found == NO_KEY, found, found - rank * width))
        token, code = token_of_best(largest, V)
        finish_row(
            row, slot, token, code, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
        )
