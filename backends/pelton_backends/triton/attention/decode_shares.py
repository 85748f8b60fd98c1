"""Share out one launch of decode attention: how many programs a kv head has, and which rows each serves.

`launch_shape` says it from shapes alone. For few rows of different lengths `deal_kernel` deals programs out by the lengths, once
a step for all layers, and every program of `decode_kernel` and `drafts_kernel` reads its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_pieces import LEVELS
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.runtime import launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

SHARE = tl.constexpr(8)  # numbers that `deal_kernel` writes for a program


@triton.jit
def first_seen(seq_len, WINDOW: tl.constexpr):
    """First key that the last token of a row sees: of its last WINDOW keys, or, below 0, of its own aligned chunk of -WINDOW."""
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    if WINDOW < 0:
        first = tl.maximum(seq_len - 1, 0) // -WINDOW * -WINDOW
    return first


@triton.jit
def chunks_of_row(seq_len, FUSED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """First key and the one past the last, the same of chunks."""
    last_key = seq_len
    if FUSED:
        last_key = seq_len - 1
    first_key = first_seen(seq_len, WINDOW)
    return first_key, last_key, first_key // N, (last_key + N - 1) // N


@triton.jit
def share_of_row(
    seq_len, FUSED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr
):
    """How many splits share a row's chunks where each row has SPLITS programs: 0 for a row left out."""
    _, _, first_chunk, last_chunk = chunks_of_row(seq_len, FUSED, WINDOW, N)
    num_splits = tl.minimum(tl.maximum((last_chunk - first_chunk + LEAST - 1) // LEAST, 1), SPLITS)
    return tl.where(seq_len > 0, num_splits, 0)


@triton.jit
def chunk_behind_new(split, num_splits):
    """Which of a row's chunks a split begins with where the row's new tokens are dealt out as one too, before all others. A row left
    out has no splits: none of its chunks is before its first, where its table does not reach."""
    return tl.where(split == 0, tl.maximum(num_splits, 1), split) - 1


@triton.jit(do_not_specialize=["num_rows"])
def deal_kernel(
    seq_lens,
    query_start_loc,
    block_table,
    shares,
    stride_table,
    num_rows,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    NEW_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p writes shares[p] = row, its length, the row's first program, how many it has, and the blocks of the first chunk,
    one for each 16 tokens: SPLITS programs of a kv head, for all rows. Arguments: see `deal_rows`.

    A row has programs in proportion to its pieces of LEAST chunks, one at least, and no more than pieces. One behind the last row's
    programs belongs to that row, and is past its splits.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    if query_start_loc is not None:  # rows with another number of tokens belong to another kernel
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
        lengths = tl.where(ends - starts == 1, lengths, 0)
    _, _, first_chunk, last_chunk = chunks_of_row(lengths, True, WINDOW, N)
    pieces = tl.maximum((last_chunk - first_chunk + LEAST - 1) // LEAST, 1)
    pieces = tl.where(lengths > 0, pieces, 0)
    num_pieces = tl.maximum(tl.sum(pieces, 0), 1)
    splits = pieces
    for i in tl.static_range(
        5
    ):  # each row rounds up: the most programs to deal out with which all fit, the first do for certain
        dealt = SPLITS - ROWS * (4 - i) // 4
        rounded = tl.minimum((pieces * dealt + num_pieces - 1) // num_pieces, pieces)
        if i == 0:
            splits = rounded
        else:
            splits = tl.where(tl.sum(rounded, 0) <= SPLITS, rounded, splits)
    ends = tl.cumsum(splits, 0)
    program = tl.program_id(0)
    row = tl.minimum(tl.sum((ends <= program).to(tl.int32), 0), num_rows - 1)
    is_row = rows == row
    length, first = tl.sum(tl.where(is_row, lengths, 0), 0), tl.sum(tl.where(is_row, ends - splits, 0), 0)
    share = shares + program * SHARE
    tl.store(share, row)
    tl.store(share + 1, length)
    tl.store(share + 2, first)
    tl.store(share + 3, tl.sum(tl.where(is_row, splits, 0), 0))
    _, _, first_chunk, _ = chunks_of_row(length, True, WINDOW, N)
    piece = tl.arange(0, N // 16)
    chunk = program - first
    if NEW_FIRST:
        chunk = chunk_behind_new(chunk, tl.sum(tl.where(is_row, splits, 0), 0))
    token = (first_chunk + chunk) * N + piece * 16
    is_entry = token < tl.minimum(length, stride_table * BLOCK_SIZE)
    block = tl.load(block_table + row.to(tl.int64) * stride_table + token // BLOCK_SIZE, mask=is_entry, other=0)
    tl.store(share + 4 + piece, block)


@triton.jit
def share_at(shares, program):
    """Load what `deal_kernel` wrote, but for the blocks."""
    share = shares + program * SHARE
    row, length = tl.load(share, cache_modifier=".cg"), tl.load(share + 1, cache_modifier=".cg")
    first, count = tl.load(share + 2, cache_modifier=".cg"), tl.load(share + 3, cache_modifier=".cg")
    return row, length, first, count


_launch_deal = Launcher(deal_kernel)

PROGRAMS_PER_SM = 8  # as many as registers let run at once: each multiprocessor has an equal share
_DEALT_UP_TO, FEW_PAIRS, _STREAMED_UP_TO = 128, 256, 1024  # pairs of row and kv head
_PARTS = 16384  # of a split launch, at most
_EARLY_BYTES, TILE_BYTES = 256, 2048  # of a head's numbers, and of all heads of a tile with their key


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How one launch shares out its work; a function of shapes alone."""

    splits: int  # programs of a kv head: of each row, or, dealt, of all rows together; 0: streamed
    programs: int  # of a streamed launch
    keys: int  # of a chunk
    num_stages: int
    least: int = 1  # chunks of a split
    is_early: bool = False
    is_dealt: bool = False


@dataclass(slots=True)
class PartBuffers:
    """Where programs leave partial results; shared by all launches of one stream. `arrivals` is zero between launches."""

    sums: Tensor  # [places, GROUP * HEAD_DIM] float32
    stats: Tensor  # [places, 2 * GROUP] float32
    arrivals: Tensor  # [places, LEVELS] int32
    shares: Tensor  # [places, SHARE] int32, of `deal_rows`

    @staticmethod
    def allocate(
        device: torch.device, *, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> PartBuffers:
        group = num_heads // num_kv_heads
        pairs = max_rows * num_kv_heads * max(cuts_of(group, padded(head_dim) * size) for size in (2, 4))
        places = 2 * max(PROGRAMS_PER_SM * num_sms(device), 2 * FEW_PAIRS)
        if pairs > _STREAMED_UP_TO:
            places = max(places, _PARTS)
        return PartBuffers(
            torch.empty(places, group * head_dim, dtype=torch.float32, device=device),
            torch.empty(places, 2 * group, dtype=torch.float32, device=device),
            torch.zeros(places, LEVELS.value, dtype=torch.int32, device=device),
            torch.zeros(places, SHARE.value, dtype=torch.int32, device=device),
        )


def padded(head_dim: int) -> int:
    """Numbers of a head in the kernels' tiles."""
    return int(max(16, triton.next_power_of_2(head_dim)))


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a padded head's numbers in the model's dtype."""
    return padded(head_dim) * dtype.itemsize


def cuts_of(group: int, row_bytes: int) -> int:
    """As how many kv heads, with a part of its query heads each, one with `group` query heads counts: a power of two.

    One warp has all heads of a tile in its registers, and the program that merges parts reads them of all heads: with 8 heads of 128
    numbers a step of one row of 256 tokens took 7.6 us in a chain on an H200, with 4 of them 4.9 us."""
    cuts = 1
    while (
        row_bytes <= _EARLY_BYTES
        and group % (2 * cuts) == 0
        and triton.next_power_of_2(group // cuts + 1) * row_bytes > TILE_BYTES
    ):
        cuts *= 2
    return cuts


@lru_cache(maxsize=4096)
def launch_shape(
    num_rows: int, num_kv_heads: int, group: int, max_seq_len: int, row_bytes: int, num_sms: int
) -> LaunchShape:
    """Measured on an H200 in captured chains, 8 kv heads of 128 numbers, blocks of 16.

    Few pairs of row and kv head are latency while they are short: the first chunk is loaded early (4.3 us at one row of 256 tokens,
    6.1 loaded late; 11.2 and 16 us at 32 rows). One row has as many programs as run at once: at 120,000 tokens 115 us, with 16 a
    kv head 372; at 8,000 tokens 13.6 and 28.6; at 256 a layer takes no longer (16.3 and 16.7 us), although most have no work then.
    Several rows share them by their lengths (8 rows, one of 32,000 tokens: 37 us, with 16 for each row 113); more than 128 pairs
    have four programs each, as dealing costs 2.5 % of a step of 32 rows of 128 to 256 tokens (0.6B). Chunks of 32 keys, but of 16 for
    one or two rows of larger groups: there the shared memory of programs without work keeps the next product's weights out (a layer
    of the 8B at 128 tokens: 115 and 110 us).

    Then come even shares: split programs that start before the kernel before has ended crowd on the multiprocessors that it leaves
    free (128 rows of 256 tokens: 85 % of the copy bandwidth; split 63, and 80 without dependent launch; 64 rows of 512: 81 %, split
    60 to 77; 64 rows of 100 to 1024: 73 %, split 77). Above, splits of 256 tokens or more (256 rows of 100 to 1024 tokens: 93 %,
    even shares 88).

    row_bytes: more than 256 leave no registers for an early chunk. A kv head that is cut (`cuts_of`) counts as so many.
    """
    cuts = cuts_of(group, row_bytes)
    num_kv_heads, group = num_kv_heads * cuts, group // cuts
    num_pairs, programs = num_rows * num_kv_heads, PROGRAMS_PER_SM * num_sms
    if num_pairs <= FEW_PAIRS:
        is_narrow = row_bytes <= _EARLY_BYTES
        keys = 32 if is_narrow and (group <= 2 or num_rows > 2) else 16
        if num_pairs > _DEALT_UP_TO:
            return LaunchShape(min(4, -(-max_seq_len // keys)), 0, keys, 2, is_early=is_narrow)
        most_rows = triton.next_power_of_2(num_rows)  # a kernel is compiled for each number of splits
        splits = min(max(programs // num_kv_heads, 2 * most_rows), most_rows * -(-max_seq_len // keys))
        return LaunchShape(splits, 0, keys, 2, is_early=is_narrow, is_dealt=num_rows > 1)
    if num_pairs <= _STREAMED_UP_TO:
        return LaunchShape(0, programs, 16, 2)
    splits = next((splits for splits in (8, 4, 2) if splits * num_pairs <= _PARTS), 1)
    return LaunchShape(splits, 0, 16, 3, least=16)


class HasShares(Protocol):
    """Buffers of launches whose programs read what they serve."""

    shares: Tensor  # [places, SHARE] int32


def deal_rows(
    seq_lens: Tensor,
    block_table: Tensor,
    parts: HasShares,
    shape: LaunchShape,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None = None,
    query_start_loc: Tensor | None = None,
    new_first: bool = False,
    pdl: bool = False,
) -> None:
    """Into `parts.shares`: which row each program of a dealt launch serves. Once for all layers of a step; rows, lengths, table
    and `query_start_loc` as in `decode_attention`. new_first: a row's new tokens are a chunk of its first split."""
    assert shape.keys in (16, 32), "a share has room for so many blocks"
    constants = {
        "WINDOW": sliding_window or 0, "BLOCK_SIZE": block_size, "N": shape.keys, "SPLITS": shape.splits, "LEAST": shape.least,
        "ROWS": triton.next_power_of_2(num_rows), "NEW_FIRST": new_first, "PDL": pdl,
    }  # fmt: skip
    key = (
        *constants.values(), seq_lens.device, query_start_loc is None, block_table.stride(0),
        alignment(seq_lens, query_start_loc, block_table, parts.shares),
    )  # fmt: skip
    arguments = seq_lens, query_start_loc, block_table, parts.shares, block_table.stride(0), num_rows
    _launch_deal(key, (shape.splits,), arguments, constants, num_warps=1, **launch_options(pdl))
