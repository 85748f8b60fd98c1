"""Grammar masks and side tables, as tokens are chosen: sets of tokens, bad words, min_tokens, bias, penalties.

Math   the grammar's mask, then `pelton.sampling.penalties` in its order: float32, rounded where torch rounds, so that the
       changed logits are equal to the bit. Part of `sampling_rows.scan_kernel`'s one pass over the logits.

Z side slots, V tokens, W bad words of at most L tokens before their last; tables [Z, V], [Z, W, L]. They are found through
`side`, an int64 tensor of their addresses: a dozen arguments that most steps never look at. Memory bound: 4 B a token for a
bias, 5 for penalties, 1 for a set, in groups of 32 tokens of which some is concerned (`SideTables.touched`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelton.sampling import side_tables
from pelton.worker.batch_state import BatchState

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
_FEATURES = tl.constexpr(16)
_TOUCHED = tl.constexpr(17)

BANNED_BIT = tl.constexpr(side_tables.BANNED)
MIN_TOKENS_BIT = tl.constexpr(side_tables.MIN_TOKENS)
BIAS_BIT = tl.constexpr(side_tables.BIAS)
PENALTIES_BIT = tl.constexpr(side_tables.PENALTIES)
BAD_WORDS_BIT = tl.constexpr(side_tables.BAD_WORDS)


def side_addresses(state: BatchState) -> Tensor:
    """[18] int64, in the order above. They hold while `state.side.layout_version` stays."""
    tables = state.side
    tensors = [
        tables.banned, tables.stop_ids, tables.bias, tables.counts, tables.in_prompt,
        tables.presence_penalty, tables.frequency_penalty, tables.repetition_penalty, tables.min_tokens,
        tables.bad_word_prefix, tables.bad_word_prefix_len, tables.bad_word_last,
        state.num_prompt_tokens, state.num_computed_tokens, state.token_ids,
    ]  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in tensors]
    addresses += [state.token_ids.stride(0), tables.features.data_ptr(), tables.touched.data_ptr()]
    return torch.tensor(addresses, dtype=torch.int64).to(state.device)


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
def touched_groups(side, side_slot, group, GROUPS: tl.constexpr):
    """Whether the row's tables say anything of these groups of tokens."""
    own = _bools(side, _TOUCHED) + side_slot * GROUPS
    return tl.load(own + group, mask=group < GROUPS, other=0) != 0


@triton.jit
def change_values(
    values, place, is_inside, slot, side_slot, side, mask_row, has_mask, mask_words,
    HAS_SIDE: tl.constexpr, V: tl.constexpr, WORDS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """A tile of a row's logits, at tokens `place`, as its mask and its side tables say; side_slot < 0: it has no tables. Tables
    are read where `is_inside`: what they say of the other tokens is nothing.

    Launched without fused products: torch rounds each of these.
    """
    if has_mask:
        word_place = place // 32  # tokens beyond the words are not allowed
        word = tl.load(mask_row + word_place, mask=word_place < mask_words, other=0)
        values = tl.where(((word >> (place % 32)) & 1) != 0, values, -float("inf"))
    if HAS_SIDE:  # noqa: SIM102, a constant: what is behind it is not compiled
        if side_slot >= 0:
            features = tl.load(_ints(side, _FEATURES) + side_slot)
            row = side_slot * V
            position = tl.load(_longs(side, _NUM_COMPUTED) + slot) + 1
            num_output = position - tl.load(_longs(side, _NUM_PROMPT) + slot)
            if features & BANNED_BIT:
                banned = tl.load(_bools(side, _BANNED) + row + place, mask=is_inside, other=0)
                values = tl.where(banned != 0, -float("inf"), values)
            if features & BAD_WORDS_BIT:
                values = _ban_bad_words(values, place, slot, position, num_output, side_slot, side, WORDS, LENGTH)
            if features & MIN_TOKENS_BIT:  # noqa: SIM102, nothing is loaded for others
                if num_output < tl.load(_longs(side, _MIN_TOKENS) + side_slot):
                    stops = tl.load(_bools(side, _STOP_IDS) + row + place, mask=is_inside, other=0)
                    values = tl.where(stops != 0, -float("inf"), values)
            if features & BIAS_BIT:
                values += tl.load(_floats(side, _BIAS) + row + place, mask=is_inside, other=0.0)
            if features & PENALTIES_BIT:
                count = tl.load(_ints(side, _COUNTS) + row + place, mask=is_inside, other=0)
                is_output = count > 0
                is_seen = is_output | (tl.load(_bools(side, _IN_PROMPT) + row + place, mask=is_inside, other=0) != 0)
                factor = tl.where(is_seen, tl.load(_floats(side, _REPETITION) + side_slot), 1.0)
                values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
                values = values - tl.load(_floats(side, _FREQUENCY) + side_slot) * count.to(tl.float32)
                values = values - tl.load(_floats(side, _PRESENCE) + side_slot) * is_output.to(tl.float32)
    return values


@triton.jit
def _ban_bad_words(
    values, place, slot, position, num_output, side_slot, side, WORDS: tl.constexpr, LENGTH: tl.constexpr
):
    """Words ban their last token where the output ends with the tokens before it."""
    word, back = tl.arange(0, WORDS), tl.arange(0, LENGTH)
    length = tl.load(_longs(side, _WORD_LENGTH) + side_slot * WORDS + word)
    last = tl.load(_longs(side, _WORD_LAST) + side_slot * WORDS + word)
    before = tl.maximum(position - LENGTH + back, 0)
    ending = tl.load(_ints(side, _TOKEN_IDS) + slot * tl.load(side + _TOKEN_STRIDE) + before)
    prefix = tl.load(_ints(side, _WORD_PREFIX) + (side_slot * WORDS + word[:, None]) * LENGTH + back[None, :])
    is_equal = (prefix == ending[None, :]) | (back[None, :] < LENGTH - length[:, None])
    is_word = (tl.min(is_equal.to(tl.int32), 1) != 0) & (length >= 0) & (length <= num_output)
    for index in range(WORDS):
        token = tl.max(tl.where((word == index) & is_word, last, -1), 0)
        values = tl.where(place == token, -float("inf"), values)
    return values
