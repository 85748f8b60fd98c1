"""Kernels that exchange words through peers' memory: what a rank brings is written to all others, and each reads its own memory.

Words of 4 bytes travel as 8, the upper half the number of the call (as NCCL's LL protocol does): an 8-byte store is whole or not
there, so data tells by itself that it has come, and no barrier is needed. Program p of one rank talks to program p of the others alone,
through places of its own, and counts its calls itself: launches of any sizes may follow each other, captured or not, as long as all
ranks make the same ones.

A program has two places for each source, used in turn. Who writes the next but one has read what all others wrote of the next, which they
wrote behind reading this one: so it is free.

Messages to one other rank have places of their own, `AHEAD` for each pair of programs: a sender waits for its receiver where that many
blocks are not read yet. So ranks may send to each other at once, and be ahead of each other by some steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLOTS = 2
"""Places of a program for one source."""
AHEAD = 16
"""Places of a program for messages from one source."""
WORDS = 512
"""Words that a program exchanges at once."""
PROGRAMS = 128
"""The most programs of a launch. All of them have to run at once: each waits for its partners."""


@triton.jit
def _memory_of(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _wait(place, flag, failed, limit):
    """Words behind `place` once all carry the flag; after `limit` looks `failed` is set, and they are whatever is there."""
    found = tl.load(place, volatile=True)
    looks = 0
    while (tl.min(((found >> 32).to(tl.int32) == flag).to(tl.int32)) == 0) & (looks < limit):
        found = tl.load(place, volatile=True)
        looks += 1
    if looks >= limit:
        tl.store(failed, 1)
    return found.to(tl.int32)


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    """The number in a word, or the first of two, in float32."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    elif tl.bfloat16 == DTYPE:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _packed(low, high, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def exchange_kernel(
    given, found, addresses, calls, failed, num_words, limit, RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr,
    SLOTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Every rank's words to every rank. DTYPE None: found [SIZE, num_words], in order of rank; else found [num_words], their sums in
    float32, added in order of rank and rounded once.

    given [num_words] int32; addresses [SIZE] int64, of the ranks' memory; calls [PROGRAMS] int32, of each program."""
    program = tl.program_id(0)
    call = tl.load(calls + program)
    own = _memory_of(addresses, RANK)
    lane = tl.arange(0, WORDS)
    for start in range(program * WORDS, num_words, tl.num_programs(0) * WORDS):
        inside = start + lane < num_words
        words = tl.load(given + start + lane, inside, 0)
        call += 1
        wire = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
        place = (program * SLOTS + (call & (SLOTS - 1))) * SIZE * WORDS + lane
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                tl.store(_memory_of(addresses, rank) + place + RANK * WORDS, wire)
        low = tl.zeros([WORDS], tl.float32)
        high = tl.zeros([WORDS], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                theirs = words
            else:
                theirs = _wait(own + place + rank * WORDS, call, failed, limit)
            if DTYPE is None:
                tl.store(found + tl.full((), rank, tl.int64) * num_words + start + lane, theirs, inside)
            else:
                low += _low(theirs, DTYPE)
                if tl.float32 != DTYPE:
                    high += _high(theirs, DTYPE)
        if DTYPE is not None:
            tl.store(found + start + lane, _packed(low, high, DTYPE), inside)
    tl.store(calls + program, call)


@triton.jit
def move_kernel(
    given, found, addresses, counts, failed, num_words, limit, other, SENDS: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, WORDS: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Words to one other rank, or from it. The receiver tells the sender what it has read, since nothing comes back otherwise.

    given [num_words] int32 (SENDS), found [num_words] int32; counts [SIZE, PROGRAMS] int32, blocks of words sent to, or received from,
    each rank. Memory behind the places of `exchange_kernel`: [PROGRAMS, AHEAD, SIZE, WORDS] places, then [SIZE, PROGRAMS] numbers of blocks
    read."""
    program = tl.program_id(0)
    lane = tl.arange(0, WORDS)
    count = tl.load(counts + other * PROGRAMS + program)
    own, theirs = _memory_of(addresses, RANK), _memory_of(addresses, other)
    places = PROGRAMS * SLOTS * SIZE * WORDS
    counts_read = places + PROGRAMS * AHEAD * SIZE * WORDS
    for start in range(program * WORDS, num_words, tl.num_programs(0) * WORDS):
        inside = start + lane < num_words
        count += 1
        place = places + (program * AHEAD + (count & (AHEAD - 1))) * SIZE * WORDS + lane
        if SENDS:
            read = own + counts_read + other * PROGRAMS + program
            looks = 0
            while (count - tl.load(read, volatile=True).to(tl.int32) > AHEAD) & (looks < limit):
                looks += 1
            if looks >= limit:
                tl.store(failed, 1)
            words = tl.load(given + start + lane, inside, 0)
            wire = (count.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
            tl.store(theirs + place + RANK * WORDS, wire)
        else:
            words = _wait(own + place + other * WORDS, count, failed, limit)
            tl.store(found + start + lane, words, inside)
            tl.store(theirs + counts_read + RANK * PROGRAMS + program, count.to(tl.int64))
    tl.store(counts + other * PROGRAMS + program, count)


def memory_words(size: int) -> int:
    """Words of 8 bytes that a rank's memory has."""
    return PROGRAMS * size * ((SLOTS + AHEAD) * WORDS + 1)
