"""Products of few rows that send them to other ranks as they are stored (`WordsToSend`): what the kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import AllReduce, WordsToSend

CALL = 65536
"""What `WordsToSend.calls` counts for a call."""


def words_of(reduce: AllReduce | None) -> Callable[[int], WordsToSend | None] | None:
    """Return the ranks' `words_to_send`, opened, where they have one; see `AllReduce`."""
    words_to_send: Callable[[int], WordsToSend | None] | None = getattr(reduce, "words_to_send", None)
    if words_to_send is not None:
        reduce.open_to_send()  # type: ignore[union-attr]
    return words_to_send


def sending(
    sent: WordsToSend | None, num_parts: int, out: Tensor
) -> tuple[Tensor | None, Tensor | None, tuple[int, int, int]]:
    """-> addresses, calls, (rank, size, most rows), for a launch of which num_parts count the call. (0, 1, 0): nothing is sent, as where
    parts are no power of two. A result that is sent gets the attribute `pelton_words`."""
    if sent is None or num_parts > CALL or num_parts.bit_count() != 1:
        return None, None, (0, 1, 0)
    out.pelton_words = True  # type: ignore[attr-defined]
    return sent.addresses, sent.calls, (sent.rank, len(sent.addresses), sent.most_rows)


@gluon.jit
def call_of(calls, num_parts):
    """Count one of num_parts of a call, a power of two, and return the call's number; see `WordsToSend`."""
    return (gl.atomic_add(calls, (65536 // num_parts).to(gl.int64), sem="relaxed", scope="gpu") >> 16).to(gl.int32) + 1


@gluon.jit
def send_words(
    low, high, cells, is_inside, addresses, call, N: gl.constexpr, RANK: gl.constexpr, SIZE: gl.constexpr, MOST_ROWS: gl.constexpr
):  # fmt: skip
    """low, high: neighbouring columns of a result, in 16 bits; cells: places of their words in [tokens, N / 2]. See `WordsToSend`."""
    upper = high.to(gl.int16, bitcast=True).to(gl.int64) << 16
    wire = low.to(gl.int16, bitcast=True).to(gl.int64) & 65535 | upper & 0xFFFF0000 | call.to(gl.int64) << 32
    place = ((call & 1) * SIZE + RANK) * (MOST_ROWS * (N // 2))
    for rank in gl.static_range(SIZE):
        memory = gl.load(addresses + rank).to(gl.pointer_type(gl.int64)) + place
        gl.store(memory + cells, wire, mask=is_inside)
