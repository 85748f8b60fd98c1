"""How streamed decode attention deals chunks to programs: all of them, once, and evenly."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_shares import chunk_behind_new
from pelton_backends.triton.attention.decode_streamed import lay_out, piece_at

N, MAX_PIECES = 16, 64


@triton.jit
def shares_kernel(
    seq_lens,
    pieces,  # [programs, MAX_PIECES, 6]: row, kv head, begin, end, first program, parts
    num_rows,
    num_programs,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    START: tl.constexpr,
    N: tl.constexpr,
    MAX_PIECES: tl.constexpr,
):
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    row_begins, row_ends, line, share = lay_out(lengths, num_programs, False, WINDOW, NUM_KV_HEADS, N, START)
    place = program * share
    last_place = tl.minimum(place + share, line)
    at = pieces + program * (MAX_PIECES * 6)
    while place < last_place:
        row, head, _, begin, end, first_program, num_parts, place = piece_at(
            place, program, share, lengths, row_begins, row_ends, False, WINDOW, N, START
        )
        if begin < end:
            tl.store(at + 0, row)
            tl.store(at + 1, head)
            tl.store(at + 2, begin)
            tl.store(at + 3, end)
            tl.store(at + 4, first_program)
            tl.store(at + 5, num_parts)
            at += 6


def deal(
    lengths: list[int], kv_heads: int, programs: int, device: torch.device, *, start: int = 4, window: int = 0
) -> list[list[tuple[int, ...]]]:
    """Each program's pieces."""
    pieces = torch.full((programs, MAX_PIECES, 6), -1, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    shares_kernel[(programs,)](
        seq_lens, pieces, len(lengths), programs, triton.next_power_of_2(len(lengths)), kv_heads, window, start, N, MAX_PIECES
    )  # fmt: skip
    return [[tuple(piece) for piece in rows if piece[0] >= 0] for rows in pieces.tolist()]


def num_chunks(length: int, window: int) -> int:
    return max(-(-length // N) - (max(length - window, 0) // N if window else 0), 1)


@pytest.mark.parametrize("seed", range(40))
def test_every_chunk_belongs_to_one_program_and_no_program_has_much_more_than_another(
    device: torch.device, seed: int
) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, rng.randrange(1, 60), rng.randrange(1, 900))) for _ in range(rng.randrange(1, 9))]
    kv_heads, programs, start = rng.randrange(1, 5), rng.randrange(1, 30), rng.choice((0, 1, 4, 9))
    window = rng.choice((0, 0, 40))
    dealt = deal(lengths, kv_heads, programs, device, start=start, window=window)

    parts: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for program, pieces in enumerate(dealt):
        for row, head, begin, end, first, count in pieces:
            parts.setdefault((row, head), []).append((program, begin, end, first, count))
        continued = [begin == 0 for *_, begin, end, _, count in pieces if count > 1]
        assert continued in ([], [True], [False], [False, True]), "each part has a place of its own"
    chunks = {(r, h): num_chunks(n, window) for r, n in enumerate(lengths) if n for h in range(kv_heads)}
    assert parts.keys() == chunks.keys()
    for pair, found in parts.items():
        assert [part[1] for part in found] + [chunks[pair]] == [0] + [part[2] for part in found]
        assert [part[0] for part in found] == list(range(found[0][3], found[0][3] + len(found)))
        assert {part[3:] for part in found} == {(found[0][0], len(found))}

    line = sum(chunks.values()) + start * len(chunks)
    costs = [sum(end - begin + start for _, _, begin, end, _, _ in pieces) for pieces in dealt]
    assert max(costs) <= -(-line // programs) + start


def test_rows_of_one_length_are_cut_in_the_middle(device: torch.device) -> None:
    """The empty places before a pair do not make the first of its programs do less than the second."""
    dealt = deal([512] * 4, 8, 66, device)
    assert {tuple(piece[2:4] for piece in pieces) for pieces in dealt if pieces} == {((0, 16),), ((16, 32),)}


def test_no_rows_are_no_work(device: torch.device) -> None:
    assert deal([0, 0, 0], 2, 5, device) == [[]] * 5


@triton.jit
def behind_new_kernel(chunks, num_splits):
    tl.store(chunks + tl.program_id(0), chunk_behind_new(tl.program_id(0), num_splits))


@pytest.mark.parametrize(("num_splits", "expected"), [(0, [0]), (1, [0]), (3, [2, 0, 1])])
def test_new_tokens_come_before_the_first_chunk(device: torch.device, num_splits: int, expected: list[int]) -> None:
    """A row left out begins with its first chunk: its table has nothing before it."""
    chunks = torch.full((len(expected),), -7, dtype=torch.int32, device=device)
    behind_new_kernel[(len(expected),)](chunks, num_splits)
    assert chunks.tolist() == expected
