"""Side tables, as tokens are chosen: sets of tokens, bad words, min_tokens, bias, penalties.

Math   `pelton_platforms.device.sampling.penalties` in its order: float32, rounded where torch rounds, so that the changed logits are
       equal to the bit. Part of `sampling_rows.scan_kernel`'s one pass over the logits, after the grammar's mask.

Z side slots, V tokens, W bad words of at most L tokens before their last; tables [Z, V], [Z, W, L]. Read only in groups of 32
tokens of which some is concerned (`SideTables.touched`): 4 B a token for a bias, 5 for penalties, 1 for a set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.sampling import side_tables

BANNED_BIT = tl.constexpr(side_tables.BANNED)
MIN_TOKENS_BIT = tl.constexpr(side_tables.MIN_TOKENS)
BIAS_BIT = tl.constexpr(side_tables.BIAS)
PENALTIES_BIT = tl.constexpr(side_tables.PENALTIES)
BAD_WORDS_BIT = tl.constexpr(side_tables.BAD_WORDS)


@triton.jit
def change_values(
    values, place, is_inside, slot, side_slot, uses, banned, stop_ids, bias, counts, in_prompt, presence, frequency,
    repetition, min_tokens, word_prefix, word_length, word_last, num_prompt_tokens, num_computed_tokens, token_ids,
    token_stride, V: tl.constexpr, WORDS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """A tile of a row's logits, at tokens `place`, as its side tables say; uses: `SideTables.features` of the row. Tables are
    read where `is_inside`.

    Launched without fused products: torch rounds each of these.
    """
    at = side_slot * V + place
    if uses & BANNED_BIT:
        values = tl.where(tl.load(banned + at, mask=is_inside, other=0) != 0, -float("inf"), values)
    if uses & (BAD_WORDS_BIT | MIN_TOKENS_BIT):
        position = tl.load(num_computed_tokens + slot) + 1
        num_output = position - tl.load(num_prompt_tokens + slot)
        if uses & BAD_WORDS_BIT:
            values = _ban_bad_words(
                values, place, token_ids + slot * token_stride, position, num_output, side_slot, word_prefix, word_length,
                word_last, WORDS, LENGTH,
            )  # fmt: skip
        if ((uses & MIN_TOKENS_BIT) != 0) & (num_output < tl.load(min_tokens + side_slot)):
            values = tl.where(tl.load(stop_ids + at, mask=is_inside, other=0) != 0, -float("inf"), values)
    if uses & BIAS_BIT:
        values += tl.load(bias + at, mask=is_inside, other=0.0)
    if uses & PENALTIES_BIT:
        count = tl.load(counts + at, mask=is_inside, other=0)
        is_output = count > 0
        is_seen = is_output | (tl.load(in_prompt + at, mask=is_inside, other=0) != 0)
        factor = tl.where(is_seen, tl.load(repetition + side_slot), 1.0)
        values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
        values = values - tl.load(frequency + side_slot) * count.to(tl.float32)
        values = values - tl.load(presence + side_slot) * is_output.to(tl.float32)
    return values


@triton.jit
def _ban_bad_words(
    values, place, row_tokens, position, num_output, side_slot, word_prefix, word_length, word_last,
    WORDS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Words ban their last token where the output ends with the tokens before it."""
    word, back = side_slot * WORDS + tl.arange(0, WORDS), tl.arange(0, LENGTH)
    length = tl.load(word_length + word)
    last = tl.load(word_last + word)
    ending = tl.load(row_tokens + tl.maximum(position - LENGTH + back, 0))
    prefix = tl.load(word_prefix + word[:, None] * LENGTH + back[None, :])
    is_equal = (prefix == ending[None, :]) | (back[None, :] < LENGTH - length[:, None])
    is_word = (tl.min(is_equal.to(tl.int32), 1) != 0) & (length >= 0) & (length <= num_output)
    for index in range(WORDS):
        token = tl.max(tl.where((tl.arange(0, WORDS) == index) & is_word, last, -1), 0)
        values = tl.where(place == token, -float("inf"), values)
    return values
