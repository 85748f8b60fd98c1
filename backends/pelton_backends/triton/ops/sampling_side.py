"""Grammar masks and side tables before tokens are chosen: sets of tokens, bad words, min_tokens, bias, penalties.

Math   the grammar's mask, then `pelton.sampling.penalties` in its order: float32, rounded where torch rounds, so that the
       changed logits are equal to the bit. In place, for the rows that have any.

Z side slots, V tokens, W bad words of at most L tokens before their last; tables [Z, V], [Z, W, L]. They are found through
`side`, an int64 tensor of their addresses: a dozen arguments that most steps never look at. Memory bound: 15 B a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelton.worker.batch_state import BatchState
from pelton_backends.triton.ops.sampling_pieces import LOWEST_KEY, order_key
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs

_BANNED = tl.constexpr(0)
_STOP_IDS = tl.constexpr(1)
_BIAS = tl.constexpr(2)
_COUNTS = tl.constexpr(3)
_IN_PROMPT = tl.constexpr(4)
_PRESENCE = tl.constexpr(5)
_FREQUENCY = tl.constexpr(6)
_REPETITION = tl.constexpr(7)
_MIN_TOKENS = tl.constexpr(8)
_WORD_PREFIX = tl.constexpr(9)
_WORD_LENGTH = tl.constexpr(10)
_WORD_LAST = tl.constexpr(11)
_NUM_PROMPT = tl.constexpr(12)
_NUM_COMPUTED = tl.constexpr(13)
_TOKEN_IDS = tl.constexpr(14)
_TOKEN_STRIDE = tl.constexpr(15)


def side_addresses(state: BatchState) -> Tensor:
    """[16] int64, in the order above. They hold while `state.side.layout_version` stays."""
    tables = state.side
    tensors = [
        tables.banned, tables.stop_ids, tables.bias, tables.counts, tables.in_prompt,
        tables.presence_penalty, tables.frequency_penalty, tables.repetition_penalty, tables.min_tokens,
        tables.bad_word_prefix, tables.bad_word_prefix_len, tables.bad_word_last,
        state.num_prompt_tokens, state.num_computed_tokens, state.token_ids,
    ]  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor([*addresses, state.token_ids.stride(0)], dtype=torch.int64).to(state.device)


@triton.jit
def _bools(side, index):
    return tl.load(side + index).to(tl.pointer_type(tl.int8))


@triton.jit
def _floats(side, index):
    return tl.load(side + index).to(tl.pointer_type(tl.float32))


@triton.jit
def _ints(side, index):
    return tl.load(side + index).to(tl.pointer_type(tl.int32))


@triton.jit
def _longs(side, index):
    return tl.load(side + index).to(tl.pointer_type(tl.int64))


@triton.jit
def _apply_tables(values, own, is_inside, num_output, side_slot, side):
    """[BLOCK] logits of a row as its sets, bias and penalties say; own: their places in a table."""
    banned = tl.load(_bools(side, _BANNED) + own, mask=is_inside, other=0)
    stops = tl.load(_bools(side, _STOP_IDS) + own, mask=is_inside, other=0)
    is_early = num_output < tl.load(_longs(side, _MIN_TOKENS) + side_slot)
    banned = tl.where(is_early, banned | stops, banned)
    values = tl.where(banned != 0, -float("inf"), values)
    values += tl.load(_floats(side, _BIAS) + own, mask=is_inside, other=0.0)
    count = tl.load(_ints(side, _COUNTS) + own, mask=is_inside, other=0)
    is_output = count > 0
    is_seen = is_output | (tl.load(_bools(side, _IN_PROMPT) + own, mask=is_inside, other=0) != 0)
    factor = tl.where(is_seen, tl.load(_floats(side, _REPETITION) + side_slot), 1.0)
    values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
    # Launched without fused products: torch rounds each of these.
    values = values - tl.load(_floats(side, _FREQUENCY) + side_slot) * count.to(tl.float32)
    return values - tl.load(_floats(side, _PRESENCE) + side_slot) * is_output.to(tl.float32)


@triton.jit
def _ban_bad_words(
    row_logits, first, stop, slot, position, num_output, side_slot, side, WORDS: tl.constexpr, LENGTH: tl.constexpr
):
    """Words ban their last token where the output ends with the tokens before it; only tokens in [first, stop).

    A banned token stays so whatever is added to it, so this comes last, on what the program itself has written.
    """
    word, back = tl.arange(0, WORDS), tl.arange(0, LENGTH)
    length = tl.load(_longs(side, _WORD_LENGTH) + side_slot * WORDS + word)
    if tl.max(length, 0) >= 0:
        last = tl.load(_longs(side, _WORD_LAST) + side_slot * WORDS + word)
        before = tl.maximum(position - LENGTH + back, 0)
        ending = tl.load(_ints(side, _TOKEN_IDS) + slot * tl.load(side + _TOKEN_STRIDE) + before)
        prefix = tl.load(_ints(side, _WORD_PREFIX) + (side_slot * WORDS + word[:, None]) * LENGTH + back[None, :])
        is_equal = (prefix == ending[None, :]) | (back[None, :] < LENGTH - length[:, None])
        is_word = (tl.min(is_equal.to(tl.int32), 1) != 0) & (length >= 0) & (length <= num_output)
        tl.debug_barrier()
        tl.store(
            row_logits + last,
            tl.full([WORDS], -float("inf"), tl.float32),
            mask=is_word & (last >= first) & (last < stop),
        )


@triton.jit
def change_kernel(
    logits,
    slots,
    raw_best,
    side_slots,
    side,
    mask_words,
    has_mask,
    row_stride,
    mask_stride,
    padding_slot,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n, SPLITS): masks and side tables of the rows that have any, in place; other rows are left alone.

    raw_best [n, SPLITS] int32, written for every row: key of the best logit before, for a row that changes, else LOWEST_KEY.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slots + row)
    side_slot = tl.full([], -1, tl.int64)
    if HAS_SIDE:
        side_slot = tl.load(side_slots + slot)
    is_masked = tl.full([], 0, tl.int1)
    if HAS_MASK:
        is_masked = tl.load(has_mask + slot) != 0
    best = tl.full([], LOWEST_KEY, tl.int32)
    if (slot != padding_slot) & ((side_slot >= 0) | is_masked):
        row_logits = logits + row.to(tl.int64) * row_stride
        position = tl.load(_longs(side, _NUM_COMPUTED) + slot) + 1
        num_output = position - tl.load(_longs(side, _NUM_PROMPT) + slot)
        size = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
        first = split * size
        for start in range(0, tl.cdiv(tl.cdiv(V, SPLITS), BLOCK)):
            place = first + start * BLOCK + tl.arange(0, BLOCK)
            is_inside = place < V
            values = tl.load(row_logits + place, mask=is_inside, other=-float("inf"))
            best = tl.maximum(best, tl.max(order_key(values), 0))
            if is_masked:
                word_place = place // 32  # tokens beyond the words are not allowed
                word = tl.load(mask_words + slot * mask_stride + word_place, mask=word_place < mask_stride, other=0)
                values = tl.where(((word >> (place % 32)) & 1) != 0, values, -float("inf"))
            if side_slot >= 0:
                values = _apply_tables(values, side_slot * V + place, is_inside, num_output, side_slot, side)
            tl.store(row_logits + place, values, mask=is_inside)
        if side_slot >= 0:
            _ban_bad_words(row_logits, first, first + size, slot, position, num_output, side_slot, side, WORDS, LENGTH)
    tl.store(raw_best + row * SPLITS + split, best)
